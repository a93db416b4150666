"""`quaff models`: the families that run, and what each was checked against."""

from __future__ import annotations

from typing import Any

from quaff.cli.console import print_json
from quaff.cli.options import Json
from quaff.measure.table import Column, markdown


def models(as_json: Json = False) -> None:
    """List the model families that run."""
    found = listed()
    if as_json:
        print_json({"models": found})
    else:
        print(table(found))


def listed() -> list[dict[str, Any]]:
    """One entry per architecture, from the registry. `tolerance`: largest error of a float32 logit as a share of the range of all."""
    from quaff.models import FAMILIES

    return [
        {
            "architecture": family.name,
            "layer_kinds": list(family.layer_kinds),
            "formats": ["gguf", *(["safetensors"] if family.huggingface else [])],
            "oracle": family.oracle,
            "tolerance": family.tolerance,
        }
        for family in sorted(FAMILIES.values(), key=lambda family: family.name)
    ]


def table(found: list[dict[str, Any]]) -> str:
    """The table of docs/models.md."""
    columns: list[Column[dict[str, Any]]] = [
        Column("architecture", lambda e: e["architecture"], right=False),
        Column("layers", lambda e: ", ".join(e["layer_kinds"]), right=False),
        Column("formats", lambda e: ", ".join(e["formats"]), right=False),
        Column("checked against", lambda e: e["oracle"], right=False),
        Column("largest error", lambda e: f"{e['tolerance']:g}"),
    ]
    return "\n".join(markdown(columns, found))
