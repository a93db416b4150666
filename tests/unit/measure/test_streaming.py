"""What is said about streaming: which of disk and arithmetic took longer, speeds, sums of prompts and generation."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from quaff.measure.streaming import Streaming, bound_of, megabytes_per_second, plan_markdown, plan_sentence
from quaff.weights.plan import Item, Plan, StreamCounters, Unit


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {f.name: 0 for f in fields(Plan)}
    units = (Unit(0, (), 0), Unit(1, ("a",), 300), Unit(2, ("b",), 500), Unit(3, ("c",), 200))
    values |= {"resident": False, "units": units, "pinned": frozenset({1}), "pinned_bytes": 300, "items": (Item("everything", 900),)}
    values |= {"memory_bytes": 1000, "weight_bytes": 1000, "pass_rows": 100, "positions": 250, "sequences": 1, "embedding": "rows"}
    return Plan(**{**values, **changes})


@pytest.mark.parametrize(
    ("wait", "compute", "expected"), [(0.0, 0.0, ""), (0.05, 0.95, "compute"), (0.11, 0.89, "disk"), (3.0, 0.1, "disk")]
)
def test_more_than_a_tenth_of_waiting_is_the_disk(wait: float, compute: float, expected: str) -> None:
    assert bound_of(StreamCounters(wait_seconds=wait, compute_seconds=compute)) == expected


def test_speed_is_that_of_reading_alone() -> None:
    assert megabytes_per_second(StreamCounters(disk_bytes=1, read_bytes=3_000_000, read_seconds=1.5, wait_seconds=9.0)) == 2.0
    assert megabytes_per_second(StreamCounters()) == 0.0


def test_prompts_and_generation_are_apart_and_summed() -> None:
    prefill = StreamCounters(disk_bytes=1000, passes=1, wait_seconds=1.0, compute_seconds=4.0, prefetch_hits=5)
    decode = StreamCounters(disk_bytes=700, passes=2, wait_seconds=3.0, compute_seconds=0.5, prefetch_misses=2)
    report = Streaming(plan(), prefill, decode, 950, 980).as_dict()
    assert (report["prefill_bytes"], report["decode_bytes"], report["pass_bytes"]) == (1000, 700, 700)
    assert (report["prefill_passes"], report["decode_passes"]) == (1, 2)
    assert (report["wait_seconds"], report["compute_seconds"], report["bound"]) == (4.0, 4.5, "disk")
    assert (report["prefetch_hits"], report["prefetch_misses"]) == (5, 2)
    assert (report["peak_bytes"], report["kernel_peak_bytes"], report["memory_bytes"]) == (950, 980, 1000)


def test_passes_read_what_is_not_pinned_and_the_tail_once() -> None:
    assert plan().pass_bytes == 700
    assert plan().disk_bytes(1, tail=3) == 1000
    assert plan().disk_bytes(10, tail=3) == 300 + 10 * 500 + 200
    assert plan(resident=True).disk_bytes(10, tail=3) == 0


def test_the_list_ends_with_what_is_free_and_the_budget() -> None:
    lines = plan_markdown(plan())
    assert lines[-4].startswith("| free | 100 |") and lines[-3].startswith("| budget | 1,000 |")
    assert "3 passes of at most 100 rows" in plan_sentence(plan())
    assert "a token alone" not in plan_sentence(plan())
    mixture = plan(units=(Unit(0, (), 0), Unit(1, ("a",), 300), Unit(2, ("b",), 100, ("c",), 400, 50, 2)))
    assert (mixture.pass_bytes, mixture.token_bytes) == (500, 200)
    assert plan_sentence(mixture).endswith("a token alone chooses so few that it reads 200 B")
    assert "stay in memory" in plan_sentence(plan(resident=True))
