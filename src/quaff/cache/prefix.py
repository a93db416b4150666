"""The prefix tree: what was computed for one request is found again by all that begin with the same token ids.

A node is a page: up to 64 ids, compared one by one, and the KV pages that hold them, by reference. A model whose layers see everything can
go on after any of those ids. One with sliding windows or recurrent state can go on only at *places*, exact positions for which the
pages of the windows and the state were kept. Every published sequence leaves a place at its end, and the places age: under pressure the
one that was not used for longest goes first, with the pages that only it needs.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quaff.batch import PAGE
from quaff.cache.pages import PageCache, first_page, pages_for
from quaff.cache.states import Slots

SHOWN_TOKENS = 16
"""A miss shows so many tokens from the first difference on."""
ID_BYTES = 4
PAGE_IDS = PAGE * ID_BYTES


def id_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as big-endian words, whose order is that of the ids."""
    return np.asarray(tokens, dtype=">i4").tobytes()


def ids_of(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype=">i4").tolist())


@dataclass(frozen=True, slots=True)
class Miss:
    """Why less of a prompt was found than a cached one has: it goes on in another way, or no state was kept where they part.

    `matched_tokens` are equal, `cached_tokens` of them could be used, `lost_tokens` are computed although their like had been cached.
    `expected` are cached ids from the first difference on, and `found` the prompt's; none when nothing differs but a state is missing.
    """

    matched_tokens: int
    cached_tokens: int
    lost_tokens: int
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()

    def reason(self, decode: Callable[[Sequence[int]], str]) -> str:
        """One line for people, with the texts that differ."""
        cost = f"{self.lost_tokens} tokens are computed again"
        if not self.expected:
            return f"no state is kept between tokens {self.cached_tokens} and {self.matched_tokens}: {cost}"
        expected, found = decode(self.expected), decode(self.found)
        return f"token {self.matched_tokens} is not what was cached: {found!r} instead of {expected!r}; {cost}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A new sequence, the caller's, with the first `length` tokens of a prompt written. `miss`: why it is not longer, where it might be."""

    sequence: int
    length: int
    miss: Miss | None = None


@dataclass(slots=True)
class PrefixCounters:
    """Since the start: tokens that were looked for and those of them that were found, sequences published and those that were not for
    want of room, bytes that were evicted."""

    queried_tokens: int = 0
    cached_tokens: int = 0
    published: int = 0
    refused: int = 0
    evicted_bytes: int = 0

    def count(self, queried: int, cached: int) -> None:
        """One more request."""
        self.queried_tokens += queried
        self.cached_tokens += cached


@dataclass(eq=False, slots=True)
class _Place:
    """A position where a prompt can be continued, `offset` ids into its node: state slots, and per KV kind (first page, ids) of the
    windows (no ids for kinds that see everything: their pages are the nodes')."""

    node: _Node
    offset: int
    slots: Slots
    windows: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(eq=False, slots=True)
class _Node:
    """`ids` of up to 64 positions and, per KV kind that sees everything, their page. Children, sorted by ids, none of which begins
    another, follow a whole page only. `newest` is the child that was published last."""

    parent: _Node | None
    ids: bytes = b""
    pages: tuple[int, ...] = ()
    children: list[_Node] = field(default_factory=list)
    places: dict[int, _Place] = field(default_factory=dict)
    newest: _Node | None = None

    def closest(self, ids: bytes) -> tuple[_Node | None, int]:
        """The child that shares the most leading ids, and how many."""
        at = bisect_left(self.children, ids, key=_ids)
        best, most = None, 0
        for child in self.children[max(0, at - 1) : at + 1]:
            if child.ids.startswith(ids) or ids.startswith(child.ids):
                return child, min(len(child.ids), len(ids)) // ID_BYTES
            common = len(os.path.commonprefix((child.ids, ids))) // ID_BYTES
            if common > most:
                best, most = child, common
        return best, most


def _ids(node: _Node) -> bytes:
    return node.ids


