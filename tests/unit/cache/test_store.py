"""The disk tier: finds the longest prefix, gives its bytes back, keeps to its cap, and costs a miss and a line when the disk fails."""

import logging
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stored import KEY, SHAPES, cold_hash, computed, make_cache, make_store, prompt, put, restore

from quaff.cache.entry import BLOCK
from quaff.cache.memory import Memory, held_bytes
from quaff.cache.store import Store

LENGTHS = [1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]


def files(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.rglob(f"*.{kind}"))


def total(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def check(store: Store, shape: str, tokens: list[int], expected: int, salt: str = "") -> None:
    """A find gives `expected` positions, and restores them with the bytes of a cold run."""
    found = store.find(tokens, salt)
    assert (found.length if found else 0) == expected
    if found is not None:
        cache = make_cache(shape)
        sequence = restore(store, cache, found)
        assert sequence is not None
        assert cache.written(sequence) == expected
        assert cache.kv_sha256(sequence) == cold_hash(shape, tokens[:expected])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prefix_is_found_by_another_process_at_block_boundaries_too(tmp_path: Path, shape: str, length: int) -> None:
    """Block boundary (sglang 22819)."""
    tokens = prompt(length + 3)
    put(make_store(tmp_path, shape), make_cache(shape), tokens[:length])
    check(make_store(tmp_path, shape), shape, tokens, length)
    check(make_store(tmp_path, shape), shape, tokens[: length + 1], length)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_token_is_always_left(tmp_path: Path, shape: str) -> None:
    """Prompt shorter than the cache (llama.cpp 1585)."""
    store = make_store(tmp_path, shape)
    tokens = prompt(600)
    put(store, make_cache(shape), tokens)
    anywhere = store.layout.anywhere
    # A window of 100 at 600 begins in the page that begins it at 576 or later.
    check(store, shape, tokens, 599 if anywhere or shape == "sliding" else 0)
    for length in (599, 513, 512, 511, 256, 100, 1):
        check(store, shape, tokens[:length], length - 1 if anywhere or (shape == "sliding" and length > 575) else 0)


@pytest.mark.parametrize("shape", ["full", "float"])
@pytest.mark.parametrize("common", [0, 1, 64, 255, 256, 300, 511, 512, 700])
def test_branches_share_to_the_token_where_a_sequence_can_be_left_anywhere(tmp_path: Path, shape: str, common: int) -> None:
    store = make_store(tmp_path, shape)
    tokens = prompt(800)
    put(store, make_cache(shape), tokens)
    other = tokens[:common] + [t + 1 for t in tokens[common:]]
    check(store, shape, other, common)
    put(store, make_cache(shape), other)
    third = tokens[:common] + [t + 2 for t in tokens[common:]]
    check(store, shape, third, common)
    check(store, shape, [*tokens, 1], 800)
    check(store, shape, [*other, 1], 800)


@pytest.mark.parametrize("shape", ["sliding", "recurrent", "everything", "states"])
def test_others_share_what_ends_at_a_place(tmp_path: Path, shape: str) -> None:
    store, cache = make_store(tmp_path, shape), make_cache(shape)
    tokens = prompt(900)
    for length in (40, 256, 300, 700):
        put(store, cache, tokens[:length])
    for length, expected in ((41, 40), (257, 256), (290, 256), (301, 300), (650, 300), (701, 700), (900, 700)):
        check(store, shape, [*tokens[: length - 1], 5], expected)
    assert store.find(tokens[:650], longer_than=299) is not None
    assert store.find(tokens[:650], longer_than=300) is None


def test_nothing_is_shared_across_keys_salts_and_layouts(tmp_path: Path) -> None:
    put(make_store(tmp_path), make_cache(), prompt(300), salt="a")
    check(make_store(tmp_path), "full", prompt(301), 300, salt="a")
    assert make_store(tmp_path).find(prompt(301)) is None
    assert make_store(tmp_path).find(prompt(301), "b") is None
    assert make_store(tmp_path, key=bytes(32)).find(prompt(301), "a") is None


def test_a_layout_that_changed_without_its_key_is_refused_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(make_store(tmp_path), make_cache(), prompt(100))
    store = make_store(tmp_path, "float")
    found = store.find(prompt(101))
    with caplog.at_level(logging.WARNING):
        assert found is not None and restore(store, make_cache("float"), found) is None
        assert store.find(prompt(101)) is None
    assert len(caplog.records) == 1
    assert "it belongs to another model" in caplog.text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_prefixes_are_found_as_far_as_they_were_put(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Against a plain model: the most positions of any prefix that was put and can be left there."""
    shape = data.draw(st.sampled_from(["full", "recurrent"]))
    store, cache = make_store(tmp_path_factory.mktemp("store"), shape), make_cache(shape)
    text = prompt(700)

    def variant() -> list[int]:
        cut, length = data.draw(st.integers(0, 700)), data.draw(st.integers(1, 700))
        return (text[:cut] + [t + 1 for t in text[cut:]])[:length]

    known = [variant() for _ in range(data.draw(st.integers(0, 4)))]
    for tokens in known:
        put(store, cache, tokens)
    asked = variant()
    expected = 0
    for tokens in known:
        common = next((i for i, (a, b) in enumerate(zip(tokens, asked, strict=False)) if a != b), min(len(tokens), len(asked)))
        if shape == "full":
            expected = max(expected, min(common, len(asked) - 1))
        elif common == len(tokens) < len(asked):
            expected = max(expected, common)
    check(store, shape, asked, expected)


def test_blocks_that_are_in_memory_are_not_read_again(tmp_path: Path) -> None:
    shape = "everything"
    put(make_store(tmp_path, shape), make_cache(shape), prompt(800))
    store, cache = make_store(tmp_path, shape), make_cache(shape)
    base = computed(cache, prompt(800)[:600])
    found = store.find(prompt(801))
    assert found is not None
    have = found.reusable(600)
    assert have == 512
    sequence = cache.receive(found.full, base, have)
    assert store.read(found, Memory.of(cache, sequence), have)
    assert cache.kv_sha256(sequence) == cold_hash(shape, prompt(800))
    assert 0 < store.counters.bytes_read < total(tmp_path) / 2
    for wrong in (511, 1024):
        with pytest.raises(ValueError, match="not whole blocks"):
            store.read(found, Memory.of(cache, sequence), wrong)


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store, cache = make_store(tmp_path), make_cache()
    put(store, cache, prompt(600))
    written = store.counters.files_written
    before = {p: p.stat().st_mtime_ns for p in files(tmp_path)}
    put(store, cache, prompt(600))
    assert store.counters.files_written == written == 3
    assert all(p.stat().st_mtime_ns > at for p, at in before.items())
    put(store, cache, prompt(900))
    assert store.counters.files_written == written + 2


def test_a_use_keeps_a_prefix_longer(tmp_path: Path) -> None:
    cache = make_cache()
    put(make_store(tmp_path), cache, prompt(256, 1))
    size = total(tmp_path)
    store = make_store(tmp_path, cap_bytes=3 * size)
    for seed in (2, 3):
        put(store, cache, prompt(256, seed))
    check(store, "full", [*prompt(256, 1), 0], 256)
    put(store, cache, prompt(256, 4))
    assert store.find([*prompt(256, 2), 0]) is None
    for seed in (1, 3, 4):
        check(store, "full", [*prompt(256, seed), 0], 256)
    assert total(tmp_path) <= store.cap_bytes
    assert store.counters.evicted == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cap_holds_whatever_is_put(tmp_path: Path, shape: str) -> None:
    """Cap ignored (ik_llama.cpp 2320)."""
    cap = 300_000
    store, cache = make_store(tmp_path, shape, cap_bytes=cap), make_cache(shape)
    for seed in range(12):
        put(store, cache, prompt(100 + 97 * seed, seed))
        assert total(tmp_path) <= cap
    last = prompt(100 + 97 * 11, 11)
    check(store, shape, [*last, 0], len(last))


def test_a_prefix_larger_than_the_cap_is_not_written_and_drives_nothing_out(tmp_path: Path) -> None:
    """Cap ignored (ik_llama.cpp 2320)."""
    store, cache = make_store(tmp_path, cap_bytes=100_000), make_cache()
    put(store, cache, prompt(300))
    before = files(tmp_path)
    put(store, cache, prompt(3000, seed=1))
    assert files(tmp_path) == before
    assert store.counters.dropped == 1


def test_the_end_of_a_chain_goes_before_its_beginning(tmp_path: Path) -> None:
    put(make_store(tmp_path), make_cache(), prompt(BLOCK * 4))
    store, cache = make_store(tmp_path, cap_bytes=total(tmp_path) + 100), make_cache()
    put(store, cache, prompt(BLOCK, seed=1))
    check(store, "full", prompt(BLOCK * 4), BLOCK * 3)


def test_the_queue_is_bounded_and_every_sequence_is_given_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = make_store(tmp_path), make_cache()
    memory = Memory.of(cache, computed(cache, prompt(100)))
    go, released = threading.Event(), list[int]()
    write = store._write
    monkeypatch.setattr(store, "_write", lambda job: (go.wait(60), write(job)))
    for i in range(80):
        store.put(prompt(100), replace(memory, sequence=i), released.append)
    assert store.counters.dropped in (15, 16)  # one may have left the queue
    go.set()
    store.close()
    assert sorted(released) == list(range(80))
    store.put(prompt(100), replace(memory, sequence=80), released.append)
    assert released[-1] == 80
    check(store, "full", prompt(101), 100)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_waits_holds_no_more_memory_than_it_may(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap ignored (ik_llama.cpp 2320): what several prefixes share counts once."""
    cache, go = make_cache(shape), threading.Event()
    sequences = [computed(cache, prompt(300, seed)) for seed in range(2)]
    memories = [Memory.of(cache, sequence) for sequence in sequences]
    each, both = held_bytes(memories[:1]), held_bytes(memories)
    held = sum(n * pool.page_bytes for n, pool in zip(cache.pages_in_use, cache.pools, strict=True))
    # Of the states there are some at other places than the end.
    assert each * 2 == both <= held + cache.states.slot_bytes * sum(cache.states.slots_in_use)
    assert held_bytes([memories[0]] * 5) == each
    store = make_store(tmp_path, shape, waiting_bytes=both - 1)
    write = store._write
    monkeypatch.setattr(store, "_write", lambda job: (go.wait(60), write(job)))
    for _ in range(5):
        store.put(prompt(300, 0), memories[0], lambda sequence: None)
    assert store.counters.dropped == 0
    store.put(prompt(300, 1), memories[1], lambda sequence: None)
    assert store.counters.dropped == 1
    go.set()
    assert store.flush(60)
    store.put(prompt(300, 1), memories[1], lambda sequence: None)
    assert store.flush(60) and store.counters.dropped == 1
    check(store, shape, prompt(301, 1), 300)


def test_what_is_queued_can_be_given_up_and_what_is_being_written_after_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = make_store(tmp_path), make_cache()
    tokens = prompt(2000)
    memory = Memory.of(cache, computed(cache, tokens))
    began, go, released = threading.Event(), threading.Event(), list[int]()
    fsync = os.fsync

    def slow(fd: int) -> None:
        began.set()
        go.wait(60)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    for i in range(5):
        store.put(tokens, replace(memory, sequence=i), released.append)
    began.wait(60)

    def finish_one_file() -> None:
        while not store._stopping:
            time.sleep(0.001)
        go.set()

    threading.Thread(target=finish_one_file).start()
    assert sorted(store.abandon()) == list(range(5))
    assert store.flush(60)
    assert released == []
    assert len(files(tmp_path, "block")) == 1
    assert store.abandon() == []
    put(store, cache, tokens)
    check(store, "full", [*tokens, 0], 2000)


def test_its_thread_ends_when_there_is_nothing_to_write(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for seed in range(3):
        put(store, make_cache(), prompt(10, seed))
        assert not [t for t in threading.enumerate() if t.name == "quaff-store"]


def test_a_full_disk_is_one_line_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store, cache = make_store(tmp_path), make_cache()
    left, write = 100_000, os.write

    def full(fd: int, data: memoryview) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(28, "No space left on device")
        left -= len(data)
        return write(fd, data)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        for seed in range(5):
            put(store, cache, prompt(600, seed))
    assert [r.getMessage() for r in caplog.records] == [
        f"prefix cache: nothing is written to {store.folder} until it works again: No space left on device"
    ]
    assert store.counters.dropped >= 4
    assert not list(tmp_path.rglob(".writing-*"))
    check(store, "full", prompt(600), BLOCK)
    put(store, cache, prompt(600, 9))
    check(store, "full", [*prompt(600, 9), 0], 600)


@pytest.mark.parametrize("what", ["file", "pipe", "missing"])
def test_a_folder_that_cannot_be_one_is_one_line_and_no_cache(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    if what == "file":
        folder.write_bytes(b"")
    elif what == "pipe":
        os.mkfifo(folder)
    else:
        folder.symlink_to(tmp_path / "nowhere" / "at" / "all")
    store, cache = make_store(folder), make_cache()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert store.find(prompt(100, seed)) is None
            put(store, cache, prompt(100, seed))
    assert len(caplog.records) == 1
    assert "nothing is written to" in caplog.text


def test_two_stores_write_the_same_prefixes_at_once(tmp_path: Path) -> None:
    prefixes = [prompt(500, seed)[:n] for seed in range(6) for n in (300, 400, 500)]

    def write() -> None:
        store, cache = make_store(tmp_path, "recurrent"), make_cache("recurrent")
        for tokens in prefixes:
            put(store, cache, tokens)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = make_store(tmp_path, "recurrent")
    for tokens in prefixes:
        check(store, "recurrent", [*tokens, 0], len(tokens))
    assert store.counters.damaged == 0
    assert not list(tmp_path.rglob(".writing-*"))


def test_a_key_has_a_folder_of_its_own(tmp_path: Path) -> None:
    put(make_store(tmp_path), make_cache(), prompt(10))
    assert [p.name for p in (tmp_path / "v2").iterdir()] == [KEY.hex()[:32]]


def test_a_place_is_found_among_any_number_of_conversations_that_begin_alike(tmp_path: Path) -> None:
    store, cache = make_store(tmp_path, "recurrent"), make_cache("recurrent")
    tokens = prompt(100)
    for i in range(90):
        put(store, cache, [*tokens[: 10 + i % 50], 1000 + i])
    check(store, "recurrent", [*tokens[:10], 1000, 5], 11)
    check(store, "recurrent", [*tokens[:17], 1007, 5], 18)


def test_nothing_new_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = make_store(tmp_path), make_cache()
    put(store, cache, prompt(600))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    put(store, cache, prompt(600))
    assert store.counters.dropped == 0
    put(store, cache, prompt(600, 1))
    assert store.counters.dropped == 1


def test_a_release_that_fails_does_not_end_the_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, cache = make_store(tmp_path), make_cache()
    memory = Memory.of(cache, computed(cache, prompt(100)))

    def fail(sequence: int) -> None:
        raise RuntimeError("no")

    store.put(prompt(100), memory, fail)
    assert store.flush(60)
    assert "could not be given back" in caplog.text
    put(store, cache, prompt(300))
    check(store, "full", prompt(301), 300)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefixes_that_were_used_last_come_first_and_each_as_long_as_it_is(tmp_path: Path, shape: str) -> None:
    store, cache = make_store(tmp_path, shape), make_cache(shape)
    one, two = prompt(900), prompt(300) + prompt(600, seed=1)
    for tokens in (one[:300], one[:600], two, one):
        put(store, cache, tokens)
    put(store, cache, prompt(400, seed=2), salt="a")
    assert store.recent(1 << 30) == [one, two]
    check(store, shape, [*two, 0], 900)
    recent = make_store(tmp_path, shape).recent(1 << 30)
    assert recent == [two, one]
    for tokens in recent:
        check(store, shape, [*tokens, 0], 900)


def test_so_many_recent_prefixes_as_their_files_take_each_once(tmp_path: Path) -> None:
    store, cache = make_store(tmp_path), make_cache()
    one, two = prompt(900), prompt(512) + prompt(388, seed=1)
    put(store, cache, one)
    alone = total(tmp_path)
    put(store, cache, two)
    both = total(tmp_path)
    assert both < 2 * alone
    limits = (alone - 1, alone, both - 1, both)
    assert [store.recent(limit) for limit in limits] == [[], [two], [two], [two, one]]


def test_what_has_lost_its_beginning_or_is_damaged_is_not_recent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, other = make_store(tmp_path), prompt(100, seed=1)
    put(store, make_cache(), prompt(900))
    put(store, make_cache(), other)
    os.truncate(next(tmp_path.rglob("*-512.block")), 100)
    assert store.recent(1 << 30) == [other]
    # It is gone now, and what is left of the prefix ends before it.
    assert store.recent(1 << 30) == [other, prompt(900)[:256]]
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["it is no file of this cache"]


def test_names_that_go_round_in_circles_are_not_followed_for_ever(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    put(store, make_cache(), prompt(100))
    folder = next(tmp_path.rglob("*.place")).parent
    a, b = f"{folder.name}{'0' * 30}", f"{folder.name}{'1' * 30}"
    for name in (f"{a}-{b}-256.block", f"{b}-{a}-512.block", f"{b}-{a}-256.block", f"{a}-{a}-256.block", f"{a}-{'2' * 32}-512.block"):
        (folder / name).write_bytes(b"x")
    assert store.recent(1 << 30) == [prompt(100)]
