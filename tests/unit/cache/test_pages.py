"""Page tables: growth, sharing, copy on write, sliding windows, one budget, and a hash that does not see the path."""

import hashlib
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quaff import _native
from quaff.batch import PAGE
from quaff.cache.pages import FREED, PageCache, pages_for
from quaff.errors import MemoryBudgetError
from quaff.graph.program import KVKind
from quaff.weights.budget import Accountant, human_bytes


@dataclass
class FakePool:
    """Pages as NumPy arrays [layers, kv_heads, 64*(dim + value_dim + 2)], zeroed when taken."""

    layers: int
    kv_heads: int
    dim: int
    value_dim: int
    pages: dict[int, NDArray[np.uint16]] = field(default_factory=dict)
    next_id: int = 0

    @property
    def page_bytes(self) -> int:
        return self.layers * self.kv_heads * PAGE * (self.dim + self.value_dim + 2) * 2

    def take(self) -> int:
        self.next_id += 1
        self.pages[self.next_id] = np.zeros((self.layers, self.kv_heads, PAGE * (self.dim + self.value_dim + 2)), np.uint16)
        return self.next_id

    def give(self, page: int) -> None:
        del self.pages[page]

    def copy(self, page: int) -> int:
        new = self.take()
        self.pages[new][:] = self.pages[page]
        return new

    def view(self, page: int) -> NDArray[np.uint16]:
        return self.pages[page]


def make(windows: tuple[int, ...] = (0,), limit: int | None = None, dim: int = 16) -> PageCache:
    kinds = [KVKind(f"kind{i}", (2 * i, 2 * i + 1), 1, dim, dim + 16, w) for i, w in enumerate(windows)]
    return PageCache(kinds, [FakePool(2, 1, dim, dim + 16) for _ in windows], Accountant(limit))


