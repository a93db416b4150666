"""`quaff pack`: a model as one file of weights as they lie in memory, which loads in an instant and streams as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quaff.cli.console import Bar, print_json
from quaff.cli.options import Json, Model, Quantize, Threads


def pack(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The packed file to write.", show_default=False)],
    quantize: Quantize = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a model as one packed file: loading it is a memory map, streaming it needs no packing."""
    from quaff import _native
    from quaff.errors import located
    from quaff.graph.builder import build_graph
    from quaff.hub import resolve
    from quaff.models import read_model
    from quaff.models.huggingface import open_model
    from quaff.weights.packing import write_packed

    with Bar(unit="bytes") as bar:
        path = resolve(model, bar.step)
        with open_model(path, quantize) as checkpoint:
            with located(path):
                opened = read_model(checkpoint)
                graph = build_graph(opened.config, opened.family, opened.tensors)
            count = threads or _native.default_threads()
            write_packed(out, checkpoint, opened.views, graph, count, lambda done, total: bar.step("packing", done, total))
    if as_json:
        print_json({"path": str(out.absolute()), "file_bytes": out.stat().st_size})
    else:
        print(out.absolute())
