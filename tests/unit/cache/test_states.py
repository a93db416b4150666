"""Recurrent state: known at a few positions only, shared and counted, never changed, one budget with the pages."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quaff.cache.pages import PageCache
from quaff.errors import MemoryBudgetError
from quaff.graph.program import StateKind
from quaff.weights.budget import Accountant


@dataclass
class FakePool:
    """Slots as NumPy arrays [layers, size]; those of an earlier use come back as they were."""

    layers: int
    size: int
    slots: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    next_id: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.layers * self.size * 4

    def take(self) -> int:
        self.next_id += 1
        self.slots[self.next_id] = np.full((self.layers, self.size), np.nan, np.float32)
        return self.next_id

    def give(self, slot: int) -> None:
        del self.slots[slot]

    def array(self, slot: int) -> NDArray[np.float32]:
        return self.slots[slot].copy()


KINDS = (StateKind("conv", (0, 1), 6), StateKind("delta", (2,), 4))
SLOTS = sum(len(kind.layers) * kind.size * 4 for kind in KINDS)


def make(limit: int | None = None) -> PageCache:
    return PageCache((), (), Accountant(limit), KINDS, [FakePool(len(kind.layers), kind.size) for kind in KINDS])


def state_of(tokens: list[int]) -> float:
    """Stands for everything that was read, in order."""
    value = 0.0
    for token in tokens:
        value = value / 2 + token
    return value


def write(cache: PageCache, sequence: int, known: list[int], rows: int) -> None:
    """What a step does: it fills the slots of the places it is asked for from the slot before it."""
    start = cache.written(sequence)
    segment = cache.segment(sequence, np.array(known[start : start + rows], np.int32))
    assert (segment.start, segment.rows) == (start, rows)
    for pool, (before, *places) in zip(cache.states.pools, segment.states, strict=True):
        assert isinstance(pool, FakePool)
        if before >= 0:
            assert (pool.slots[int(before)] == np.float32(state_of(known[:start]))).all()
        assert (before < 0) == (start == 0) and places[-2] == rows
        for count, slot in zip(places[::2], places[1::2], strict=True):
            pool.slots[int(slot)][:] = state_of(known[: start + int(count)])
    cache.commit(sequence, start + rows)


def test_a_step_reads_one_state_and_leaves_another() -> None:
    cache, tokens = make(), list(range(1, 30))
    s = cache.create()
    for rows, places in ((4, (4,)), (1, (5,)), (10, (15,))):
        write(cache, s, tokens, rows)
        assert cache.states.positions(s) == places
        assert cache.states.slots_in_use == (1, 1)
    assert cache.accountant.used_bytes == SLOTS
    cache.free(s)
    assert cache.states.slots_in_use == (0, 0) and cache.accountant.used_bytes == 0


def test_an_abandoned_step_leaves_nothing() -> None:
    cache, tokens = make(), list(range(1, 30))
    s = cache.create()
    write(cache, s, tokens, 5)
    before = cache.kv_sha256(s)
    cache.snapshot(s, 7)
    segment = cache.segment(s, np.array(tokens[5:15], np.int32))
    assert [len(states) for states in segment.states] == [5, 5]
    for written in (6, 14):
        with pytest.raises(ValueError, match=f"no state at position {written}"):
            cache.commit(s, written)
    cache.commit(s, 5)
    assert (cache.kv_sha256(s), cache.states.positions(s), cache.states.slots_in_use) == (before, (5,), (1, 1))
    cache.segment(s, np.array(tokens[5:15], np.int32))
    cache.segment(s, np.array(tokens[5:9], np.int32))  # a step that never ran takes nothing from the next one
    assert cache.states.slots_in_use == (3, 3)
    cache.free(s)
    assert cache.states.slots_in_use == (0, 0) and cache.accountant.used_bytes == 0


def test_snapshots_are_the_places_to_go_back_to() -> None:
    cache, tokens = make(), list(range(1, 30))
    s = cache.create()
    cache.snapshot(s, 0)
    for place in (3, 8, 12):
        cache.snapshot(s, place)
    write(cache, s, tokens, 10)
    assert cache.states.positions(s) == (3, 8, 10)
    write(cache, s, tokens, 10)
    assert cache.states.positions(s) == (3, 8, 12, 20)
    with pytest.raises(ValueError, match="position 10 is gone"):
        cache.snapshot(s, 10)
    assert [cache.longest(s, n) for n in (25, 20, 19, 11, 8, 2)] == [20, 20, 12, 8, 8, 0]
    twin = cache.fork(s, 8)
    assert (cache.written(twin), cache.states.positions(twin)) == (8, (3, 8))
    assert cache.states.slots_in_use == (4, 4), "shared"
    write(cache, twin, tokens[:8] + [90, 91], 2)
    cache.truncate(s, 8)
    assert cache.states.positions(s) == (3, 8)
    write(cache, s, tokens, 1)
    for length in (5, 7):
        with pytest.raises(ValueError, match="left behind"):
            cache.fork(s, length)
    cache.truncate(s, 0)
    assert cache.states.positions(s) == ()
    cache.free(twin)
    assert cache.states.slots_in_use == (0, 0) and cache.accountant.used_bytes == 0


def test_the_budget_covers_the_next_state_before_it_is_taken() -> None:
    cache, tokens = make(3 * SLOTS), list(range(1, 30))
    s = cache.create()
    cache.snapshot(s, 6)
    cache.reserve(s, 20, 10)
    assert cache.accountant.used_bytes == 3 * SLOTS
    other = cache.create()
    with pytest.raises(MemoryBudgetError, match="recurrent state"):
        cache.reserve(other, 20, 10)
    with pytest.raises(MemoryBudgetError, match="recurrent state"):
        cache.segment(other, np.array([1], np.int32))
    write(cache, s, tokens, 10)
    write(cache, s, tokens, 10)
    assert cache.accountant.used_bytes == 3 * SLOTS
    cache.settle(s)
    assert cache.accountant.used_bytes == 2 * SLOTS
    cache.free(other)
    cache.free(s)
    assert cache.accountant.used_bytes == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_history_leaves_the_state_of_its_tokens(data: st.DataObject) -> None:
    cache = make()
    known: dict[int, list[int]] = {}
    for step in range(data.draw(st.integers(1, 25))):
        ids = st.sampled_from(sorted(known)) if known else st.nothing()
        action = data.draw(st.sampled_from(["create", "write", "snapshot", "fork", "truncate", "free"] if known else ["create"]))
        if action == "create":
            known[cache.create()] = []
            continue
        s = data.draw(ids)
        written = cache.written(s)
        if action == "write":
            rows = data.draw(st.integers(1, 6))
            known[s] = known[s][:written] + [step * 10 + i for i in range(rows)]
            write(cache, s, known[s], rows)
        elif action == "snapshot":
            cache.snapshot(s, written + data.draw(st.integers(0, 6)))
        elif action == "free":
            cache.free(s)
            del known[s]
        else:
            length = cache.longest(s, data.draw(st.integers(0, written)))
            if action == "fork":
                known[cache.fork(s, length)] = known[s][:length]
            else:
                cache.truncate(s, length)
                known[s] = known[s][:length]
        for sequence, tokens in known.items():
            held = cache.states._sequences[sequence].kept
            for pool, k in zip(cache.states.pools, range(2), strict=True):
                assert all((pool.array(slots[k]) == np.float32(state_of(tokens[:place]))).all() for place, slots in held.items())
    for s in known:
        cache.free(s)
    assert cache.states.slots_in_use == (0, 0) and cache.accountant.used_bytes == 0
