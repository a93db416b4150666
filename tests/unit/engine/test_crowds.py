"""Crowds of random requests with little memory: every answer is what it is alone, and nothing is left behind."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny import CASES, prompt

import quaff
import quaff.engine.engine as engine_module
from quaff import LLM, SamplingParams
from quaff.engine.engine import Request
from quaff.engine.pace import Policy
from quaff.errors import MemoryBudgetError

LOGITS_ROWS = 16
THREAD_SCRATCH_BYTES = 1 << 16
KINDS = ["llama-gqa", "gemma3", "gemma4", "qwen35", "lfm2"]


def common_prompts(vocab: int) -> list[list[int]]:
    """Prompts that begin alike, part at all kinds of places, and repeat themselves."""
    trunk, turn = prompt(vocab, 200, seed=1), prompt(vocab, 12, seed=2)
    cuts = [1, 63, 64, 65, 100, 128, 150, 199]
    return [trunk[:cut] + prompt(vocab, 1 + 7 * i, seed=10 + i) + turn * (i % 4) for i, cut in enumerate(cuts)]


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([0, 1, 5, 40, 90]),
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(3),
        repetition_penalty=rng.choice([1.0, 0.7]),
        prompt_logprobs=rng.choice([None, None, 0]),
        ignore_eos=True,
    )


class Crowd:
    """Requests of one run, beside the answers that are known."""

    def __init__(self, llm: LLM, alone: LLM, seed: int) -> None:
        self.llm, self.alone, self.rng = llm, alone, random.Random(seed)
        self.prompts = common_prompts(llm.config.vocab)
        self.requests: list[Request] = []
        self.known: dict[tuple[object, ...], tuple[list[int], list[object]]] = {}

    def add(self) -> None:
        rng = self.rng
        tokens, params = rng.choice(self.prompts), some_params(rng)
        boundaries = sorted(rng.sample(range(1, len(tokens) + 1), min(len(tokens), rng.randrange(3))))
        first = self.llm.engine.submit(tokens, params=params, boundaries=boundaries, salt=rng.choice(["", "", "other"]))
        self.requests.append(first)
        for choice in range(1, rng.choice([1, 1, 3])):
            self.requests.append(self.llm.engine.submit(tokens, params=replace(params, choice=choice), share=first))

    def answer(self, request: Request) -> tuple[list[int], list[object]]:
        assert request.params is not None
        key = (tuple(request.tokens[: request.prompt_tokens]), request.params)
        if key not in self.known:
            other = self.alone.engine.submit(key[0], params=request.params)
            self.alone.engine.run([other])
            self.known[key] = other.tokens, list(other.prompt_logprobs)
        return self.known[key]

    def check(self, request: Request) -> None:
        tokens, logprobs = self.answer(request)
        if request.finish_reason == "cancelled":
            assert request.tokens == tokens[: len(request.tokens)]
            assert request.prompt_logprobs == logprobs[: len(request.prompt_logprobs)]
        else:
            assert (request.error, request.finish_reason) == (None, "length")
            assert (request.tokens, request.prompt_logprobs) == (tokens, logprobs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_crowds(kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AHEAD_TOKENS", 8)
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", LOGITS_ROWS * 4 * 300)
    path, rng = CASES[kind].write(tmp_path / "m.gguf"), random.Random(seed)
    with quaff.load(path, threads=1, chunk=32, prefix_cache_bytes=1 << 20) as llm, quaff.load(path, threads=1, chunk=32) as alone:
        engine, idle = llm.engine, llm.accountant.used_bytes
        engine.set_policy(Policy(max_stall_ms=0.5, draft_tokens=6, max_running=5))
        crowd = Crowd(llm, alone, seed)
        # Room for the largest request and about half another one.
        scratch = llm.graph.scratch_bytes(64, 32) + LOGITS_ROWS * 4 * llm.config.vocab + THREAD_SCRATCH_BYTES
        largest = engine.cache.peak_bytes(350, engine.block_rows) + 3 * engine.cache.states.slot_bytes
        llm.accountant.limit_bytes = idle + scratch + largest * 3 // 2
        for _ in range(150):
            if rng.random() < 0.3 and len(crowd.requests) < 60:
                crowd.add()
            if crowd.requests and rng.random() < 0.1:
                engine.cancel(rng.choice(crowd.requests))
            if rng.random() < 0.02:
                with suppress(MemoryBudgetError):
                    engine.set_policy(replace(engine.policy, draft_tokens=rng.choice([0, 6])))
            engine.step()
        engine.run(crowd.requests)
        for request in crowd.requests:
            crowd.check(request)
        assert len(crowd.requests) > 20 and any(r.cached_tokens for r in crowd.requests)
        assert engine.running == engine.waiting == 0 and not engine._followers
        assert engine.cache.sequences == 0
        assert engine.prefix is not None
        engine.prefix.clear()
        assert not any(engine.cache.pages_in_use) and not any(engine.cache.states.slots_in_use)
        # What is left is scratch, which the native side keeps.
        assert llm.accountant.used_bytes - idle == engine.runner._scratch_rows_bytes
