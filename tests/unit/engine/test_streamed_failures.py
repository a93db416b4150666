"""A file that fails under a running model ends the requests that needed it, and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiny import Tiny

import quaff
from quaff import LLM, SamplingParams
from quaff.engine import engine
from quaff.errors import CheckpointError, MemoryBudgetError, UnsupportedError
from quaff.weights import planner, streamed
from quaff.weights.budget import memory_limit_bytes

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
TOKENS = [(i * 37) % 300 for i in range(90)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Tiny(dim=256, ffn_dim=1024, layers=8, heads=4, head_dim=64, kv_heads=2, tied=False).write(tmp_path / "model.gguf")


@pytest.fixture
def llm(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A model of which next to nothing fits."""
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (100 << 20, 100 << 20))
    for module in (planner, streamed):
        monkeypatch.setattr(module, "READ_BUFFER_BYTES", 128 << 10)
    with pytest.raises(MemoryBudgetError) as refused:
        quaff.load(path, threads=1, memory=1, context=128)
    least = int(str(refused.value).split("smallest budget that will do is ")[1].split("MiB")[0]) << 20
    with quaff.load(path, threads=1, memory=least, context=128) as model:
        assert model.streamed
        yield model


def touch(path: Path, by_ns: int) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + by_ns))


def test_what_was_finished_stays_and_what_comes_later_is_whole(llm: LLM, path: Path) -> None:
    expected = llm.generate(TOKENS, PARAMS)
    first = llm.prefill(TOKENS[:70])
    before = first.kv_sha256
    touch(path, 1)
    with pytest.raises(CheckpointError, match=r"model\.gguf: the file was written to since it was opened"):
        llm.generate(TOKENS, PARAMS, state=first.state)
    several = llm.generate([TOKENS, TOKENS[:5]], PARAMS)
    assert [type(c.error) for c in several] == [CheckpointError] * 2 and not any(c.tokens for c in several)
    assert first.kv_sha256 == before
    touch(path, -1)
    assert llm.generate(TOKENS, PARAMS, state=first.state).tokens == expected.tokens
    assert llm.generate(TOKENS, PARAMS).tokens == expected.tokens
    first.state.close()


def test_a_stream_ends_with_the_error_after_the_text_it_had(llm: LLM, path: Path) -> None:
    stream = llm.stream(TOKENS, SamplingParams(max_tokens=8, ignore_eos=True))
    request = stream._request
    while request.generated < 3:
        llm.engine.step()
    touch(path, 1)
    with pytest.raises(CheckpointError, match="written to"):
        for _ in stream:
            pass
    assert request.generated == 3 and request.finish_reason == "error"


@pytest.mark.parametrize("cut", [False, True], ids=["written", "cut"])
def test_a_file_that_changes_in_the_middle_of_a_pass(llm: LLM, path: Path, cut: bool) -> None:
    """Whenever that is, a request has its whole answer or an error, and the next one is none the worse for it."""
    whole, status = path.read_bytes(), path.stat()

    def damage() -> None:
        if cut:
            os.truncate(path, len(whole) // 2)
        else:
            touch(path, 1)

    def repair() -> None:
        with path.open("r+b") as file:
            file.write(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    llm.configure(schedule="token")  # a pass for every token
    expected = llm.generate(TOKENS[:12], PARAMS).tokens
    for delay in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04):
        timer = threading.Timer(delay, damage)
        timer.start()
        completion = llm.generate([TOKENS[:12]], PARAMS)[0]
        assert completion.tokens == expected or isinstance(completion.error, CheckpointError)
        assert completion.tokens == expected[: len(completion.tokens)]
        timer.join()
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            llm.generate(TOKENS[:12], PARAMS)
        repair()
        assert llm.generate(TOKENS[:12], PARAMS).tokens == expected


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the memory limit of this process's control group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    limit = tmp_path / "sys/fs/cgroup/job/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    monkeypatch.setattr(engine, "memory_limit_bytes", lambda: memory_limit_bytes(tmp_path))
    return limit


def test_a_limit_that_is_lowered_ends_requests_until_it_is_raised(llm: LLM, group: Path) -> None:
    assert llm.plan is not None
    expected = llm.generate(TOKENS, PARAMS).tokens
    group.write_text(f"{llm.plan.memory_bytes}\n")
    first = llm.prefill(TOKENS[:70])
    before = first.kv_sha256
    group.write_text(f"{llm.plan.base_bytes + (1 << 20)}\n")
    with pytest.raises(MemoryBudgetError, match=r"allows this process [0-9.]+ MiB by now, but [0-9.]+ MiB are in use"):
        llm.generate(TOKENS, PARAMS, state=first.state)
    several = llm.generate([TOKENS, TOKENS[:5]], PARAMS)
    assert [type(c.error) for c in several] == [MemoryBudgetError] * 2 and not any(c.tokens for c in several)
    group.write_text("max\n")
    assert first.kv_sha256 == before
    assert llm.generate(TOKENS, PARAMS, state=first.state).tokens == expected
    first.state.close()


def test_a_limit_that_is_lowered_ends_a_stream_after_the_text_it_had(llm: LLM, group: Path) -> None:
    assert llm.plan is not None
    stream = llm.stream(TOKENS, SamplingParams(max_tokens=8, ignore_eos=True))
    request = stream._request
    while request.generated < 3:
        llm.engine.step()
    group.write_text(f"{llm.plan.base_bytes}\n")
    with pytest.raises(MemoryBudgetError, match="allows this process"):
        for _ in stream:
            pass
    assert request.generated == 3 and request.finish_reason == "error"


def test_a_cache_gives_way_to_a_limit_that_is_lowered(path: Path, group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not refused for what was kept in case it comes again. Nothing is streamed: the limit counts when a request comes."""
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (100 << 20, 100 << 20))
    with quaff.load(path, threads=1, memory=256 << 20, context=128, prefix_cache_bytes=4 << 20) as llm:
        assert llm.plan is not None and llm.engine.prefix is not None and not llm.streamed
        expected = [llm.generate([i, *TOKENS], PARAMS).tokens for i in range(3)]
        assert not llm.engine.prefix.counters.evicted_bytes
        group.write_text(f"{llm.plan.base_bytes + llm.accountant.total_bytes - 1}\n")
        assert [llm.generate([i, *TOKENS], PARAMS).tokens for i in range(3)] == expected
        assert llm.engine.prefix.counters.evicted_bytes


def test_a_budget_beyond_the_limit_is_refused(path: Path, group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quaff.llm.memory_limit_bytes", engine.memory_limit_bytes)
    group.write_text(f"{1 << 30}\n")
    with pytest.raises(MemoryBudgetError, match=r"the budget is 2\.0 GiB, but the control group of this process has 1\.0 GiB"):
        quaff.load(path, threads=1, memory="2GiB")


def test_embeddings_say_what_they_need(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="all weights in memory"):
        llm.embed(["a"])


def test_what_is_read_is_a_sign_of_life(llm: LLM) -> None:
    *_, before = llm.engine.runner.pulse
    llm.prefill(TOKENS, logits="none").state.close()
    *_, after = llm.engine.runner.pulse
    assert after > before
