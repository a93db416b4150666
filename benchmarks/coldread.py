"""Files without their page cache, and how fast the disk gives them: what a cold start is measured against."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, POINTER, c_size_t, c_ubyte, c_void_p
from pathlib import Path

import numpy as np

PIECE_BYTES = 4 << 20
READERS = 2


def drop(path: Path) -> float:
    """Ask the system to forget the file's pages, and return the share that is still in memory; RuntimeError when that is more than 1 %."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached_share(file.fileno(), path.stat().st_size)
    if left > 0.01:
        raise RuntimeError(f"{100 * left:.0f} % of {path} stays in the page cache; another process may be using it")
    return left


def cached_share(fd: int, size: int) -> float:
    """Share of a file's pages that the page cache holds (mincore)."""
    mapped = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
    pages = -(-size // mmap.PAGESIZE)
    resident = np.zeros(pages, dtype=np.uint8)
    mincore = CDLL(None, use_errno=True).mincore
    mincore.argtypes = [c_void_p, c_size_t, POINTER(c_ubyte)]
    if mincore(mapped.ctypes.data, size, resident.ctypes.data_as(POINTER(c_ubyte))) != 0:
        raise RuntimeError("mincore failed")
    return float((resident & 1).mean())


def seconds_to_read(path: Path) -> float:
    """Of the whole file, past the page cache where the file system allows it, by as many threads as the engine reads with."""
    size = path.stat().st_size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        drop(path)
        fd = os.open(path, os.O_RDONLY)

    def read(first: int) -> int:
        # Anonymous memory begins at a page, as direct reads want.
        with mmap.mmap(-1, PIECE_BYTES) as buffer:
            view = memoryview(buffer)
            total = 0
            for offset in range(first * PIECE_BYTES, size, READERS * PIECE_BYTES):
                total += os.preadv(fd, [view], offset)
            view.release()
            return total

    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            total = sum(pool.map(read, range(READERS)))
        seconds = time.perf_counter() - began
    finally:
        os.close(fd)
    if total != size:
        raise RuntimeError(f"{total} of {size} bytes of {path} were read")
    return seconds
