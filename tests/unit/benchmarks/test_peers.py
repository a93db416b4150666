"""The arithmetic of the comparison: rotation, warm-up, paired ratios, and which peer counts."""

from __future__ import annotations

import pytest
from benchmarks.peers import compare, report


class FakeWorker:
    """Takes the given seconds in turn; the round of warm-up takes ten times as long."""

    def __init__(self, name: str, seconds: list[float], log: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.log = name, log
        self.values = iter([10 * seconds[0], *seconds])

    def seconds(self, ids: list[int]) -> float:
        self.log.append((self.name, tuple(ids)))
        return next(self.values)


def test_rounds_share_a_new_prompt_and_rotate() -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    workers = [FakeWorker("a", [1.0, 1.0, 1.0], log), FakeWorker("b", [2.0, 2.0, 4.0], log)]
    rates = compare(workers, vocab=1000, tokens=8, rounds=3, seed=1)  # type: ignore[arg-type]
    assert rates == {"a": [8.0, 8.0, 8.0], "b": [4.0, 4.0, 2.0]}
    prompts = [ids for _, ids in log]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 4
    assert [name for name, _ in log] == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_ratio_is_the_median_of_paired_ratios_against_the_fastest_peer() -> None:
    rates = {"quaff": [100.0, 50.0, 90.0], "xllamacpp": [50.0, 10.0, 30.0], "llama-cpp-python": [20.0, 25.0, 60.0]}
    result = report(rates)
    assert result["ratios"] == {"xllamacpp": 3.0, "llama-cpp-python": 2.0}
    assert result["fastest_peer"] == "xllamacpp"
    assert result["ratio"] == 3.0
    assert result["engines"]["quaff"] == {"tokens_per_second": 90.0, "best": 100.0, "samples": [100.0, 50.0, 90.0]}


@pytest.mark.parametrize("rates", [{"quaff": [1.0]}, {"xllamacpp": [1.0]}])
def test_no_ratio_without_both_sides(rates: dict[str, list[float]]) -> None:
    assert "ratio" not in report(rates)
