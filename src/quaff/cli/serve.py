"""`quaff serve`: a model over HTTP."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quaff.cli.console import Bar, note
from quaff.cli.options import MOST_COUNTED, Chunk, Memory, Model, Quantize, Schedule, Temperature, Threads
from quaff.errors import ConfigError, QuaffError, located

if TYPE_CHECKING:
    from quaff.llm import LLM, LoadProgress

PLANNED_SEQUENCES = 4
"""A budget leaves room for so many conversations of the planned length at once; more of them wait."""


def serve(
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    api_key: Annotated[str | None, typer.Option("--api-key", help="What clients must send as bearer token or x-api-key.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model in replies; without it, that of the file.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, max=1 << 30, help="Most tokens of prompt and reply; without it, the model's.")
    ] = None,
    threads: Threads = None,
    chunk: Chunk = None,
    schedule: Schedule = None,
    memory: Memory = None,
    quantize: Quantize = None,
    prefix_cache: Annotated[
        str,
        typer.Option(
            "--prefix-cache",
            help="Memory for KV state, such as 2GiB: what requests leave of it keeps what prompts begin with. 0: nothing is kept.",
            show_default="a quarter of --memory, or of what is free",
        ),
    ] = "auto",
    store: Annotated[
        str, typer.Option("--store", help="Where that is kept on disk too: on (the user's cache folder), off, or a folder.")
    ] = "on",
    store_size: Annotated[str, typer.Option("--store-size", help="Most bytes on disk.")] = "16GiB",
    max_stall_ms: Annotated[
        int, typer.Option("--max-stall-ms", min=1, max=MOST_COUNTED, help="How long someone's prompt may hold up the next token of others.")
    ] = 200,
    draft: Annotated[
        int, typer.Option("--draft", min=0, max=64, help="Tokens guessed from the text before, checked together; 0: none.")
    ] = 8,
    queue: Annotated[int, typer.Option("--queue", min=1, max=MOST_COUNTED, help="Requests that may wait; more are sent away (429).")] = 64,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=1 << 30, help="Most tokens of a reply whose request names no bound.")
    ] = 4096,
    temperature: Temperature = 1.0,
) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic. Every option has a variable: --max-stall-ms is QUAFF_MAX_STALL_MS."""
    try:
        from quaff.serve.overview import overview
        from quaff.serve.server import Server, listen
        from quaff.serve.service import Service
        from quaff.serve.settings import Settings
    except ModuleNotFoundError as error:
        raise QuaffError(f"quaff serve needs the package {error.name}: pip install 'quaff[serve]'") from None
    from quaff import hub
    from quaff.config import Workload
    from quaff.engine.pace import Policy
    from quaff.llm import load
    from quaff.weights.budget import usable_memory_bytes

    _log_to_stderr()
    folder = hub.cache_dir() / "prefixes" if store == "on" else None if store == "off" else Path(store)
    settings = Settings(
        name or Path(model).stem,
        host,
        port,
        api_key or None,
        queue,
        max_tokens,
        temperature,
        replies=folder / "replies" if folder is not None else None,
    )
    free = usable_memory_bytes() or 4 << 30
    prefix_bytes = size("--prefix-cache", prefix_cache, (size("--memory", memory, free) if memory is not None else free) // 4)
    store_bytes = size("--store-size", store_size)
    with Bar() as bar, listen(host, port) as sock:

        def open_model(progress: LoadProgress) -> LLM:
            def report(what: str, done: int, total: int) -> None:
                progress(what, done, total)
                bar.step(what, done, total)

            llm = load(
                model,
                quantize=quantize,
                threads=threads,
                chunk=chunk,
                schedule=schedule,
                context=context,
                memory=memory,
                workload=Workload(sequences=PLANNED_SEQUENCES, logits_rows=PLANNED_SEQUENCES * (1 + draft)),
                prefix_cache_bytes=prefix_bytes,
                store=folder if folder is not None and prefix_bytes else False,
                store_cap_bytes=store_bytes,
                progress=report,
            )
            llm.engine.set_policy(Policy(max_stall_ms=max_stall_ms, draft_tokens=draft))
            llm.restore_recent(partial(report, "restoring prefixes"))
            return llm

        def ready(llm: LLM) -> None:
            bar.close()
            url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
            note("\n".join(overview(llm, settings, url)))

        Server(Service(settings), open_model, ready).run(sock)


def size(option: str, text: str, auto: int | None = None) -> int:
    """Bytes of a size; ConfigError that names the option. `auto` stands for "auto", where that is a size."""
    from quaff.config import parse_memory

    if text.strip() == "0":
        return 0
    with located(option):
        value = parse_memory(text)
        if isinstance(value, int):
            return value
        if auto is None:
            raise ConfigError("expected a size such as 16GiB")
        return auto


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("quaff").setLevel(logging.INFO)
    # What it warns of are clients that hung up, which have their line.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
