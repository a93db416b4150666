"""The verbs and their border. Heavy modules are imported inside the verbs, so that `quaff --help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from quaff.cli.bench import bench
from quaff.cli.chat import chat
from quaff.cli.console import fail
from quaff.cli.convert import convert
from quaff.cli.explain import explain
from quaff.cli.inspect import inspect
from quaff.cli.models import models
from quaff.cli.pack import pack
from quaff.cli.pull import pull
from quaff.cli.run import run
from quaff.cli.score import score
from quaff.cli.serve import serve
from quaff.cli.verify import verify
from quaff.errors import QuaffError

app = typer.Typer(
    help="Read long prompts fast on CPUs, with the same bits on every path.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer may carry its own copy of click; its base class of usage errors is reached through what typer exports.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def print_version(wanted: bool) -> None:
    if not wanted:
        return
    from quaff import _native
    from quaff.release import release

    print(f"quaff {release() or '(not installed)'}, numerics version {_native.NUMERICS_VERSION}, {_native.isa()}")
    raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and ISA.")] = False,
) -> None:
    pass


for verb in (pull, run, chat, bench, explain, verify, inspect, score, convert, pack, models):
    app.command()(verb)
app.command(context_settings={"auto_envvar_prefix": "QUAFF"})(serve)


def execute(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; see `quaff.cli.main`. No arguments are a question for help."""
    open_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = app(args=arguments, prog_name="quaff", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except UsageError as error:
        fail(f"{error.format_message()} (quaff --help)" if hasattr(error, "format_message") else str(error))
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        _silence_stdout()
        sys.exit(1)
    except (QuaffError, MemoryError) as error:
        fail(str(error) or "out of memory")
        sys.exit(1)
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename}" if error.filename is not None else str(error))
        sys.exit(1)
    except ValueError:
        if (message := wrong_isa()) is None:
            raise
        fail(message)
        sys.exit(1)


def open_streams() -> None:
    """Stand-ins for standard streams that the caller closed (Python has None there); UTF-8 for data whatever the locale says."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")


def wrong_isa() -> str | None:
    """What is wrong with QUAFF_ISA, which any call of the native module may be the first to read; None when nothing is."""
    if not os.environ.get("QUAFF_ISA"):
        return None
    from quaff import _native

    try:
        _native.isa()
    except ValueError as error:
        return f"QUAFF_ISA: {error}"
    return None


def _silence_stdout() -> None:
    """The reader has gone: point stdout at nothing, so that the flush at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
