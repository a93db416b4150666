"""Recurrent state of sequences: what a layer that keeps no positions leaves behind, known only at the positions where it was kept.

A state that was reached never changes. A step reads the slots of a sequence's end and fills new ones, which `commit` adopts or drops;
sequences that share a prefix share its slots, counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quaff.graph.program import StateKind
from quaff.weights.budget import Accountant

Slots = tuple[int, ...]
"""One slot per kind."""


class SlotPool(Protocol):
    """Memory of the slots of one kind (native StatePool)."""

    @property
    def slot_bytes(self) -> int: ...
    def take(self) -> int: ...
    def give(self, slot: int) -> None: ...
    def array(self, slot: int) -> NDArray[np.float32]: ...
    def view(self, slot: int) -> NDArray[np.float32]: ...


@dataclass(slots=True)
class _States:
    """Slots by position: of the end (`written`, none at 0) and of snapshots; `filling` are those of a step that is not committed."""

    written: int = 0
    kept: dict[int, Slots] = field(default_factory=dict)
    filling: dict[int, Slots] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    claimed: int = 0
    reserved: int = 0

    @property
    def held(self) -> int:
        return len(self.kept) + len(self.filling)


class StateCache:
    """States of sequences by their ids. The budget counts a position's slots once for each sequence that holds them."""

    def __init__(self, kinds: Sequence[StateKind], pools: Sequence[SlotPool], accountant: Accountant) -> None:
        self.kinds = tuple(kinds)
        self.pools = tuple(pools)
        self.accountant = accountant
        self.slot_bytes = sum(pool.slot_bytes for pool in pools)
        self._counts: tuple[dict[int, int], ...] = tuple({} for _ in kinds)
        self._sequences: dict[int, _States] = {}

    def create(self, sequence: int) -> None:
        self._sequences[sequence] = _States()

    def fork(self, source: int, sequence: int, length: int) -> None:
        """`sequence` begins with what `source` kept of its first `length` positions, a place where it has a state."""
        old = self._sequences[source]
        new = _States(length)
        shared = {position: slots for position, slots in old.kept.items() if position <= length}
        self._claim(new, len(shared))
        for position, slots in shared.items():
            new.kept[position] = slots
            for counts, slot in zip(self._counts, slots, strict=True):
                counts[slot] += 1
        new.snapshots = {position for position in old.snapshots if position <= length}
        self._sequences[sequence] = new
        self._trim(new)

    def receive(self, sequence: int, length: int) -> None:
        """`sequence` begins at `length` with a state that the caller fills."""
        s = _States(length)
        if self.kinds and length:
            self._claim(s, 1)
            try:
                s.kept[length] = self._take()
            except BaseException:
                self.accountant.give(s.claimed * self.slot_bytes)
                raise
        self._sequences[sequence] = s

    def end(self, sequence: int) -> Slots:
        """Slots of the state at the end; none at position 0."""
        s = self._sequences[sequence]
        return s.kept.get(s.written, ())

    def free(self, sequence: int) -> None:
        s = self._sequences.pop(sequence)
        for slots in (*s.kept.values(), *s.filling.values()):
            self._drop(slots)
        self.accountant.give(s.claimed * self.slot_bytes)

    def snapshot(self, sequence: int, position: int) -> None:
        """Keep the state at a position: the end, or one that a step will pass."""
        s = self._sequences[sequence]
        if position < s.written:
            raise ValueError(f"the state of position {position} is gone; {s.written} positions are written")
        if self.kinds and position:
            s.snapshots.add(position)

    def has(self, sequence: int, position: int) -> bool:
        """True where a row may continue: at 0, at the end, and at snapshots."""
        return not self.kinds or position == 0 or position in self._sequences[sequence].kept

    def reserve(self, sequence: int) -> None:
        """Count the bytes of everything a growing sequence holds at once: its end, the next one, and its snapshots."""
        if self.kinds:
            s = self._sequences[sequence]
            self._claim(s, 2 + len(s.snapshots))
            s.reserved = 2 + len(s.snapshots)

    def settle(self, sequence: int) -> None:
        s = self._sequences[sequence]
        s.reserved = 0
        self._unclaim(s)

    def grow(self, sequence: int, end: int) -> None:
        """Take slots for a step that ends at `end`, and for the snapshots on its way."""
        s = self._sequences[sequence]
        self._forget(s)
        if not self.kinds or end <= s.written:
            return
        wanted = sorted({end, *(p for p in s.snapshots if s.written < p < end)})
        self._claim(s, len(s.kept) + len(wanted))
        for position in wanted:
            s.filling[position] = self._take()

    def commit(self, sequence: int, written: int) -> None:
        """Adopt what a step left at its end and at snapshots; `written` where the step began drops all of it."""
        s = self._sequences[sequence]
        if self.kinds and written != s.written:
            if written not in s.filling:
                raise ValueError(f"the step left no state at position {written}")
            s.kept.update({p: s.filling.pop(p) for p in list(s.filling) if p <= written})
        s.written = written
        self._forget(s)
        self._trim(s)

    def truncate(self, sequence: int, length: int) -> None:
        """The end is now at `length`, a place where there is a state."""
        s = self._sequences[sequence]
        s.written = length
        s.snapshots = {position for position in s.snapshots if position <= length}
        self._forget(s)
        self._trim(s)

    def tables(self, sequence: int) -> tuple[NDArray[np.int32], ...]:
        """What `Segment.states` holds, for the step that `grow` prepared."""
        s = self._sequences[sequence]
        before = s.kept.get(s.written, (-1,) * len(self.kinds))
        ends = sorted(s.filling.items())
        pairs = [[n for position, slots in ends for n in (position - s.written, slots[k])] for k in range(len(self.kinds))]
        return tuple(np.array([slot, *pair], dtype=np.int32) for slot, pair in zip(before, pairs, strict=True))

    def positions(self, sequence: int) -> tuple[int, ...]:
        """Where a state is held, ascending."""
        return tuple(sorted(self._sequences[sequence].kept))

    def read(self, sequence: int, update: Callable[[bytes], object]) -> None:
        """Feed the state at the end: per kind and layer its values, f32."""
        for pool, slot in zip(self.pools, self.end(sequence), strict=False):
            update(pool.array(slot).astype("<f4", copy=False).tobytes())

    @property
    def slots_in_use(self) -> tuple[int, ...]:
        """Slots held per kind, a shared one once."""
        return tuple(len(counts) for counts in self._counts)

    def _take(self) -> Slots:
        slots: list[int] = []
        try:
            for pool, counts in zip(self.pools, self._counts, strict=True):
                slot = pool.take()
                counts[slot] = 1
                slots.append(slot)
        except BaseException:
            self._drop(tuple(slots))
            raise
        return tuple(slots)

    def _drop(self, slots: Slots) -> None:
        for pool, counts, slot in zip(self.pools, self._counts, slots, strict=False):
            counts[slot] -= 1
            if not counts[slot]:
                del counts[slot]
                pool.give(slot)

    def _forget(self, s: _States) -> None:
        for slots in s.filling.values():
            self._drop(slots)
        s.filling.clear()
        self._unclaim(s)

    def _trim(self, s: _States) -> None:
        for position in [p for p in s.kept if p > s.written or (p != s.written and p not in s.snapshots)]:
            self._drop(s.kept.pop(position))
        self._unclaim(s)

    def _claim(self, s: _States, positions: int) -> None:
        if positions > s.claimed:
            self.accountant.take((positions - s.claimed) * self.slot_bytes, "recurrent state")
            s.claimed = positions

    def _unclaim(self, s: _States) -> None:
        keep = max(s.held, s.reserved)
        if s.claimed > keep:
            self.accountant.give((s.claimed - keep) * self.slot_bytes)
            s.claimed = keep
