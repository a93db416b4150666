"""Law: tokens, state and counters of a reply do not depend on how many of its tokens one native call draws and computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CASES, prompt
from tests.unit.engine.test_llm import overflowing

import quaff
import quaff.engine.engine as engine_module
import quaff.engine.runner as runner_module
from quaff import LLM, SamplingParams, _native
from quaff.batch import Batch, Counters, Logits, Shape
from quaff.engine.engine import Engine, Request
from quaff.engine.pace import BURST_TOKENS, Policy
from quaff.engine.runner import Draw, Runner
from quaff.errors import MemoryBudgetError, NonFiniteError, ScheduleError
from quaff.graph.program import StageKind
from quaff.schedule import CompiledSchedule, Order, compile_order

ONE_BY_ONE = Policy(burst_ms=0)
BURSTS = Policy(burst_ms=1000)  # as many tokens as a burst may have, however slow the machine is
SAMPLING = [
    SamplingParams(max_tokens=41, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=2, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=(1 << 64) - 1, choice=5, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, top_p=0.5, seed=9, ignore_eos=True),
]


@pytest.fixture(scope="module", params=["llama-gqa", "gemma3", "qwen3moe", "deepseek2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[request.param].write(tmp_path_factory.mktemp("bursts") / "m.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with quaff.load(path, threads=2, chunk=32) as llm:
        yield llm
        llm.engine.sweep()
        assert llm.engine.cache.sequences == 0, "a request kept its pages"


def ask(engine: Engine, tokens: list[int], policy: Policy, params: SamplingParams, **options: object) -> Request:
    engine.set_policy(policy)
    request = engine.submit(tokens, params=params, keep=True, **options)  # type: ignore[arg-type]
    engine.run([request])
    return request


def answer(
    llm: LLM, tokens: list[int], policy: Policy, params: SamplingParams, **options: object
) -> tuple[tuple[object, ...], Counters, int]:
    """What a request left, by bytes, what it cost, and its steps."""
    before, steps = llm.counters, llm.engine.steps
    request = ask(llm.engine, tokens, policy, params, **options)
    assert request.error is None
    state = llm.engine.cache.kv_sha256(request.sequence)
    llm.engine.release(request.sequence)
    left = (tuple(request.tokens), request.computed, request.finish_reason, request.drafted, state)
    return left, llm.counters - before, llm.engine.steps - steps


def fill(llm: LLM, tokens: list[int]) -> None:
    """A burst takes no more memory than there is: scratch for a prompt must have been needed before."""
    llm.prefill(tokens, logits="none").state.close()


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "drawn", "two", "nucleus"])
@pytest.mark.parametrize("length", [1, 60, 127])
def test_bursts_never_show(llm: LLM, params: SamplingParams, length: int) -> None:
    tokens = prompt(llm.config.vocab, length, seed=length)
    fill(llm, prompt(llm.config.vocab, 40))
    alone, cost, steps = answer(llm, tokens, ONE_BY_ONE, params)
    together, same_cost, fewer = answer(llm, tokens, BURSTS, params)
    assert together == alone and same_cost == cost
    assert steps == params.max_tokens and fewer <= 2 + -(-(params.max_tokens - 1) // BURST_TOKENS)
    with llm.prefill(list(alone[0][: alone[1]]), logits="none").state as state:  # type: ignore[index, misc]
        assert state.kv_sha256() == alone[-1]


def test_another_place_of_the_random_numbers_fails_the_comparison(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the step draws with the numbers of another completion."""
    tokens = prompt(llm.config.vocab, 60)
    alone, _, _ = answer(llm, tokens, ONE_BY_ONE, SAMPLING[1])
    options = SAMPLING[1].draw
    assert options is not None
    monkeypatch.setattr(SamplingParams, "draw", property(lambda self: (*options[:-1], self.choice + 1)))
    assert answer(llm, tokens, BURSTS, SAMPLING[1])[0] != alone


def test_an_end_inside_a_burst_ends_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, params = prompt(llm.config.vocab, 60), replace(SAMPLING[1], max_tokens=40)
    first, _, _ = answer(llm, tokens, ONE_BY_ONE, params)
    made = list(first[0][60:])  # type: ignore[index]
    at = next(i for i in range(4, 40) if made.index(made[i]) == i)
    monkeypatch.setattr(llm.engine, "end_ids", frozenset({made[at]}))
    monkeypatch.setattr(llm.engine, "_ends", np.array([made[at]], dtype=np.int32))
    params = replace(params, ignore_eos=False)
    alone, cost, _ = answer(llm, tokens, ONE_BY_ONE, params)
    together, same_cost, steps = answer(llm, tokens, BURSTS, params)
    assert together == alone and same_cost == cost, "no row follows the end"
    assert alone[1:3] == (60 + at, "stop") and steps < at


