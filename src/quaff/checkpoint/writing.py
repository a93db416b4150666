"""New files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quaff.errors import CheckpointError


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """A temporary file beside `out`, to be filled in the block; then it reaches the disk and gets its name. On failure nothing is left.

    CheckpointError when `out` exists or its folder does not, and, naming it, for what the system refuses, such as a full disk.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already; remove it or choose another name")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.parent}")
    temporary: Path | None = None
    try:
        fd, name = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
        os.close(fd)
        temporary = Path(name)
        yield temporary
        # mkstemp's files are private; a model is as readable as any other file.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        _sync(temporary)
        os.replace(temporary, out)
        _sync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
