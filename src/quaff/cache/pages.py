"""KV pages of 64 positions: one page table per sequence and KV kind, shared pages counted, a shared page copied before it is written.

A sequence has `written` positions. A sliding kind needs position j for the next row i = written only while j > i - window, so the
pages below are given back as the sequence grows; what was given back bounds how far it can be shortened or forked. Recurrent layers keep
no positions: their state (states.py) exists at a few of them, and only there can a sequence be shortened or forked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quaff.batch import PAGE, Segment
from quaff.cache.states import SlotPool, StateCache
from quaff.graph.program import KVKind, StateKind
from quaff.weights.budget import Accountant


class Pool(Protocol):
    """Memory of the pages of one kind (native PagePool). A page is zeroed when taken, unless all of it is about to be written."""

    @property
    def page_bytes(self) -> int: ...
    def take(self, zeroed: bool = True) -> int: ...
    def give(self, page: int) -> None: ...
    def copy(self, page: int) -> int: ...
    def array(self, page: int) -> NDArray[np.uint16]: ...
    def view(self, page: int) -> NDArray[np.uint16]: ...


def split_page(words: NDArray[np.uint16], kind: KVKind) -> tuple[NDArray[Any], NDArray[Any]]:
    """16-bit words of one head in pages as keys [..., 64, dim] and values [..., 64, value_dim], of 16 bits or, for f32, of 32."""
    words = words.view(f"u{kind.value_bytes}")
    keys, values = words[..., : PAGE * kind.dim], words[..., PAGE * kind.dim :]
    lead = words.shape[:-1]
    return keys.reshape(*lead, kind.dim, PAGE).swapaxes(-1, -2), values.reshape(*lead, PAGE, kind.value_dim)


FREED = -1


@dataclass(slots=True)
class _Table:
    """Page ids by position // 64 in `ids[:pages]`; those below `first` were given back. `claimed` pages are counted in the budget."""

    ids: NDArray[np.int32] = field(default_factory=lambda: np.full(4, FREED, dtype=np.int32))
    pages: int = 0
    first: int = 0
    claimed: int = 0
    reserved: int = 0

    @property
    def held(self) -> int:
        return self.pages - self.first

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


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


