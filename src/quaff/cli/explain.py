"""`quaff explain`: what reading a prompt costs in every schedule, before it is read; with --run, beside what it did cost."""

from __future__ import annotations

from typing import Annotated

import typer

from quaff.cli.console import Bar
from quaff.cli.options import MOST_COUNTED, Chunk, Json, Memory, Model, Quantize, Threads


def explain(
    model: Model,
    prompt: Annotated[int, typer.Option("--n-prompt", "-p", min=1, max=1 << 30, help="Prompt tokens.")] = 512,
    threads: Threads = None,
    chunk: Chunk = None,
    memory: Memory = None,
    measure: Annotated[bool, typer.Option("--run", help="Load the model, read such a prompt, show predicted beside measured.")] = False,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, max=MOST_COUNTED, help="Measured runs with --run, after a warm-up.")
    ] = 3,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Predict bytes, launches, memory and seconds of every schedule."""
    from quaff import _native
    from quaff.config import Workload, parse_memory
    from quaff.errors import located
    from quaff.hub import resolve
    from quaff.llm import load
    from quaff.measure import explain as lib
    from quaff.measure.roofline import measure_ceilings
    from quaff.measure.table import render
    from quaff.models.huggingface import open_model

    with Bar() as bar:
        path = resolve(model, bar.step)
        with located(path), open_model(path, quantize) as checkpoint:
            ceilings = measure_ceilings(threads or _native.default_threads())
            told = lib.explain(checkpoint, prompt, ceilings, chunk, parse_memory(memory) if memory is not None else None)
        if measure:
            rows = max(cost.order.chunk for cost in told.costs)
            workload = Workload(prompt, logits_rows=1)
            with load(
                path, quantize=quantize, threads=told.ceilings.threads, chunk=rows, memory=memory, workload=workload, progress=bar.step
            ) as llm:
                told = lib.run(llm, told, repetitions, bar.step)
    print(render("json" if as_json else "md", lib.explain_json(told), sentences=lambda: lib.explain_markdown(told)))
