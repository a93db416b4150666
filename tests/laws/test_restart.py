"""Law, through the public API: a conversation goes on after a restart where it was, from the disk, with the bits of a cold run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.laws.paths import prompt
from tests.tiny import CASES

import quaff
from quaff import LLM, SamplingParams

TURNS = 3
NEW = 150
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(params=list(CASES))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return CASES[request.param].write(tmp_path / "model.gguf")


def load(path: Path, **options: Any) -> LLM:
    return quaff.load(path, threads=1, chunk=64, **options)


def restarts(path: Path) -> Iterator[LLM]:
    """The same model, again and again with an empty memory and what the disk has."""
    while True:
        with load(path, prefix_cache_bytes=1 << 28, store=path.parent / "store") as llm:
            yield llm


def test_every_turn_of_a_conversation_is_found_after_a_restart(path: Path) -> None:
    tokens: list[int] = []
    with load(path) as cold:
        for turn, llm in zip(range(TURNS), restarts(path), strict=False):
            resent = len(tokens)
            tokens += prompt(cold.config.vocab, NEW, seed=turn)
            asked = llm.prefill(tokens)
            expected = cold.prefill(tokens)
            assert asked.logits is not None and expected.logits is not None
            assert asked.logits.tobytes() == expected.logits.tobytes()
            assert asked.kv_sha256 == expected.kv_sha256
            # The last token that was sampled was never computed.
            assert asked.cached_tokens == max(0, resent - 1)
            assert llm.disk is not None
            assert llm.disk.store.counters.hits == (turn > 0)
            answer = llm.generate(tokens, PARAMS)
            assert answer.tokens == cold.generate(tokens, PARAMS).tokens
            tokens += answer.tokens
            for result in (asked, expected):
                result.state.close()


def test_the_first_prompt_again_after_a_restart_computes_its_last_token(path: Path) -> None:
    tokens = prompt(300, 2 * NEW, seed=9)
    with load(path) as cold:
        expected = cold.generate(tokens, PARAMS)
    for turn, llm in zip(range(2), restarts(path), strict=False):
        answer = llm.generate(tokens, PARAMS)
        assert answer.tokens == expected.tokens
        assert answer.cached_tokens == (len(tokens) - 1 if turn else 0)


def test_scores_do_not_depend_on_what_is_on_the_disk(path: Path) -> None:
    """Logprobs with a warm cache (vllm 3251, 42019)."""
    tokens = prompt(300, 2 * NEW, seed=8)
    with load(path) as cold:
        expected = cold.score(tokens).logprobs
    for _, llm in zip(range(2), restarts(path), strict=False):
        llm.generate(tokens, PARAMS)
        assert llm.score(tokens).logprobs == expected
        assert llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0)).cached_tokens == 0