def first_page(window: int, length: int) -> int:
    """First page that a row at position `length` can see through a window (0: none), at most the number of written pages."""
    return min(max(0, length - window + 1) // PAGE, pages_for(length)) if window else 0


class PageCache:
    """Sequences and their pages. Every page is in at least one table, and its count is the number of tables that hold it.

    The budget counts a page once for each sequence that holds it, so that freeing one never leaves another short.
    """

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
        """A new sequence that shares the first `length` positions (default: all written); ValueError when some of them were given back."""
        source = self._sequences[sequence]
        length = source.written if length is None else length
        self._check_length(sequence, length)
        self._next_id += 1
        twin = _Sequence(tuple(_Table() for _ in self.kinds), length)
        try:
            for k, (table, old) in enumerate(zip(twin.tables, source.tables, strict=True)):
                pages = pages_for(length)
                first = self._first_needed_page(k, length)
                self._claim(k, table, pages - first)
                table.first = table.pages = first
                table.ids = np.full(max(4, pages), FREED, dtype=np.int32)
                for page in old.ids[first:pages].tolist():
                    self._counts[k][page] += 1
                    table.append(page)
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
                first = self._first_needed_page(k, length)
                self._claim(k, table, pages - first)
                table.first = table.pages = first
                table.ids = np.full(max(4, pages), FREED, dtype=np.int32)
                if base is not None and not self.kinds[k].window:
                    for page in self._sequences[base].tables[k].ids[: shared // PAGE].tolist():
                        self._counts[k][page] += 1
                        table.append(page)
                while table.pages < pages:
                    page = self.pools[k].take(zeroed=False)
                    self._counts[k][page] = 1
                    table.append(page)
            self.states.receive(self._next_id, length)
        except BaseException:
            self._release(s)
            raise
        self._sequences[self._next_id] = s
        return self._next_id

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages go back unless another sequence holds them."""
        self._release(self._sequences.pop(sequence))
        self.states.free(sequence)

    def _release(self, s: _Sequence) -> None:
        for k, table in enumerate(s.tables):
            for page in table.ids[table.first : table.pages].tolist():
                self._drop(k, page)
            self.accountant.give(table.claimed * self.pools[k].page_bytes)
            table.first = table.pages = table.claimed = 0

    # Growth

    def reserve(self, sequence: int, positions: int, step_rows: int) -> None:
        """Count the bytes that `positions` in steps of at most `step_rows` need at their peak; MemoryBudgetError before any is taken."""
        s = self._sequences[sequence]
        wanted = [self.peak_pages(k, positions, step_rows) for k in range(len(self.kinds))]
        need = sum(max(0, n - t.claimed) * pool.page_bytes for n, t, pool in zip(wanted, s.tables, self.pools, strict=True))
        self.accountant.take(need, f"the KV state of {positions} tokens")
        try:
            self.states.reserve(sequence)
        except BaseException:
            self.accountant.give(need)
            raise
        for n, table in zip(wanted, s.tables, strict=True):
            table.reserved = n
            table.claimed = max(table.claimed, n)

    def settle(self, sequence: int) -> None:
        """Give back what is reserved beyond the pages held: the sequence is not expected to grow for now."""
        s = self._sequences[sequence]
        for k, table in enumerate(s.tables):
            table.reserved = 0
            self._unclaim(k, table)
        self.states.settle(sequence)

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
            self._claim(k, table, max(table.held, pages_for(end) - table.first))
            pool, counts = self.pools[k], self._counts[k]
            for p in range(s.written // PAGE, table.pages):
                page = int(table.ids[p])
                if counts[page] > 1:
                    copy = pool.copy(page)
                    counts[copy] = 1
                    table.ids[p] = copy
                    self._drop(k, page)
            while table.pages < pages_for(end):
                page = pool.take()
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
        if not s.written <= written or any(written > t.pages * PAGE for t in s.tables):
            raise ValueError(f"{written} positions cannot be finished: {s.written} were, and pages end before")
        self.states.commit(sequence, written)
        s.written = written
        self._trim(s)

    def truncate(self, sequence: int, length: int) -> None:
        """Shorten to `length` positions; ValueError when that needs positions, or a state, that were given back."""
        s = self._sequences[sequence]
        self._check_length(sequence, length)
        self.states.truncate(sequence, length)
        s.written = length
        self._trim(s)

    def can_shorten(self, sequence: int, length: int) -> bool:
        """True when every position that a row at `length` can see is still there, and the state before it."""
        s = self._sequences[sequence]
        seen = 0 <= length <= s.written and all(self._first_needed_page(k, length) >= t.first for k, t in enumerate(s.tables))
        return seen and self.states.has(sequence, length)

    def longest(self, sequence: int, length: int) -> int:
        """The most positions, at most `length`, that the sequence can be shortened to; 0 always works for what is computed afresh."""
        places = (length,) if not self.states.kinds else reversed(self.states.positions(sequence))
        return next((p for p in places if p <= length and self.can_shorten(sequence, p)), 0)

    def snapshot(self, sequence: int, position: int) -> None:
        """Keep the recurrent state at a position: at the end, or where a step will pass. The sequence can be shortened and forked there."""
        self.states.snapshot(sequence, position)

    def _check_length(self, sequence: int, length: int) -> None:
        s = self._sequences[sequence]
        if not 0 <= length <= s.written:
            raise ValueError(f"length {length} is outside the {s.written} written positions")
        for k, table in enumerate(s.tables):
            if self._first_needed_page(k, length) < table.first:
                raise ValueError(f"length {length} needs positions that the window of KV kind {self.kinds[k].name!r} has left behind")
        if not self.states.has(sequence, length):
            raise ValueError(
                f"length {length} needs a recurrent state that was left behind; there are some at {self.states.positions(sequence)}"
            )

    def _first_needed_page(self, kind: int, length: int) -> int:
        return first_page(self.kinds[kind].window, length)

    def _trim(self, s: _Sequence) -> None:
        for k, table in enumerate(s.tables):
            while table.pages > max(pages_for(s.written), table.first):
                table.pages -= 1
                page, table.ids[table.pages] = int(table.ids[table.pages]), FREED
                self._drop(k, page)
            keep = self._first_needed_page(k, s.written)
            while table.first < keep:
                page, table.ids[table.first] = int(table.ids[table.first]), FREED
                table.first += 1
                self._drop(k, page)
            self._unclaim(k, table)

    def _claim(self, kind: int, table: _Table, pages: int) -> None:
        if pages > table.claimed:
            self.accountant.take((pages - table.claimed) * self.pools[kind].page_bytes, f"KV pages of kind {self.kinds[kind].name!r}")
            table.claimed = pages

    def _unclaim(self, kind: int, table: _Table) -> None:
        keep = max(table.held, table.reserved)
        if table.claimed > keep:
            self.accountant.give((table.claimed - keep) * self.pools[kind].page_bytes)
            table.claimed = keep

    def _drop(self, kind: int, page: int) -> None:
        counts = self._counts[kind]
        counts[page] -= 1
        if not counts[page]:
            del counts[page]
            self.pools[kind].give(page)

    # Reading

    def written(self, sequence: int) -> int:
        return self._sequences[sequence].written

    def tables(self, sequence: int) -> tuple[NDArray[np.int32], ...]:
        """Page ids by position // 64, int32, one array per kind, -1 where a page was given back; valid until the sequence changes."""
        return tuple(t.ids[: t.pages] for t in self._sequences[sequence].tables)

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages held per kind, a shared page once."""
        return tuple(len(counts) for counts in self._counts)

    def visible(self, kind: int, sequence: int) -> tuple[int, int]:
        """Positions begin .. end - 1 of a kind that the next row of the sequence can see."""
        window, written = self.kinds[kind].window, self._sequences[sequence].written
        return (max(0, written - window + 1) if window else 0), written

    def read(self, sequence: int, update: Callable[[bytes], object]) -> None:
        """Feed the state that the next row can see in a fixed order: per kind, layer and KV head K [positions, dim], then V [positions,
        value_dim], f16 words; then recurrent state."""
        s = self._sequences[sequence]
        for k, kind in enumerate(self.kinds):
            begin, end = self.visible(k, sequence)
            if begin == end:
                continue
            first = begin // PAGE
            pages = [self.pools[k].array(page) for page in s.tables[k].ids[first : pages_for(end)].tolist()]
            word = np.dtype(f"<u{kind.value_bytes}")
            rows = slice(begin - first * PAGE, end - first * PAGE)
            for layer in range(len(kind.layers)):
                for head in range(kind.kv_heads):
                    keys, values = split_page(np.stack([page[layer, head] for page in pages]), kind)
                    update(keys.reshape(-1, kind.dim)[rows].astype(word, copy=False).tobytes())
                    update(values.reshape(-1, kind.value_dim)[rows].astype(word, copy=False).tobytes())
        self.states.read(sequence, update)

    def kv_sha256(self, sequence: int) -> str:
        """Hash of the state that the next row can see: written positions only, so every path to the same tokens gives the same hash."""
        digest = hashlib.sha256()
        self.read(sequence, digest.update)
        return digest.hexdigest()
