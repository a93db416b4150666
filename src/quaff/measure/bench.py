"""Tokens per second of prompts (pp) and generation (tg), named and measured as llama-bench does: random tokens, warm-up, repetitions."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quaff.batch import Counters
from quaff.config import Schedule
from quaff.engine.sampler import SamplingParams
from quaff.errors import PromptError
from quaff.measure.forecast import StageForecast, Trial, forecast
from quaff.measure.profile import OpTime, profile
from quaff.measure.roofline import (
    LEAST_PROBE_MEGABYTES,
    PROBE_MEGABYTES,
    Bound,
    Ceilings,
    Work,
    bound,
    measure_ceilings,
    probe_memory,
)
from quaff.measure.streaming import Streaming
from quaff.weights.plan import StreamCounters

if TYPE_CHECKING:
    from quaff.llm import LLM, State

Progress = Callable[[str, int, int], None]

SEED = 20240611
"""Prompts are random but the same in every run, so that counters and figures can be compared."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every trial with each number of threads, prompts in each schedule, `repetitions` after one warm-up.

    `roofline` measures every cache level too; `profile` times each op in one repetition more.
    """

    trials: tuple[Trial, ...]
    threads: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    chunk: int | None
    repetitions: int
    roofline: bool = False
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One test. `samples` are tokens per second of each repetition; `counters` those of one repetition, equal in all; `work` by stage.

    `stream`: what streaming weights cost in one repetition, None where all are in memory.
    """

    trial: Trial
    threads: int
    schedule: str
    chunk: int
    samples: tuple[float, ...]
    counters: Counters
    work: tuple[Work, ...]
    ops: tuple[OpTime, ...] = ()
    stream: StreamCounters | None = None

    @property
    def test(self) -> str:
        return self.trial.name

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def stddev(self) -> float:
        """Of the sample (n - 1); 0 for a single run."""
        if len(self.samples) < 2:
            return 0.0
        return math.sqrt(sum((s - self.mean) ** 2 for s in self.samples) / (len(self.samples) - 1))

    @property
    def spread(self) -> float:
        """Fastest minus slowest repetition, as a share of the median."""
        return (max(self.samples) - min(self.samples)) / self.median

    @property
    def seconds(self) -> float:
        """Of the median repetition."""
        return self.trial.tokens / self.median


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Results in the order they were measured, the machine's ceilings, and what was loaded.

    `load_average` of the system over one minute, before and after; `streaming` in all, where weights are streamed.
    """

    model: dict[str, Any]
    results: tuple[Result, ...]
    ceilings: tuple[Ceilings, ...]
    load_average: tuple[float, float]
    streaming: Streaming | None = None

    def find(self, test: str, threads: int, schedule: str) -> Result | None:
        return next((r for r in self.results if (r.test, r.threads, r.schedule) == (test, threads, schedule)), None)

    def bound(self, result: Result) -> Bound:
        """The least seconds that the ceilings of the same run and threads allow; over `result.seconds` it is the share reached."""
        ceilings = next(c for c in self.ceilings if c.threads == result.threads)
        return bound(result.work, ceilings, self.model["weight_bytes"])

    @property
    def threads(self) -> int:
        return max(c.threads for c in self.ceilings)

    @property
    def headline(self) -> tuple[Result, Result] | None:
        """The first prompt and the first generation measured with the most threads, if both were."""
        mine = [r for r in self.results if r.threads == self.threads]
        prompt = next((r for r in mine if r.trial.prompt), None)
        generated = next((r for r in mine if r.trial.generate), None)
        return (prompt, generated) if prompt and generated else None

    @property
    def phase_ratio(self) -> float | None:
        """Prompt tokens per second over generated tokens per second."""
        return self.headline[0].mean / self.headline[1].mean if self.headline else None


def run_bench(llm: LLM, plan: Plan, progress: Progress | None = None) -> BenchReport:
    """Measure everything in `plan` with a loaded model. PromptError when a test does not fit the context, before any runs."""
    check_trials(plan.trials, llm.context)
    before = _load_average()
    results: list[Result] = []
    ceilings: list[Ceilings] = []
    megabytes = PROBE_MEGABYTES if llm.plan is None else LEAST_PROBE_MEGABYTES
    with Stand(llm, plan, progress) as stand:
        for threads in plan.threads:
            llm.configure(threads=threads)
            limits = measure_ceilings(threads, plan.roofline, megabytes)
            results += stand.run(limits)
            # Probed on both sides of what it is compared with: shared hosts change within minutes.
            ceilings.append(limits.probed_again(probe_memory(threads, megabytes)))
    return BenchReport(llm.describe(), tuple(results), tuple(ceilings), (before, _load_average()), llm.streaming)


def check_trials(trials: tuple[Trial, ...], context: int) -> None:
    """PromptError unless there is something to measure and all of it fits."""
    if not trials:
        raise PromptError("nothing to measure: give prompt tokens or generated tokens")
    longest = max(trials, key=lambda trial: trial.positions)
    if longest.positions > context:
        raise PromptError(f"{longest.name}: a test of {longest.positions} tokens does not fit the context of {context} tokens")


class Stand:
    """Runs the trials of a plan. Holds their prompts, and the states that tests at a depth start from; close it to free them."""

    def __init__(self, llm: LLM, plan: Plan, progress: Progress | None = None) -> None:
        self._progress = progress or _silent
        self.llm = llm
        self.plan = plan
        numbers = random.Random(SEED)
        longest = max(trial.positions for trial in plan.trials)
        most = max(trial.sequences for trial in plan.trials)
        self._tokens = [[numbers.randrange(llm.config.vocab) for _ in range(longest)] for _ in range(most)]
        self._states: dict[tuple[int, int], State] = {}
        self._stack = ExitStack()
        self._done = 0

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, limits: Ceilings) -> Iterator[Result]:
        """Prompts in every schedule, then generation in the first: a row at a time has one order only."""
        plan = self.plan
        prompts = [trial for trial in plan.trials if trial.prompt]
        rest = [trial for trial in plan.trials if not trial.prompt]
        jobs = [(schedule, trial) for schedule in plan.schedules for trial in prompts] + [(plan.schedules[0], trial) for trial in rest]
        for schedule, trial in jobs:
            self.llm.configure(schedule=schedule, chunk=plan.chunk)
            yield self._measure(trial, limits, len(plan.threads) * len(jobs))

    def _measure(self, trial: Trial, limits: Ceilings, jobs: int) -> Result:
        llm, samples, spent = self.llm, [], Counters()
        stream: StreamCounters | None = None
        for i in range(self.plan.repetitions + 1):
            before = llm.engine.runner.stream_counters()
            seconds, spent = self._once(trial)
            after = llm.engine.runner.stream_counters()
            stream = after - before if after is not None and before is not None else None
            if i:
                samples.append(trial.tokens / seconds)
            self._done += 1
            self._progress("measuring", self._done, jobs * (self.plan.repetitions + 1))
        stages = forecast(llm.graph, llm.engine.runner.costs, llm.order, trial, llm.plan)
        ops = self._profile(trial, stages, limits) if self.plan.profile else ()
        work = tuple(stage.work for stage in stages)
        return Result(trial, llm.threads, llm.order.name, llm.order.chunk, tuple(samples), spent, work, ops, stream)

    def _profile(self, trial: Trial, stages: tuple[StageForecast, ...], limits: Ceilings) -> tuple[OpTime, ...]:
        runner = self.llm.engine.runner
        runner.start_profile()
        try:
            seconds, _ = self._once(trial)
        finally:
            times = runner.stop_profile()
        return profile(self.llm.graph, runner.weight_bytes, stages, times, seconds, limits)

    def _once(self, trial: Trial) -> tuple[float, Counters]:
        """Wall-clock seconds and counters of one run: all sequences submitted, then the loop until each has what it asked for."""
        llm, engine = self.llm, self.llm.engine
        states = [self._state(trial.depth, i) for i in range(trial.sequences)]
        params = SamplingParams(max_tokens=trial.generate, ignore_eos=True) if trial.generate else None
        before, began = llm.counters, time.perf_counter()
        requests = []
        for state, tokens in zip(states, self._tokens, strict=False):
            prompt = tokens[: trial.depth + max(1, trial.prompt)]
            base, base_tokens = (state.sequence(), state.tokens) if state is not None else (None, ())
            # A prompt alone is read up to the logits of its last token, as it is when tokens follow.
            wanted, ignore = (None, None) if params is not None else (len(prompt) - 1, _ignore)
            request = engine.submit(prompt, params=params, logits_from=wanted, on_logits=ignore, base=base, base_tokens=base_tokens)
            requests.append(request)
        engine.run(requests)
        seconds = time.perf_counter() - began
        for request in requests:
            if request.error is not None:
                raise request.error
        return seconds, llm.counters - before

    def _state(self, depth: int, sequence: int) -> State | None:
        """What a test at a depth starts from: `depth` tokens that are read already, other ones for every sequence."""
        if not depth:
            return None
        key = (depth, sequence)
        if key not in self._states:
            tokens = self._tokens[sequence][:depth]
            read = self.llm.prefill(
                tokens, logits="none", progress=lambda done, whole: self._progress(f"reading {depth} tokens", done, whole)
            )
            self._states[key] = self._stack.enter_context(read.state)
        return self._states[key]


def _silent(label: str, done: int, total: int) -> None:
    """No one watches."""


def _ignore(position: int, row: Any) -> None:
    """Logits are computed because someone waits for them; nobody looks."""


def _load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
