"""`quaff verify`: every way of reading a prompt gives the same bits, shown on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from quaff.cli.console import Bar, print_json
from quaff.cli.options import Json, Memory, Model, Quantize, Threads


def verify(
    model: Model,
    tokens: Annotated[int, typer.Option("--tokens", min=130, max=1 << 30, help="Length of the prompt.")] = 709,
    threads: Threads = None,
    memory: Memory = None,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Read one prompt on every path and compare the bits of logits, KV state and text; with --memory, inside that budget too."""
    from quaff import _native
    from quaff.config import Workload
    from quaff.llm import load
    from quaff.measure.verify import GENERATED, Outcome, Verdict, Verifier
    from quaff.weights.budget import human_bytes

    outcomes: list[Outcome] = []

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        bar.close()
        if not as_json:
            mark = "✓" if outcome.same_bits(outcomes[0]) else "✗"
            print(
                f"{mark} {outcome.name:<42} {outcome.logits_sha256[:12]}  {outcome.kv_sha256[:12]}  {outcome.text_sha256[:12]}", flush=True
            )

    with Bar() as bar:
        budgeted: Outcome | None = None
        if memory is not None:
            # First, while the process is as small as it can be; what does not fit is refused before the long work.
            workload = Workload(tokens + GENERATED)
            with load(model, quantize=quantize, threads=threads, memory=memory, workload=workload, progress=bar.step) as llm:
                assert llm.plan is not None
                name = f"{'streamed' if llm.streamed else 'resident'} in {human_bytes(llm.plan.memory_bytes)}"
                budgeted = Verifier(llm, tokens).run_default(name)
        with load(model, quantize=quantize, threads=threads, progress=bar.step) as llm:
            verifier = Verifier(llm, tokens)  # Refuses a prompt that does not fit, before anything is printed.
            if not as_json:
                print(f"  {'path':<42} {'logits':<12}  {'KV':<12}  text")
            for outcome in verifier.run():
                add(outcome)
                bar.step("verifying", len(outcomes), len(verifier.paths) + 1)
            path, chunk = llm.path, llm.chunk
        with load(path, quantize=quantize, threads=threads, chunk=chunk, fuse=False, progress=bar.step) as llm:
            add(Verifier(llm, tokens).run_default("without fusions"))
        if budgeted is not None:
            add(budgeted)
    verdict = Verdict(_native.NUMERICS_VERSION, _native.isa(), tokens, tuple(outcomes))
    if as_json:
        print_json(verdict.as_dict())
    else:
        word = "EQUAL" if verdict.equal else "DIFFERENT"
        print(f"{word}: {len(outcomes)} paths, {tokens} tokens; logits of every row, KV state, greedy text")
    if not verdict.equal:
        raise typer.Exit(1)
