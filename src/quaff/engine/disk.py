"""Between the prefix tree in memory and the store on disk: what is published goes down, what is asked for again comes up before it is
computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from quaff.batch import PAGE
from quaff.cache.memory import Memory
from quaff.cache.prefix import PrefixCache
from quaff.cache.store import Found, Store
from quaff.engine.engine import Engine
from quaff.errors import MemoryBudgetError

WORTH_TOKENS = PAGE
"""Shorter prefixes, and shorter gains over what is in memory, are computed sooner than they are read."""
RECENT_BYTES = 512 << 20
"""What a start may bring back before anyone asks: about half a second of it."""
ATTEMPTS = 4
"""A file that turns out damaged is removed, and the next attempt finds what is left."""


class DiskTier:
    """Puts what an engine's prefix tree is told of into `store`, and restores from it. Any thread may call."""

    def __init__(self, engine: Engine, prefix: PrefixCache, store: Store) -> None:
        self.store = store
        self._engine = engine
        self._prefix = prefix
        self._reading = threading.Lock()
        self._written: deque[int] = deque()
        self._restoring = False
        prefix.on_publish = self._published
        engine.cache.accountant.reclaim = self._reclaim

    def restore(self, tokens: Sequence[int], salt: str = "") -> int:
        """Bring what the disk has of a prompt into memory, where a request that is submitted next finds it; how many more tokens it finds.

        Files are read in the calling thread, as long as the disk takes; the engine only pauses between two steps to hand out pages.
        """
        # Of two clients that come with one prompt the second finds what the first brought.
        with self._reading:
            for _ in range(ATTEMPTS):
                found = self.store.find(tokens, salt, longer_than=WORTH_TOKENS - 1)
                gained = self._restore(found, tokens[: found.length], salt) if found is not None else 0
                if gained >= 0:
                    return gained
        return 0

    def restore_recent(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring back what was used last, `RECENT_BYTES` of it or what the tree may have, before anyone asks for it; how many tokens.

        `progress` gets (prefixes restored, prefixes in all) and may raise.
        """
        prefixes = self.store.recent(min(RECENT_BYTES, self._prefix.cap_bytes))
        gained = 0
        # The one that was used last comes last, and is the last to go.
        for n, tokens in enumerate(reversed(prefixes), 1):
            gained += self.restore([*tokens, 0])
            if progress is not None:
                progress(n, len(prefixes))
        return gained

    def _restore(self, found: Found, tokens: Sequence[int], salt: str) -> int:
        """Tokens gained, or -1 when a file was not what it should be."""
        room = self._engine.call(partial(self._receive, found, tokens, salt))
        if room is None:
            return 0
        sequence, memory, shared, known = room
        whole = False
        try:
            whole = self.store.read(found, memory, shared)
        finally:
            self._engine.call(partial(self._settle, sequence, tokens if whole else (), salt))
        return found.length - known if whole else -1

    def _receive(self, found: Found, tokens: Sequence[int], salt: str) -> tuple[int, Memory, int, int] | None:
        """(a sequence to be filled, its memory, positions of it that are there, tokens that memory has); None where it is not worth it."""
        cache = self._engine.cache
        hit = self._prefix.attach(tokens, len(tokens), salt)
        try:
            if found.length - hit.length < WORTH_TOKENS or found.payload_bytes(self.store.layout) > self._prefix.cap_bytes:
                return None
            shared = found.reusable(hit.length)
            sequence = cache.receive(found.full, hit.sequence, shared)
        except (MemoryBudgetError, MemoryError):
            return None
        finally:
            cache.free(hit.sequence)
        return sequence, Memory.of(cache, sequence), shared, hit.length

    def _settle(self, sequence: int, tokens: Sequence[int], salt: str) -> None:
        """Give what was read, if anything, to the tree."""
        if tokens:
            self._engine.cache.truncate(sequence, len(tokens))
            self._restoring = True
            try:
                self._prefix.publish(sequence, tokens, salt)
            finally:
                self._restoring = False
        self._engine.cache.free(sequence)

    def _published(self, sequence: int, tokens: Sequence[int], salt: str) -> None:
        """Under the engine's lock: queue every place of a sequence, the end alone where it can be left anywhere."""
        self._free_written()
        if self._restoring:
            return
        cache, ids = self._engine.cache, np.array(tokens, dtype=np.int32)
        for end in (len(tokens),) if self.store.layout.anywhere else cache.places(sequence):
            if end < WORTH_TOKENS:
                continue
            twin = cache.fork(sequence, end)
            self.store.put(ids[:end], Memory.of(cache, twin), self._written.append, salt)

    def _reclaim(self, need_bytes: int) -> None:
        """Memory is short: the tree gives way, and where what waits to be written holds its pages, that is given up first."""
        accountant = self._engine.cache.accountant
        wanted = accountant.used_bytes - need_bytes
        self._free_written()
        self._evict(accountant.used_bytes - wanted)
        if accountant.used_bytes > wanted:
            for twin in self.store.abandon():
                self._engine.cache.free(twin)
            self._evict(accountant.used_bytes - wanted)

    def _evict(self, need_bytes: int) -> None:
        if need_bytes > 0:
            self._prefix.evict(need_bytes)

    def _free_written(self) -> None:
        """Under the engine's lock, which the thread that writes must not wait for."""
        while self._written:
            self._engine.cache.free(self._written.popleft())

    def close(self) -> None:
        """Write what is queued."""
        self.store.close()
