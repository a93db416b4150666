"""The loop's thread: what listeners hear, queues and their end, cancels, faults, signs of life."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.tiny import CASES, prompt

import quaff
import quaff.engine.loop as loop_module
import quaff.engine.runner as runner_module
from quaff import LLM, SamplingParams
from quaff.batch import Batch, Logits
from quaff.engine.engine import Engine, Request
from quaff.engine.loop import EngineLoop, Update
from quaff.engine.pace import Policy
from quaff.engine.runner import Draw
from quaff.errors import ClosedError, ConfigError, QuaffError, QueueFullError
from quaff.schedule import Order

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
SECONDS = 60


@pytest.fixture(scope="module", params=["llama-gqa"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[request.param].write(tmp_path_factory.mktemp("loop") / "tiny.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with quaff.load(path, threads=1, chunk=64) as llm:
        yield llm
        assert llm.engine.cache.sequences == 0, "a request kept its pages"


@pytest.fixture
def loop(llm: LLM) -> Iterator[EngineLoop]:
    llm.engine.set_policy(Policy(max_stall_ms=50))
    loop = EngineLoop(llm.engine, max_waiting=4)
    loop.start()
    yield loop
    loop.close()


class Ear:
    """A listener that a test can wait on."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._queue: SimpleQueue[Update] = SimpleQueue()

    def __call__(self, update: Update) -> None:
        self._queue.put(update)

    def hear(self) -> Update:
        self.updates.append(self._queue.get(timeout=SECONDS))
        return self.updates[-1]

    def all(self) -> list[Update]:
        while not self.updates or not self.updates[-1].done:
            self.hear()
        return self.updates

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for u in self.all() for t in u.tokens)


class Gate:
    """A request that holds the loop inside a step until it is opened."""

    def __init__(self, loop: EngineLoop) -> None:
        self.inside, self.opened = threading.Event(), threading.Event()
        self.ear = Ear()
        self.request = loop.submit([1, 2], self.ear, logits_from=0, on_logits=self._wait)
        assert self.inside.wait(SECONDS)

    def _wait(self, position: int, row: object) -> None:
        self.inside.set()
        assert self.opened.wait(SECONDS)


def test_updates_add_up_to_the_answer(llm: LLM, loop: EngineLoop) -> None:
    ids = prompt(300, 300)
    expected = llm.generate(ids, PARAMS)
    ear = Ear()
    request = loop.submit(ids, ear, params=PARAMS)
    updates = ear.all()
    assert ear.tokens == expected.tokens == tuple(request.tokens[300:])
    assert (request.finish_reason, updates[-1].done) == ("length", True)
    computed = [u.computed for u in updates]
    assert computed == sorted(computed) and len([n for n in computed if 0 < n < 300]) >= 4  # a step has one chunk
    assert computed[-1] == 311
    assert not any(u.logprobs for u in updates)
    assert [u.admitted for u in updates[-3:]] == [True] * 3


def test_log_probabilities_come_with_their_tokens(loop: EngineLoop) -> None:
    from dataclasses import replace

    ear = Ear()
    request = loop.submit([5, 6, 7], ear, params=replace(PARAMS, logprobs=2))
    for update in ear.all():
        assert [p.id for p in update.logprobs] == list(update.tokens)
    assert [p for u in ear.updates for p in u.logprobs] == request.logprobs


def test_many_clients_get_what_they_would_get_alone(llm: LLM, loop: EngineLoop) -> None:
    prompts = [prompt(300, 20 + 61 * i, seed=i) for i in range(8)]
    alone = [llm.generate(p, PARAMS).tokens for p in prompts]
    ears = [Ear() for _ in prompts]
    first = [loop.submit(p, ear, params=PARAMS) for p, ear in zip(prompts[:4], ears, strict=False)]
    ears[0].hear()
    while loop.waiting:
        time.sleep(0.001)
    rest = [loop.submit(p, ear, params=PARAMS) for p, ear in zip(prompts[4:], ears[4:], strict=False)]
    assert [ear.tokens for ear in ears] == alone
    assert all(r.finish_reason == "length" for r in first + rest)


def test_submit_and_cancel_do_not_wait_for_a_step(loop: EngineLoop) -> None:
    gate = Gate(loop)
    ear, other = Ear(), Ear()
    request = loop.submit(prompt(300, 50), ear, params=PARAMS)
    loop.submit([3], other, params=PARAMS)
    assert loop.waiting == 2 and not request.admitted
    loop.cancel(request)
    gate.opened.set()
    assert [(u.done, u.tokens) for u in ear.all()][-1] == (True, ())
    assert request.finish_reason == "cancelled" and request.computed == 0
    assert len(other.tokens) == 12


def test_a_full_queue_refuses_and_says_when(loop: EngineLoop) -> None:
    gate = Gate(loop)
    ears = [Ear() for _ in range(4)]
    for ear in ears:
        loop.submit([3], ear, params=PARAMS)
    with pytest.raises(QueueFullError, match="4 requests are waiting") as error:
        loop.submit([3], Ear(), params=PARAMS)
    assert 1 <= error.value.retry_after_seconds <= 60
    gate.opened.set()
    assert len({ear.tokens for ear in ears}) == 1
    ear = Ear()
    loop.submit([3], ear, params=PARAMS)
    assert ear.tokens == ears[0].tokens


