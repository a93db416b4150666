"""Plain reads of files and of places in them: a file that becomes shorter is an error."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from quaff import _native
from quaff.checkpoint import ModelFile, Place
from quaff.checkpoint import file as module
from quaff.errors import CheckpointError

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)


@pytest.fixture
def opened(tmp_path: Path) -> ModelFile:
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    return ModelFile(path)


def test_what_is_read(opened: ModelFile) -> None:
    assert opened.nbytes == 5000
    data = opened.read(100, 4000)
    assert data.tobytes() == CONTENT[100:4100].tobytes() and not data.flags.writeable
    assert opened.pread(4990, 100) == CONTENT[4990:].tobytes()
    mapped = opened.map().array()
    opened.close()
    opened.close()
    assert mapped.tobytes() == CONTENT.tobytes() and not mapped.flags.writeable
    with pytest.raises(CheckpointError, match="cannot be read: Bad file descriptor"):
        opened.read(0, 1)


@pytest.mark.parametrize("block", [1 << 22, 64])
def test_places_read_their_pieces(opened: ModelFile, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    rows = Place(opened, 7, 20, 30, 100)
    expected = np.stack([CONTENT[7 + 100 * i : 37 + 100 * i] for i in range(20)])
    assert rows.read().tobytes() == expected.tobytes() and not rows.read().flags.writeable
    assert b"".join(b.tobytes() for b in rows.blocks()) == expected.tobytes()
    assert rows.pieces(3, 5).read().tobytes() == expected[3:8].tobytes()
    assert rows.within(4, 9).pieces(1, 2).read().tobytes() == expected[1:3, 4:13].tobytes()
    whole = Place(opened, 7, 20, 100, 100)
    assert whole.read().tobytes() == b"".join(b.tobytes() for b in whole.blocks()) == CONTENT[7:2007].tobytes()


def test_a_file_that_becomes_shorter(opened: ModelFile) -> None:
    os.truncate(opened.path, 1000)
    with pytest.raises(CheckpointError, match=r"became shorter while it was read \(it had 5000 bytes\)"):
        opened.read(900, 200)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        opened.check_unchanged()
    with pytest.raises(CheckpointError, match="changed while it was read"):
        opened.map()


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("none", "no such file"),
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
        ("a\0b", "cannot be opened"),
    ):
        with pytest.raises(CheckpointError, match=said):
            ModelFile(tmp_path / name)


def holds(address: int) -> bool:
    """Whether memory of this process lies at the address."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) - 1, 2 << 20, (32 << 20) + 5000, 65 << 20])
def test_mapped_bytes_are_the_same_before_and_after_they_move(nbytes: int, tmp_path: Path) -> None:
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    file = ModelFile(tmp_path / "file")
    mapped = file.map()
    file.close()
    array = mapped.array()
    for _ in range(5):  # while the thread moves them
        assert np.array_equal(array, content)
    mapped.wait()
    assert np.array_equal(array, content) and mapped.moved_bytes in (0, nbytes)
    address = array.ctypes.data
    assert address % (2 << 20) == 0 and holds(address) and not array.flags.writeable
    if mapped.moved_bytes:
        os.truncate(tmp_path / "file", 0)
        assert np.array_equal(array, content), "it is in memory, not in the file"
    del mapped
    assert holds(address), "the array keeps it"
    del array
    gc.collect()
    assert not holds(address)


def test_a_mapping_that_ends_while_it_moves(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(40 << 20))
    for _ in range(5):
        file = ModelFile(tmp_path / "file")
        address = file.map().array().ctypes.data
        gc.collect()
        assert not holds(address)


def test_what_cannot_be_mapped(opened: ModelFile) -> None:
    with pytest.raises(RuntimeError, match="empty"):
        _native.MappedFile(opened.fd, 0)
    with pytest.raises(RuntimeError, match="cannot be mapped: Bad file descriptor"):
        _native.MappedFile(-1, 10)
