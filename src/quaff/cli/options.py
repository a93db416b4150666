"""Arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ScheduleName = Literal["token", "chunk", "layer"]
OutputName = Literal["md", "csv", "json", "jsonl"]

Model = Annotated[str, typer.Argument(help="A GGUF file, an alias (smollm2, gemma3), or hf:owner/repo/file.", show_default=False)]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Worker threads; without it, the physical cores we may use.")]
Chunk = Annotated[int | None, typer.Option("--chunk", "-C", min=1, help="Rows computed together; without it, from the machine's ceilings.")]
Schedule = Annotated[ScheduleName, typer.Option("--schedule", help="Order of the work; never changes a bit.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=0, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Start of the random numbers; the same seed gives the same text.")]
Raw = Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