def test_no_more_than_max_running_take_part(llm: LLM, loop: EngineLoop) -> None:
    llm.engine.set_policy(Policy(max_stall_ms=50, max_running=2))
    ears = [Ear() for _ in range(4)]
    running: list[int] = []
    for ear in ears:
        loop.submit([3], ear, params=PARAMS, accept=lambda token: running.append(llm.engine.running))
    assert len({ear.tokens for ear in ears}) == 1
    assert max(running) == 2


def test_parameters_that_do_not_fit_the_model_are_refused_at_once(loop: EngineLoop) -> None:
    with pytest.raises(ConfigError, match="token 300, which is outside the vocabulary of 300"):
        loop.submit([3], Ear(), params=SamplingParams(logit_bias={300: 1.0}))
    assert loop.waiting == 0


def test_a_request_that_cannot_start_is_told_so(loop: EngineLoop) -> None:
    ear = Ear()
    request = loop.submit([3], ear, params=PARAMS, base=999)
    assert ear.all()[-1].done and request.finish_reason == "error" and isinstance(request.error, KeyError)
    assert request.finished_at > request.submitted_at


def test_a_listener_that_fails_ends_its_own_request_only(loop: EngineLoop) -> None:
    def broken(update: Update) -> None:
        raise RuntimeError("nobody there")

    ear = Ear()
    bad = loop.submit([3], broken, params=SamplingParams(max_tokens=4000, ignore_eos=True))
    loop.submit([3], ear, params=PARAMS)
    assert len(ear.tokens) == 12
    while not bad.done:
        time.sleep(0.001)
    assert bad.finish_reason == "cancelled"


def test_calls_run_between_steps_in_the_loops_thread(loop: EngineLoop) -> None:
    assert loop.call(lambda: threading.current_thread().name).result(SECONDS) == "quaff-loop"
    with pytest.raises(KeyError):
        loop.call(lambda: {}["x"]).result(SECONDS)


def test_a_step_of_another_engine_is_a_sign_of_life(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.0)
    moved, seen = loop._moved, set[Engine]()

    def watch(engine: Engine, done: int) -> None:
        moved(engine, done)
        seen.add(engine)

    monkeypatch.setattr(loop, "_moved", watch)
    llm.embed([prompt(300, 3000)], drive=lambda engine: loop.drive(engine).result(SECONDS))
    assert llm._embedder is not None and seen == {llm._embedder._engine}


