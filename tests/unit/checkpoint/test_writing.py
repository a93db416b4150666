"""New files appear whole or not at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from quaff.checkpoint.writing import new_file
from quaff.errors import CheckpointError


def test_a_whole_file_gets_its_name_and_the_usual_permissions(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_file(out) as temporary:
        assert temporary.parent == tmp_path and not out.exists()
        temporary.write_bytes(b"whole")
    assert out.read_bytes() == b"whole" and os.listdir(tmp_path) == ["out"]
    plain = tmp_path / "plain"
    plain.touch()
    assert out.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_when_it_fails(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_file(tmp_path / "out") as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert os.listdir(tmp_path) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="out: exists already"), new_file(tmp_path / "out"):
        pass
    with pytest.raises(CheckpointError, match="there is no folder"), new_file(tmp_path / "none" / "out"):
        pass
    assert (tmp_path / "out").read_bytes() == b"old"


def test_a_disk_without_room_is_named_with_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="out: cannot be written: File too large"), new_file(tmp_path / "out") as temporary:
            temporary.write_bytes(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []
