"""Between memory and disk: what is published is written, what is asked for is read, and neither holds up or costs a request."""

import os
import stat
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.laws.paths import prompt
from tests.tiny import CASES

import quaff
from quaff import LLM, SamplingParams
from quaff.engine.disk import DiskTier
from quaff.errors import ClosedError, ConfigError

TOKENS = prompt(300, 700, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(params=["llama-gqa", "gemma3", "lfm2"])
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = folder / f"{request.param}.gguf"
    return path if path.exists() else CASES[request.param].write(path)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def load(path: Path, store: Path, cap: int = 1 << 28) -> LLM:
    return quaff.load(path, threads=1, chunk=64, prefix_cache_bytes=cap, store=store)


def disk(llm: LLM) -> DiskTier:
    assert llm.disk is not None
    return llm.disk


def read(llm: LLM, tokens: list[int]) -> bytes:
    with llm.prefill(tokens).state as state:
        return bytes.fromhex(state.kv_sha256())


@pytest.fixture
def filled(path: Path, store: Path) -> bytes:
    """The hash of the state of TOKENS, which are in the store."""
    with load(path, store) as llm:
        return read(llm, TOKENS)


def pages_held(llm: LLM) -> int:
    """Pages that neither a sequence nor the tree accounts for."""
    llm.engine.sweep()
    llm.engine.call(disk(llm)._free_written)
    assert llm.engine.prefix is not None
    llm.engine.prefix.clear()
    return sum(llm.engine.cache.pages_in_use) + sum(llm.engine.cache.states.slots_in_use)


def test_nothing_is_held_when_all_is_written_and_read(path: Path, store: Path, filled: bytes) -> None:
    with load(path, store) as llm:
        assert read(llm, [*TOKENS, 1]) != filled
        assert disk(llm).store.flush(60)
        assert disk(llm).store.counters.restored_tokens == 700
        assert pages_held(llm) == 0


def test_what_was_used_last_is_there_before_it_is_asked_for(path: Path, store: Path, filled: bytes) -> None:
    other = prompt(300, 400, seed=2)
    with load(path, store) as llm:
        read(llm, other)
    with load(path, store) as llm:
        seen: list[tuple[int, int]] = []
        assert llm.restore_recent(lambda done, of: seen.append((done, of))) == 1100
        assert seen == [(1, 2), (2, 2)]
        assert llm.restore_recent() == llm.restore([*TOKENS, 1]) == 0
        assert llm.prefill([*TOKENS, 1]).cached_tokens == 700
        assert llm.prefill([*other, 1]).cached_tokens == 400
        assert read(llm, TOKENS) == filled
        assert disk(llm).store.flush(60)
        assert pages_held(llm) == 0


def test_no_more_comes_back_than_the_tree_may_have_and_what_was_used_last_first(path: Path, store: Path, filled: bytes) -> None:
    other = prompt(300, 400, seed=2)
    with load(path, store) as llm:
        read(llm, other)
        assert disk(llm).store.flush(60)
        cap = 0
        for tokens in (TOKENS, other):
            found = disk(llm).store.find([*tokens, 1])
            assert found is not None
            cap += found.payload_bytes(disk(llm).store.layout)  # without headers
    with load(path, store, cap=cap) as llm:
        assert llm.restore_recent() == 400
        assert llm.restore([*other, 1]) == 0
    with load(path, store, cap=1000) as llm:
        assert llm.restore_recent() == 0


def test_clients_with_one_prompt_read_it_once(path: Path, store: Path, filled: bytes) -> None:
    with load(path, store) as llm:
        gained: list[int] = []
        threads = [threading.Thread(target=lambda: gained.append(llm.restore([*TOKENS, 1]))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(gained) == [0, 0, 0, 700]
        assert disk(llm).store.counters.restored_tokens == 700
        assert llm.prefill([*TOKENS, 1]).cached_tokens == 700


def test_only_what_memory_lacks_is_read(path: Path, store: Path, filled: bytes) -> None:
    with load(path, store) as whole, load(path, store) as half:
        whole.restore([*TOKENS, 1])
        # The first prompt is computed for want of a file that ends in it, but where a sequence can be left anywhere.
        assert half.prefill(TOKENS[:600]).cached_tokens == (599 if disk(half).store.layout.anywhere else 0)
        before = disk(half).store.counters.bytes_read
        assert half.restore([*TOKENS, 1]) == 100
        half_bytes = disk(half).store.counters.bytes_read - before
        assert 0 < half_bytes < disk(whole).store.counters.bytes_read / 2
        assert read(half, TOKENS) == filled


def test_what_is_restored_is_not_written_again(path: Path, store: Path, filled: bytes) -> None:
    with load(path, store) as llm:
        llm.restore([*TOKENS, 1])
        assert disk(llm).store.flush(60)
        assert disk(llm).store.counters.files_written == 0


def test_prompts_with_another_salt_share_nothing(path: Path, store: Path) -> None:
    with load(path, store) as llm:
        request = llm.engine.submit(TOKENS, salt="a")
        llm.engine.run([request])
    with load(path, store) as llm:
        assert llm.restore([*TOKENS, 1]) == llm.restore([*TOKENS, 1], "b") == 0
        assert llm.restore([*TOKENS, 1], "a") == 700


def test_a_short_prefix_is_computed_rather_than_read(path: Path, store: Path) -> None:
    with load(path, store) as llm:
        read(llm, TOKENS[:63])
        assert not list(store.rglob("*.place"))
        read(llm, TOKENS[:64])
        assert disk(llm).store.flush(60)
        assert list(store.rglob("*.place"))


def test_damaged_files_cost_what_they_held(path: Path, store: Path, filled: bytes) -> None:
    last = next((store / "v2").rglob("*-512.block"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    with load(path, store) as llm:
        gained = llm.restore([*TOKENS, 1])
        assert gained < 512
        assert disk(llm).store.counters.damaged >= 1
        assert read(llm, TOKENS) == filled
    with load(path, store) as llm:
        assert llm.restore([*TOKENS, 1]) == 700


def test_what_is_larger_than_the_prefix_cache_or_the_memory_is_left_on_the_disk(path: Path, store: Path, filled: bytes) -> None:
    with load(path, store, cap=20_000) as llm:
        assert llm.restore([*TOKENS, 1]) == 0
        assert disk(llm).store.counters.bytes_read == 0
        assert read(llm, TOKENS) == filled
    with load(path, store) as llm:
        llm.accountant.limit_bytes = llm.accountant.total_bytes + 10_000
        assert llm.restore([*TOKENS, 1]) == 0
        assert pages_held(llm) == 0


def test_closing_waits_for_what_is_to_be_written_and_ends_the_rest(path: Path, store: Path) -> None:
    llm = load(path, store)
    for seed in range(5):
        read(llm, prompt(300, 300, seed))
    llm.close()
    assert not [t for t in threading.enumerate() if t.name == "quaff-store"]
    with pytest.raises(ClosedError, match="closed"):
        llm.restore([*prompt(300, 300, 0), 1])
    with load(path, store) as again:
        assert [again.restore([*prompt(300, 300, seed), 1]) for seed in range(5)] == [300] * 5


def test_options_are_checked(path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give prefix_cache_bytes too"):
        quaff.load(path, store=store)
    with pytest.raises(ConfigError, match="store is 3; expected a folder"):
        quaff.load(path, prefix_cache_bytes=1 << 20, store=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="store_cap_bytes"):
        quaff.load(path, prefix_cache_bytes=1 << 20, store=store, store_cap_bytes=0)
    monkeypatch.setenv("QUAFF_CACHE", str(store))
    with quaff.load(path, threads=1, chunk=64, prefix_cache_bytes=1 << 20, store=True) as llm:
        assert disk(llm).store.folder == store / "prefixes"
        assert llm.describe()["store"] == str(store / "prefixes")
    with quaff.load(path, threads=1, chunk=64, prefix_cache_bytes=1 << 20) as llm:
        assert llm.disk is None
        assert llm.restore(TOKENS) == 0
        assert llm.describe()["store"] is None


def test_memory_that_waits_for_the_disk_is_there_for_requests(path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be written must never make a request fail that would fit without it."""
    with load(path, store) as llm:
        read(llm, TOKENS)
        assert disk(llm).store.flush(60)
        go, fsync, abandon = threading.Event(), os.fsync, disk(llm).store.abandon

        def abandon_slowly() -> list[int]:
            """The disk gets on with one file when it is given up, and not before."""
            timer = threading.Timer(0.05, go.set)
            timer.start()
            given_up = abandon()
            timer.join()
            go.clear()
            return given_up

        monkeypatch.setattr(os, "fsync", lambda fd: (go.wait(60), fsync(fd)))
        monkeypatch.setattr(disk(llm).store, "abandon", abandon_slowly)
        llm.accountant.limit_bytes = llm.accountant.peak_bytes + 20_000  # enough for one prompt, not for what two have left
        for seed in range(4):
            with llm.prefill(prompt(300, 700, 10 + seed)).state as state:
                assert state.kv_sha256()
        go.set()
        assert disk(llm).store.flush(60)
        assert disk(llm).store.counters.dropped
        assert pages_held(llm) == 0


def test_what_waits_for_the_disk_holds_no_more_memory_than_the_cache_may(path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap ignored (ik_llama.cpp 2320): prompts come faster than the disk takes them, and one is larger than the cache."""
    go = threading.Event()
    with load(path, store, cap=400_000) as llm, ExitStack() as stack:
        stack.callback(go.set)
        cache, prefix, write = llm.engine.cache, llm.engine.prefix, disk(llm).store._write
        assert prefix is not None
        monkeypatch.setattr(disk(llm).store, "_write", lambda job: (go.wait(60), write(job)))
        for seed in range(12):
            read(llm, prompt(300, 300, 20 + seed))
            llm.engine.sweep()
            pages = sum(n * pool.page_bytes for n, pool in zip(cache.pages_in_use, cache.pools, strict=True))
            states = max(cache.states.slots_in_use, default=0) * cache.states.slot_bytes
            assert prefix.used_bytes <= prefix.cap_bytes and pages + states <= 2 * prefix.cap_bytes
        dropped = disk(llm).store.counters.dropped
        assert dropped
        read(llm, prompt(300, 3000, 40))
        assert disk(llm).store.counters.dropped > dropped
        go.set()
        assert disk(llm).store.flush(60)
        assert disk(llm).store.counters.files_written
        assert pages_held(llm) == 0


def test_reading_files_counts_in_the_time_to_the_first_token(
    path: Path, store: Path, filled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path, store) as llm:
        restore, spent = disk(llm).restore, 0.0

        def slow(tokens: list[int], salt: str = "") -> int:
            nonlocal spent
            began = time.perf_counter()
            time.sleep(0.02)
            gained = restore(tokens, salt)
            spent = time.perf_counter() - began
            return gained

        monkeypatch.setattr(disk(llm), "restore", slow)
        completion = llm.generate([*TOKENS, 1], SamplingParams(max_tokens=1))
        assert completion.cached_tokens == 700
        assert completion.timings.ttft_seconds >= spent > 0


def test_all_of_the_folder_is_private(path: Path, store: Path) -> None:
    os.utime(path, (1, 1))  # old enough to be remembered
    with load(path, store) as llm:
        read(llm, TOKENS)
    for found in (store, *store.rglob("*")):
        assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600), found
    assert {p.name for p in store.iterdir()} == {"content", "v2"}
