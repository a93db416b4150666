"""`quaff bench`: prompt and decode speed, with the control beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar, cast, get_args

import typer

from quaff.cli.console import Bar, print_json
from quaff.cli.options import Chunk, Json, Model, ScheduleName

T = TypeVar("T")


def bench(
    model: Model,
    prompt: Annotated[str, typer.Option("--n-prompt", "-p", help="Prompt tokens, several with commas; 0 leaves the test out.")] = "512",
    generate: Annotated[str, typer.Option("--n-gen", "-n", help="Generated tokens, likewise.")] = "64",
    threads: Annotated[str | None, typer.Option("--threads", "-t", help="Worker threads, several with commas.", show_default=False)] = None,
    chunk: Chunk = None,
    schedule: Annotated[str, typer.Option("--schedule", help="token, chunk, layer; several with commas.")] = "chunk",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Measured runs of each test, after a warm-up.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure tokens per second."""
    from quaff import _native
    from quaff.llm import load
    from quaff.measure.bench import Plan, run_bench
    from quaff.measure.report import bench_json, bench_markdown

    plan = Plan(
        prompts=tuple(n for n in numbers("-p", prompt, least=0) if n),
        generate=tuple(n for n in numbers("-n", generate, least=0) if n),
        threads=numbers("-t", threads, least=1) if threads is not None else (_native.default_threads(),),
        schedules=listed(schedule, schedule_name),
        chunk=chunk,
        repetitions=repetitions,
    )
    with Bar() as bar, load(model, threads=max(plan.threads), chunk=chunk, progress=bar.step) as llm:
        report = run_bench(llm, plan, bar.step)
        bar.close()
        if as_json:
            print_json(bench_json(report))
        else:
            print(bench_markdown(report))


def listed(text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """Whole numbers between commas; a usage error names the option."""

    def parse(part: str) -> int:
        if not part.isdecimal() or not least <= int(part) <= 1 << 20:
            raise typer.BadParameter(f"{option} {text}: expected whole numbers from {least} to {1 << 20}, with commas between them")
        return int(part)

    return listed(text, parse)


def schedule_name(part: str) -> ScheduleName:
    if part not in get_args(ScheduleName):
        raise typer.BadParameter(f"--schedule {part}: expected token, chunk or layer")
    return cast(ScheduleName, part)
