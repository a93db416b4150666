"""Arguments and options that several verbs share."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import typer

MOST_THREADS = 1024
MOST_COUNTED = 1 << 20  # rows, tokens, repetitions

ScheduleName = Literal["token", "chunk", "layer"]
OutputName = Literal["md", "csv", "json", "jsonl"]


def _a_number(value: float) -> float:
    """NaN is neither below nor above a limit."""
    if math.isnan(value):
        raise typer.BadParameter("expected a number")
    return value


Model = Annotated[
    str,
    typer.Argument(
        help="A GGUF or packed file, a Hugging Face folder, an alias (smollm2, gemma3), or hf:owner/repo(/file).", show_default=False
    ),
]
QuantizeName = Literal["q8_0", "q4_0", "q4_1", "none"]
Quantize = Annotated[
    QuantizeName | None,
    typer.Option("--quantize", help="What the matrices of a Hugging Face folder become.", show_default="q8_0"),
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, max=MOST_THREADS, help="Worker threads; without it, the physical cores we may use.")
]
Chunk = Annotated[
    int | None,
    typer.Option("--chunk", "-C", min=1, max=MOST_COUNTED, help="Rows computed together; without it, from the machine's ceilings."),
]
Schedule = Annotated[
    ScheduleName | None,
    typer.Option("--schedule", help="Order of the work; never changes a bit.", show_default="chunk, or layer where weights are streamed"),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        envvar="QUAFF_MEMORY",
        help="Memory of the whole process, such as 2GiB, or auto; weights that do not fit are streamed from the file.",
        show_default=False,
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--store", envvar="QUAFF_STORE", help="Where what was read is kept on disk: on (the user's cache folder), off, or a folder."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=0, max=1 << 30, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, max=100.0, callback=_a_number, help="0 takes the most likely token.")]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, max=(1 << 64) - 1, help="Start of the random numbers; the same seed gives the same text."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
