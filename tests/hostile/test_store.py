"""Damaged, foreign and half-written files in the disk tier: a miss with one line in the log, never a wrong byte."""

import logging
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stored import SHAPES, cold_hash, computed, make_cache, make_store, prompt, put, restore

from quaff.cache.entry import checksum, header_bytes
from quaff.cache.memory import Memory
from quaff.cache.store import Store

TOKENS = prompt(600)
KILLS = 50


@pytest.fixture(scope="module", params=["full", "everything"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    put(make_store(folder, request.param), make_cache(request.param), TOKENS)
    return request.param, folder


def restored(store: Store, shape: str, tokens: list[int]) -> int:
    """Positions that come back, with the right bytes; a damaged file may cost a second look."""
    for _ in range(4):
        found = store.find(tokens)
        if found is None:
            return 0
        cache = make_cache(shape)
        sequence = restore(store, cache, found)
        if sequence is not None:
            assert cache.kv_sha256(sequence) == cold_hash(shape, tokens[: found.length])
            return found.length
    raise AssertionError("damaged files stay in the way")


def change_byte(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)


def cut_off(path: Path, data: st.DataObject) -> None:
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))


def lengthen(path: Path, data: st.DataObject) -> None:
    path.write_bytes(path.read_bytes() + data.draw(st.binary(min_size=1, max_size=100)))


def replace(path: Path, data: st.DataObject) -> None:
    path.write_bytes(data.draw(st.binary(max_size=5000)))


