"""How the weights of a model share a budget of memory: which stay, which are read anew in every pass, and in which pieces.

A pass is a walk over all stages that reads every streamed byte once. A unit is what is loaded together: the matrices of one stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from quaff.batch import Sums
from quaff.graph.program import Graph

PANEL_ROWS = 16
"""Rows of a packed panel (NUMERICS 8): blocks of the head are whole panels."""
SLOTS = 2
"""One is computed with while the other is filled; memory beyond that saves more bytes as a pin."""
EXPERTS_BYTES = 32 << 20
"""Of experts two groups of half of this, or one expert in each: one computes while the other is read (native/runtime/source.h)."""
SECTOR_BYTES = 4096
"""Direct reads begin and end at multiples of it."""
READ_BUFFER_BYTES = 8 << 20
"""Aligned memory into which the reader reads before it packs, all of it together."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights of one stage, sizes as packed. `names` are loaded together; of `experts`, stacks of matrices, those that rows chose.

    `expert_bytes` is the sum of one expert's matrices, `experts_used` how many a row chooses. Vectors, biases and token tables are in no
    unit.
    """

    stage: int
    names: tuple[str, ...]
    nbytes: int
    experts: tuple[str, ...] = ()
    experts_bytes: int = 0
    expert_bytes: int = 0
    experts_used: int = 0

    @property
    def all_bytes(self) -> int:
        return self.nbytes + self.experts_bytes

    @property
    def row_bytes(self) -> int:
        """Of those that one row reads."""
        return self.nbytes + self.experts_used * self.expert_bytes

    @property
    def kept_bytes(self) -> int:
        """Where it stays: an expert's matrix may begin and end within a sector."""
        matrices = len(self.experts) * (self.experts_bytes // self.expert_bytes) if self.experts else 0
        return self.all_bytes + 2 * SECTOR_BYTES * matrices


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a plan."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the bytes of a budget go. Sizes are bytes; the items' sum is at most `memory_bytes`, the resident memory of the whole process.

    `base_bytes`: the process before weights are loaded, and a margin. `small_bytes`: vectors and biases, always in memory. With
    `resident` all weights are, and slots and pins mean nothing. Else `slots` slots of `slot_bytes` hold streamed units in turn, of the head
    at most `head_block_rows` rows; `expert_slot_bytes` hold routed experts. The units of the stages in `pinned` are read once and kept,
    `pinned_bytes` of them. Token tables are kept (`embedding` "pinned") or read by rows; a head that is one of the kept tables is pinned
    too, its bytes being the table's. `pass_rows` rows go through the model in one pass, in cells of `chunk` rows; `positions` of KV state
    are priced for each of `sequences`, and `logits_rows` rows of logits in one step.
    """

    memory_bytes: int
    base_bytes: int
    weight_bytes: int
    resident: bool
    units: tuple[Unit, ...]
    small_bytes: int
    slots: int
    slot_bytes: int
    read_buffer_bytes: int
    expert_slot_bytes: int
    pinned: frozenset[int]
    pinned_bytes: int
    embedding: Literal["pinned", "rows"]
    embedding_bytes: int
    head_block_rows: int
    chunk: int
    pass_rows: int
    positions: int
    sequences: int
    logits_rows: int
    kv_bytes: int
    scratch_bytes: int
    logits_bytes: int
    prefix_cache_bytes: int
    items: tuple[Item, ...]

    @property
    def planned_bytes(self) -> int:
        """The peak of resident memory that the plan foresees."""
        return sum(item.nbytes for item in self.items)

    @property
    def pass_bytes(self) -> int:
        """Packed bytes that a pass streams once what is pinned has been read; of mixtures, if rows choose every expert."""
        return 0 if self.resident else sum(unit.all_bytes for unit in self.units if unit.stage not in self.pinned)

    @property
    def token_bytes(self) -> int:
        """Packed bytes that a generated token streams where it has a pass to itself; rows of token tables left out."""
        return 0 if self.resident else sum(unit.row_bytes for unit in self.units if unit.stage not in self.pinned)

    def disk_bytes(self, passes: int, tail: int) -> int:
        """Packed bytes that reading a prompt in so many passes takes, the first of which reads what is pinned too; 0 where nothing is
        streamed. Stages from `tail` on are needed for the last row alone, and so by one of the passes."""
        if self.resident:
            return 0
        once = sum(unit.all_bytes for unit in self.units[tail:] if unit.stage not in self.pinned)
        return self.embedding_bytes + self.pinned_bytes + passes * (self.pass_bytes - once) + once

    def as_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("units", "pinned", "items")}
        return {
            **plain,
            "pinned_stages": sorted(self.pinned),
            "pass_bytes": self.pass_bytes,
            "token_bytes": self.token_bytes,
            "planned_bytes": self.planned_bytes,
            "items": [{"what": item.what, "bytes": item.nbytes} for item in self.items],
        }


@dataclass(frozen=True, slots=True)
class StreamCounters(Sums):
    """What streaming weights did. A unit's bytes count in the pass that uses it, also when they were read ahead of it.

    `wait_seconds`: the computation stood still for the disk; `compute_seconds`: it ran. Beside it `read_bytes` were read in `read_seconds`,
    what is read ahead included, and packed in `pack_seconds`, of all readers together.
    `prefetch_hits`: units that were there when they were asked for; `prefetch_misses`: those that were not.
    """

    disk_bytes: int = 0
    read_bytes: int = 0
    passes: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    read_seconds: float = 0.0
    pack_seconds: float = 0.0
    prefetch_hits: int = 0
    prefetch_misses: int = 0


def units_of(graph: Graph, sizes: Mapping[str, int]) -> tuple[Unit, ...]:
    """One unit per stage, by its index; `sizes` are packed bytes by tensor name. A matrix that two stages share is in both units."""
    return tuple(
        Unit(
            index,
            stage.linear_weights,
            sum(sizes[name] for name in stage.linear_weights),
            stage.expert_weights,
            sum(sizes[name] for name in stage.expert_weights),
            sum(sizes[name] for name in stage.expert_weights) // max(1, stage.experts[0]),
            stage.experts[1],
        )
        for index, stage in enumerate(graph.stages)
    )
