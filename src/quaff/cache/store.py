"""The disk tier of the prefix cache: prefixes of one model in files, found again after a restart and by other processes.

What a prefix leaves behind is a pure function of the bits key and of its token ids, so it is stored like a build artifact. Files are
written behind, by a thread that lives while there is something to write. Nothing that the disk does raises: it costs a line in the log,
and a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quaff.batch import Sums
from quaff.cache.entry import (
    BLOCK,
    LONGEST_HEADER_BYTES,
    VERSION,
    DamagedError,
    Layout,
    Piece,
    Tokens,
    checksum,
    header_bytes,
    pack_header,
    pieces,
    read_header,
    root,
    shared,
    stem,
)
from quaff.cache.memory import Memory, held_bytes
from quaff.cache.shelf import Shelf, now_ns
from quaff.weights.budget import human_bytes

log = logging.getLogger(__name__)

_CANDIDATES = 64
"""Headers that are read to see how far a file goes along with a prompt: the last used ones of those that continue one chain."""
_QUEUE = 64
"""Prefixes that wait to be written; their pages cannot be evicted from memory meanwhile."""
_READERS = 2
"""Files that are read and checked at once: most of it is copying, and clearing new memory."""
_NICE = 10
"""Niceness of the writing thread: it has time, the next prompt does not."""


@dataclass(frozen=True, slots=True)
class StoreCounters(Sums):
    """Prefixes looked for and found, tokens and bytes restored; files and bytes written; prefixes not written (`dropped`: too many or too
    much waited, the disk was full, or the cap is smaller); files removed for room (`evicted`), and because they were not what they should
    be."""

    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    bytes_read: int = 0
    files_written: int = 0
    bytes_written: int = 0
    dropped: int = 0
    evicted: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A prefix on disk. Its files give `full` positions, of which the first `length` are those that were looked for."""

    pieces: tuple[Piece, ...]
    length: int

    @property
    def full(self) -> int:
        return self.pieces[-1].end

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of pages and states in its files."""
        return sum(piece.payload_bytes(layout) for piece in self.pieces)

    def reusable(self, positions: int) -> int:
        """How many of `positions` leading ones that are in memory need not be read: those of whole blocks, the last file apart."""
        return min(positions // BLOCK * BLOCK, self.pieces[-1].start)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    root: bytes
    tokens: Tokens
    memory: Memory
    release: Callable[[int], None]


class Store:
    """Prefixes of the model with bits key `key`, 32 bytes, whose state has the given layout. Any thread may call.

    `cap_bytes` bounds the files of all models in `folder`; several processes may pass it by a sixteenth each before they notice.
    `waiting_bytes` bounds the memory of what is not written yet.
    """

    def __init__(self, folder: Path, key: bytes, layout: Layout, cap_bytes: int, waiting_bytes: int = 1 << 62) -> None:
        self.key = key
        self.layout = layout
        self._shelf = Shelf(folder, f"v{VERSION}/{stem(key)}", cap_bytes)
        self._waiting_bytes = waiting_bytes
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._counters = StoreCounters()
        self._current: _Job | None = None
        self._stopping = False
        self._failing = False
        self._closed = False

    @property
    def folder(self) -> Path:
        return self._shelf.folder

    @property
    def cap_bytes(self) -> int:
        return self._shelf.cap_bytes

    @property
    def counters(self) -> StoreCounters:
        with self._changed:
            return replace(self._counters, evicted=self._shelf.evicted)

    # Looking for a prefix

    def find(self, tokens: Sequence[int], salt: str = "", longer_than: int = 0) -> Found | None:
        """The longest prefix on disk that leaves a token to compute, or None when it has no more than `longer_than` positions.

        Ids are compared, not only hashes. Names and headers are read, no state.
        """
        ids = np.array(tokens, dtype=np.int32)
        blocks = self._blocks(ids, root(self.key, salt))
        found = None
        for n in range(len(blocks), -1, -1):
            parent = blocks[n - 1].hash if n else root(self.key, salt)
            found = self._best(tuple(blocks[:n]), parent, ids)
            # An earlier branching point is nearer to the start, and matters only where a chain cannot be left anywhere.
            if found is not None or self.layout.anywhere or n * BLOCK <= longer_than:
                break
        if found is not None and found.length <= longer_than:
            found = None
        self._count(lookups=1, hits=found is not None)
        return found

    def _blocks(self, ids: Tokens, parent: bytes) -> list[Piece]:
        """The blocks of a prompt that are there, up to the first that is not."""
        out: list[Piece] = []
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            piece = Piece(parent, ids[start : start + BLOCK], start, place=False)
            if not self._shelf.has(piece.name):
                break
            out.append(piece)
            parent = piece.hash
        return out

    def _best(self, blocks: tuple[Piece, ...], parent: bytes, ids: Tokens) -> Found | None:
        """The longest prefix that goes through `blocks` and one file more, or none more."""
        start, most = len(blocks) * BLOCK, len(ids) - 1
        children = self._shelf.children(stem(parent))
        best: tuple[int, Piece] | None = None
        # A place that the prompt goes through is told by its name.
        for child in children:
            if child.place and start <= child.end <= most and (best is None or child.end > best[0]):
                piece = Piece(parent, ids[start : child.end], start, place=True)
                if stem(piece.hash) == child.stem:
                    best = child.end, piece
        # Others have to be opened to see how far they go along with it.
        anywhere, states = self.layout.anywhere, self.layout.state_kinds
        near = [c for c in children if (anywhere or (c.place and not states)) and (best is None or c.end > best[0])]
        for child in near[:_CANDIDATES]:
            other = self._header(child.name)
            if other is None or other.parent != parent or other.start != start:
                continue
            length = min(start + shared(other.tokens, ids[start:]), most)
            if (anywhere or self.layout.can_shorten(other.end, length)) and length >= start and (best is None or length > best[0]):
                best = length, other
        if best is not None and (best[0] > start or not anywhere):
            return Found((*blocks, best[1]), best[0])
        return Found(blocks, min(start, most)) if blocks and anywhere else None

    def recent(self, limit_bytes: int) -> list[list[int]]:
        """The token ids of the prefixes that were used last, the last one first, as many as take `limit_bytes` of files together; of one
        that others go on from, the longest. A salt is nowhere on the disk: those of the salt "" only."""
        files = self._shelf.every()
        blocks = {file.stem: file for file in files if not file.place}
        inside, taken = {file.parent for file in files}, set[str]()
        out = []
        for last in files:
            if last.stem in inside or last.parent in taken or not (last.place or self.layout.anywhere):
                continue
            chain = [last]
            # A block ends where the next file begins, so this ends, whatever names there are.
            while (above := blocks.get(chain[-1].parent)) is not None and above.end == (
                chain[-1].end - (not chain[-1].place)
            ) // BLOCK * BLOCK:
                chain.append(above)
            nbytes = sum(file.nbytes for file in chain if file.stem not in taken)
            if nbytes > limit_bytes:
                break
            if tokens := self._tokens([file.name for file in reversed(chain)]):
                taken |= {file.stem for file in chain}
                limit_bytes -= nbytes
                out.append(tokens)
        return out

    def _tokens(self, names: Sequence[str]) -> list[int]:
        """The ids of a whole prefix; none when its files are not that."""
        tokens: list[int] = []
        parent = root(self.key, "")
        for name in names:
            piece = self._header(name)
            if piece is None or piece.parent != parent:
                return []
            tokens += piece.tokens.tolist()
            parent = piece.hash
        return tokens

    def _header(self, name: str) -> Piece | None:
        try:
            with self._shelf.open(name) as (fd, size):
                piece, _ = read_header(os.pread(fd, LONGEST_HEADER_BYTES, 0), size, self.key, self.layout)
                if piece.name != name:
                    raise DamagedError("it has the name of another file")
                return piece
        except DamagedError as error:
            self._damaged(name, error)
        except OSError as error:
            log.debug("%s: %s", name, error)
        return None

    # Bringing it back

    def read(self, found: Found, memory: Memory, have: int = 0) -> bool:
        """Fill the memory of a sequence of `found.full` positions, but for the first `have` (see `reusable`) of kinds without a window.

        False when a file is gone or damaged: the memory holds nothing then, and looking again finds what is left.
        """
        if have != found.reusable(have):
            raise ValueError(f"{have} positions are not whole blocks before the last file")
        wanted = [piece for piece in found.pieces if piece.place or piece.end > have]
        if len(wanted) > 1:
            with ThreadPoolExecutor(_READERS, "quaff-restore") as readers:
                sizes = list(readers.map(lambda piece: self._read(piece, memory), wanted))
        else:
            sizes = [self._read(piece, memory) for piece in wanted]
        if any(size < 0 for size in sizes):
            return False
        self._shelf.touch([piece.name for piece in found.pieces], now_ns())
        self._count(restored_tokens=found.length, bytes_read=sum(sizes))
        return True

    def _read(self, piece: Piece, memory: Memory) -> int:
        """Bytes read of a file, or -1."""
        try:
            with self._shelf.open(piece.name) as (fd, size):
                head, payload = read_header(os.pread(fd, LONGEST_HEADER_BYTES, 0), size, self.key, self.layout)
                if (head.parent, head.start, head.place) != (piece.parent, piece.start, piece.place) or (
                    head.tokens.tobytes() != piece.tokens.tobytes()
                ):
                    raise DamagedError("it holds other tokens than its name says")
                if checksum(_filled(fd, header_bytes(len(piece.tokens)), memory.writable(piece))) != payload:
                    raise DamagedError("its checksum does not fit")
                return size
        except DamagedError as error:
            self._damaged(piece.name, error)
        except OSError as error:
            log.debug("%s: %s", piece.name, error)
        return -1

    def _damaged(self, name: str, error: DamagedError) -> None:
        """Out of the way, so that the next one that computes the prefix writes it anew."""
        log.warning("prefix cache: %s is left out and removed: %s", self._shelf.path(name), error)
        self._shelf.remove(name)
        self._count(damaged=1)

    # Writing behind

    def put(self, tokens: Sequence[int] | Tokens, memory: Memory, release: Callable[[int], None], salt: str = "") -> None:
        """Queue a prefix that is all positions of the sequence of `memory`, which must not change until it is written: then `release` gets
        the sequence, once, in any thread.

        What is there already is only marked as used. A prefix larger than the cap is not written, nor one that comes when too much waits.
        """
        job = _Job(root(self.key, salt), np.array(tokens, dtype=np.int32), memory, release)
        with self._changed:
            if not self._closed and len(self._queue) < _QUEUE and self._has_room(job) and self._start():
                self._queue.append(job)
                return
        self._count(dropped=1)
        release(memory.sequence)

    def _has_room(self, job: _Job) -> bool:
        waiting = [*self._queue, *([self._current] if self._current is not None else []), job]
        return held_bytes([one.memory for one in waiting]) <= self._waiting_bytes

    def _start(self) -> bool:
        """True when there is a thread that writes. It cannot begin before the lock is free."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="quaff-store")
            try:
                thread.start()
            except RuntimeError as error:  # the system has none left, or the process is ending
                log.debug("prefix cache: %s", error)
                return False
            self._thread = thread
        return True

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all that was queued is on the disk; False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_seconds)

    def abandon(self) -> list[int]:
        """Write nothing of what is queued, and no more of what is being written: their sequences, which are not released. Waits for at most
        one file to be written."""
        with self._changed:
            jobs = [*self._queue] if self._current is None else [self._current, *self._queue]
            self._queue.clear()
            self._stopping = True
            self._changed.wait_for(lambda: self._current is None)
            self._stopping = False
        self._count(dropped=len(jobs))
        return [job.memory.sequence for job in jobs]

    def close(self) -> None:
        """Write what is queued, and take no more."""
        with self._changed:
            self._closed = True
        self.flush()

    def _write_all(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be the niceness of the process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._current = self._queue.popleft()
            try:
                self._write(job)
                self._failing = False
            except OSError as error:
                self._count(dropped=1)
                if not self._failing:
                    log.warning("prefix cache: nothing is written to %s until it works again: %s", self.folder, error.strerror or error)
                self._failing = True
            except Exception:
                self._count(dropped=1)
                log.exception("prefix cache: a prefix of %d tokens was not written", len(job.tokens))
            with self._changed:
                self._current = None
                abandoned = self._stopping
                self._changed.notify_all()
            if not abandoned:
                self._release(job)

    @staticmethod
    def _release(job: _Job) -> None:
        try:
            job.release(job.memory.sequence)
        except Exception:  # the thread has more to write
            log.exception("prefix cache: a sequence could not be given back")

    def _write(self, job: _Job) -> None:
        every = pieces(job.root, job.tokens, self.layout)
        new = [piece for piece in every if not self._shelf.has(piece.name)]
        total = sum(piece.file_bytes(self.layout) for piece in every)
        if total > self.cap_bytes:
            self._count(dropped=1)
            log.debug("a prefix of %s is larger than the cap", human_bytes(total))
            return
        # One time for all: of equal age the end of a chain goes first, and what is left can still be used.
        used_ns = now_ns()
        self._shelf.touch([piece.name for piece in every], used_ns)
        if not new:
            return
        for piece in new:
            if self._stopping:
                return
            buffers = job.memory.readable(piece)
            header = pack_header(piece, self.key, self.layout, checksum(buffers))
            nbytes = self._shelf.write(piece.name, [header, *buffers], used_ns)
            self._count(files_written=1, bytes_written=nbytes)
        self._shelf.sync(piece.name for piece in new)

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counters += StoreCounters(**more)


def _filled(fd: int, position: int, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Read a file from `position` on; each buffer as soon as it is full."""
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            n = os.preadv(fd, [buffer[done:]], position)
            if not n:
                raise DamagedError("it is cut off")
            done, position = done + n, position + n
        yield buffer
