"""The folder of the disk tier: whole files or none, private, and the least used ones first to go."""

import os
import stat
from pathlib import Path

import pytest

from quaff.cache import shelf as shelf_module
from quaff.cache.shelf import Child, Shelf


def name(parent: int, own: int, end: int = 256, kind: str = "block") -> str:
    return f"{parent:032x}-{own:032x}-{end}.{kind}"


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "cache", "v2/model", 1000)


def test_files_and_folders_are_private(shelf: Shelf) -> None:
    shelf.write(name(1, 2), [b"abc", memoryview(b"de")], 5)
    shelf.sync([name(1, 2)])
    path = shelf.path(name(1, 2))
    assert path.read_bytes() == b"abcde"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_mtime_ns == 5
    for folder in (path.parent, shelf.model, shelf.model.parent, shelf.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_appears_whole_or_not_at_all(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        if len(data) > 100:
            return os_write(fd, data[:100])
        raise OSError(28, "No space left on device")

    os_write = os.write
    monkeypatch.setattr(shelf_module.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        shelf.write(name(1, 2), [bytes(150)], 5)
    assert files(shelf.folder) == []


def test_short_writes_are_continued(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    os_write = os.write
    monkeypatch.setattr(shelf_module.os, "write", lambda fd, data: os_write(fd, data[:7]))
    assert shelf.write(name(1, 2), [bytes(range(50)), bytes(3)], 5) == 53
    assert shelf.path(name(1, 2)).read_bytes() == bytes(range(50)) + bytes(3)


def test_children_are_those_of_one_parent_the_last_used_first(shelf: Shelf) -> None:
    for i, (parent, own) in enumerate([(7, 1), (7, 2), (8, 3), (7, 4)]):
        shelf.write(name(parent, own), [b"x"], 100 - i)
    (shelf.path(name(7, 1)).parent / f"{7:032x}-notes.txt").write_text("not ours")
    shelf.touch([name(7, 2), name(9, 9)], 1000)
    assert [c.name for c in shelf.children(f"{7:032x}")] == [name(7, 2), name(7, 1), name(7, 4)]
    assert shelf.children(f"{8:032x}") == [Child(name(8, 3), f"{3:032x}", 256, place=False, nbytes=1)]
    assert shelf.children(f"{9:032x}") == []
    assert [c.name for c in shelf.every()] == [name(7, 2), name(7, 1), name(8, 3), name(7, 4)]
    assert {c.parent for c in shelf.every()} == {f"{7:032x}", f"{8:032x}"}


def test_what_is_not_there_has_no_files(shelf: Shelf, tmp_path: Path) -> None:
    assert shelf.every() == []
    (tmp_path / "cache").write_bytes(b"")
    assert shelf.every() == []


def test_all_files_of_a_model_are_those_of_all_its_folders(shelf: Shelf) -> None:
    for parent in (1, 1 << 120, 255 << 120):
        shelf.write(name(parent, 5), [b"x"], parent >> 120)
    Shelf(shelf.folder, "v2/other", 1000).write(name(1, 6), [b"x"], 1)
    assert [c.name for c in shelf.every()] == [name(255 << 120, 5), name(1 << 120, 5), name(1, 5)]


def test_the_least_used_files_go_first_and_of_one_age_the_deepest(shelf: Shelf) -> None:
    shelf.write(name(1, 1, 256), [bytes(300)], 50)
    shelf.write(name(1, 2, 512), [bytes(300)], 50)
    shelf.write(name(1, 3, 300, "place"), [bytes(300)], 20)
    shelf.write(name(2, 4, 256), [bytes(100)], 60)
    assert shelf.evicted == 0
    shelf.write(name(2, 5, 256), [bytes(1)], 60)
    assert (files(shelf.folder), shelf.evicted) == ([name(1, 1, 256), name(1, 2, 512), name(2, 4, 256), name(2, 5, 256)], 1)
    shelf.write(name(2, 6, 256), [bytes(400)], 60)
    assert files(shelf.folder) == [name(1, 1, 256), name(2, 4, 256), name(2, 5, 256), name(2, 6, 256)]


@pytest.mark.parametrize("models", [("v2/one", "v2/two"), ("v1/one", "v2/one")])
def test_room_is_made_among_the_files_of_all_models_and_versions_and_of_nobody_else(tmp_path: Path, models: tuple[str, str]) -> None:
    one, two = (Shelf(tmp_path, model, 1000) for model in models)
    one.write(name(1, 1), [bytes(600)], 10)
    (one.model / "README").write_bytes(bytes(5000))
    two.write(name(1, 1), [bytes(600)], 20)
    assert not one.has(name(1, 1))
    assert two.has(name(1, 1))
    assert (one.model / "README").exists()


def test_what_other_processes_write_is_noticed_after_a_sixteenth_of_the_cap(tmp_path: Path) -> None:
    mine, other = Shelf(tmp_path, "m", 16000), Shelf(tmp_path, "m", 16000)
    mine.write(name(2, 99), [bytes(1)], 100)
    for i in range(15):
        other.write(name(1, i), [bytes(1000)], i)
    for i in range(3):
        mine.write(name(2, i), [bytes(1000)], 100 + i)
    total = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert total <= 17000
    assert mine.evicted


def test_what_others_are_writing_takes_room_and_is_not_removed(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.write(name(1, 1), [bytes(300)], 1)
    other = Shelf(shelf.folder, "v2/model", shelf.cap_bytes)
    seen: list[str] = []

    def during(fd: int) -> None:
        if not seen:
            seen.append("other")
            other.write(name(1, 3), [bytes(600)], 2)
            seen.extend(files(shelf.folder))

    monkeypatch.setattr(shelf_module.os, "fsync", during)
    shelf.write(name(1, 2), [bytes(300)], 2)
    assert sum(n.startswith(".writing-") for n in seen) == 1
    assert files(shelf.folder) == [name(1, 2), name(1, 3)]


def test_abandoned_files_are_removed(shelf: Shelf) -> None:
    abandoned = shelf.path(name(1, 1)).parent / ".writing-0123"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_bytes(bytes(10))
    shelf.write(name(1, 1), [b"x"], 1)
    assert files(shelf.folder) == [name(1, 1)]


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_what_others_clear_away_is_created_again(shelf: Shelf, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the folder while it is empty, or the file before it is locked."""
    opened = shelf_module.os.open
    cleared: list[str] = []

    def late(path: Path, *args: int) -> int:
        if Path(path).name.startswith(".writing-") and len(cleared) < 3:
            cleared.append(taken)
            if taken == "folder":
                Path(path).parent.rmdir()
                return opened(path, *args)
            fd = opened(path, *args)
            Path(path).unlink()
            return fd
        return opened(path, *args)

    monkeypatch.setattr(shelf_module.os, "open", late)
    shelf.write(name(1, 1), [b"x"], 1)
    assert len(cleared) == 3
    assert files(shelf.folder) == [name(1, 1)]


def test_a_file_system_without_locks_is_written_all_the_same(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(shelf_module.fcntl, "flock", refuse)
    left = shelf.path(name(1, 1)).parent / ".writing-0123"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"perhaps another's")
    shelf.write(name(1, 1), [b"x"], 1)
    assert files(shelf.folder) == [".writing-0123", name(1, 1)]


def test_a_disk_that_is_nearly_full_is_left_alone(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shelf_module.shutil.disk_usage("/")
    monkeypatch.setattr(shelf_module.shutil, "disk_usage", lambda path: usage._replace(free=(256 << 20) + 99))
    shelf.write(name(1, 1), [bytes(99)], 1)
    with pytest.raises(OSError, match="No space left"):
        shelf.write(name(1, 2), [bytes(100)], 1)
    assert files(shelf.folder) == [name(1, 1)]


@pytest.mark.parametrize("what", ["pipe", "link", "folder"])
def test_what_is_no_file_is_not_opened(shelf: Shelf, what: str, tmp_path: Path) -> None:
    path = shelf.path(name(1, 1))
    path.parent.mkdir(parents=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        (tmp_path / "elsewhere").write_bytes(b"secret")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(OSError), shelf.open(name(1, 1)):
        pass
