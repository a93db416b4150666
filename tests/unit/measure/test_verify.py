"""The verifier watches what it claims to watch: paths really differ in how they run, and a wrong bit anywhere is seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CASES

from quaff import LLM, _native, load
from quaff.cache.memory import Memory
from quaff.cache.store import Found, Store
from quaff.errors import NonFiniteError, QuaffError
from quaff.measure import verify
from quaff.measure.verify import Outcome, Verdict, Verifier

TOKENS = 150


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with load(CASES["gemma3"].write(tmp_path / "tiny.gguf"), threads=2, chunk=32) as llm:
        yield llm


def verdict(outcomes: list[Outcome]) -> Verdict:
    return Verdict(_native.NUMERICS_VERSION, _native.isa(), TOKENS, tuple(outcomes))


def test_paths_run_in_different_ways_and_agree(llm: LLM) -> None:
    outcomes = list(Verifier(llm, TOKENS).run())
    assert len(outcomes) >= 12 and verdict(outcomes).equal
    counters = {o.name: o.counters for o in outcomes}
    passes = {
        "token-major": TOKENS,
        "chunk-major(7)": -(-TOKENS // 7),
        "chunk-major(64)": 3,
        f"chunk-major({TOKENS})": 1,
        "layer-major(64)": 1,
    }
    heads = {name: counters[name].head_bytes_touched for name in passes}
    whole = heads[f"chunk-major({TOKENS})"]
    assert heads == {name: n * whole for name, n in passes.items()}
    assert counters["half at once, then row by row"].head_bytes_touched == (3 + TOKENS // 2) * whole
    assert all(counters[name].head_rows == TOKENS for name in passes)
    isas = {o.isa for o in outcomes if o.name in _native.available_isas() or o.name.startswith("scalar")}
    assert isas == set(_native.available_isas()) - {_native.isa()}


@pytest.mark.parametrize("name", {tiny.architecture: name for name, tiny in reversed(CASES.items())}.values())
def test_every_family_agrees(name: str, tmp_path: Path) -> None:
    with load(CASES[name].write(tmp_path / "tiny.gguf"), threads=2, chunk=32) as llm:
        outcomes = list(Verifier(llm, 100).run())
        assert len(outcomes) >= 12 and verdict(outcomes).equal
        llm.engine.sweep()
        assert llm.engine.cache.sequences == 0 and not any(llm.engine.cache.states.slots_in_use)


def test_everything_is_given_back(llm: LLM) -> None:
    before = llm.accountant.used_bytes, llm.engine.cache.sequences, _native.isa(), llm.threads
    list(Verifier(llm, TOKENS).run())
    after = llm.accountant.used_bytes, llm.engine.cache.sequences, _native.isa(), llm.threads
    assert after[1:] == before[1:]
    list(Verifier(llm, TOKENS).run())
    assert llm.accountant.used_bytes == after[0]  # scratch keeps its high-water mark, pages do not


def test_unfused_model_agrees(llm: LLM) -> None:
    expected = Verifier(llm, TOKENS).run_default("fused")
    with load(llm.path, threads=2, chunk=32, fuse=False) as plain:
        outcome = Verifier(plain, TOKENS).run_default("plain")
    assert outcome.same_bits(expected) and outcome.counters.launches > expected.counters.launches


def test_one_wrong_bit_of_one_logit_is_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm.engine.runner.run

    def damaged(batch, order, on_work=None):  # type: ignore[no-untyped-def]
        logits = run(batch, order, on_work)
        if order.name == "layer" and batch.rows == TOKENS:
            logits.values.view(np.uint32)[TOKENS // 2, 5] ^= 1
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", damaged)
    outcomes = list(Verifier(llm, TOKENS).run())
    assert {o.name for o in outcomes if not o.same_bits(outcomes[0])} == {"layer-major(64)", "layer-major(512)"}
    assert not verdict(outcomes).equal


def test_wrong_bits_from_the_disk_are_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Store.read

    def damaged(self: Store, found: Found, memory: Memory, have: int = 0) -> bool:
        done = read(self, found, memory, have)
        for buffer in memory.writable(found.pieces[-1]):
            np.frombuffer(buffer, np.uint16)[:] ^= 1
        return done

    monkeypatch.setattr(Store, "read", damaged)
    outcomes = list(Verifier(llm, TOKENS).run())
    assert {o.name for o in outcomes if not o.same_bits(outcomes[0])} == {"restored from disk"}


def test_a_disk_that_gives_nothing_back_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    before = llm.engine.cache.sequences
    with pytest.raises(QuaffError, match="set TMPDIR"):
        list(Verifier(llm, TOKENS).run())
    assert llm.engine.cache.sequences == before + 1  # that of the path that failed


def test_one_wrong_token_changes_state_and_text(llm: LLM) -> None:
    right = Verifier(llm, TOKENS)
    wrong = Verifier(llm, TOKENS)
    wrong.tokens[-1] ^= 1
    a, b = right.run_default("right"), wrong.run_default("wrong")
    assert a.logits_sha256 != b.logits_sha256 and a.kv_sha256 != b.kv_sha256


def test_values_that_are_not_finite_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm.engine.runner.run

    def poisoned(batch, order, on_work=None):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(run(batch, order, on_work), poisoned=(True,) * len(batch.segments))

    monkeypatch.setattr(llm.engine.runner, "run", poisoned)
    with pytest.raises(NonFiniteError):
        next(Verifier(llm, TOKENS).run())


def test_prompt_has_the_length_asked_for(llm: LLM) -> None:
    text = verify.prompt_tokens(llm, 700)
    assert len(text) == 700
    long = verify.prompt_tokens(llm, 4000)
    assert len(long) == 4000 and long[:700] == text
