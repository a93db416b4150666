"""What every verb shares at its border: messages on stderr, data on stdout, one line per error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quaff.errors import PromptError, one_line
from quaff.measure.table import render

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from quaff.llm import LLM

BAR_AFTER_SECONDS = 1.0


def note(text: str = "") -> None:
    """A line for the person at the terminal; never data."""
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> None:
    print(f"error: {one_line(text)}", file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    print(render("json", value))


def read_text(path: Path) -> str:
    """A whole text file as UTF-8; raises PromptError naming the first bad byte, OSError when it cannot be read."""
    return decode(path.read_bytes(), str(path))


def decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None


def argument_text(argument: str, where: str) -> str:
    """An argument as text; the system hands bytes that are not in its encoding over as lone surrogates. Raises PromptError."""
    return decode(argument.encode("utf-8", "surrogateescape"), where)


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the command line, a file or standard input; exactly one of them. Raises PromptError."""
    if argument is not None and file is not None:
        raise PromptError("two prompts: give the text or --file, not both")
    if argument is not None:
        text = argument_text(argument, "the prompt on the command line")
    elif file is not None:
        text = read_text(file)
    elif sys.stdin.isatty():
        raise PromptError("no prompt: give it as an argument, with --file, or on standard input")
    else:
        text = decode(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise PromptError("the prompt is empty")
    return text


class Bar:
    """Progress on stderr for waits that turn out longer than a second; silent when stderr is not a terminal."""

    def __init__(self, label: str = "", unit: str = "work") -> None:
        self._label, self._unit = label, unit
        self._start = time.monotonic()
        self._shown: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def step(self, label: str, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` units (0: unknown) of the work named `label` are finished; a new label starts over, a new `detail` does not."""
        if label != self._label:
            self.close()
            self._label, self._start = label, time.monotonic()
        if self._shown is None:
            over = 0 < total <= done
            if over or not sys.stderr.isatty() or time.monotonic() - self._start < BAR_AFTER_SECONDS:
                return
            self._open()
        if self._shown is not None and self._task is not None:
            said = f"{self._label} ({detail})" if detail else self._label
            self._shown.update(self._task, description=said, completed=done, total=total or None)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        amount: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()] if self._unit == "bytes" else [TextColumn("{task.percentage:>3.0f} %")]
        )
        self._shown = Progress(
            TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        self._shown.start()
        self._task = self._shown.add_task(self._label)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
        self._shown = self._task = None


def reading(bar: Bar, llm: LLM, label: str = "reading the prompt") -> Callable[[int, int], None]:
    """Progress of a prompt; where weights are streamed it says what it waits for."""
    return lambda done, total: bar.step(label, done, total, f"{llm.bound} bound" if llm.bound else "")
