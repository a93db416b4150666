"""Plans for streamed weights, written by hand: what is kept in memory and in which pieces the rest comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal

from quaff.graph.program import Graph
from quaff.weights.plan import Plan, units_of

MakePlan = Callable[[Graph, Mapping[str, int]], Plan]


def plan(
    slots: int = 2,
    pinned: Iterable[int] | None = (),
    embedding: Literal["pinned", "rows"] = "rows",
    head_block_rows: int = 16,
    expert_slot_bytes: int = 0,
) -> MakePlan:
    """A plan of these decisions, other figures being zero; `pinned` None: all stages."""

    def of(graph: Graph, sizes: Mapping[str, int]) -> Plan:
        values: dict[str, Any] = {f.name: 0 for f in fields(Plan)}
        stages = range(len(graph.stages)) if pinned is None else pinned
        values |= {"resident": False, "units": units_of(graph, sizes), "slots": slots, "pinned": frozenset(stages), "items": ()}
        values |= {"embedding": embedding, "head_block_rows": head_block_rows, "expert_slot_bytes": expert_slot_bytes}
        return Plan(**values)

    return of


PLANS: dict[str, MakePlan] = {
    "least": plan(slots=1),
    "two slots": plan(),
    "leading layers pinned": plan(pinned=(1, 2, 3), head_block_rows=64, expert_slot_bytes=1 << 14),
    "embedding pinned": plan(slots=3, embedding="pinned", head_block_rows=1 << 16, expert_slot_bytes=1 << 20),
    "all pinned": plan(pinned=None, embedding="pinned", head_block_rows=1 << 16),
}