def test_an_end_that_only_its_client_sees_leaves_the_state_of_its_tokens(llm: LLM) -> None:
    def after_ten() -> Callable[[int], str | None]:
        seen: list[int] = []

        def accept(token: int) -> str | None:
            seen.append(token)
            return "stop" if len(seen) == 10 else None

        return accept

    tokens = prompt(llm.config.vocab, 60)
    alone, _, _ = answer(llm, tokens, ONE_BY_ONE, SAMPLING[1], accept=after_ten())
    together, _, steps = answer(llm, tokens, BURSTS, SAMPLING[1], accept=after_ten())
    assert together == alone and alone[1:3] == (69, "stop") and steps < 10


def test_a_cancel_inside_a_burst_keeps_what_is_finished(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = answer(llm, prompt(llm.config.vocab, 60), ONE_BY_ONE, SAMPLING[1])
    runner, run, seen = llm.engine.runner, llm.engine.runner.run, []

    def watched(batch: Batch, order: Order, on_work: object, draw: Sequence[Draw]) -> Logits:
        if not draw:
            return run(batch, order)
        target = 1 + 7 * len(seen)

        def cancel() -> None:
            while runner.control.cells_done < target and not over.is_set():
                pass
            runner.control.cancel()

        over, thread = threading.Event(), threading.Thread(target=cancel)
        thread.start()
        logits = run(batch, order, None, draw)
        over.set()
        thread.join()
        seen.append(logits.finished[0])
        return logits

    monkeypatch.setattr(runner, "run", watched)
    together, _, _ = answer(llm, prompt(llm.config.vocab, 60), BURSTS, SAMPLING[1])
    assert together == whole and seen and min(seen) < BURST_TOKENS


def test_those_whose_logits_are_looked_at_get_one_token_at_a_time(llm: LLM) -> None:
    tokens, params = prompt(llm.config.vocab, 60), replace(SAMPLING[0], max_tokens=12)
    fill(llm, tokens)
    for other in (
        replace(params, logprobs=0),
        replace(params, repetition_penalty=1.1),
        replace(params, presence_penalty=0.5),
        replace(params, frequency_penalty=0.5),
        replace(params, logit_bias={7: 1.0}),
    ):
        assert answer(llm, tokens, BURSTS, other)[2] == 12
    rows: list[int] = []
    assert answer(llm, tokens, BURSTS, params, on_logits=lambda position, row: rows.append(position))[2] == 12
    assert rows == list(range(59, 71))


def test_those_who_decode_together_have_bursts_together(llm: LLM) -> None:
    """Each with its own way of drawing and its own end. Someone who comes waits for no more than the burst that runs."""
    prompts = [prompt(llm.config.vocab, 60 - 7 * i, seed=i) for i in range(4)]
    alone = [answer(llm, tokens, ONE_BY_ONE, params)[0] for tokens, params in zip(prompts, SAMPLING, strict=True)]
    llm.engine.set_policy(BURSTS)
    requests = [llm.engine.submit(t, params=p, keep=True) for t, p in zip(prompts[:3], SAMPLING[:3], strict=True)]
    for _ in range(4):
        llm.engine.step()
    assert [r.generated > 4 for r in requests] == [True, True, False] and not requests[0].done
    requests.append(llm.engine.submit(prompts[3], params=SAMPLING[3], keep=True))
    while not requests[3].generated:
        before = requests[0].generated
        llm.engine.step()
        assert requests[0].generated == before + 1
    steps = llm.engine.steps
    llm.engine.run(requests)
    assert llm.engine.steps - steps <= 30 // BURST_TOKENS + 2 * len(requests)
    for request, bits in zip(requests, alone, strict=True):
        assert (tuple(request.tokens), request.computed, llm.engine.cache.kv_sha256(request.sequence)) == (bits[0], bits[1], bits[-1])
        llm.engine.release(request.sequence)


def test_one_that_ends_lets_the_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [prompt(llm.config.vocab, 60, seed=i) for i in range(2)], SAMPLING[1]
    alone = [answer(llm, tokens, ONE_BY_ONE, params)[0] for tokens in prompts]
    made = alone[0][0][60:]  # type: ignore[index]
    at = next(i for i in range(4, 40) if made.index(made[i]) == i)
    monkeypatch.setattr(llm.engine, "end_ids", frozenset({made[at]}))
    monkeypatch.setattr(llm.engine, "_ends", np.array([made[at]], dtype=np.int32))
    alone[0], cost, _ = answer(llm, prompts[0], ONE_BY_ONE, replace(params, ignore_eos=False))
    _, other, _ = answer(llm, prompts[1], ONE_BY_ONE, params)
    before = llm.counters
    llm.engine.set_policy(BURSTS)
    requests = [llm.engine.submit(tokens, params=replace(params, ignore_eos=i > 0), keep=True) for i, tokens in enumerate(prompts)]
    llm.engine.run(requests)
    assert [r.finish_reason for r in requests] == ["stop", "length"] and requests[0].generated == at + 1
    assert (llm.counters - before).macs == cost.macs + other.macs, "no row follows the end"
    for request, bits in zip(requests, alone, strict=True):
        assert (tuple(request.tokens), llm.engine.cache.kv_sha256(request.sequence)) == (bits[0], bits[-1])
        llm.engine.release(request.sequence)


def test_the_end_of_the_context_ends_a_burst(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=32, context=80) as llm:
        tokens = prompt(llm.config.vocab, 60)
        alone, cost, _ = answer(llm, tokens, ONE_BY_ONE, SAMPLING[0])
        together, same_cost, steps = answer(llm, tokens, BURSTS, SAMPLING[0])
    assert together == alone and same_cost == cost and alone[1:3] == (80, "length") and steps < 10


def test_recurrent_layers_go_token_by_token(tmp_path: Path) -> None:
    """Their state is known at the end of a step only, and a reply may end before."""
    with quaff.load(CASES["lfm2"].write(tmp_path / "m.gguf"), threads=1, chunk=32) as llm:
        tokens = prompt(llm.config.vocab, 60)
        assert answer(llm, tokens, BURSTS, SAMPLING[0])[2] == 41


def test_a_row_that_overflows_inside_a_burst_fails_as_it_does_alone(tmp_path: Path) -> None:
    with quaff.load(overflowing(tmp_path, 77), threads=1, chunk=16) as llm:
        for seed in range(200):
            params = SamplingParams(max_tokens=60, temperature=1.5, seed=seed, ignore_eos=True)
            alone = ask(llm.engine, [5] * 20, ONE_BY_ONE, params)
            if alone.error is not None and alone.generated > 4:
                break
            llm.engine.release(alone.sequence)
        together = ask(llm.engine, [5] * 20, BURSTS, params)
        assert isinstance(alone.error, NonFiniteError) and isinstance(together.error, NonFiniteError)
        assert (together.tokens, str(together.error)) == (alone.tokens, str(alone.error))
        assert llm.engine.cache.sequences == 0


def test_a_burst_needs_no_memory_that_is_not_there(path: Path) -> None:
    """Neither counted nor found: rows of bursts are many, and their cells small."""

    def memory(policy: Policy) -> tuple[tuple[int, ...], int]:
        with quaff.load(path, threads=2, chunk=64) as llm:
            engine, accountant = llm.engine, llm.engine.runner._accountant
            engine.set_policy(policy)
            prompts = [prompt(llm.config.vocab, 6, seed=i) for i in range(8)]
            engine.run([engine.submit(tokens, params=SAMPLING[0]) for tokens in prompts])
            return (engine.runner.scratch_bytes, accountant.found_bytes, accountant.peak_bytes), engine.steps

    (alone, many), (together, few) = memory(ONE_BY_ONE), memory(BURSTS)
    assert together == alone and few < many


def test_no_burst_where_a_cell_would_need_more_scratch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "rows_with_scratch", lambda self, cell_rows: 0)
    assert answer(llm, prompt(llm.config.vocab, 60), BURSTS, SAMPLING[0])[2] == 41


