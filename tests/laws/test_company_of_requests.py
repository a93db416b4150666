"""Law: tokens, logits and state of a request do not depend on its neighbours, on the order in which they came, on how long a step may take,
or on guesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import CASES, prompt

import quaff
import quaff.engine.engine as engine_module
from quaff import LLM, SamplingParams
from quaff.engine.engine import Engine, Request
from quaff.engine.pace import Policy
from quaff.engine.speculate import Lookup

POLICIES = [
    Policy(max_stall_ms=1e-3),  # every step is too long: prompts get the fewest rows beside decodes
    Policy(max_stall_ms=1e3, max_running=2),
    Policy(draft_tokens=7),
    Policy(max_stall_ms=1e-3, draft_tokens=16, max_running=3),
]


@dataclass
class Ask:
    tokens: list[int]
    params: SamplingParams


class Answer:
    """What a request left, by bytes."""

    def __init__(self, engine: Engine, ask: Ask) -> None:
        self._engine = engine
        self._logits = sha256()
        self.request: Request = engine.submit(ask.tokens, params=ask.params, on_logits=self._add, keep=True)

    def _add(self, position: int, row: NDArray[np.float32]) -> None:
        self._logits.update(row.tobytes())

    def bits(self) -> tuple[object, ...]:
        r = self.request
        assert r.error is None and r.finish_reason == "length"
        state = self._engine.cache.kv_sha256(r.sequence)
        self._engine.release(r.sequence)
        return (tuple(r.tokens), self._logits.hexdigest(), r.computed, state, tuple(r.logprobs))


def asks(vocab: int) -> list[Ask]:
    """Short and long prompts, greedy and drawn; some repeat themselves, as small models do. The last answer is one token over and over."""
    pattern = prompt(vocab, 9, seed=5)
    prompts = [
        pattern * 6,
        prompt(vocab, 150, seed=1),
        prompt(vocab, 1, seed=2),
        pattern * 3 + prompt(vocab, 200, seed=3) + pattern,
        pattern,
    ]
    drawn = [
        Ask(
            tokens, SamplingParams(max_tokens=20 + 3 * i, temperature=0.6 * (i % 2), top_k=2 * (i % 2), seed=i, logprobs=1, ignore_eos=True)
        )
        for i, tokens in enumerate(prompts)
    ]
    return [*drawn, Ask(prompt(vocab, 70, seed=6), SamplingParams(max_tokens=30, logit_bias={7: 100.0}, ignore_eos=True))]


@pytest.fixture(scope="module", params=list(CASES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[request.param].write(tmp_path_factory.mktemp("company") / "m.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with quaff.load(path, threads=1, chunk=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[object, ...]]:
    return [run(llm, [ask], [0])[0] for ask in asks(llm.config.vocab)]


def run(llm: LLM, crowd: list[Ask], arrivals: list[int]) -> list[tuple[object, ...]]:
    """The answers of requests that arrive before the given steps."""
    answers: dict[int, Answer] = {}
    step = 0
    while len(answers) < len(crowd) or any(not a.request.done for a in answers.values()):
        for i, arrival in enumerate(arrivals):
            if arrival == step:
                answers[i] = Answer(llm.engine, crowd[i])
        llm.engine.step()
        step += 1
    return [answers[i].bits() for i in range(len(crowd))]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_company_never_shows(llm: LLM, alone: list[tuple[object, ...]], policy: Policy) -> None:
    crowd, rng = asks(llm.config.vocab), np.random.default_rng(POLICIES.index(policy))
    llm.engine.set_policy(policy)
    drafted, accepted, steps = llm.engine.drafted_tokens, llm.engine.accepted_tokens, llm.engine.steps
    try:
        order = rng.permutation(len(crowd)).tolist()
        arrivals = rng.integers(0, 12, len(crowd)).tolist()
        got = run(llm, [crowd[i] for i in order], arrivals)
    finally:
        llm.engine.set_policy(Policy())
    for i, bits in zip(order, got, strict=True):
        assert bits == alone[i], f"request {i} beside others, {policy}"
    assert llm.engine.steps - steps < sum(ask.params.max_tokens for ask in crowd), "no step decoded for several"
    fired = policy.draft_tokens > 0 and not llm.graph.state_kinds
    assert (llm.engine.drafted_tokens > drafted) == fired
    assert (llm.engine.accepted_tokens > accepted) == fired


def test_company_never_shows_through_a_prefix_tree(llm: LLM, alone: list[tuple[object, ...]], path: Path) -> None:
    """The same requests again, and once more: what they find of each other changes nothing either."""
    crowd = asks(llm.config.vocab)
    with quaff.load(path, threads=1, chunk=32, prefix_cache_bytes=8 << 20) as warm:
        warm.engine.set_policy(POLICIES[-1])
        for arrivals in ([0] * len(crowd), [5, 4, 3, 2, 1, 0], [0, 7, 0, 7, 0, 7]):
            assert run(warm, crowd, arrivals) == alone
        assert warm.engine.prefix is not None and warm.engine.prefix.counters.cached_tokens > 0


def test_guesses_that_are_believed_fail_the_comparison(llm: LLM, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what followed before is taken for what follows."""
    draw = engine_module.sample

    def believe(params: SamplingParams, row: NDArray[np.float32], tokens: list[int], *rest: object) -> int:
        guess = Lookup(4).draft(tokens, 1)
        return guess[0] if guess else draw(params, row, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "sample", believe)
    crowd = asks(llm.config.vocab)
    assert [run(llm, [crowd[0]], [0])[0], run(llm, [crowd[3]], [0])[0]] != [alone[0], alone[3]]
