"""The only values that pass between stages: what to run, what it cost, what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import add, sub
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

PAGE = 64
"""Positions of a KV page (NUMERICS 16); pages start at absolute multiples of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`len(tokens)` consecutive rows of one sequence, the first at absolute position `start`.

    `tables` holds, per KV kind, the page ids of the sequence by `position // 64` (int32, -1 where a page was freed); it covers
    the segment's last position. `logits` lists the rows whose logits are wanted, counted from the segment's first row, ascending.
    `states` holds, per kind of recurrent state, int32: the slot before the first row (-1 at position 0), then pairs (rows, slot): where
    the state after so many rows of the segment is left, ascending; the last pair is the segment's end.
    """

    sequence: int
    start: int
    tokens: NDArray[np.int32]
    tables: tuple[NDArray[np.int32], ...]
    logits: tuple[int, ...] = ()
    states: tuple[NDArray[np.int32], ...] = ()

    @property
    def rows(self) -> int:
        return len(self.tokens)


Shape = tuple[tuple[int, tuple[int, ...]], ...]
"""Of every segment of a batch its number of rows, and those whose logits are wanted: all that its schedules depend on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of different sequences, computed together. Row r of the batch is the r-th token of all segments in order."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    @property
    def shape(self) -> Shape:
        return tuple([(len(s.tokens), s.logits) for s in self.segments])


@dataclass(frozen=True, slots=True)
class Sums:
    """What counters have in common: they are added and subtracted field by field."""

    def _each(self, operation: Callable[[Any, Any], Any], other: Self) -> Self:
        make: Callable[..., Self] = type(self)
        return make(*(operation(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def __add__(self, other: Self) -> Self:
        return self._each(add, other)

    def __sub__(self, other: Self) -> Self:
        return self._each(sub, other)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Counters(Sums):
    """What a run did, counted where it happened.

    Bytes are bytes, `launches` executed ops (one parallel region each), `macs` multiply-accumulates of linear ops, `attention_macs` those
    of scores and values over visible positions, `state_macs` those of convolutions and recurrences. Stages after the last one that leaves
    state behind run only for rows whose logits are wanted; they count as `head_...`, so that `weight_bytes_touched` follows the rows of a
    prompt alone. The embedding is apart too.

    Mixtures, all layers: `expert_rows` counts (row, chosen expert) pairs, `experts_touched` the distinct experts of every cell, and
    `expert_bytes_touched` their bytes. The last two follow the routing: a prediction of them is an expectation, `fixed` leaves them out,
    and `weight_bytes_loaded` too.
    """

    weight_bytes_touched: int = 0
    weight_bytes_loaded: int = 0
    embedding_bytes_touched: int = 0
    head_bytes_touched: int = 0
    launches: int = 0
    macs: int = 0
    attention_macs: int = 0
    state_macs: int = 0
    head_macs: int = 0
    head_rows: int = 0
    kv_bytes_written: int = 0
    expert_rows: int = 0
    experts_touched: int = 0
    expert_bytes_touched: int = 0

    @property
    def fixed(self) -> Counters:
        """What is known to the unit before a run: without what the routing decides, and what memory held already."""
        return replace(self, weight_bytes_loaded=0, experts_touched=0, expert_bytes_touched=0)

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of weights that kernels read: layers, experts, embedding rows and head."""
        return self.weight_bytes_touched + self.expert_bytes_touched + self.embedding_bytes_touched + self.head_bytes_touched

    @property
    def work(self) -> int:
        """Multiply-accumulates of layers, attention, recurrences and head: what progress is measured in."""
        return self.macs + self.attention_macs + self.state_macs + self.head_macs


@dataclass(frozen=True, slots=True)
class Logits:
    """Result of one step. `values[i]` are the f32 logits of batch row `rows[i]`; a cancelled step has those whose head was done. They are
    overwritten by the next step of the same runner. Where the step drew tokens they are `drawn`, by segment, and `values` has but the last
    row of each.

    `finished[i]` counts the leading rows of segment i whose state is complete in every mixer (with recurrent layers all rows or none);
    `poisoned[i]` says that a row of segment i became non-finite (NUMERICS 7): nothing of that segment may be published or cached.
    """

    rows: NDArray[np.int32]
    values: NDArray[np.float32]
    finished: tuple[int, ...]
    poisoned: tuple[bool, ...]
    drawn: tuple[list[int], ...] = ()