@pytest.mark.parametrize("error", [MemoryBudgetError, SystemExit])
def test_a_step_that_raises_takes_no_burst_along(llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be drawn is forgotten with it: the others go on, and nothing is taken for a guess."""
    prompts = [prompt(llm.config.vocab, 60, seed=i) for i in range(3)]
    alone = [answer(llm, tokens, ONE_BY_ONE, SAMPLING[1])[0][0] for tokens in prompts]
    run, left = llm.engine.runner.run, 3

    def failing(batch: Batch, order: Order, on_work: object, draw: Sequence[Draw]) -> Logits:
        nonlocal left
        left -= len(draw) > 0
        if not left:
            left = -1
            raise error("none left")
        return run(batch, order, None, draw)

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    llm.engine.set_policy(BURSTS)
    requests = [llm.engine.submit(tokens, params=SAMPLING[1]) for tokens in prompts]
    try:
        llm.engine.run(requests)
    except SystemExit:
        llm.engine.run(requests)
    assert left < 0
    failed = [r for r in requests if r.error is not None]
    assert [type(r.error) for r in failed] == [error] * (error is MemoryBudgetError)
    assert all(r in failed or tuple(r.tokens) == tokens for r, tokens in zip(requests, alone, strict=True))


def test_one_who_cancels_hears_no_more(llm: LLM) -> None:
    heard: list[int] = []

    def accept(token: int) -> None:
        heard.append(token)
        if len(heard) == 5:
            llm.engine.cancel(request)

    llm.engine.set_policy(BURSTS)
    request = llm.engine.submit(prompt(llm.config.vocab, 60), params=SAMPLING[1], accept=accept)
    llm.engine.run([request])
    assert (request.finish_reason, len(heard), request.generated) == ("cancelled", 5, 5)


def test_the_native_step_refuses_rows_it_cannot_draw_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory safety must not depend on the order of cells: a row that is computed before its token is drawn would be another one."""
    runner, cache = llm.engine.runner, llm.engine.cache
    good = Draw((0.0, 0, 1.0, 0.0, 0, 0), np.array([1 << 30, -5], dtype=np.int32))
    sequences = [cache.create() for _ in range(2)]

    def run(lengths: list[int], draws: list[Draw], least: int = 0) -> Logits:
        segments = [cache.segment(s, np.zeros(n, np.int32), range(least, n)) for s, n in zip(sequences, lengths, strict=False)]
        return runner.run(Batch(tuple(segments)), Order("token"), None, draws)

    order = Order("token")

    def others(stages: tuple[StageKind, ...], shape: Shape) -> CompiledSchedule:
        return compile_order(stages, shape, order)

    try:
        assert [len(tokens) for tokens in run([3, 3], [good, good]).drawn] == [3, 3]
        for lengths, draws, least in (([3], [good], 1), ([3, 3], [good], 0), ([3], [good, good], 0), ([2, 3], [good, good], 0)):
            with pytest.raises((ValueError, ScheduleError), match="as many rows each|never computed|not wanted"):
                run(lengths, draws, least)
        bad = Draw((-1.0, 0, 1.0, 0.0, 0, 0), good.ends)  # nothing can be drawn: the first rows are the last ones
        logits = run([3, 3], [good, bad])
        assert ([len(t) for t in logits.drawn], logits.finished, logits.rows.tolist()) == ([1, 0], (1, 1), [0, 3])
        with pytest.raises(ValueError, match="out of range"):
            _native.sample(logits.values[1], -1.0, 0, 1.0, 0.0, 1.0, np.empty(0, np.int32), 0, 1, 0)
        monkeypatch.setattr(runner_module, "compile_burst", others)
        with pytest.raises(ValueError, match="as many rows each"):
            run([2, 3], [good, good])
        for order in (Order("chunk", 2), Order("layer", 1), Order("token")):  # noqa: B007
            with pytest.raises(ValueError, match="one row of every segment"):
                run([3, 3], [good, good])
    finally:
        for sequence in sequences:
            cache.free(sequence)


def test_bursts_are_as_long_as_their_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    commit = llm.engine._commit

    def slow(work: object, logits: Logits) -> None:
        drawn.append(max(map(len, logits.drawn), default=0))
        llm.engine._row_seconds = 0.004
        commit(work, logits)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine, "_commit", slow)
    llm.engine.set_policy(Policy(burst_ms=13))
    request = llm.engine.submit(prompt(llm.config.vocab, 60), params=replace(SAMPLING[0], max_tokens=9))
    llm.engine.run([request])
    assert drawn == [0, 3, 3, 2] and request.generated == 9


def test_a_step_of_one_row_of_logits_has_no_burst(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _, _ = answer(llm, prompt(llm.config.vocab, 60), ONE_BY_ONE, SAMPLING[0])
    make = engine_module.make_scheduler
    for name in ("logits_rows", "mixed_rows"):
        monkeypatch.setattr(engine_module, "make_scheduler", lambda *args, name=name: (s := make(*args), setattr(s, name, 1))[0])
        bits, _, steps = answer(llm, prompt(llm.config.vocab, 60), BURSTS, SAMPLING[0])
        assert bits == alone and steps >= 41
