"""Streamed weights for people and programs: the plan as a list, what streaming did, and whether disk or arithmetic took longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quaff.measure import counted
from quaff.measure.table import Column, markdown
from quaff.weights.budget import human_bytes
from quaff.weights.plan import Item, Plan, StreamCounters

DISK_SHARE = 0.1
"""A computation that stands still for more of the time than this is bound by the disk."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What streaming did, for prompts and for generation. `peak_bytes` by our own count, `kernel_peak_bytes` by the system's."""

    plan: Plan
    prefill: StreamCounters
    decode: StreamCounters
    peak_bytes: int
    kernel_peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Bytes are bytes, seconds seconds; `pass_bytes` are those that a pass streams once all pins are in memory."""
        both = self.prefill + self.decode
        parts = {"prefill": self.prefill, "decode": self.decode}
        return {
            "memory_bytes": self.plan.memory_bytes,
            "peak_bytes": self.peak_bytes,
            "kernel_peak_bytes": self.kernel_peak_bytes,
            "pass_bytes": self.plan.pass_bytes,
            **{f"{name}_passes": c.passes for name, c in parts.items()},
            **{f"{name}_bytes": c.disk_bytes for name, c in parts.items()},
            **{f"{name}_wait_seconds": c.wait_seconds for name, c in parts.items()},
            **{f"{name}_compute_seconds": c.compute_seconds for name, c in parts.items()},
            "wait_seconds": both.wait_seconds,
            "compute_seconds": both.compute_seconds,
            "read_bytes": both.read_bytes,
            "read_seconds": both.read_seconds,
            "pack_seconds": both.pack_seconds,
            "read_mb_per_second": megabytes_per_second(both),
            "prefetch_hits": both.prefetch_hits,
            "prefetch_misses": both.prefetch_misses,
            "bound": bound_of(both),
        }

    def sentence(self) -> str:
        """One line for the person at the terminal."""
        both = self.prefill + self.decode
        parts = ((self.prefill, "prompt"), (self.decode, "answer"))
        read = " and ".join(f"{human_bytes(c.disk_bytes)} in {counted(c.passes, 'pass', 'passes')} for the {name}" for c, name in parts)
        return (
            f"streamed {read} at {megabytes_per_second(both):,.0f} MB/s; {both.wait_seconds:.1f} s waiting for the disk, "
            f"{both.compute_seconds:.1f} s computing; peak {human_bytes(self.kernel_peak_bytes)} of {human_bytes(self.plan.memory_bytes)}"
        )


def bound_of(counters: StreamCounters) -> str:
    """ "disk" or "compute"; "" before anything ran."""
    seconds = counters.wait_seconds + counters.compute_seconds
    if not seconds:
        return ""
    return "disk" if counters.wait_seconds > DISK_SHARE * seconds else "compute"


def megabytes_per_second(counters: StreamCounters) -> float:
    """Of reading alone, in units of 10^6 bytes."""
    return counters.read_bytes / counters.read_seconds / 1e6 if counters.read_seconds else 0.0


def plan_markdown(plan: Plan) -> list[str]:
    """The items of a plan, then what it means."""
    columns: list[Column[Item]] = [
        Column("memory", lambda item: item.what, right=False),
        Column("bytes", lambda item: f"{item.nbytes:,}"),
        Column("", lambda item: human_bytes(item.nbytes)),
    ]
    spare = plan.memory_bytes - plan.planned_bytes
    items = [*plan.items, Item("free", spare), Item("budget", plan.memory_bytes)]
    return [*markdown(columns, items), "", plan_sentence(plan)]


def plan_sentence(plan: Plan) -> str:
    if plan.resident:
        return f"all weights, {human_bytes(plan.weight_bytes)}, stay in memory"
    passes = -(-plan.positions * plan.sequences // plan.pass_rows)
    alone = (
        f"; of experts a token alone chooses so few that it reads {human_bytes(plan.token_bytes)}"
        if plan.token_bytes < plan.pass_bytes
        else ""
    )
    return (
        f"weights are streamed layer by layer: {human_bytes(plan.weight_bytes)} are read once, then {human_bytes(plan.pass_bytes)} in "
        f"every pass over the model; {plan.positions:,} tokens take {counted(passes, 'pass', 'passes')} of at most {plan.pass_rows:,} "
        f"rows, and every generated token takes one, which all sequences share{alone}"
    )
