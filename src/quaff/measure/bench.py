"""Tokens per second of prompts (pp) and generation (tg), named and measured as llama-bench does: random tokens, warm-up, repetitions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quaff.batch import Counters
from quaff.config import Schedule
from quaff.engine.sampler import SamplingParams
from quaff.errors import PromptError
from quaff.measure.roofline import Ceilings, measure_ceilings

if TYPE_CHECKING:
    from quaff.llm import LLM

SEED = 20240611
"""Prompts are random but the same in every run, so that counters and figures can be compared."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: prompt and generation lengths in tokens, thread counts, schedules, `repetitions` after one warm-up."""

    prompts: tuple[int, ...]
    generate: tuple[int, ...]
    threads: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    chunk: int | None
    repetitions: int


@dataclass(frozen=True, slots=True)
class Result:
    """One test. `samples` are tokens per second of each repetition; `counters` those of one repetition, equal in all."""

    test: str
    threads: int
    schedule: str
    chunk: int
    samples: tuple[float, ...]
    counters: Counters

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples)

    @property
    def stddev(self) -> float:
        """Of the sample (n - 1); 0 for a single run."""
        if len(self.samples) < 2:
            return 0.0
        return math.sqrt(sum((s - self.mean) ** 2 for s in self.samples) / (len(self.samples) - 1))


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Results in the order they were measured, the machine's ceilings, and what was loaded."""

    model: dict[str, Any]
    results: tuple[Result, ...]
    ceilings: tuple[Ceilings, ...]

    def find(self, test: str, threads: int, schedule: str) -> Result | None:
        return next((r for r in self.results if (r.test, r.threads, r.schedule) == (test, threads, schedule)), None)

    @property
    def threads(self) -> int:
        return max(c.threads for c in self.ceilings)

    @property
    def headline(self) -> tuple[Result, Result] | None:
        """The first prompt and the first generation measured with the most threads, if both were."""
        mine = [r for r in self.results if r.threads == self.threads]
        prompt = next((r for r in mine if r.test.startswith("pp")), None)
        generated = next((r for r in mine if r.test.startswith("tg")), None)
        return (prompt, generated) if prompt and generated else None

    @property
    def phase_ratio(self) -> float | None:
        """Prompt tokens per second over generated tokens per second."""
        return self.headline[0].mean / self.headline[1].mean if self.headline else None


def run_bench(llm: LLM, plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> BenchReport:
    """Measure everything in `plan` with a loaded model. PromptError when a test does not fit the context, before any runs."""
    longest = max(plan.prompts + plan.generate, default=0)
    if not longest:
        raise PromptError("nothing to measure: give prompt tokens or generated tokens")
    if longest > llm.context:
        raise PromptError(f"a test of {longest} tokens does not fit the context of {llm.context} tokens")
    numbers = random.Random(SEED)
    tokens = [numbers.randrange(llm.config.vocab) for _ in range(longest)]
    results: list[Result] = []
    ceilings: list[Ceilings] = []
    jobs = len(plan.threads) * (len(plan.prompts) * len(plan.schedules) + len(plan.generate)) * (plan.repetitions + 1)
    done = 0

    def repeat(name: str, once: Callable[[], tuple[float, Counters]], test_tokens: int) -> None:
        nonlocal done
        samples = []
        for i in range(plan.repetitions + 1):
            seconds, counters = once()
            if i:
                samples.append(test_tokens / seconds)
            done += 1
            if progress is not None:
                progress("measuring", done, jobs)
        results.append(Result(name, llm.threads, llm.order.name, llm.order.chunk, tuple(samples), counters))

    for threads in plan.threads:
        llm.configure(threads=threads)
        ceilings.append(measure_ceilings(threads))
        for schedule in plan.schedules:
            llm.configure(schedule=schedule, chunk=plan.chunk)
            for n in plan.prompts:
                repeat(f"pp{n}", lambda n=n: _prefill(llm, tokens[:n]), n)  # type: ignore[misc]
        # One row at a time has one order only.
        llm.configure(schedule=plan.schedules[0], chunk=plan.chunk)
        for n in plan.generate:
            repeat(f"tg{n}", lambda n=n: _generate(llm, tokens[0], n), n)  # type: ignore[misc]
    return BenchReport(llm.describe(), tuple(results), tuple(ceilings))


def _prefill(llm: LLM, tokens: list[int]) -> tuple[float, Counters]:
    read = llm.prefill(tokens)
    read.state.close()
    return read.seconds, read.counters


def _generate(llm: LLM, first: int, n: int) -> tuple[float, Counters]:
    """`n` rows from an empty state, one at a time, each sampled greedily."""
    completion = llm.generate([first], SamplingParams(max_tokens=n, ignore_eos=True))
    return completion.timings.prefill_seconds + completion.timings.decode_seconds, completion.counters
