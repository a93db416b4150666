"""Embeddings: what is refused, what is given back."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CASES, prompt

import quaff
from quaff import SamplingParams
from quaff.engine.embedder import MAX_TOGETHER
from quaff.engine.engine import Engine, Request
from quaff.engine.pace import Policy
from quaff.engine.scheduler import LEAST_ROWS
from quaff.errors import ConfigError, MemoryBudgetError, PromptError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("embed") / "tiny.gguf")


def test_vectors_have_length_one_and_tell_texts_apart(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        vectors = llm.embed(["a cat", "a cat", "mathematics"])
        assert vectors.dtype == np.float32 and vectors.shape == (3, llm.config.dim)
        assert np.allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=1e-6)
        assert (vectors[0] == vectors[1]).all() and (vectors[0] != vectors[2]).any()
        assert llm.embed([]).shape == (0, llm.config.dim)


def test_more_texts_than_run_together_keep_their_order(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        texts = [prompt(llm.config.vocab, 3, seed=i) for i in range(MAX_TOGETHER + 3)]
        vectors = llm.embed(texts, "last")
        assert vectors[-1].tobytes() == llm.embed(texts[-1:], "last")[0].tobytes()


def test_the_file_says_how_to_pool(tmp_path: Path) -> None:
    path = replace(CASES["llama-gqa"], keys={"pooling_type": 3}).write(tmp_path / "last.gguf")
    with quaff.load(path, threads=1, chunk=64) as llm:
        assert llm.pooling == "last"
        assert llm.embed(["a b c"]).tobytes() == llm.embed(["a b c"], "last").tobytes() != llm.embed(["a b c"], "mean").tobytes()


def test_what_is_refused(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        with pytest.raises(ConfigError, match="mean or last"):
            llm.embed(["a"], "max")  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="empty"):
            llm.embed(["a", ""])
        with pytest.raises(PromptError, match="context"):
            llm.embed([[1] * (llm.context + 1)])


def test_memory_is_given_back_also_when_the_work_is_ended(path: Path) -> None:
    class Enough(Exception):
        pass

    with quaff.load(path, threads=1, chunk=64) as llm:
        text = prompt(llm.config.vocab, 2000)
        llm.embed([text, text])
        before, steps = llm.accountant.total_bytes, 0

        def drive(engine: Engine) -> None:
            nonlocal steps
            steps += 1
            if steps == 2:
                raise Enough
            engine.step()

        with pytest.raises(Enough):
            llm.embed([text, text], drive=drive)
        assert llm.accountant.total_bytes == before
        llm.embed([text, text])
        assert llm.accountant.total_bytes == before


def test_an_answer_beside_waits_for_a_few_rows_and_not_for_a_chunk(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=256) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200))
        text, rows = prompt(llm.config.vocab, 2000), list[int]()

        def drive(engine: Engine) -> None:
            before = engine.counters.kv_bytes_written
            engine.step()
            rows.append((engine.counters.kv_bytes_written - before) // row_bytes)

        row_bytes = llm.prefill(text).counters.kv_bytes_written // len(text)
        alone = llm.embed([text], drive=drive)
        assert rows[0] == 256
        rows.clear()
        llm._embedder = None  # one that has measured nothing yet
        answer = llm.engine.submit(text[:9], params=SamplingParams(max_tokens=9, ignore_eos=True))
        llm.engine.step()
        assert llm.embed([text], drive=drive).tobytes() == alone.tobytes()
        assert 0 < rows[0] <= LEAST_ROWS and sum(rows) == len(text)
        llm.engine.run([answer])


def test_one_lock_covers_all_that_share_the_memory(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        for _ in range(2):  # the second time there is an embedder
            other = threading.Thread(target=llm.embed, args=(["a cat"],))
            with llm.engine.lock:
                other.start()
                other.join(0.2)
                assert other.is_alive()
            other.join()


def test_a_text_that_does_not_fit_is_refused(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        llm.embed(["a"])
        used = llm.accountant.total_bytes
    with quaff.load(path, threads=1, chunk=64, memory_limit_bytes=used + 4096) as llm:
        with pytest.raises(MemoryBudgetError):
            llm.embed([prompt(llm.config.vocab, 3000)])
        assert llm.embed(["a"]).shape == (1, llm.config.dim)


@pytest.mark.parametrize("answer_first", [False, True])
def test_answers_and_embeddings_wait_for_each_others_memory(path: Path, answer_first: bool) -> None:
    params = SamplingParams(max_tokens=5)
    with quaff.load(path, threads=1, chunk=64) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200))
        texts = [prompt(llm.config.vocab, 2000, seed=i) for i in range(2)]
        vector, answer = llm.embed(texts[:1]), llm.generate(texts[1], params)
        llm.embed(texts[:1])  # beside the scratch of both
        room = llm.accountant.peak_bytes
    with quaff.load(path, threads=1, chunk=64, memory_limit_bytes=room) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200))
        requests, running = list[Request](), list[tuple[int, int]]()

        def drive(engine: Engine) -> None:
            if not requests:
                requests.append(llm.engine.submit(texts[1], params=params))
            for one in (llm.engine, engine) if answer_first else (engine, llm.engine):
                one.step()
            running.append((engine.running, llm.engine.running))

        assert llm.embed(texts[:1], drive=drive).tobytes() == vector.tobytes()
        llm.engine.run(requests)
        assert tuple(requests[0].tokens[2000:]) == answer.tokens
        assert {(1, 0), (0, 1)} <= set(running) and (1, 1) not in running