def cancel_in_step(llm: LLM, loop: EngineLoop, step: int, request: Request, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cancel a request as its `step`-th step begins; rows of all steps that finish from then on."""
    run, rows = llm.engine.runner.run, []
    seen = 0

    def watched(batch: Batch, order: Order, *rest: object) -> Logits:
        nonlocal seen
        seen += 1
        if seen == step:
            loop.cancel(request)
        logits = run(batch, order, *rest)  # type: ignore[arg-type]
        if seen >= step:
            rows.append(sum(logits.finished))
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", watched)
    return rows


@pytest.mark.parametrize("path", ["llama-gqa", "gemma3", "qwen35", "lfm2"], indirect=True)
def test_a_cancelled_prompt_ends_at_the_next_cell(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client gone (ds4 333): the step that computes for nobody else ends, what is finished stays, nothing more is computed."""
    gate, ear = Gate(loop), Ear()
    request = loop.submit(prompt(300, 4000), ear, params=PARAMS, keep=True)
    rows = cancel_in_step(llm, loop, 5, request, monkeypatch)
    gate.opened.set()
    ear.all()
    assert (request.finish_reason, request.computed, rows) == ("cancelled", 4 * 64, [0])
    with llm.prefill(request.tokens[: request.computed], logits="none").state as expected:
        assert llm.engine.cache.kv_sha256(request.sequence) == expected.kv_sha256()
    llm.engine.release(request.sequence)
    llm.engine.sweep()


def test_a_cancel_does_not_take_the_step_from_its_neighbours(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llm.generate(prompt(300, 500, seed=1), PARAMS).tokens
    gate, ear, other = Gate(loop), Ear(), Ear()
    request = loop.submit(prompt(300, 4000), ear, params=PARAMS)
    loop.submit(prompt(300, 500, seed=1), other, params=PARAMS)
    rows = cancel_in_step(llm, loop, 5, request, monkeypatch)
    gate.opened.set()
    assert other.tokens == alone
    assert request.finish_reason == "cancelled" and 64 <= request.computed < 5 * 64
    # The step was finished for both; from then on there is only the neighbour.
    assert rows[0] == 64 and sum(rows) <= 500 + 12


def test_close_cancels_what_is_left(llm: LLM) -> None:
    loop = EngineLoop(llm.engine)
    loop.start()
    ear = Ear()
    request = loop.submit([3], ear, params=SamplingParams(max_tokens=4000, ignore_eos=True))
    ear.hear()
    loop.close()
    assert ear.all()[-1].done and request.finish_reason == "cancelled"
    with pytest.raises(ClosedError, match="shutting down"):
        loop.submit([3], ear)
    with pytest.raises(ClosedError, match="shutting down"):
        loop.call(lambda: None)
    loop.close()


def test_close_may_wait_for_what_is_running(llm: LLM) -> None:
    loop = EngineLoop(llm.engine)
    loop.start()
    ear = Ear()
    request = loop.submit([3], ear, params=PARAMS)
    loop.close(drain_seconds=SECONDS)
    assert (request.finish_reason, len(ear.tokens)) == ("length", 12)


def test_close_before_the_start(llm: LLM) -> None:
    EngineLoop(llm.engine).close()
    with pytest.raises(ConfigError, match="max_waiting"):
        EngineLoop(llm.engine, max_waiting=0)


def test_a_wedged_step_is_silent_and_an_idle_loop_is_not(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_SECONDS", 0.01)
    gate = Gate(loop)
    before = loop.silent_seconds
    while loop.silent_seconds < before + 0.2:
        time.sleep(0.01)
    gate.opened.set()
    gate.ear.all()
    beats = set()
    while len(beats) < 3:
        beats.add(loop._beat)
        time.sleep(0.01)


def test_a_long_step_that_moves_is_not_silent(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.0)
    beats: list[float] = []
    moved = loop._moved

    def watch(engine: Engine, done: int) -> None:
        moved(engine, done)
        beats.append(loop._beat)

    monkeypatch.setattr(loop, "_moved", watch)
    # A busy core may run some steps in one go, before their progress is looked at: one request of many must show it by itself.
    for attempt in range(100):
        beats.clear()
        ear = Ear()
        loop.submit(prompt(300, 3000, seed=attempt), ear, params=PARAMS)
        ear.all()
        if len(set(beats)) > 3:
            return
    pytest.fail(f"progress was seen {len(set(beats))} times")


def test_a_long_step_tells_how_far_it_is(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence (cline 13843, opencode 49044): a step may be a whole prompt, where all weights are read for it once."""
    monkeypatch.setattr(loop_module, "TELL_SECONDS", 0.0)
    llm.configure(schedule="layer")
    run, work, ids = llm.engine.runner.run, llm.engine.runner.work(0, 1000, 1), prompt(300, 1000)

    def watched(batch: Batch, order: Order, on_work: Callable[[int], None], draw: Sequence[Draw]) -> Logits:
        for tenth in (1, 5, 10, 12):
            on_work(tenth * work // 10)
        return run(batch, order, on_work, draw)

    monkeypatch.setattr(llm.engine.runner, "run", watched)
    ear = Ear()
    loop.submit(ids, ear, params=SamplingParams(max_tokens=2, ignore_eos=True))
    told = [(u.computed, u.step_rows, round(u.step_share, 3)) for u in ear.all() if u.step_rows]
    assert told == [(0, 1000, share) for share in (0.1, 0.5, 0.999, 0.999)], "nobody is told of steps that decode"
    assert [u.computed for u in ear.updates][-1] == 1001 and len(ear.tokens) == 2


def test_a_listener_that_fails_inside_a_step_ends_its_own_request_only(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TELL_SECONDS", 0.0)
    run = llm.engine.runner.run
    monkeypatch.setattr(llm.engine.runner, "run", lambda batch, order, on_work, draw: (on_work(1), run(batch, order, on_work, draw))[1])

    def broken(update: Update) -> None:
        assert not update.step_rows

    gate, ear = Gate(loop), Ear()
    bad = loop.submit(prompt(300, 1000), broken, params=PARAMS)
    loop.submit([3], ear, params=PARAMS)
    gate.opened.set()
    assert len(ear.tokens) == 12
    while not bad.done:
        time.sleep(0.001)
    assert bad.finish_reason == "cancelled"


def test_steps_that_fail_for_no_requests_fault_end_the_loop_and_tell_everyone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(llm.engine)
    monkeypatch.setattr(llm.engine, "step", lambda on_work: 1 / 0)
    loop.start()
    ear = Ear()
    request = loop.submit([3], ear, params=PARAMS)
    assert ear.all()[-1].done
    assert request.finish_reason == "error" and isinstance(request.error, ZeroDivisionError)
    with pytest.raises(QuaffError, match="shutting down"):
        loop.submit([3], ear)
    loop.close()
    monkeypatch.undo()
    llm.engine.sweep()


def test_one_bad_step_costs_its_requests_only(llm: LLM, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    step, failed = llm.engine.step, []

    def once(on_work: object) -> None:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError
        step(on_work)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine, "step", once)
    ear, again = Ear(), Ear()
    request: Request = loop.submit([3], ear, params=PARAMS)
    ear.all()
    assert request.finish_reason == "cancelled"
    loop.submit([3], again, params=PARAMS)
    assert len(again.tokens) == 12
