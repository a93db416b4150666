"""Law, through the public API: a conversation goes on after a restart where it was, from the disk, with the bits of a cold run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.laws.paths import prompt
from tests.tiny import CASES, Tiny

import quaff
import quaff.llm as llm_module
from quaff import LLM, SamplingParams
from quaff.checkpoint import open_checkpoint
from quaff.config import Workload
from quaff.graph.builder import build_graph
from quaff.models import read_model
from quaff.weights import planner, streamed
from quaff.weights.packing import write_packed

TURNS = 3
NEW = 150
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(params=list(CASES))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return CASES[request.param].write(tmp_path / "model.gguf")


def load(path: Path, **options: Any) -> LLM:
    return quaff.load(path, threads=1, chunk=64, **options)


def stored(path: Path) -> LLM:
    return load(path, prefix_cache_bytes=1 << 28, store=path.parent / "store")


def restarts(path: Path) -> Iterator[LLM]:
    """The same model, again and again with an empty memory and what the disk has."""
    while True:
        with stored(path) as llm:
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


def test_what_comes_back_before_it_is_asked_for_goes_on_with_the_bits_of_a_cold_run(path: Path) -> None:
    tokens = prompt(300, 2 * NEW, seed=5)
    for turn, llm in zip(range(2), restarts(path), strict=False):
        if turn:
            assert llm.restore_recent() == 2 * NEW
            assert llm.disk is not None
            read = llm.disk.store.counters.bytes_read
        asked = llm.prefill([*tokens, 1] if turn else tokens)
    assert llm.disk.store.counters.bytes_read == read > 0
    with load(path) as cold:
        expected = cold.prefill([*tokens, 1])
        assert asked.logits is not None and expected.logits is not None
        assert (asked.cached_tokens, asked.logits.tobytes()) == (2 * NEW, expected.logits.tobytes())


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


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_what_other_weights_left_fails_the_comparison(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: under one key for all models, the state of another one is believed."""
    monkeypatch.setattr(llm_module, "bits_key", lambda *parts: bytes(32))
    tokens = prompt(300, 2 * NEW, seed=6)
    with stored(CASES[name].write(tmp_path / "model.gguf")) as llm:
        llm.generate(tokens, PARAMS)
    other = replace(CASES[name], seed=99).write(tmp_path / "other.gguf")
    with load(other) as cold, stored(other) as llm:
        stale, expected = llm.prefill(tokens), cold.prefill(tokens)
        assert stale.cached_tokens == len(tokens) - 1
        assert stale.logits is not None and expected.logits is not None
        assert stale.logits.tobytes() != expected.logits.tobytes()


@pytest.mark.parametrize("packed", [False, True], ids=["gguf", "packed"])
def test_a_streamed_model_goes_on_where_one_in_memory_was(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in memory or streamed, from a GGUF file or its packed form: one bits key, one store, the same bits."""
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (100 << 20, 100 << 20))
    monkeypatch.setattr(planner, "READ_BUFFER_BYTES", 256 << 10)
    monkeypatch.setattr(streamed, "READ_BUFFER_BYTES", 256 << 10)
    path = Tiny(dim=512, ffn_dim=2048, layers=4, heads=8, kv_heads=2, head_dim=64, vocab=2048, tied=False).write(tmp_path / "model.gguf")
    tokens = prompt(2048, 120, seed=7)
    with stored(path) as llm:
        expected = llm.prefill(tokens)
        assert expected.logits is not None
        bits, state = expected.logits.tobytes(), expected.kv_sha256
    if packed:
        with open_checkpoint(path) as checkpoint:
            model = read_model(checkpoint)
            graph = build_graph(model.config, model.family, model.tensors)
            write_packed(tmp_path / "model.quaff", checkpoint, model.views, graph)
        path = tmp_path / "model.quaff"
    # What a plan leaves for the prefix cache comes last: of the budgets that stream, one that leaves enough for two pages.
    for mib in range(140, 148):
        workload = Workload(2 * NEW + 8, sequences=2, logits_rows=16)
        with load(path, memory=mib << 20, workload=workload, prefix_cache_bytes=1 << 22, store=tmp_path / "store") as llm:
            assert llm.streamed and llm.plan is not None
            if llm.plan.prefix_cache_bytes > 270_000:
                result = llm.prefill(tokens)
                assert result.cached_tokens == 119
                assert result.logits is not None
                assert (result.logits.tobytes(), result.kv_sha256) == (bits, state)
                return
    raise AssertionError("no budget that streams leaves room for a prefix")
