"""Recurrent state of sequences: what a layer that keeps no positions leaves behind, known only at the positions where it was kept.

A state that was reached never changes. A step reads the slots of a sequence's end and fills new ones, which `commit` adopts or drops;
sequences that share a prefix share its slots, counted. As with pages, a slot is paid for once, and a reservation is credit for more.
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
    """Slots by position: of the end (`written`, none at 0) and of snapshots; `filling` are those of a step that is not committed.

    `credit` positions are paid for and have no slots yet; `reserved` is the most that credit must cover at once, 0 without a reservation.
    """

    written: int = 0
    kept: dict[int, Slots] = field(default_factory=dict)
    filling: dict[int, Slots] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    credit: int = 0
    reserved: int = 0


class StateCache:
    """States of sequences by their ids."""

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
        for position, slots in old.kept.items():
            if position <= length:
                new.kept[position] = slots
                self.hold(slots)
        new.snapshots = {position for position in old.snapshots if position <= length}
        self._trim(new)
        try:
            self._cover(old)
        except BaseException:
            self._release(new)
            raise
        self._sequences[sequence] = new

    def assemble(self, sequence: int, length: int, slots: Slots) -> None:
        """`sequence` begins at `length` with slots that others hold."""
        self._sequences[sequence] = new = _States(length)
        if self.kinds and length:
            new.kept[length] = slots
            self.hold(slots)

    def receive(self, sequence: int, length: int) -> None:
        """`sequence` begins at `length` with a state that the caller fills."""
        s = _States(length)
        if self.kinds and length:
            self._pay(s, 1)
            try:
                s.kept[length] = self._take()
            except BaseException:
                self._refund(s)
                raise
            s.credit -= 1
        self._sequences[sequence] = s

    def free(self, sequence: int) -> None:
        self._release(self._sequences.pop(sequence))

    def hold(self, slots: Slots) -> None:
        """Keep a position's slots whoever drops them. Not those that a reserved sequence may still drop."""
        for counts, slot in zip(self._counts, slots, strict=True):
            counts[slot] += 1

    def drop(self, slots: Slots) -> None:
        """End a `hold`."""
        if self._drop(slots):
            self.accountant.give(self.slot_bytes)

    def holders(self, slots: Slots) -> int:
        """Sequences that hold a position's slots, and one for each `hold`."""
        return self._counts[0][slots[0]]

    def _release(self, s: _States) -> None:
        s.reserved = 0
        for slots in (*s.kept.values(), *s.filling.values()):
            self._let_go(s, slots)
        self._refund(s)

    def snapshot(self, sequence: int, position: int) -> None:
        """Keep the state at a position: the end, or one that a step will pass."""
        s = self._sequences[sequence]
        if position < s.written:
            raise ValueError(f"the state of position {position} is gone; {s.written} positions are written")
        if self.kinds and position:
            s.snapshots.add(position)

    def forget_snapshots(self, sequence: int) -> None:
        """Keep no state but that of the end."""
        s = self._sequences[sequence]
        s.snapshots.clear()
        self._trim(s)

    def has(self, sequence: int, position: int) -> bool:
        """True where a row may continue: at 0, at the end, and at snapshots."""
        return not self.kinds or position == 0 or position in self._sequences[sequence].kept

    def reserve(self, sequence: int) -> None:
        """Pay for everything a growing sequence holds at once: its end, the next one, and its snapshots."""
        if self.kinds:
            s = self._sequences[sequence]
            before, s.reserved = s.reserved, 2 + len(s.snapshots)
            try:
                self._cover(s)
            except BaseException:
                s.reserved = before
                raise

    def settle(self, sequence: int) -> None:
        s = self._sequences[sequence]
        s.reserved = 0
        self._refund(s)

    def _cover(self, s: _States) -> None:
        """Credit for every position that a reserved sequence may still fill: what it shares it may drop without getting anything back."""
        if s.reserved:
            self._pay(s, s.reserved - sum(self.holders(slots) == 1 for slots in s.kept.values()))

    def grow(self, sequence: int, end: int) -> None:
        """Take slots for a step that ends at `end`, and for the snapshots on its way."""
        if not self.kinds:
            return
        s = self._sequences[sequence]
        self._forget(s)
        if end <= s.written:
            return
        wanted = sorted({end, *(p for p in s.snapshots if s.written < p < end)})
        self._pay(s, len(wanted))
        for position in wanted:
            s.filling[position] = self._take()
            s.credit -= 1

    def commit(self, sequence: int, written: int) -> None:
        """Adopt what a step left at its end and at snapshots; `written` where the step began drops all of it."""
        s = self._sequences[sequence]
        if not self.kinds:
            s.written = written
            return
        if written != s.written:
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
        if not self.kinds:
            return ()
        s = self._sequences[sequence]
        before = s.kept.get(s.written, (-1,) * len(self.kinds))
        ends = sorted(s.filling.items())
        pairs = [[n for position, slots in ends for n in (position - s.written, slots[k])] for k in range(len(self.kinds))]
        return tuple(np.array([slot, *pair], dtype=np.int32) for slot, pair in zip(before, pairs, strict=True))

    def positions(self, sequence: int) -> tuple[int, ...]:
        """Where a state is held, ascending."""
        return tuple(sorted(self._sequences[sequence].kept))

    def slots(self, sequence: int, position: int) -> Slots:
        """The slots of a position that has a state; none at 0, and without recurrent layers."""
        return self._sequences[sequence].kept[position] if self.kinds and position else ()

    def read(self, sequence: int, update: Callable[[bytes], object]) -> None:
        """Feed the state at the end: per kind and layer its values, f32."""
        for pool, slot in zip(self.pools, self.slots(sequence, self._sequences[sequence].written), strict=False):
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

    def _drop(self, slots: Slots) -> bool:
        """One holder less; True when it was the last and the slots went back to their pools."""
        last = False
        for pool, counts, slot in zip(self.pools, self._counts, slots, strict=False):
            counts[slot] -= 1
            if last := not counts[slot]:
                del counts[slot]
                pool.give(slot)
        return last

    def _let_go(self, s: _States, slots: Slots) -> None:
        if self._drop(slots):
            if s.reserved:
                s.credit += 1
            else:
                self.accountant.give(self.slot_bytes)

    def _forget(self, s: _States) -> None:
        for slots in s.filling.values():
            self._let_go(s, slots)
        s.filling.clear()
        self._refund(s)

    def _trim(self, s: _States) -> None:
        for position in [p for p in s.kept if p > s.written or (p != s.written and p not in s.snapshots)]:
            self._let_go(s, s.kept.pop(position))
        self._refund(s)

    def _pay(self, s: _States, positions: int) -> None:
        """Make `positions` of credit, the budget asked for what is missing."""
        short = positions - s.credit
        if short > 0:
            self.accountant.take(short * self.slot_bytes, "recurrent state")
            s.credit += short

    def _refund(self, s: _States) -> None:
        """Give back credit beyond the reservation."""
        if s.credit > s.reserved:
            self.accountant.give((s.credit - s.reserved) * self.slot_bytes)
            s.credit = s.reserved