def zero_block(path: Path, data: st.DataObject) -> None:
    """What a power cut leaves of a page that was never written."""
    content = bytearray(path.read_bytes())
    begin = data.draw(st.integers(0, len(content) // 512)) * 512
    content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    path.write_bytes(content)


DAMAGES: list[Callable[[Path, st.DataObject], None]] = [change_byte, cut_off, lengthen, replace, zero_block]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_a_miss_one_line_and_written_anew(
    written: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory, damage: Callable[[Path, st.DataObject], None], data: st.DataObject
) -> None:
    shape, good = written
    folder = tmp_path_factory.mktemp("damaged") / "cache"
    shutil.copytree(good, folder)
    path = data.draw(st.sampled_from(sorted(folder.rglob("*.block")) + sorted(folder.rglob("*.place"))))
    before = path.read_bytes()
    damage(path, data)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quaff.cache.store")
    logger.addHandler(handler)
    try:
        store = make_store(folder, shape)
        length = restored(store, shape, [*TOKENS, 0])
    finally:
        logger.removeHandler(handler)
    assert length < 600 or path.read_bytes() == before
    assert len(lines) <= 1
    assert store.counters.damaged == len(lines)
    put(store, make_cache(shape), TOKENS)
    assert restored(store, shape, [*TOKENS, 0]) == 600


@pytest.mark.parametrize("swapped", [("block", "block"), ("block", "place")])
def test_a_good_file_under_the_name_of_another_is_refused(written: tuple[str, Path], tmp_path: Path, swapped: tuple[str, str]) -> None:
    shape, good = written
    shutil.copytree(good, tmp_path / "cache")
    blocks, places = sorted((tmp_path / "cache").rglob("*.block")), sorted((tmp_path / "cache").rglob("*.place"))
    one, two = (blocks[0], blocks[1]) if swapped == ("block", "block") else (blocks[0], places[0])
    shutil.copy(one, two)
    store = make_store(tmp_path / "cache", shape)
    assert restored(store, shape, [*TOKENS, 0]) < 600
    assert store.counters.damaged == 1


def test_a_checksum_that_is_not_compared_would_let_a_changed_byte_through(
    written: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the bytes that these tests compare do show one changed byte of a payload."""
    shape, good = written
    shutil.copytree(good, tmp_path / "cache")
    path = next((tmp_path / "cache").rglob("*.place"))
    content = bytearray(path.read_bytes())
    payload = header_bytes(600 - 512)
    right = checksum([memoryview(bytes(content[payload:]))])
    content[payload + 5] ^= 1
    wrong = checksum([memoryview(bytes(content[payload:]))])
    path.write_bytes(content)
    monkeypatch.setattr("quaff.cache.store.checksum", lambda buffers: right if (digest := checksum(buffers)) == wrong else digest)
    store, cache = make_store(tmp_path / "cache", shape), make_cache(shape)
    found = store.find([*TOKENS, 0])
    assert found is not None
    sequence = restore(store, cache, found)
    assert sequence is not None
    assert cache.kv_sha256(sequence) != cold_hash(shape, TOKENS)


def _write_until_killed(folder: Path, at: int) -> None:
    """In a child: put prefixes, and die by SIGKILL at the `at`-th byte or system call of writing."""
    left = at

    def spend(n: int) -> int:
        nonlocal left
        left -= n
        return left

    os_write, os_fsync, os_rename = os.write, os.fsync, os.rename

    def write(fd: int, data: memoryview) -> int:
        if spend(len(data)) < 0:
            os_write(fd, data[: len(data) + left])
            os.kill(os.getpid(), signal.SIGKILL)
        return os_write(fd, data)

    def fsync(fd: int) -> None:
        if spend(1) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os_fsync(fd)

    def rename(old: Path, new: Path) -> None:
        if spend(1) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os_rename(old, new)
        if spend(1) < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.write, os.fsync, os.rename = write, fsync, rename  # type: ignore[assignment]
    store, cache = make_store(folder, "everything"), make_cache("everything")
    for tokens in PREFIXES:
        put(store, cache, tokens)


PREFIXES = [prompt(600, seed)[:n] for seed in (1, 2) for n in (300, 600)]


def test_kill_9_at_any_byte_loses_entries_and_nothing_else(tmp_path: Path) -> None:
    """Fifty random points of a run of writes, each in a process that dies there; all that is found then is right."""
    put_all = tmp_path / "all"
    store, cache = make_store(put_all, "everything"), make_cache("everything")
    for tokens in PREFIXES:
        put(store, cache, tokens)
    spent = store.counters.bytes_written + 4 * store.counters.files_written
    dice = random.Random(50)
    killed = abandoned = complete = 0
    for i, at in enumerate([0, spent - 1, *(dice.randrange(spent) for _ in range(KILLS - 2))]):
        folder = tmp_path / str(i)
        child = os.fork()
        if not child:
            try:
                _write_until_killed(folder, at)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        abandoned += len(list(folder.rglob(".writing-*")))
        store = make_store(folder, "everything")
        lengths = [restored(store, "everything", [*tokens, 0]) for tokens in PREFIXES]
        complete += sum(length == len(tokens) for length, tokens in zip(lengths, PREFIXES, strict=True))
        assert store.counters.damaged == 0
        if i % 10 == 0:
            for tokens in PREFIXES:
                put(store, make_cache("everything"), tokens)
            assert [restored(store, "everything", [*tokens, 0]) for tokens in PREFIXES] == [300, 600, 300, 600]
            assert not list(folder.rglob(".writing-*"))
    assert killed == KILLS
    assert abandoned > KILLS // 2
    assert 0 < complete < KILLS * len(PREFIXES)


@pytest.mark.parametrize("shape", SHAPES)
def test_foreign_files_are_left_alone(shape: str, tmp_path: Path) -> None:
    store = make_store(tmp_path, shape)
    put(store, make_cache(shape), TOKENS)
    foreign = []
    for folder in [p for p in tmp_path.rglob("*") if p.is_dir()]:
        for name in ("README", ".hidden", "x.block", f"{'0' * 32}.place", "é.block", "-" * 200):
            (folder / name).write_bytes(b"not ours")
            foreign.append(folder / name)
    store = make_store(tmp_path, shape, cap_bytes=200_000)
    assert restored(store, shape, [*TOKENS, 0]) == 600
    put(store, make_cache(shape), prompt(600, 5))
    assert all(path.read_bytes() == b"not ours" for path in foreign)
    assert store.counters.damaged == 0


def _share(folder: Path, seed: int) -> None:
    """In a child: write, drive out what others wrote, and look for it, with what comes back compared."""
    dice = random.Random(seed)
    store, cache = make_store(folder, "everything", cap_bytes=400_000), make_cache("everything")
    for _ in range(25):
        tokens = prompt(dice.choice((90, 300, 600)), dice.randrange(4))
        if dice.random() < 0.5:
            put(store, cache, tokens)
        else:
            restored(store, "everything", [*tokens, 0])
    assert store.counters.damaged == 0


def test_processes_that_write_read_and_evict_in_one_folder_never_see_half_a_file(tmp_path: Path) -> None:
    children = []
    for seed in range(4):
        child = os.fork()
        if not child:
            status = 1
            try:
                _share(tmp_path, seed)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert list(tmp_path.rglob("*.place"))
    # Each of four may be a sixteenth of the cap behind.
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 400_000 * 5 // 4


@pytest.mark.parametrize("mode", ["size", "descriptors", "read-only"])
def test_what_the_system_refuses_is_no_cache(mode: str, tmp_path: Path) -> None:
    """Real limits: files that may not grow, no descriptors left, and (where the tests are not root) a folder that cannot be written."""
    put(make_store(tmp_path), make_cache(), TOKENS)
    child = os.fork()
    if not child:
        status = 1
        try:
            store, cache = make_store(tmp_path), make_cache()
            sequence = computed(cache, prompt(600, 7))
            if mode == "size":
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            elif mode == "descriptors":
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            else:
                os.chmod(tmp_path / "v2", 0o500)
                if not os.geteuid():
                    os.setuid(65534)
            store.put(prompt(600, 7), Memory.of(cache, sequence), lambda sequence: None)
            assert store.flush(60)
            assert store.counters.dropped == 1
            assert store.counters.files_written == 0
            assert store.find([*prompt(600, 7), 0]) is None
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    os.chmod(tmp_path / "v2", 0o700)
    assert os.waitstatus_to_exitcode(status) == 0
    assert restored(make_store(tmp_path), "full", [*TOKENS, 0]) == 600
    assert not list(tmp_path.rglob(".writing-*"))