def write(cache: PageCache, sequence: int, tokens: list[int]) -> None:
    """What a step does: grow, write a value that names the token and the position into K and V, commit."""
    start = cache.written(sequence)
    cache.grow(sequence, start + len(tokens))
    for k, table in enumerate(cache.tables(sequence)):
        pool = cache.pools[k]
        assert isinstance(pool, FakePool)
        dim = pool.dim
        for i, token in enumerate(tokens):
            p = start + i
            page = pool.pages[int(table[p // PAGE])]
            page[:, :, : PAGE * dim].reshape(2, 1, dim // 2, PAGE, 2)[..., p % PAGE, :] = token * 7 + p
            page[:, :, PAGE * dim : -2 * PAGE].reshape(2, 1, PAGE // 2, -1, 2)[:, :, p % PAGE // 2, :, p % 2] = token * 7 + p + 1
            page[:, :, -2 * PAGE :].reshape(2, 1, 2, PAGE)[..., p % PAGE] = (p + 2, p + 3)
    cache.commit(sequence, start + len(tokens))


def test_pages_are_taken_on_demand_and_given_back() -> None:
    cache = make()
    s = cache.create()
    for n, pages in ((1, 1), (63, 1), (1, 2), (64, 3), (63, 3)):
        write(cache, s, [1] * n)
        assert cache.pages_in_use == (pages,)
        assert len(cache.tables(s)[0]) == pages
    used = cache.accountant.used_bytes
    assert used == 3 * cache.pools[0].page_bytes
    cache.free(s)
    assert cache.pages_in_use == (0,)
    assert cache.accountant.used_bytes == 0


def test_commit_of_a_finished_prefix_drops_the_rest() -> None:
    cache = make()
    s = cache.create()
    cache.grow(s, 300)
    assert cache.pages_in_use == (5,)
    cache.commit(s, 70)
    assert (cache.written(s), cache.pages_in_use) == (70, (2,))
    with pytest.raises(ValueError, match="cannot be finished"):
        cache.commit(s, 129)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129])
def test_fork_at_block_boundaries_leaves_the_other_alone(length: int) -> None:
    """Block boundary (sglang 22819): prefixes of one page, one less and one more, and twice that."""
    cache = make()
    a = cache.create()
    write(cache, a, list(range(150)))
    before = cache.kv_sha256(a)
    b = cache.fork(a, length)
    write(cache, b, list(range(1000, 1010)))
    assert cache.kv_sha256(a) == before
    alone = cache.create()
    write(cache, alone, list(range(length)))
    write(cache, alone, list(range(1000, 1010)))
    assert cache.kv_sha256(b) == cache.kv_sha256(alone)
    write(cache, a, [5])
    assert cache.kv_sha256(b) == cache.kv_sha256(alone)


def test_full_pages_are_shared_and_only_the_partial_one_is_copied() -> None:
    cache = make()
    a = cache.create()
    write(cache, a, [1] * 150)
    b = cache.fork(a)
    assert cache.pages_in_use == (3,)
    write(cache, b, [2])
    assert cache.pages_in_use == (4,)
    ta, tb = cache.tables(a)[0], cache.tables(b)[0]
    assert ta[0] == tb[0]
    assert ta[1] == tb[1]
    assert ta[2] != tb[2]
    cache.free(a)
    assert cache.pages_in_use == (3,)
    cache.free(b)
    assert cache.pages_in_use == (0,)


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 100, 512])
def test_sliding_pages_live_exactly_as_long_as_a_row_can_see_them(window: int) -> None:
    cache = make((window,))
    s = cache.create()
    for n in range(1, 700):
        write(cache, s, [n % 50])
        table = cache.tables(s)[0]
        seen = {j // PAGE for j in range(n) if j > n - window}
        held = {p for p, page in enumerate(table.tolist()) if page != FREED}
        assert seen <= held
        assert len(held) <= len(seen | {(n - 1) // PAGE})
        assert cache.visible(0, s) == (max(0, n - window + 1), n)


def test_what_a_window_left_behind_cannot_come_back() -> None:
    cache = make((0, 64))
    s = cache.create()
    write(cache, s, [1] * 400)
    assert not cache.can_shorten(s, 100)
    with pytest.raises(ValueError, match="left behind"):
        cache.fork(s, 100)
    with pytest.raises(ValueError, match="left behind"):
        cache.truncate(s, 100)
    with pytest.raises(ValueError, match="outside"):
        cache.truncate(s, 401)
    shortest = min(n for n in range(1, 401) if cache.can_shorten(s, n))
    assert shortest == 5 * PAGE + 64 - 1
    cache.truncate(s, shortest)
    fresh = cache.create()
    write(cache, fresh, [1] * shortest)
    assert cache.kv_sha256(s) == cache.kv_sha256(fresh)


def test_hash_is_of_written_visible_positions_in_the_stated_order() -> None:
    cache = make((0, 70))
    s = cache.create()
    tokens = [3 * i % 11 for i in range(200)]
    write(cache, s, tokens)
    digest = hashlib.sha256()
    for window in (0, 70):
        begin = max(0, 200 - window + 1) if window else 0
        k, v = (np.array([[tokens[p] * 7 + p + i] * dim for p in range(begin, 200)], dtype="<u2") for i, dim in enumerate((16, 32)))
        scales = np.array([[p + 2, p + 3] for p in range(begin, 200)], dtype="<u2")
        for _layer in range(2):
            digest.update(np.concatenate([k, v, scales], axis=1).tobytes())
    assert cache.kv_sha256(s) == digest.hexdigest()


def test_hash_sees_one_changed_bit() -> None:
    """Negative control of every comparison of state."""
    cache = make()
    s = cache.create()
    write(cache, s, [1] * 70)
    before = cache.kv_sha256(s)
    pool = cache.pools[0]
    assert isinstance(pool, FakePool)
    page = pool.pages[int(cache.tables(s)[0][1])]
    values, scales = 64 * 16, 64 * 48
    for written in (2 * 5 + 1, values + 2 * 2 * 32 + 1, scales + 5, scales + 64 + 5):  # K, V and scales of position 69
        page[1, 0, written] ^= 1
        assert cache.kv_sha256(s) != before
        page[1, 0, written] ^= 1
    for later in (2 * 6, values + 3 * 2 * 32, scales + 6, scales + 64 + 6):  # position 70 is not written
        page[1, 0, later] ^= 1
    assert cache.kv_sha256(s) == before


def test_budget_is_asked_before_pages_are_taken() -> None:
    """Cap ignored (ik_llama.cpp 2320)."""
    page = make().pools[0].page_bytes
    cache = make(limit=3 * page)
    s = cache.create()
    write(cache, s, [1] * 192)
    with pytest.raises(MemoryBudgetError, match="budget"):
        cache.grow(s, 193)
    assert cache.pages_in_use == (3,)
    twin = cache.fork(s)
    assert cache.accountant.used_bytes == 3 * page, "a page is paid for once"
    cache.truncate(s, 100)
    assert cache.accountant.used_bytes == 3 * page
    with pytest.raises(MemoryBudgetError, match="budget"):
        cache.grow(s, 101)
    assert cache.pages_in_use == (3,), "the shared page was to be copied"
    cache.free(twin)
    assert cache.accountant.used_bytes == 2 * page
    write(cache, s, [1] * 92)
    assert cache.accountant.used_bytes == 3 * page


def test_reservation_is_taken_whole_and_growth_uses_it() -> None:
    page = make().pools[0].page_bytes
    cache = make((0, 64), limit=20 * page)
    s = cache.create()
    cache.reserve(s, 500, 32)
    reserved = cache.accountant.used_bytes
    assert reserved == cache.peak_bytes(500, 32)
    for _ in range(15):
        write(cache, s, [1] * 32)
        assert cache.accountant.used_bytes == reserved
    t = cache.create()
    with pytest.raises(MemoryBudgetError, match="500 tokens"):
        cache.reserve(t, 500, 32)
    cache.free(s)
    cache.reserve(t, 500, 32)


@pytest.mark.parametrize("window", [1, 40, 64, 100])
def test_a_snapshot_keeps_the_window_of_its_position(window: int) -> None:
    cache, tokens = make((0, window)), [i % 89 for i in range(900)]
    s = cache.create()
    for place in (70, 128, 300, 301, 800):
        cache.snapshot(s, place)
    for begin in range(0, 700, 100):
        write(cache, s, tokens[begin : begin + 100])
    assert cache.places(s) == (70, 128, 300, 301, 700)
    assert cache.longest(s, 299) == (299 if cache.can_shorten(s, 299) else 128)
    twin = cache.fork(s, 301)
    assert cache.places(twin) == (70, 128, 300, 301)
    write(cache, s, tokens[700:])
    assert cache.places(s) == (70, 128, 300, 301, 800, 900)
    for place in (301, 300, 128, 70):
        cache.truncate(twin, place)
        one, alone = cache.fork(s, place), cache.create()
        write(cache, alone, tokens[:place])
        assert cache.kv_sha256(one) == cache.kv_sha256(twin) == cache.kv_sha256(alone)
        for sequence in (one, alone):
            write(cache, sequence, tokens[place : place + 90])
        assert cache.kv_sha256(one) == cache.kv_sha256(alone)
        cache.free(one)
        cache.free(alone)
    with pytest.raises(ValueError, match="left behind"):
        cache.fork(s, 500)
    cache.free(s)
    cache.free(twin)
    assert cache.pages_in_use == (0, 0) and cache.accountant.used_bytes == 0


@pytest.mark.parametrize("length", [1, 64, 100, 320])
def test_a_sequence_is_assembled_of_pages_that_others_hold(length: int) -> None:
    cache, tokens = make((0, 70)), [i % 89 for i in range(320)]
    s = cache.create()
    cache.snapshot(s, length)
    write(cache, s, tokens)
    tables = [cache.seen_pages(s, k, length) for k in range(2)]
    for k, (_, ids) in enumerate(tables):
        for page in ids:
            cache.hold(k, page)
    cache.free(s)
    assert cache.pages_in_use == tuple(len(ids) for _, ids in tables)
    twin, alone = cache.assemble(length, tables, ()), cache.create()
    write(cache, alone, tokens[:length])
    assert all(cache.holders(k, page) == 2 for k, (_, ids) in enumerate(tables) for page in ids)
    for sequence in (twin, alone):
        write(cache, sequence, [7] * 150)
    assert cache.kv_sha256(twin) == cache.kv_sha256(alone)
    with pytest.raises(ValueError, match="not those of"):
        cache.assemble(length + 64, tables, ())
    if length > 64:
        with pytest.raises(ValueError, match="not those of"):
            cache.assemble(length, [(first + 1, ids[1:]) for first, ids in tables], ())
    cache.free(twin)
    cache.free(alone)
    for k, (_, ids) in enumerate(tables):
        for page in ids:
            cache.drop(k, page)
    assert cache.pages_in_use == (0, 0) and cache.accountant.used_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_reserved_sequence_never_fails_whoever_shares_its_pages(data: st.DataObject) -> None:
    """Once everything is reserved there is not one byte left; forks and cuts into shared pages may be refused, what was promised holds."""
    cache = make(data.draw(st.sampled_from([(0,), (0, 40), (100, 0)])))
    base = cache.create()
    write(cache, base, [1] * data.draw(st.integers(1, 200)))
    reserved = {}
    for _ in range(data.draw(st.integers(1, 3))):
        s = cache.fork(base) if data.draw(st.booleans()) else cache.create()
        for place in data.draw(st.lists(st.integers(0, 300), max_size=2)):
            cache.snapshot(s, cache.written(s) + place)
        reserved[s] = cache.written(s) + data.draw(st.integers(1, 400))
        cache.reserve(s, reserved[s], 50)
    others = [base]
    cache.accountant.limit_bytes = cache.accountant.used_bytes + data.draw(st.sampled_from([0, 0, 5])) * cache.pools[0].page_bytes
    for _ in range(data.draw(st.integers(1, 25))):
        s = data.draw(st.sampled_from(sorted(reserved)))
        action = data.draw(st.sampled_from(["write", "write", "write", "fork", "shorten", "free"]))
        if action == "write":
            rows = min(50, reserved[s] - cache.written(s))
            write(cache, s, [2] * data.draw(st.integers(0, rows)))
        elif action == "shorten":
            place = cache.longest(s, data.draw(st.integers(0, cache.written(s))))
            try:
                cache.truncate(s, place)
            except MemoryBudgetError:
                continue
        elif action == "free" and others:
            cache.free(others.pop())
        elif action == "fork":
            try:
                others.append(cache.fork(s))
            except MemoryBudgetError:
                continue
    for s in [*reserved, *others]:
        cache.free(s)
    assert cache.pages_in_use == (0,) * len(cache.kinds) and cache.accountant.used_bytes == 0


def test_a_reserved_sequence_that_is_cut_into_shared_pages_can_still_grow() -> None:
    cache = make((0,))
    base = cache.create()
    write(cache, base, [1] * 200)
    twin = cache.fork(base)
    cache.reserve(twin, 201, 50)
    page = cache.pools[0].page_bytes
    cache.accountant.limit_bytes = cache.accountant.used_bytes
    with pytest.raises(MemoryBudgetError):
        cache.truncate(twin, 10)
    assert cache.written(twin) == 200
    cache.accountant.limit_bytes += 3 * page
    cache.truncate(twin, 10)
    while cache.written(twin) < 201:
        write(cache, twin, [2] * min(50, 201 - cache.written(twin)))
    for s in (base, twin):
        cache.free(s)
    assert cache.accountant.used_bytes == 0


def test_a_cache_gives_way_before_anything_is_refused() -> None:
    a, asked = Accountant(100), []

    def reclaim(missing: int) -> None:
        asked.append(missing)
        a.give(missing)

    a.take(90, "a")
    a.reclaim = reclaim
    a.take(10, "b")
    a.take(7, "c")
    assert asked == [7] and a.used_bytes == 100
    a.reclaim = asked.append
    with pytest.raises(MemoryBudgetError, match="d needs 3 B"):
        a.take(3, "d")
    assert asked == [7, 3]


def test_accountant_counts() -> None:
    a = Accountant(100)
    a.take(60, "a")
    with pytest.raises(MemoryBudgetError, match=r"b needs 50 B, but 60 B of the budget of 100 B"):
        a.take(50, "b")
    assert a.total_bytes == 60
    a.give(60)
    with pytest.raises(ValueError, match="given back"):
        a.give(1)
    assert Accountant().fits(1 << 60)
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(5 << 40) == "5.0 TiB"


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_operations_keep_contents_counts_and_budget(data: st.DataObject) -> None:
    """Any mix of write, fork, truncate and free: every sequence reads as if it were alone, and nothing leaks."""
    windows = data.draw(st.sampled_from([(0,), (0, 40), (100, 0)]))
    cache = make(windows)
    model: dict[int, list[int]] = {cache.create(): []}
    for step in range(data.draw(st.integers(1, 25))):
        if not model:
            model[cache.create()] = []
        s = data.draw(st.sampled_from(sorted(model)))
        action = data.draw(st.sampled_from(["write", "write", "fork", "truncate", "free", "reserve"]))
        if action == "write":
            tokens = [(step * 31 + i) % 97 for i in range(data.draw(st.integers(1, 90)))]
            write(cache, s, tokens)
            model[s] += tokens
        elif action in ("fork", "truncate"):
            length = data.draw(st.integers(0, len(model[s])))
            if not cache.can_shorten(s, length):
                continue
            if action == "fork":
                model[cache.fork(s, length)] = model[s][:length]
            else:
                cache.truncate(s, length)
                del model[s][length:]
        elif action == "reserve":
            cache.reserve(s, len(model[s]) + 100, 90)
        else:
            cache.free(s)
            del model[s]
        held = sum(n * p.page_bytes for n, p in zip(cache.pages_in_use, cache.pools, strict=True))
        credit = sum(t.credit * p.page_bytes for q in cache._sequences.values() for t, p in zip(q.tables, cache.pools, strict=True))
        assert cache.accountant.used_bytes == held + credit
    for s, tokens in model.items():
        assert cache.written(s) == len(tokens)
        alone = make(windows)
        t = alone.create()
        if tokens:
            write(alone, t, tokens)
        assert cache.kv_sha256(s) == alone.kv_sha256(t)
    for s in list(model):
        cache.free(s)
    assert cache.accountant.used_bytes == 0
    assert all(not pool.pages for pool in cache.pools if isinstance(pool, FakePool))


def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


# Memory of pools


def test_steps_that_take_and_give_as_many_again_keep_their_memory() -> None:
    pool = _native.StatePool(1, 64)
    held = [pool.take() for _ in range(100)]
    for step in range(8):
        new = [pool.take() for _ in held]
        for slot in held:
            pool.give(slot)
        held = new
        assert (pool.slots_in_use, pool.spare_slots) == (100, 100), step


def test_memory_that_nobody_needs_is_handed_back_but_for_16_mib() -> None:
    pool = _native.PagePool(16, 1, 128, 128)
    ready = (16 << 20) // pool.page_bytes
    pages = [pool.take() for _ in range(100)]
    pool.view(pages[0])[:] = 7
    for page in pages[10:]:
        pool.give(page)
    for _ in range(2 * (pool.pages_in_use + 20)):
        pool.give(pool.take())
    assert (pool.pages_in_use, pool.spare_pages) == (10, ready)
    assert (pool.view(pages[0]) == 7).all()
    again = [pool.take() for _ in range(90)]
    assert not any(pool.view(page).any() for page in again), "a page is zeroed, wherever its memory comes from"
    for page in (*pages[:10], *again):
        pool.give(page)
    assert (pool.pages_in_use, pool.spare_pages) == (0, ready)


BURST = """
from quaff import _native


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20


pool = _native.PagePool(8, 8, 64, 64)  # 1 MiB
kept = [pool.take() for _ in range(10)]
before = resident()
burst = [pool.take() for _ in range(300)]
most = resident()
for page in burst:
    pool.give(page)
for _ in range(60):
    pool.give(pool.take())
print(before, most, resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_burst_leaves_little_memory_behind() -> None:
    result = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)
    before, most, after = map(int, result.stdout.split())
    assert most - before > 290 and after - before < 30
