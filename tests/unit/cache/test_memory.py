"""The memory of a sequence as bytes: all of it, in a file's order, and of rows dropped since nothing."""

import numpy as np
import pytest
from tests.stored import SHAPES, compute, computed, make_cache, prompt

from quaff import _native
from quaff.cache.entry import Layout, pieces, root
from quaff.cache.memory import Memory
from quaff.weights.budget import process_memory_bytes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 64, 255, 256, 257, 600])
def test_what_is_read_from_one_sequence_fills_another(shape: str, length: int) -> None:
    cache, other = make_cache(shape), make_cache(shape)
    tokens = prompt(length)
    sequence, received = computed(cache, tokens), other.receive(length)
    layout = Layout(*SHAPES[shape])
    for piece in pieces(root(bytes(32), ""), np.array(tokens, np.int32), layout):
        source, target = Memory.of(cache, sequence).readable(piece), Memory.of(other, received).writable(piece)
        assert sum(len(b) for b in source) == piece.payload_bytes(layout)
        # What a block leaves out is in the place.
        for a, b in zip(source, target, strict=True):
            b[:] = a
    assert other.kv_sha256(received) == cache.kv_sha256(sequence)
    assert other.written(received) == length


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_follow_from_the_tokens_alone(shape: str) -> None:
    """A page that was filled further and cut back holds rows that nobody sees; they must not reach a file."""
    cache = make_cache(shape)
    tokens = prompt(320)
    layout = Layout(*SHAPES[shape])
    place = pieces(root(bytes(32), ""), np.array(tokens[:300], np.int32), layout)[-1]
    sequence = cache.create()
    cache.snapshot(sequence, 300)
    compute(cache, sequence, tokens[:300])
    expected = [bytes(b) for b in Memory.of(cache, sequence).readable(place)]
    compute(cache, sequence, tokens, 300)
    cache.truncate(sequence, 300)
    memory = Memory.of(cache, sequence)
    assert [bytes(b) for b in memory.readable(place)] == expected
    if layout.kinds:
        assert [bytes(b) for b in memory.writable(place)] != expected


def test_a_received_sequence_shares_whole_pages_of_kinds_without_a_window() -> None:
    cache = make_cache("sliding")
    base = computed(cache, prompt(600))
    received = cache.receive(600, base, 512)
    mine, theirs = cache.tables(received), cache.tables(base)
    sliding, full = 0, 1
    assert mine[full][:8].tolist() == theirs[full][:8].tolist()
    assert not set(mine[full][8:].tolist()) & set(theirs[full].tolist())
    assert not set(mine[sliding][mine[sliding] >= 0].tolist()) & set(theirs[sliding].tolist())
    cache.free(base)
    cache.free(received)
    assert cache.pages_in_use == (0, 0)
    assert cache.accountant.used_bytes == 0


def test_a_view_is_the_page_itself_and_outlives_it() -> None:
    pool, states = _native.PagePool(2, 1, 16, 32), _native.StatePool(2, 5)
    page, slot = pool.take(), states.take()
    view, state = pool.view(page), states.view(slot)
    assert view.shape == pool.array(page).shape
    view[:] = 7
    state[:] = 3.5
    assert (pool.array(page) == 7).all()
    assert (states.array(slot) == 3.5).all()
    pool.give(page)
    states.give(slot)
    del pool, states
    # The memory is still there; what it holds is nobody's any more.
    assert np.isin(view, (0, 7)).all()
    assert np.isin(state, (0, 3.5)).all()


def test_only_held_pages_are_viewed_and_only_some_are_zeroed() -> None:
    pool = _native.PagePool(1, 1, 16, 16)
    first, other = pool.take(), pool.take()
    pool.view(first)[:] = 9
    pool.give(first)
    with pytest.raises(ValueError, match="not in use"):
        pool.view(first)
    assert (pool.array(pool.take(zeroed=False)) == 9).all()
    pool.view(other)[:] = 9
    pool.give(other)
    assert not pool.array(pool.take()).any()
    with pytest.raises(ValueError, match="not in use"):
        _native.StatePool(1, 4).view(0)


def test_memory_that_is_let_go_is_not_in_use_any_more() -> None:
    """Beside a weight that keeps the slab which both share."""
    blocks = np.zeros(4096 * 4096 // 32 * 34, np.uint8)
    kept = _native.Weight(8, blocks[: 64 * 34], 64, 32, 1)
    before = process_memory_bytes()[0]
    for _ in range(4):
        weight = _native.Weight(8, blocks, 4096, 4096, 1)
        assert process_memory_bytes()[0] > before + (12 << 20)
        del weight
        assert process_memory_bytes()[0] < before + (4 << 20)
    assert kept.nbytes
