"""KV pages of 64 positions: one page table per sequence and KV kind, shared pages counted, a shared page copied before it is written.

A sequence has `written` positions. A sliding kind needs position j for the next row i = written only while j > i - window, so the
pages below are given back as the sequence grows. Recurrent layers keep no positions: their state (states.py) exists at a few of them. A
sequence can be shortened or forked where all that the next row sees is still there: at snapshots always, elsewhere as far as it goes.

A page is paid for once, when it is taken from its pool, and its bytes come back when the last holder drops it. A reservation is credit
for pages to come: a sequence that has one never fails for want of memory, whoever shares its pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quaff.batch import PAGE, Segment
from quaff.cache.states import SlotPool, Slots, StateCache
from quaff.graph.program import KVKind, StateKind
from quaff.weights.budget import Accountant


class Pool(Protocol):
    """Memory of the pages of one kind (native PagePool). A page is zeroed when taken, unless all of it is about to be written."""

    @property
    def page_bytes(self) -> int: ...
    def take(self, zeroed: bool = True) -> int: ...
    def give(self, page: int) -> None: ...
    def copy(self, page: int) -> int: ...
    def view(self, page: int) -> NDArray[np.uint16]: ...


def split_page(words: NDArray[np.uint16], kind: KVKind) -> tuple[NDArray[Any], ...]:
    """16-bit words of one head in pages as views [..., 32, 2, width], positions by twos: keys, values, and the scales of codes.

    Keys are whole or, of codes, pairs of dimensions as u32; values are u32 or u16; scales are bf16, one a position.
    """
    lead, k_end = words.shape[:-1], PAGE * kind.dim * kind.value_bytes // 2
    v_end = k_end + PAGE * kind.value_dim * kind.value_bytes // 2
    keys = np.moveaxis(words[..., :k_end].view(np.uint32).reshape(*lead, -1, PAGE // 2, 2), -3, -1)
    if kind.value_bytes == 4:
        return keys, words[..., k_end:].view(np.uint32).reshape(*lead, PAGE // 2, 2, kind.value_dim)
    values = words[..., k_end:v_end].reshape(*lead, PAGE // 2, kind.value_dim, 2).swapaxes(-1, -2)
    scales = words[..., v_end:].reshape(*lead, 2, PAGE // 2, 2, 1)
    return keys, values, scales[..., 0, :, :, :], scales[..., 1, :, :, :]


def page_rows(words: NDArray[np.uint16], kind: KVKind) -> NDArray[np.uint16]:
    """What every position of one head in pages holds, [..., 64, words]: key, value, scales."""
    lead = words.shape[:-1]
    parts = [np.ascontiguousarray(part).reshape(*lead, PAGE, -1).view(np.uint16) for part in split_page(words, kind)]
    return np.concatenate(parts, axis=-1)


def clear_page(words: NDArray[np.uint16], kind: KVKind, used: int) -> None:
    """Zero the positions of a page from `used` on."""
    for part in split_page(words, kind):
        part[..., (used + 1) // 2 :, :, :] = 0
        if used % 2:
            part[..., used // 2, 1, :] = 0


FREED = -1


@dataclass(slots=True)
class _Table:
    """Page ids by position // 64 in `ids[:pages]`; of those below `first`, only what snapshots see is still held.

    `credit` pages are paid for and not taken yet. `reserved` is the most pages that credit must cover at once, 0 without a reservation.
    """

    ids: NDArray[np.int32] = field(default_factory=lambda: np.full(4, FREED, dtype=np.int32))
    pages: int = 0
    first: int = 0
    credit: int = 0
    reserved: int = 0

    def held(self) -> list[int]:
        ids = self.ids[: self.pages].tolist()
        return ids if not self.first else [page for page in ids if page != FREED]

    def append(self, page: int) -> None:
        if self.pages == len(self.ids):
            grown = np.full(2 * self.pages, FREED, dtype=np.int32)
            grown[: self.pages] = self.ids
            self.ids = grown
        self.ids[self.pages] = page
        self.pages += 1


@dataclass(slots=True)
class _Sequence:
    tables: tuple[_Table, ...]
    written: int = 0
    snapshots: set[int] = field(default_factory=set)


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


def first_page(window: int, length: int) -> int:
    """First page that a row at position `length` sees through a window (0: none), at most the number of written pages."""
    return min(max(0, length - window + 1) // PAGE, pages_for(length)) if window else 0


class PageCache:
    """Sequences and their pages. Every page has a holder, and its count is the number of them: tables, and whoever called `hold`."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        pools: Sequence[Pool],
        accountant: Accountant,
        state_kinds: Sequence[StateKind] = (),
        state_pools: Sequence[SlotPool] = (),
    ) -> None:
        self.kinds = tuple(kinds)
        self.pools = tuple(pools)
        self.accountant = accountant
        self.make_way: Callable[[int], object] | None = None
        """Told how many bytes of pages are taken next: what holds memory for later may drop some first, and it is used again."""
        self.states = StateCache(state_kinds, state_pools, accountant)
        self._counts: tuple[dict[int, int], ...] = tuple({} for _ in kinds)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    # Sequences

    def create(self) -> int:
        """A new, empty sequence."""
        self._next_id += 1
        self._sequences[self._next_id] = _Sequence(tuple(_Table() for _ in self.kinds))
        self.states.create(self._next_id)
        return self._next_id

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that shares the first `length` positions (default: all written) and the snapshots among them; ValueError when
        some of what the next row sees was given back. Costs nothing, but for credit that a reserved source needs to write on."""
        source = self._sequences[sequence]
        length = source.written if length is None else length
        self._check_length(sequence, length)
        self._next_id += 1
        snapshots = {position for position in source.snapshots if position <= length}
        twin = _Sequence(tuple(_Table() for _ in self.kinds), length, snapshots)
        try:
            for k, (table, old) in enumerate(zip(twin.tables, source.tables, strict=True)):
                self._fill(k, table, self._first_needed_page(k, length), old.ids[: pages_for(length)], self._needed(k, snapshots))
            self._cover(source)
            self.states.fork(sequence, self._next_id, length)
        except BaseException:
            self._release(twin)
            raise
        self._sequences[self._next_id] = twin
        return self._next_id

    def receive(self, length: int, base: int | None = None, shared: int = 0) -> int:
        """A new sequence of `length` positions with the memory that a row there sees, for the caller to fill before others know of it.

        Of kinds without a window, the pages of the first `shared` positions (whole pages) are those of `base`. Raises MemoryBudgetError.
        """
        self._next_id += 1
        s = _Sequence(tuple(_Table() for _ in self.kinds), length)
        pages = pages_for(length)
        try:
            for k, table in enumerate(s.tables):
                first, there = self._first_needed_page(k, length), []
                if base is not None and not self.kinds[k].window:
                    there = self._sequences[base].tables[k].ids[: shared // PAGE].tolist()
                self._fill(k, table, first, np.array([FREED] * first + there, dtype=np.int32), set())
                self._pay(k, table, pages - table.pages)
                while table.pages < pages:
                    page = self.pools[k].take(zeroed=False)
                    table.credit -= 1
                    self._counts[k][page] = 1
                    table.append(page)
            self.states.receive(self._next_id, length)
        except BaseException:
            self._release(s)
            raise
        self._sequences[self._next_id] = s
        return self._next_id

    def assemble(self, length: int, tables: Sequence[tuple[int, Sequence[int]]], slots: Slots) -> int:
        """A new sequence of `length` written positions, made of pages and state slots that others hold: per kind (first page, page ids up
        to the last position), and one slot per kind of state. ValueError when they are not what a row at `length` sees."""
        for k, (first, ids) in enumerate(tables):
            if first > self._first_needed_page(k, length) or first + len(ids) != pages_for(length):
                raise ValueError(
                    f"pages {first}..{first + len(ids) - 1} of KV kind {self.kinds[k].name!r} are not those of {length} positions"
                )
        self._next_id += 1
        s = _Sequence(tuple(_Table() for _ in self.kinds), length)
        for k, (table, (first, ids)) in enumerate(zip(s.tables, tables, strict=True)):
            self._fill(k, table, first, np.array([FREED] * first + list(ids), dtype=np.int32), set())
        self.states.assemble(self._next_id, length, slots)
        self._sequences[self._next_id] = s
        return self._next_id

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages go back unless another holds them."""
        self._release(self._sequences.pop(sequence))
        self.states.free(sequence)

    def hold(self, kind: int, page: int) -> None:
        """Keep a page whoever drops it. Not one that a reserved sequence may still drop: it has counted on what that gives back."""
        self._counts[kind][page] += 1

    def drop(self, kind: int, page: int) -> None:
        """End a `hold`."""
        if self._drop(kind, page):
            self.accountant.give(self.pools[kind].page_bytes)

    def holders(self, kind: int, page: int) -> int:
        """Sequences that hold a page, and one for each `hold`."""
        return self._counts[kind][page]

    def _fill(self, kind: int, table: _Table, first: int, ids: NDArray[np.int32], kept: set[int]) -> None:
        """Hold what an empty table shares: pages from `first` on, and those below that are in `kept`."""
        table.ids = np.full(max(4, len(ids)), FREED, dtype=np.int32)
        table.first, table.pages = first, len(ids)
        for p in [*sorted(p for p in kept if p < min(first, len(ids))), *range(first, len(ids))]:
            table.ids[p] = ids[p]
            self._counts[kind][int(ids[p])] += 1

    def _release(self, s: _Sequence) -> None:
        for k, table in enumerate(s.tables):
            table.reserved = 0
            for page in table.held():
                self._let_go(k, table, page)
            self._refund(k, table)
            table.first = table.pages = 0

    # Growth

    def reserve(self, sequence: int, positions: int, step_rows: int) -> None:
        """Pay for the pages that `positions` in steps of at most `step_rows` need beyond those held; MemoryBudgetError before any is."""
        s = self._sequences[sequence]
        before = [table.reserved for table in s.tables]
        for k, table in enumerate(s.tables):
            kept = sum(pages_for(p) - self._first_needed_page(k, p) for p in s.snapshots) if self.kinds[k].window else 0
            table.reserved = self.peak_pages(k, positions, step_rows) + kept
        try:
            self._cover(s, f"the KV state of {positions} tokens")
            self.states.reserve(sequence)
        except BaseException:
            for k, (table, old) in enumerate(zip(s.tables, before, strict=True)):
                table.reserved = old
                self._refund(k, table)
            raise

    def settle(self, sequence: int) -> None:
        """Give back what is reserved beyond the pages held: the sequence is not expected to grow for now."""
        s = self._sequences[sequence]
        for k, table in enumerate(s.tables):
            table.reserved = 0
            self._refund(k, table)
        self.states.settle(sequence)

    def _cover(self, s: _Sequence, what: str = "KV pages that another sequence shares", length: int | None = None) -> None:
        """Credit for every page that a reserved sequence may still take, once it is shortened to `length`: what it shares it may drop
        without getting anything back."""
        length = s.written if length is None else length
        short = []
        for k, table in enumerate(s.tables):
            need = 0
            if table.reserved and self.kinds[k].window:
                need = table.reserved - sum(self._counts[k][page] == 1 for page in table.held())
            elif table.reserved:
                pages = min(table.pages, pages_for(length))
                dropped = sum(self._counts[k][int(page)] == 1 for page in table.ids[pages : table.pages])
                need = table.reserved - pages + len(self._shared_tail(k, table, length, pages)) - dropped
            short.append(max(0, need - table.credit))
        self.accountant.take(sum(n * pool.page_bytes for n, pool in zip(short, self.pools, strict=True)), what)
        for n, table in zip(short, s.tables, strict=True):
            table.credit += n

    def _shared_tail(self, kind: int, table: _Table, length: int, pages: int) -> list[int]:
        """Indices of the first `pages` pages that rows from `length` on write into and another holds too: they must be copied first."""
        counts = self._counts[kind]
        return [p for p in range(length // PAGE, pages) if counts[int(table.ids[p])] > 1]

    def peak_pages(self, kind: int, positions: int, step_rows: int) -> int:
        """Most pages of a kind that a sequence of `positions`, grown by at most `step_rows` at a time, holds at once."""
        window = self.kinds[kind].window
        held = positions if not window else min(positions, window + step_rows + PAGE)
        return pages_for(held) + (1 if window and held < positions else 0)

    def peak_bytes(self, positions: int, step_rows: int) -> int:
        """Bytes of pages, and of the recurrent state before and after a step."""
        pages = sum(self.peak_pages(k, positions, step_rows) * pool.page_bytes for k, pool in enumerate(self.pools))
        return pages + 2 * self.states.slot_bytes

    def grow(self, sequence: int, end: int) -> None:
        """Make positions written .. end - 1 writable: take pages, and copy a partly filled page that another sequence shares."""
        s = self._sequences[sequence]
        if end <= s.written:
            return
        for k, table in enumerate(s.tables):
            pool, counts = self.pools[k], self._counts[k]
            needed = len(self._shared_tail(k, table, s.written, table.pages)) + max(0, pages_for(end) - table.pages)
            if not needed:
                continue
            self._pay(k, table, needed)
            # The tail is looked at anew: a cache may have given way to pay for it.
            for p in self._shared_tail(k, table, s.written, table.pages):
                page = int(table.ids[p])
                copy = pool.copy(page)
                table.credit -= 1
                counts[copy] = 1
                table.ids[p] = copy
                counts[page] -= 1
            while table.pages < pages_for(end):
                page = pool.take()
                table.credit -= 1
                counts[page] = 1
                table.append(page)
        self.states.grow(sequence, end)

    def segment(self, sequence: int, tokens: NDArray[np.int32], logits: Sequence[int] = ()) -> Segment:
        """The next rows of a sequence, with room made for them; MemoryBudgetError when there is none."""
        start = self._sequences[sequence].written
        self.grow(sequence, start + len(tokens))
        return Segment(sequence, start, tokens, self.tables(sequence), tuple(logits), self.states.tables(sequence))

    def commit(self, sequence: int, written: int) -> None:
        """Positions below `written` are finished: drop the pages taken beyond them, and those that no later row can see.

        Recurrent layers finish all rows that the sequence was grown by, or none.
        """
        s = self._sequences[sequence]
        least = min([table.pages for table in s.tables], default=pages_for(written))
        if not s.written <= written <= least * PAGE:
            raise ValueError(f"{written} positions cannot be finished: {s.written} were, and pages end before")
        self.states.commit(sequence, written)
        s.written = written
        self._trim(s)

    def truncate(self, sequence: int, length: int) -> None:
        """Shorten to `length` positions; ValueError when that needs positions, or a state, that were given back, MemoryBudgetError when a
        reserved sequence shares pages that it would have to take anew. Neither changes anything."""
        s = self._sequences[sequence]
        self._check_length(sequence, length)
        self._cover(s, length=length)
        self.states.truncate(sequence, length)
        s.written = length
        s.snapshots = {position for position in s.snapshots if position <= length}
        self._trim(s)

    def can_shorten(self, sequence: int, length: int) -> bool:
        """True when every position that a row at `length` can see is still there, and the state before it."""
        s = self._sequences[sequence]
        seen = 0 <= length <= s.written and all(self._sees(k, s, length) for k in range(len(self.kinds)))
        return seen and self.states.has(sequence, length)

    def longest(self, sequence: int, length: int) -> int:
        """The most positions, at most `length`, that the sequence can be shortened to; 0 always works for what is computed afresh."""
        if self.can_shorten(sequence, length):
            return length
        return next((p for p in reversed(self.places(sequence)) if p <= length), 0)

    def snapshot(self, sequence: int, position: int) -> None:
        """Keep what a row at a position sees: at the end, or where a step will pass. The sequence can be shortened and forked there."""
        self.states.snapshot(sequence, position)
        if position and any(kind.window for kind in self.kinds):
            self._sequences[sequence].snapshots.add(position)

    def snapshot_bytes(self, position: int) -> int:
        """Most bytes that a snapshot keeps."""
        pages = [pages_for(position) - self._first_needed_page(k, position) if kind.window else 0 for k, kind in enumerate(self.kinds)]
        return sum(n * pool.page_bytes for n, pool in zip(pages, self.pools, strict=True)) + self.states.slot_bytes

    def forget_snapshots(self, sequence: int) -> None:
        """Keep nothing but what the end needs."""
        s = self._sequences[sequence]
        s.snapshots.clear()
        for k, table in enumerate(s.tables):
            for p in range(table.first):
                self._forget(k, table, p)
            if not table.reserved:
                self._refund(k, table)
        self.states.forget_snapshots(sequence)

    def places(self, sequence: int) -> tuple[int, ...]:
        """Ascending, the end and the snapshots that have been reached: where the sequence can be continued for sure."""
        s = self._sequences[sequence]
        kept = set(self.states.positions(sequence)) if self.states.kinds else {p for p in s.snapshots if p < s.written} | {s.written}
        return tuple(sorted(p for p in kept - {0} if self.can_shorten(sequence, p)))

    def seen_pages(self, sequence: int, kind: int, length: int) -> tuple[int, list[int]]:
        """(index of the first, ids) of the pages of a kind that a row at `length` sees; `can_shorten` must be true there."""
        first = self._first_needed_page(kind, length)
        return first, self._sequences[sequence].tables[kind].ids[first : pages_for(length)].tolist()

    def page(self, sequence: int, kind: int, index: int) -> int:
        """The page of positions 64 * index .. 64 * index + 63."""
        return int(self._sequences[sequence].tables[kind].ids[index])

    def _check_length(self, sequence: int, length: int) -> None:
        s = self._sequences[sequence]
        if not 0 <= length <= s.written:
            raise ValueError(f"length {length} is outside the {s.written} written positions")
        for k in range(len(self.kinds)):
            if not self._sees(k, s, length):
                raise ValueError(f"length {length} needs positions that the window of KV kind {self.kinds[k].name!r} has left behind")
        if not self.states.has(sequence, length):
            raise ValueError(
                f"length {length} needs a recurrent state that was left behind; there are some at {self.states.positions(sequence)}"
            )

    def _sees(self, kind: int, s: _Sequence, length: int) -> bool:
        first, table = self._first_needed_page(kind, length), s.tables[kind]
        return first >= table.first or FREED not in table.ids[first : pages_for(length)]

    def _first_needed_page(self, kind: int, length: int) -> int:
        return first_page(self.kinds[kind].window, length)

    def _needed(self, kind: int, snapshots: Iterable[int]) -> set[int]:
        """Indices of the pages of a sliding kind that rows at snapshots see."""
        if not self.kinds[kind].window:
            return set()
        return {page for p in snapshots for page in range(self._first_needed_page(kind, p), pages_for(p))}

    def _trim(self, s: _Sequence) -> None:
        for k, table in enumerate(s.tables):
            while table.pages > pages_for(s.written):
                table.pages -= 1
                self._forget(k, table, table.pages)
            keep = self._first_needed_page(k, s.written)
            if table.first < keep:
                needed = self._needed(k, (p for p in s.snapshots if p <= s.written))
                for p in range(table.first, keep):
                    if p not in needed:
                        self._forget(k, table, p)
            table.first = keep
            if not table.reserved:
                self._refund(k, table)

    def _forget(self, kind: int, table: _Table, index: int) -> None:
        page, table.ids[index] = int(table.ids[index]), FREED
        if page != FREED:
            self._let_go(kind, table, page)

    def _pay(self, kind: int, table: _Table, pages: int) -> None:
        """Make `pages` of credit, which are taken next: the budget is asked for what is missing."""
        if pages > 0 and self.make_way is not None:
            self.make_way(pages * self.pools[kind].page_bytes)
        short = pages - table.credit
        if short > 0:
            self.accountant.take(short * self.pools[kind].page_bytes, f"KV pages of kind {self.kinds[kind].name!r}")
            table.credit += short

    def _refund(self, kind: int, table: _Table) -> None:
        """Give back the credit of a table, or what it has beyond its reservation."""
        if table.credit > table.reserved:
            self.accountant.give((table.credit - table.reserved) * self.pools[kind].page_bytes)
            table.credit = table.reserved

    def _let_go(self, kind: int, table: _Table, page: int) -> None:
        """Drop a page of a table: what it was paid with is the reservation's again, or the budget's."""
        if self._drop(kind, page):
            if table.reserved:
                table.credit += 1
            else:
                self.accountant.give(self.pools[kind].page_bytes)

    def _drop(self, kind: int, page: int) -> bool:
        """One holder less; True when it was the last and the page went back to its pool."""
        counts = self._counts[kind]
        counts[page] -= 1
        if counts[page]:
            return False
        del counts[page]
        self.pools[kind].give(page)
        return True

    # Reading

    def written(self, sequence: int) -> int:
        return self._sequences[sequence].written

    def tables(self, sequence: int) -> tuple[NDArray[np.int32], ...]:
        """Page ids by position // 64, int32, one array per kind, -1 where a page was given back; valid until the sequence changes."""
        return tuple([t.ids[: t.pages] for t in self._sequences[sequence].tables])

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages held per kind, a shared page once."""
        return tuple(len(counts) for counts in self._counts)

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages and states that someone holds."""
        pages = sum(n * pool.page_bytes for n, pool in zip(self.pages_in_use, self.pools, strict=True))
        return pages + max(self.states.slots_in_use, default=0) * self.states.slot_bytes

    def visible(self, kind: int, sequence: int) -> tuple[int, int]:
        """Positions begin .. end - 1 of a kind that the next row of the sequence can see."""
        window, written = self.kinds[kind].window, self._sequences[sequence].written
        return (max(0, written - window + 1) if window else 0), written

    def read(self, sequence: int, update: Callable[[bytes], object]) -> None:
        """Feed the state that the next row can see in a fixed order: per kind, layer and KV head the rows of `page_rows`; then recurrent
        state."""
        s = self._sequences[sequence]
        for k, kind in enumerate(self.kinds):
            begin, end = self.visible(k, sequence)
            if begin == end:
                continue
            first = begin // PAGE
            pages = [self.pools[k].view(page) for page in s.tables[k].ids[first : pages_for(end)].tolist()]
            rows = slice(begin - first * PAGE, end - first * PAGE)
            for layer in range(len(kind.layers)):
                for head in range(kind.kv_heads):
                    words = page_rows(np.stack([page[layer, head] for page in pages]), kind)
                    update(words.reshape(-1, words.shape[-1])[rows].tobytes())
        self.states.read(sequence, update)

    def kv_sha256(self, sequence: int) -> str:
        """Hash of the state that the next row can see: written positions only, so every path to the same tokens gives the same hash."""
        digest = hashlib.sha256()
        self.read(sequence, digest.update)
        return digest.hexdigest()
