"""The folder of the disk tier: files that appear whole or not at all, and go in the order in which they were used last.

Any number of processes may share a folder. A file is written under a temporary name, synced, and renamed; what a killed process left under
such a name is removed by the next one that counts. The modification time is the time of the last use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Buffer = bytes | memoryview
_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{32})-(\d{1,13})\.(block|place)")
_TEMPORARY = ".writing-"
_RECOUNT_SHARE = 16
"""The folder is counted again after a sixteenth of the cap was written: other processes write to it too."""
_ATTEMPTS = 16
"""To create a file in a folder that others clear at the same time."""
_SPARE_BYTES = 256 << 20
"""Room that is left on the disk for others."""


@dataclass(frozen=True, slots=True)
class Child:
    """A file by what its name says, the stem of its own hash and where it ends, and its size."""

    name: str
    stem: str
    end: int
    place: bool
    nbytes: int

    @property
    def parent(self) -> str:
        """The stem of the hash that it continues."""
        return self.name[: len(self.stem)]


@dataclass(frozen=True, slots=True)
class _File:
    mtime_ns: int
    end: int
    nbytes: int
    path: str
    writing: bool


class Shelf:
    """The files of one model, "version/key", in `folder`, which has room for `cap_bytes` of the files of all versions and models: what an
    older quaff wrote counts, and goes first, as nobody uses it. Not locked: one thread writes.

    OSError, of a full disk or a folder that cannot be written, comes out of `write`; reading finds nothing instead.
    """

    def __init__(self, folder: Path, model: str, cap_bytes: int) -> None:
        self.folder = folder
        self.model = folder / model
        self.cap_bytes = cap_bytes
        self.evicted = 0
        self._used = 0
        self._uncounted = cap_bytes

    def path(self, name: str) -> Path:
        return self.model / name[:2] / name

    def has(self, name: str) -> bool:
        return os.path.isfile(self.path(name))

    def children(self, parent: str) -> list[Child]:
        """The files that continue a hash chain, the last used first."""
        return self._list([self.model / parent[:2]], parent)

    def every(self) -> list[Child]:
        """All files of the model, the last used first."""
        return self._list(self.model.glob("[0-9a-f][0-9a-f]"), "")

    @staticmethod
    def _list(folders: Iterable[Path], parent: str) -> list[Child]:
        found = []
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(parent) and (match := _NAME.fullmatch(entry.name)):
                        with contextlib.suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            child = Child(entry.name, match[1], int(match[2]), match[3] == "place", status.st_size)
                            found.append((status.st_mtime_ns, child))
        return [child for _, child in sorted(found, key=lambda pair: pair[0], reverse=True)]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[int, int]]:
        """(descriptor, bytes) of a file; OSError when there is none, or something else by its name."""
        # Not blocking: somebody may have put a pipe there.
        fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{name} is no regular file")
            yield fd, status.st_size
        finally:
            os.close(fd)

    def write(self, name: str, buffers: Sequence[Buffer], used_ns: int) -> int:
        """Make room for a file, write it and return its bytes. It appears when all of it is on the disk, last used at `used_ns`."""
        nbytes = sum(len(buffer) for buffer in buffers)
        with contextlib.ExitStack() as stack:
            fd, temporary = self._create(self.path(name).parent)
            stack.callback(os.close, fd)
            self._used += nbytes
            self._uncounted += nbytes
            try:
                # It has its size before room is made: processes that make room at one time see each other's files.
                os.ftruncate(fd, nbytes)
                self._make_room(nbytes)
                for buffer in buffers:
                    _write(fd, buffer)
                os.utime(fd, ns=(used_ns, used_ns))
                os.fsync(fd)
                os.rename(temporary, self.path(name))
            except BaseException:
                self._used -= nbytes
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        return nbytes

    def _create(self, folder: Path) -> tuple[int, Path]:
        """A new temporary file, locked: who can lock one has found one whose writer is dead."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(_ATTEMPTS):
            for parent in (self.folder, self.model.parent, self.model, folder):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
            # Others remove empty folders, and what is not locked yet.
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, flags, 0o600)
                with contextlib.suppress(OSError):  # a file system without locks: then nobody can
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return fd, path
                os.close(fd)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def sync(self, names: Iterable[str]) -> None:
        """Make the appearance of files last through a power cut."""
        for folder in {self.path(name).parent for name in names}:
            with contextlib.suppress(FileNotFoundError):  # what it held has been removed already
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def touch(self, names: Iterable[str], used_ns: int) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self.path(name), ns=(used_ns, used_ns), follow_symlinks=False)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path(name))

    def _make_room(self, nbytes: int) -> None:
        """Remove what was not used for longest until a file of `nbytes` that is being written fits under the cap; of one age, what comes
        last in its chain."""
        if nbytes + _SPARE_BYTES > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._uncounted * _RECOUNT_SHARE <= self.cap_bytes and self._used <= self.cap_bytes:
            return
        files = sorted(self._files(), key=lambda f: (f.mtime_ns, -f.end))
        self._used, self._uncounted = sum(f.nbytes for f in files), 0
        for file in files:
            if self._used <= self.cap_bytes:
                return
            if not file.writing:
                self._remove(file)

    def _remove(self, file: _File) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        self._used -= file.nbytes
        self.evicted += 1
        with contextlib.suppress(OSError):  # where it was the last of its folder
            os.rmdir(os.path.dirname(file.path))

    def _files(self) -> Iterator[_File]:
        """Every file of the tier, of all versions and models; what was left behind half written is removed."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                writing = name.startswith(_TEMPORARY)
                match = _NAME.fullmatch(name)
                if (writing and not _removed_abandoned(path)) or match:
                    with contextlib.suppress(OSError):
                        status = os.stat(path, follow_symlinks=False)
                        yield _File(status.st_mtime_ns, int(match[2]) if match else 0, status.st_size, path, writing)


def _write(fd: int, buffer: Buffer) -> None:
    view = memoryview(buffer)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])


def _removed_abandoned(path: str) -> bool:
    """Remove a temporary file unless its writer holds it; True when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def now_ns() -> int:
    """The time of a use."""
    return time.time_ns()