class PrefixCache:
    """Prefixes of one engine, whose model and options are one bits key; `salt` keeps the prompts of different clients apart.

    At most `cap_bytes` of pages and states are held, a shared one counted once; what a sequence uses too is never evicted. Not locked: the
    engine's lock covers every caller. The tree gives way where `evict` is asked for what others need (`Accountant.reclaim`), and before
    sequences and tree together pass the cap (`PageCache.make_way`): memory grows up to there, and then stays.
    """

    def __init__(self, cache: PageCache, cap_bytes: int) -> None:
        self.cache = cache
        self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self.version = 0
        """Grows with what can be found."""
        self.counters = PrefixCounters()
        self.on_publish: Callable[[int, Sequence[int], str], None] | None = None
        """Told of (sequence, its tokens, salt) when a sequence has ended, kept here or not."""
        self._roots: dict[str, _Node] = {}
        self._places: OrderedDict[_Place, None] = OrderedDict()
        self._held: tuple[dict[int, int], ...] = tuple({} for _ in cache.kinds)
        self._held_slots: dict[Slots, int] = {}
        self._whole = tuple(k for k, kind in enumerate(cache.kinds) if not kind.window)
        self._sliding = tuple(k for k, kind in enumerate(cache.kinds) if kind.window)
        self.anywhere = not self._sliding and not cache.states.kinds
        """True when prompts can be continued at any position: all that a row sees is in the nodes."""
        self._window_pages = (
            0 if cache.states.kinds else max((pages_for(kind.window) + 1 for kind in cache.kinds if kind.window), default=0)
        )
        self._node_bytes = sum(cache.pools[k].page_bytes for k in self._whole)

    @property
    def places(self) -> int:
        """Positions kept at present."""
        return len(self._places)

    # Looking for a prompt

    def attach(self, tokens: Sequence[int], most: int, salt: str = "") -> Hit:
        """A new sequence with the longest cached prefix of at most `most` tokens written; an empty one when there is none."""
        ids = id_bytes(tokens)
        path, matched = self._walk(ids, salt)
        usable = min(matched, most)
        length, place = (usable, None) if self.anywhere else self._last_place(path, usable)
        miss = self._miss(ids, path, matched, most, length, salt)
        if not length:
            return Hit(self.cache.create(), 0, miss)
        if place is not None:
            self._places.move_to_end(place)
        nodes = path[: pages_for(length)]
        tables: list[tuple[int, Sequence[int]]] = [(0, ())] * len(self.cache.kinds)
        for i, k in enumerate(self._whole):
            tables[k] = (0, [node.pages[i] for node in nodes])
        for k in self._sliding:
            assert place is not None
            first, pages = place.windows[k]
            tables[k] = (first, pages[: pages_for(length) - first])
        return Hit(self.cache.assemble(length, tables, place.slots if place else ()), length, miss)

    def _walk(self, ids: bytes, salt: str) -> tuple[list[_Node], int]:
        """Nodes that share ids with a prompt, from the root's child on, and how many ids they share."""
        path: list[_Node] = []
        node, matched = self._roots.get(salt), 0
        while node is not None and matched * ID_BYTES < len(ids):
            node, common = node.closest(ids[matched * ID_BYTES : matched * ID_BYTES + PAGE_IDS])
            if node is not None:
                path.append(node)
                matched += common
                if common < PAGE:
                    break
        return path, matched

    def _last_place(self, path: Sequence[_Node], most: int) -> tuple[int, _Place | None]:
        """The longest length up to `most` that places on a path allow, and the place."""
        best: tuple[int, _Place | None] = (0, None)
        # What the window of a place sees may reach back to before the prompt parted from its branch.
        below = path[-1].newest if path else None
        path = list(path)
        while below is not None and len(path) - pages_for(most) < self._window_pages:
            path.append(below)
            below = below.newest
        for index in range(len(path) - 1, -1, -1):
            if best[0] > index * PAGE:
                break
            for place in path[index].places.values():
                length = min(most, index * PAGE + place.offset)
                if length > best[0] and (length == index * PAGE + place.offset or self._sees(place, length)):
                    best = length, place
        return best

    def _sees(self, place: _Place, length: int) -> bool:
        """True when what a place keeps is enough for a row at a position before it."""
        return not place.slots and all(place.windows[k][0] <= first_page(self.cache.kinds[k].window, length) for k in self._sliding)

    def _miss(self, ids: bytes, path: Sequence[_Node], matched: int, most: int, length: int, salt: str) -> Miss | None:
        # The cached text that goes on where the prompt parted from it: the rest of the last node, or the branch that is newest.
        branch = path[-1] if path else self._roots.get(salt)
        if branch is None or (length == most and matched >= most):
            return None
        rest = branch.ids[(matched - PAGE * max(0, len(path) - 1)) * ID_BYTES :] if path else b""
        known = len(rest)
        shown = rest
        while (branch := branch.newest) is not None:
            known += len(branch.ids)
            if len(shown) < SHOWN_TOKENS * ID_BYTES:
                shown += branch.ids
        lost = min(most, matched + known // ID_BYTES) - length
        if lost <= 0:
            return None
        found = ids[matched * ID_BYTES : (matched + SHOWN_TOKENS) * ID_BYTES] if matched < most else b""
        expected = shown[: SHOWN_TOKENS * ID_BYTES] if found else b""
        return Miss(matched, length, lost, ids_of(expected), ids_of(found) if expected else ())

    # Keeping what was computed

    def publish(self, sequence: int, tokens: Sequence[int], salt: str = "", growing: bool = False) -> bool:
        """Keep what a sequence has written, `tokens`, and its places; False when that is larger than the cap or does not fit beside what
        is in use. A `growing` sequence shares only what it does not write into any more: whole pages, and the places among them.
        """
        written = self.cache.written(sequence)
        if len(tokens) != written:
            raise ValueError(f"{len(tokens)} tokens for {written} written positions")
        places = self._new_places(sequence, written, growing)
        if not places:
            return False
        if not growing and self.on_publish is not None:
            self.on_publish(sequence, tokens, salt)
        ids, nodes = id_bytes(tokens[: places[-1]]), pages_for(places[-1])
        if not self._make_room(ids, sequence, places, salt):
            self.counters.refused += 1
            return False
        node = self._roots.setdefault(salt, _Node(None))
        reached = 0
        for index in range(nodes):
            node = self._extend(node, ids[index * PAGE_IDS : (index + 1) * PAGE_IDS], sequence, index)
            while reached < len(places) and places[reached] <= (index + 1) * PAGE:
                self._put_place(node, places[reached] - index * PAGE, sequence, places[reached])
                reached += 1
        self.counters.published += 1
        self.version += 1
        return True

    def _new_places(self, sequence: int, written: int, growing: bool) -> list[int]:
        if self.anywhere:
            end = written // PAGE * PAGE if growing else written
            return [end] if end else []
        places = self.cache.places(sequence)
        return [p for p in places if p < written and pages_for(p) * PAGE <= written] if growing else list(places)

    def _make_room(self, ids: bytes, sequence: int, places: Sequence[int], salt: str) -> bool:
        """Evict until there is room for what a sequence adds; False when there cannot be."""
        nodes = pages_for(places[-1])
        if nodes * self._node_bytes + self._places_bytes(sequence, places) > self.cap_bytes:
            return False
        while True:
            # What is there already may be evicted on the way.
            path, matched = self._walk(ids, salt)
            there = len(path) - (matched < min(PAGE * len(path), places[-1]))
            new = [p for p in places if p > matched or (p - 1) % PAGE + 1 not in path[(p - 1) // PAGE].places]
            room = self.cap_bytes - (nodes - there) * self._node_bytes - self._places_bytes(sequence, new)
            if self.used_bytes <= room:
                return True
            before = self.used_bytes
            self._evict(partial(self._is_within, room))
            if self.used_bytes == before:
                return False

    def _places_bytes(self, sequence: int, places: Sequence[int]) -> int:
        """Bytes of what the places of a sequence keep beside the nodes."""
        total = len(places) * self.cache.states.slot_bytes
        for k in self._sliding:
            total += len({page for p in places for page in self.cache.seen_pages(sequence, k, p)[1]}) * self.cache.pools[k].page_bytes
        return total

    def _is_within(self, room: int) -> bool:
        return self.used_bytes <= room

    def _extend(self, node: _Node, ids: bytes, sequence: int, index: int) -> _Node:
        """The child of a node that begins with `ids`, made of the sequence's page where there is none."""
        child, common = node.closest(ids)
        if child is None or common * ID_BYTES < min(len(child.ids), len(ids)):
            child = _Node(node, ids, self._pages(sequence, index))
            node.children.insert(bisect_left(node.children, ids, key=_ids), child)
            self._hold(self._whole, child.pages)
        elif len(child.ids) < len(ids):
            # The page was cut short by the end of its sequence; this one has the same positions and more.
            self._drop(self._whole, child.pages)
            child.ids, child.pages = ids, self._pages(sequence, index)
            self._hold(self._whole, child.pages)
        node.newest = child
        return child

    def _pages(self, sequence: int, index: int) -> tuple[int, ...]:
        return tuple(self.cache.page(sequence, k, index) for k in self._whole)

    def _put_place(self, node: _Node, offset: int, sequence: int, position: int) -> None:
        if self.anywhere:
            # One is enough: pages are dropped from the end of a branch, wherever on it sequences ended.
            self._forget_above(node)
            offset = 0
        place = node.places.get(offset)
        if place is None:
            windows = tuple(self._window(sequence, k, position) for k in range(len(self.cache.kinds)))
            slots = self.cache.states.slots(sequence, position)
            place = node.places[offset] = _Place(node, offset, slots, windows)
            for k, (_, pages) in enumerate(windows):
                self._hold((k,) * len(pages), pages)
            self._hold_slots(slots)
        self._places[place] = None
        self._places.move_to_end(place)

    def _window(self, sequence: int, kind: int, position: int) -> tuple[int, tuple[int, ...]]:
        if kind not in self._sliding:
            return 0, ()
        first, pages = self.cache.seen_pages(sequence, kind, position)
        return first, tuple(pages)

    def _forget_above(self, node: _Node) -> None:
        above = node.parent
        while above is not None:
            for place in above.places.values():
                del self._places[place]
            above.places.clear()
            above = above.parent

    # Giving back

    def make_way(self, need_bytes: int) -> None:
        """A sequence takes so many bytes next. Evict until they and all that is held are within the cap, as far as that can be: the pages
        that go are those that the sequence gets."""
        room = self.cap_bytes - need_bytes
        if self.cache.held_bytes > room:
            self._evict(lambda: self.cache.held_bytes <= room)

    def evict(self, need_bytes: int) -> int:
        """Give back at least so many bytes, the places first that were not used for longest; nothing when there are not so many to give.
        The bytes given back."""
        if need_bytes > self.used_bytes or need_bytes > self._evictable_bytes():
            return 0
        before = self.cache.accountant.used_bytes
        self._evict(lambda: before - self.cache.accountant.used_bytes >= need_bytes)
        return before - self.cache.accountant.used_bytes

    def clear(self) -> None:
        """Forget everything. Sequences keep what they use."""
        for place in list(self._places):
            rest: _Place | None = place
            while rest is not None:
                rest = self._remove(rest)

    def _evict(self, enough: Callable[[], bool]) -> None:
        before = self.used_bytes
        for place in list(self._places):
            rest: _Place | None = place
            while rest is not None and not enough() and not self._in_use(rest):
                rest = self._remove(rest)
            if enough():
                break
        self.counters.evicted_bytes += before - self.used_bytes

    def _in_use(self, place: _Place) -> bool:
        """True when a sequence holds what would be given back."""
        if place.slots and self.cache.states.holders(place.slots) > 1:
            return True
        if any(self.cache.holders(k, page) > 1 for k in self._sliding for page in place.windows[k][1]):
            return True
        return not place.node.children and any(self.cache.holders(k, p) > 1 for k, p in zip(self._whole, place.node.pages, strict=True))

    def _remove(self, place: _Place) -> _Place | None:
        """Forget a place, and the nodes that nothing continues. Of a plain branch only its last page goes, and the place moves up."""
        node: _Node | None = place.node
        assert node is not None
        del self._places[place]
        del node.places[place.offset]
        for k, (_, pages) in enumerate(place.windows):
            self._drop((k,) * len(pages), pages)
        self._drop_slots(place.slots)
        while node is not None and not node.children and not node.places:
            parent = node.parent
            if parent is None:
                self._roots = {salt: root for salt, root in self._roots.items() if root is not node}
                return None
            self._drop(self._whole, node.pages)
            parent.children.remove(node)
            if parent.newest is node:
                parent.newest = parent.children[-1] if parent.children else None
            node = parent
            if self.anywhere and node.parent is not None and not node.children and not node.places:
                moved = node.places[0] = _Place(node, 0, (), place.windows)
                self._places[moved] = None
                self._places.move_to_end(moved, last=False)
                return moved
        return None

    def _evictable_bytes(self) -> int:
        """Bytes that no sequence holds: no more than these can come back."""
        pools, total = self.cache.pools, 0
        for k, held in enumerate(self._held):
            total += pools[k].page_bytes * sum(self.cache.holders(k, page) == 1 for page in held)
        return total + self.cache.states.slot_bytes * sum(self.cache.states.holders(slots) == 1 for slots in self._held_slots)

    # What several places keep, or branches that part after it, is held once and counted once

    def _hold(self, kinds: Sequence[int], pages: Sequence[int]) -> None:
        for k, page in zip(kinds, pages, strict=True):
            held = self._held[k]
            if page not in held:
                self.cache.hold(k, page)
                self.used_bytes += self.cache.pools[k].page_bytes
            held[page] = held.get(page, 0) + 1

    def _hold_slots(self, slots: Slots) -> None:
        if slots:
            if slots not in self._held_slots:
                self.cache.states.hold(slots)
                self.used_bytes += self.cache.states.slot_bytes
            self._held_slots[slots] = self._held_slots.get(slots, 0) + 1

    def _drop_slots(self, slots: Slots) -> None:
        if slots:
            self._held_slots[slots] -= 1
            if not self._held_slots[slots]:
                del self._held_slots[slots]
                self.cache.states.drop(slots)
                self.used_bytes -= self.cache.states.slot_bytes

    def _drop(self, kinds: Sequence[int], pages: Sequence[int]) -> None:
        for k, page in zip(kinds, pages, strict=True):
            held = self._held[k]
            held[page] -= 1
            if not held[page]:
                del held[page]
                self.cache.drop(k, page)
                self.used_bytes -= self.cache.pools[k].page_bytes
