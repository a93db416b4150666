"""`quaff convert`: a Hugging Face folder as one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from quaff.cli.console import Bar, print_json
from quaff.cli.options import Json


def convert(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json, safetensors and tokenizer.json.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.", show_default=False)],
    kind: Annotated[
        Literal["q8_0", "q4_0", "q4_1", "f16", "f32"], typer.Option("--type", help="What matrices of a fitting width become.")
    ] = "q8_0",
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder as a GGUF file."""
    from quaff.models.convert import convert as write

    with Bar(unit="bytes") as bar:
        write(folder, out, kind, lambda done, total: bar.step("converting", done, total))
    if as_json:
        print_json({"path": str(out.absolute()), "file_bytes": out.stat().st_size, "type": kind})
    else:
        print(out.absolute())
