"""The memory of one sequence, as the disk tier reads and fills it: pages and state as runs of bytes, in a file's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quaff.batch import PAGE
from quaff.cache.entry import Layout, Piece
from quaff.cache.pages import PageCache, Pool, clear_page
from quaff.cache.states import SlotPool


@dataclass(frozen=True, slots=True)
class Memory:
    """Page ids by kind and position // 64, and the slots of the end. Whoever has it sees to it that `sequence` holds them."""

    sequence: int
    layout: Layout
    pools: Sequence[Pool]
    state_pools: Sequence[SlotPool]
    tables: tuple[NDArray[np.int32], ...]
    slots: tuple[int, ...]

    @staticmethod
    def of(cache: PageCache, sequence: int) -> Memory:
        """Of a sequence as it is now; under the engine's lock, as all that reads a cache."""
        layout = Layout(cache.kinds, cache.states.kinds)
        tables = tuple(table.copy() for table in cache.tables(sequence))
        return Memory(sequence, layout, cache.pools, cache.states.pools, tables, cache.states.slots(sequence, cache.written(sequence)))

    def writable(self, piece: Piece) -> list[memoryview]:
        """The memory of a piece, to be filled."""
        pages = [_flat(self.pools[k].view(int(self.tables[k][p]))) for k, p in piece.pages(self.layout)]
        return pages + self._states(piece)

    def readable(self, piece: Piece) -> list[memoryview]:
        """The memory of a piece, to be written to a file: what a page holds beyond the end, of rows dropped since, is replaced by zeros."""
        out = []
        for k, p in piece.pages(self.layout):
            used = piece.end - p * PAGE
            view = self.pools[k].view(int(self.tables[k][p]))
            if used < PAGE:
                view = view.copy()
                clear_page(view, self.layout.kinds[k], used)
            out.append(_flat(view))
        return out + self._states(piece)

    def _states(self, piece: Piece) -> list[memoryview]:
        return [_flat(pool.view(slot)) for pool, slot in zip(self.state_pools, self.slots, strict=False)] if piece.place else []


def held_bytes(memories: Sequence[Memory]) -> int:
    """Bytes of pages and states that sequences of one cache, at least one, hold; what several of them share counts once."""
    total = 0
    for k, pool in enumerate(memories[0].pools):
        pages = np.unique(np.concatenate([memory.tables[k] for memory in memories]))
        total += int((pages >= 0).sum()) * pool.page_bytes
    slots = {memory.slots for memory in memories if memory.slots}
    return total + len(slots) * sum(pool.slot_bytes for pool in memories[0].state_pools)


def _flat(array: NDArray[np.uint16] | NDArray[np.float32]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
