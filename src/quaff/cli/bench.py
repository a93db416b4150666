"""`quaff bench`: prompt and decode speed, the control beside it, the machine's ceilings around both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar, cast, get_args

import typer

from quaff.cli.console import Bar
from quaff.cli.options import MOST_COUNTED, MOST_THREADS, Chunk, Json, Memory, Model, OutputName, Quantize, ScheduleName
from quaff.errors import ConfigError, quote

T = TypeVar("T")

PROFILE_DEPTHS = (0, 1024, 4096)


def bench(
    model: Model,
    prompt: Annotated[str, typer.Option("--n-prompt", "-p", help="Prompt tokens, several with commas; 0 leaves the test out.")] = "512",
    generate: Annotated[str, typer.Option("--n-gen", "-n", help="Generated tokens, likewise.")] = "64",
    depth: Annotated[
        str | None, typer.Option("--n-depth", "-d", help="Tokens in the KV state before a test, likewise.", show_default="0")
    ] = None,
    parallel: Annotated[str, typer.Option("--n-parallel", "-np", help="Sequences at once, likewise; speed counts all.")] = "1",
    threads: Annotated[str | None, typer.Option("--threads", "-t", help="Worker threads, several with commas.", show_default=False)] = None,
    chunk: Chunk = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", help="token, chunk, layer; several with commas.", show_default="chunk, or layer where weights are streamed"
        ),
    ] = None,
    memory: Memory = None,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, max=MOST_COUNTED, help="Measured runs of each test, after a warm-up.")
    ] = 5,
    roofline: Annotated[bool, typer.Option("--roofline", help="Measure every cache level; show shares of the ceilings.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Time every op, at depths 0, 1024 and 4096 without -d.")] = False,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Append the figures to this file, a JSON line.", show_default=False)
    ] = None,
    output: Annotated[OutputName, typer.Option("--output", "-o", help="How to print the report.")] = "md",
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Measure tokens per second."""
    from quaff import _native
    from quaff.config import Workload
    from quaff.llm import load
    from quaff.measure import ledger as lines
    from quaff.measure.bench import Plan, run_bench
    from quaff.measure.forecast import Trial
    from quaff.measure.report import bench_json, bench_markdown
    from quaff.measure.roofline import LEAST_PROBE_MEGABYTES
    from quaff.measure.table import render

    prompts = [n for n in numbers("-p", prompt, least=0) if n]
    generated = [n for n in numbers("-n", generate, least=0) if n]
    if not prompts and not generated:
        raise typer.BadParameter("nothing to measure: -p and -n are both 0")
    depths = numbers("-d", depth, least=0) if depth is not None else PROFILE_DEPTHS if profile else (0,)
    trials = [
        Trial(p, g, d, s)
        for d in depths
        for s in numbers("-np", parallel, least=1)
        for p, g in [*((p, 0) for p in prompts), *((0, g) for g in generated)]
    ]
    plan_threads = numbers("-t", threads, least=1, most=MOST_THREADS) if threads is not None else (_native.default_threads(),)
    schedules = listed(schedule, schedule_name) if schedule is not None else ()
    if ledger is not None:
        if Path(model).is_dir():
            raise ConfigError("the ledger keeps figures of model files; write the folder as one first: quaff convert")
        lines.read(ledger)  # A damaged file, and that no version is installed, are reported before minutes are spent.
        lines.installed()
    most = max(t.sequences for t in trials)
    workload = Workload(
        max(t.positions for t in trials) + 1,
        # A test at a depth forks states that stay.
        sequences=most * (2 if any(t.depth for t in trials) else 1),
        logits_rows=most,
        spare_bytes=LEAST_PROBE_MEGABYTES << 20,
    )
    with (
        Bar() as bar,
        load(model, quantize=quantize, threads=max(plan_threads), chunk=chunk, memory=memory, workload=workload, progress=bar.step) as llm,
    ):
        if depth is None:
            trials = [t for t in trials if not t.depth or t.positions <= llm.context]
        report = run_bench(
            llm, Plan(tuple(trials), plan_threads, schedules or (llm.order.name,), chunk, repetitions, roofline, profile), bar.step
        )
        bar.close()
        values = bench_json(report)
        if ledger is not None:
            lines.append(ledger, lines.entry(values))
        print(render("json" if as_json else output, values, "results", lambda: bench_markdown(report, roofline)))


def listed(text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def numbers(option: str, text: str, least: int, most: int = MOST_COUNTED) -> tuple[int, ...]:
    """Whole numbers between commas; a usage error names the option."""

    def parse(part: str) -> int:
        # Python refuses to convert thousands of digits, so the length is looked at first.
        if not part.isdecimal() or len(part) > 20 or not least <= int(part) <= most:
            raise typer.BadParameter(f"{option} {quote(text)}: expected whole numbers from {least} to {most}, with commas between them")
        return int(part)

    return listed(text, parse)


def schedule_name(part: str) -> ScheduleName:
    if part not in get_args(ScheduleName):
        raise typer.BadParameter(f"--schedule {quote(part)}: expected token, chunk or layer")
    return cast(ScheduleName, part)
