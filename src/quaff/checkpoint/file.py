"""Files of a model, open: read by plain reads, so that one that is cut short or on a failing disk is an error and never a signal."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from quaff import _native
from quaff.errors import CheckpointError

_BLOCK_BYTES = 1 << 22


class ModelFile:
    """A regular file, open until `close`. `nbytes` and `mtime_ns` are those of the moment it was opened. Messages do not name it."""

    def __init__(self, path: Path) -> None:
        """CheckpointError for a file that is missing, may not be read, or is none."""
        self.path = path
        self._fd = -1
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except FileNotFoundError:
            raise CheckpointError("no such file") from None
        except PermissionError:
            raise CheckpointError("not allowed to read this file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be opened: {_reason(error)}") from None
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError("is not a regular file")
        self.nbytes = status.st_size
        self.mtime_ns = status.st_mtime_ns

    @property
    def fd(self) -> int:
        """The descriptor; -1 when closed."""
        return self._fd

    def pread(self, offset: int, nbytes: int) -> bytes:
        """At most `nbytes` bytes at `offset`; fewer only where the file ends."""
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {_reason(error)}") from None

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Exactly `nbytes` bytes, read-only. CheckpointError where the file ends before that: callers have checked that it does not."""
        out = np.empty(nbytes, np.uint8)
        view, done = memoryview(out.data), 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot be read: {_reason(error)}") from None
            if not count:
                raise CheckpointError(f"the file became shorter while it was read (it had {self.nbytes} bytes)")
            done += count
        out.flags.writeable = False
        return out

    def map(self) -> _native.MappedFile:
        """The whole file, mapped. Whoever cuts it short before all of it has moved into memory ends the process."""
        self.check_unchanged()
        try:
            return _native.MappedFile(self._fd, self.nbytes)
        except RuntimeError as error:
            raise CheckpointError(str(error)) from None

    def check_unchanged(self) -> None:
        """CheckpointError when the file was written to since it was opened."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.nbytes, self.mtime_ns):
            raise CheckpointError("the file changed while it was read; try again when whatever writes it is done")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextmanager
def closed_on_error(file: ModelFile) -> Iterator[ModelFile]:
    """The file, closed again when what follows fails."""
    try:
        yield file
    except BaseException:
        file.close()
        raise


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where bytes lie in a file: `count` pieces of `nbytes` bytes, the first at `offset`, each `stride` bytes after the one before.

    A piece is a row of blocks, a whole vector, or in packed files the panels of a matrix.
    """

    file: ModelFile
    offset: int
    count: int
    nbytes: int
    stride: int

    def read(self) -> NDArray[np.uint8]:
        """All pieces, one after the other."""
        if self.stride == self.nbytes:
            return self.file.read(self.offset, self.count * self.nbytes)
        out = np.concatenate(list(self.blocks()))
        out.flags.writeable = False
        return out

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        """The same in blocks of a few MiB."""
        if self.stride == self.nbytes:
            for begin in range(0, self.count * self.nbytes, _BLOCK_BYTES):
                yield self.file.read(self.offset + begin, min(_BLOCK_BYTES, self.count * self.nbytes - begin))
            return
        # Small pieces that lie close are read together with what is between them.
        step = max(1, _BLOCK_BYTES // self.stride)
        for begin in range(0, self.count, step):
            count = min(step, self.count - begin)
            span = self.file.read(self.offset + begin * self.stride, (count - 1) * self.stride + self.nbytes)
            yield np.ascontiguousarray(as_strided(span, (count, self.nbytes), (self.stride, 1))).reshape(-1)

    def pieces(self, begin: int, count: int) -> Place:
        """Pieces begin .. begin + count - 1."""
        return Place(self.file, self.offset + begin * self.stride, count, self.nbytes, self.stride)

    def within(self, begin: int, nbytes: int) -> Place:
        """Bytes begin .. begin + nbytes - 1 of every piece."""
        return Place(self.file, self.offset + begin, self.count, nbytes, self.stride)
