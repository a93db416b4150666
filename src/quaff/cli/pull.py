"""`quaff pull`: fetch a model by name and check it."""

from __future__ import annotations

from typing import Annotated

import typer

from quaff.cli.console import Bar, print_json
from quaff.cli.options import Json


def pull(
    name: Annotated[
        str,
        typer.Argument(help="An alias (smollm2, gemma3), hf:owner/repo/file, hf:owner/repo for a folder, or a path.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """Fetch a model, check it, and print where it is."""
    from quaff.hub import resolve

    with Bar(unit="bytes") as bar:
        path = resolve(name, bar.step)
    if as_json:
        print_json({"path": str(path.absolute())})
    else:
        print(path.absolute())
