"""What a request may ask the engine for: log-probabilities, constraints, choices that share a prompt, as much as there is memory for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import CASES, prompt
from tests.unit.engine.test_llm import overflowing

import quaff
import quaff.engine.engine as engine_module
from quaff import LLM, SamplingParams
from quaff.engine.engine import Request, make_scheduler, row_work
from quaff.engine.pace import Policy
from quaff.engine.speculate import Lookup
from quaff.errors import ConfigError, MemoryBudgetError
from quaff.schedule import Order

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama-gqa", "gemma3", "qwen35"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[request.param].write(tmp_path_factory.mktemp("requests") / "tiny.gguf")


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with quaff.load(model, threads=1, chunk=32) as llm:
        yield llm
        llm.engine.sweep()
        assert llm.engine.cache.sequences == 0, "a request kept its pages"


def generated(request: Request) -> list[int]:
    assert request.error is None
    return request.tokens[request.prompt_tokens :]


# Log-probabilities


def test_log_probabilities_are_those_of_a_score(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 60, seed=1)
    score = llm.score(tokens)
    request = llm.engine.submit(tokens, params=replace(PARAMS, logprobs=3, prompt_logprobs=2))
    llm.engine.run([request])
    assert [p.logprob for p in request.prompt_logprobs] == list(score.logprobs)
    assert [p.id for p in request.prompt_logprobs] == tokens[1:] and all(len(p.top) == 2 for p in request.prompt_logprobs)
    assert [p.id for p in request.logprobs] == generated(request) and all(len(p.top) == 3 for p in request.logprobs)
    whole = llm.score(request.tokens)
    assert [p.logprob for p in request.logprobs] == list(whole.logprobs[59:])
    plain = llm.engine.submit(tokens, params=PARAMS)
    llm.engine.run([plain])
    assert generated(plain) == generated(request) and not plain.logprobs and not plain.prompt_logprobs


def test_log_probabilities_of_a_prompt_alone(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 60, seed=1)
    read, nothing = (llm.engine.submit(tokens, params=SamplingParams(max_tokens=0, prompt_logprobs=n)) for n in (0, None))
    llm.engine.run([read, nothing])
    assert [p.logprob for p in read.prompt_logprobs] == list(llm.score(tokens).logprobs)
    assert (read.finish_reason, generated(read), nothing.finish_reason, nothing.computed) == ("length", [], "length", 0)


def test_prompt_log_probabilities_with_a_warm_state(llm: LLM) -> None:
    """Logprobs with a warm cache (vllm 3251, 42019): rows that must be told are computed, whatever is there already."""
    tokens = prompt(llm.config.vocab, 60, seed=2)
    asked = replace(PARAMS, prompt_logprobs=1)
    with llm.prefill(tokens[:50]).state as state:
        cold = llm.engine.submit(tokens, params=asked)
        warm = llm.engine.submit(tokens, params=asked, base=state.sequence(), base_tokens=state.tokens)
        llm.engine.run([cold, warm])
    assert warm.prompt_logprobs == cold.prompt_logprobs and len(cold.prompt_logprobs) == 59
    assert generated(warm) == generated(cold)


# Constraints


class Walk:
    """Allows steps of 1 or 2 from the last token, for `length` tokens."""

    def __init__(self, vocab: int, start: int, length: int) -> None:
        self.vocab, self.at, self.left = vocab, start, length
        self.drawn: list[int] = []

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.vocab, bool)
        mask[[(self.at + 1) % self.vocab, (self.at + 2) % self.vocab]] = True
        return mask

    def accept(self, token: int) -> None:
        self.drawn.append(token)
        self.at, self.left = token, self.left - 1

    @property
    def ended(self) -> bool:
        return self.left == 0


@pytest.mark.parametrize("drafts", [0, 8])
def test_a_constraint_is_asked_and_told_in_order(llm: LLM, drafts: int) -> None:
    vocab = llm.config.vocab
    llm.engine.set_policy(Policy(draft_tokens=drafts))
    # A prompt that has walked before, so that guesses are right at times.
    tokens = [*range(5, 60), *range(5, 60, 2), 5]
    walk = Walk(vocab, 5, 25)
    request = llm.engine.submit(tokens, params=replace(PARAMS, max_tokens=100), constraint=walk)
    llm.engine.run([request])
    out = generated(request)
    assert (request.finish_reason, len(out), walk.drawn) == ("stop", 25, out)
    assert all((b - a) % vocab in (1, 2) for a, b in zip([5, *out], out, strict=False))
    if drafts and not llm.graph.state_kinds:
        assert request.drafted > 0
    again = llm.engine.submit(tokens, params=replace(PARAMS, max_tokens=100), constraint=Walk(vocab, 5, 25))
    llm.engine.set_policy(Policy())
    llm.engine.run([again])
    assert generated(again) == out


def test_a_constraint_that_fails_ends_its_request_only(llm: LLM) -> None:
    class Nothing(Walk):
        def allowed(self) -> NDArray[np.bool_]:
            return np.zeros(self.vocab, bool)

    bad = llm.engine.submit([1, 2, 3], params=PARAMS, constraint=Nothing(llm.config.vocab, 0, 5))
    good = llm.engine.submit([1, 2, 3], params=PARAMS)
    llm.engine.run([bad, good])
    assert isinstance(bad.error, ConfigError) and len(generated(good)) == 12


# Choices of one prompt


def test_choices_share_the_prompt_and_are_what_they_are_alone(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 150, seed=3)
    each = [replace(PARAMS, choice=i) for i in range(4)]
    alone = [llm.generate(tokens, p).tokens for p in each]
    assert len(set(alone)) > 1
    before = llm.counters
    first = llm.engine.submit(tokens, params=each[0])
    rest = [llm.engine.submit(tokens, params=p, share=first) for p in each[1:]]
    assert llm.engine.waiting == 4
    llm.engine.run([first, *rest])
    assert [tuple(generated(r)) for r in (first, *rest)] == list(alone)
    assert [r.cached_tokens for r in rest] == [149] * 3
    rows = (llm.counters - before).macs // sum(s.macs_per_row for s in llm.graph.stages[: llm.graph.stages.index(last_mixer(llm)) + 1])
    assert rows <= 150 + 3 + 4 * 12


def last_mixer(llm: LLM):  # noqa: ANN201
    return [s for s in llm.graph.stages if s.kind == "mixer"][-1]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_choices_outlive_the_request_that_they_share(llm: LLM, when: str) -> None:
    tokens = prompt(llm.config.vocab, 150, seed=4)
    each = [replace(PARAMS, choice=i) for i in range(3)]
    alone = [llm.generate(tokens, p).tokens for p in each]
    first = llm.engine.submit(tokens, params=each[0])
    rest = [llm.engine.submit(tokens, params=p, share=first) for p in each[1:]]
    llm.engine.set_policy(Policy(max_stall_ms=1000))  # steps of one chunk
    for _ in range({"before": 0, "during": 2, "after": 5}[when]):
        llm.engine.step()
    assert bool(first.prefilled_at) == (when == "after")
    llm.engine.cancel(first)
    llm.engine.run([first, *rest])
    assert first.finish_reason == "cancelled"
    assert [tuple(generated(r)) for r in rest] == alone[1:]
    if when == "during":
        assert (
            rest[0].cached_tokens == (first.computed if not llm.graph.state_kinds else rest[0].cached_tokens)
            and rest[1].cached_tokens == 149
        )
    assert not llm.engine._followers


def test_a_choice_that_comes_late_or_has_another_prompt_is_right_all_the_same(llm: LLM) -> None:
    tokens, other = prompt(llm.config.vocab, 80, seed=5), prompt(llm.config.vocab, 90, seed=6)
    alone = [llm.generate(ids, PARAMS).tokens for ids in (tokens, other)]
    first = llm.engine.submit(tokens, params=PARAMS)
    wrong = llm.engine.submit(other, params=PARAMS, share=first)
    gone = llm.engine.submit(tokens, params=PARAMS, share=wrong)
    llm.engine.cancel(gone)
    while not first.prefilled_at:
        llm.engine.step()
    late = llm.engine.submit(tokens, params=PARAMS, share=first)
    llm.engine.run([first, wrong, gone, late])
    assert [tuple(generated(r)) for r in (first, wrong, late)] == [alone[0], alone[1], alone[0]]
    assert (wrong.cached_tokens, gone.finish_reason) == (0, "cancelled")
    after = llm.engine.submit(tokens, params=PARAMS, share=first)
    llm.engine.run([after])
    assert tuple(generated(after)) == alone[0]


# Memory


def test_alone_a_request_may_generate_as_much_as_there_is_room_for(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 100, seed=7)
    wanted = SamplingParams(max_tokens=3000, ignore_eos=True)
    llm.generate(tokens, SamplingParams(max_tokens=40, ignore_eos=True))
    full = llm.engine.submit(tokens, params=replace(wanted, max_tokens=200))
    llm.engine.run([full])
    llm.accountant.limit_bytes = llm.accountant.total_bytes + llm.engine.cache.peak_bytes(180, llm.engine.block_rows) + 1000
    request = llm.engine.submit(tokens, params=wanted)
    llm.engine.run([request])
    assert request.finish_reason == "length" and request.error is None
    assert 128 <= request.reserved <= 192 and len(request.tokens) == request.reserved + 1  # pages are whole
    assert generated(full)[: request.generated] == generated(request)
    llm.accountant.limit_bytes = llm.accountant.total_bytes + llm.engine.cache.peak_bytes(60, llm.engine.block_rows)
    refused = llm.engine.submit(tokens, params=wanted)
    llm.engine.run([refused])
    assert isinstance(refused.error, MemoryBudgetError)


def test_those_that_came_last_give_way_and_answer_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AHEAD_TOKENS", 16)
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 8 * 4 * llm.config.vocab)
    llm.configure(chunk=32)
    prompts = [prompt(llm.config.vocab, 60 + 10 * i, seed=i) for i in range(3)]
    each = [replace(PARAMS, max_tokens=150, logprobs=0, prompt_logprobs=0 if i == 2 else None) for i in range(3)]
    heard: dict[int, list[int]] = {}
    alone = []
    for ids, params in zip(prompts, each, strict=True):
        request = llm.engine.submit(ids, params=params)
        llm.engine.run([request])
        alone.append((request.tokens, request.logprobs, request.prompt_logprobs))
    # Room for the prompts of all, not for their answers.
    need = llm.engine.cache.peak_bytes(128, llm.engine.block_rows) * 3
    llm.accountant.limit_bytes = llm.accountant.total_bytes + need + llm.engine.cache.states.slot_bytes
    before = llm.engine.preemptions
    requests = []
    for i, (ids, params) in enumerate(zip(prompts, each, strict=True)):
        heard[i] = []
        requests.append(llm.engine.submit(ids, params=params, on_logits=lambda position, row, i=i: heard[i].append(position)))
    read = llm.engine.submit(prompts[0], logits_from=0, on_logits=lambda position, row: heard.setdefault(9, []).append(position))
    llm.engine.run([*requests, read])
    assert llm.engine.preemptions > before
    assert [(r.tokens, r.logprobs, r.prompt_logprobs) for r in requests] == alone
    assert [heard[i] for i in range(3)] == [list(range(59, 209)), list(range(69, 219)), list(range(229))]
    assert heard[9] == list(range(60))


# Guesses


def test_guesses_save_steps_and_stay_within_what_was_asked(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 40, seed=8)
    params = SamplingParams(max_tokens=50, logit_bias={7: 100.0}, ignore_eos=True)
    llm.engine.set_policy(Policy(draft_tokens=16))
    before = llm.engine.steps
    request = llm.engine.submit(tokens, params=params)
    llm.engine.run([request])
    assert generated(request) == [7] * 50 and request.computed == 40 + 49
    steps = llm.engine.steps - before
    if llm.graph.state_kinds:
        assert (steps, request.drafted) == (50, 0)
    else:
        assert steps <= 12 and request.accepted == request.drafted >= 40
        assert (llm.engine.drafted_tokens, llm.engine.accepted_tokens) == (request.drafted, request.accepted)


def test_an_answer_that_ends_inside_a_guess_leaves_the_state_of_its_tokens(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 40, seed=8)
    params = SamplingParams(max_tokens=50, logit_bias={7: 100.0}, ignore_eos=True)
    llm.engine.set_policy(Policy(draft_tokens=16))

    def after_ten(token: int) -> str | None:
        seen.append(token)
        return "stop" if len(seen) == 10 else None

    seen: list[int] = []
    request = llm.engine.submit(tokens, params=params, accept=after_ten, keep=True)  # type: ignore[arg-type]
    llm.engine.run([request])
    assert (request.finish_reason, len(generated(request)), request.computed) == ("stop", 10, 49)
    with llm.prefill(request.tokens[:49], logits="none").state as expected:
        assert llm.engine.cache.kv_sha256(request.sequence) == expected.kv_sha256()
    llm.engine.release(request.sequence)


def test_guesses_are_shared_out_among_those_that_decode(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=30, logit_bias={7: 100.0}, ignore_eos=True)
    llm.engine.set_policy(Policy(draft_tokens=16))
    monkeypatch.setattr(engine_module, "STEP_DRAFTS", 4)
    rows: list[int] = []
    batch = llm.engine._batch
    monkeypatch.setattr(llm.engine, "_batch", lambda planned: (rows.append(sum(w.rows for w in planned)), batch(planned))[1])
    requests = [llm.engine.submit([i], params=params) for i in range(3)]
    llm.engine.run(requests)
    assert all(generated(r) == [7] * 30 for r in requests)
    assert max(rows) == (3 if llm.graph.state_kinds else 6)


class Stubborn(Lookup):
    """Guesses token 77, whatever there is, until it is stopped."""

    guesses = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        if self.stopped:
            return []
        self.guesses += 1
        return [77][:limit]

    stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_a_guess_that_overflows_is_forgotten(tmp_path: Path) -> None:
    """An answer must not fail for a token that nobody asked for."""
    with quaff.load(overflowing(tmp_path, 77), threads=1, chunk=16) as llm:
        llm.engine.set_policy(Policy(draft_tokens=4))
        request = llm.engine.submit([5, 6], params=SamplingParams(max_tokens=10, logit_bias={7: 100.0}, ignore_eos=True))
        request.lookup = lookup = Stubborn(4)
        llm.engine.run([request])
        assert generated(request) == [7] * 10
        assert (lookup.guesses, lookup.stopped, request.drafted) == (1, True, 0)


# Work of prompts


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35", "deepseek2", "lfm2moe"])
def test_the_work_of_rows_is_what_they_count(name: str, tmp_path: Path) -> None:
    with quaff.load(CASES[name].write(tmp_path / "m.gguf"), threads=1, chunk=32) as llm:
        work = row_work(llm.graph)
        llm.prefill(prompt(llm.config.vocab, 130), logits="none")
        counted = llm.counters
        assert sum(work(position) for position in range(130)) == counted.work - counted.head_macs
        assert all(work(p) <= work(p + 1) for p in range(200))


def test_a_bound_on_stalls_cuts_steps_of_prompts_to_one_chunk(llm: LLM) -> None:
    for order, rows in (
        (Order("chunk", 32), 32),
        (Order("token"), 64),
        (Order("layer", 32), make_scheduler(Order("layer", 32), llm.graph).prompt_rows),
    ):
        assert make_scheduler(order, llm.graph, Policy(max_stall_ms=200)).prompt_rows == rows
        assert make_scheduler(order, llm.graph, Policy(draft_tokens=4)).prompt_rows > 64


def test_requests_that_are_cancelled_while_they_wait_are_forgotten(llm: LLM) -> None:
    llm.engine.set_policy(Policy(max_running=1))
    first = llm.engine.submit([1, 2, 3], params=PARAMS)
    llm.engine.step()
    waiting = [llm.engine.submit([4, 5, i], params=PARAMS) for i in range(5)]
    for request in waiting[:-1]:
        llm.engine.cancel(request)
    llm.engine.step()
    assert not first.done and list(llm.engine._waiting) == waiting[-1:]
    llm.engine.run([first, waiting[-1]])
    assert waiting[-1].finish_reason == "length"


def test_the_logits_of_all_steps_take_the_same_memory(llm: LLM) -> None:
    """It is kept while there are requests, and counted as long."""
    idle, rows, used = llm.accountant.used_bytes, [], set()

    def on_logits(position: int, row: NDArray[np.float32]) -> None:
        rows.append(row)
        used.add(llm.accountant.used_bytes)

    # Its positions fit into one page: nothing else is taken while it runs.
    request = llm.engine.submit(prompt(llm.config.vocab, 5), params=replace(PARAMS, max_tokens=20), on_logits=on_logits)
    llm.engine.run([request])
    assert len(rows) == 20 and all(np.shares_memory(rows[0], row) for row in rows) and len(used) == 1
    del request
    assert llm.accountant.used_bytes - idle == llm.engine.runner._scratch_rows_bytes
