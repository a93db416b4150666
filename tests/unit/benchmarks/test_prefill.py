"""The ratio that the prefill benchmark expects of the counters."""

from __future__ import annotations

import pytest
from benchmarks.prefill import passes


@pytest.mark.parametrize(
    ("schedule", "tokens", "chunk", "times"),
    [
        ("token", 512, 64, 512),
        ("chunk", 512, 512, 1),
        ("chunk", 513, 512, 2),
        ("chunk", 5, 2, 3),
        ("layer", 512, 512, 1),
        ("layer", 513, 512, None),
    ],
)
def test_passes_over_the_weights(schedule: str, tokens: int, chunk: int, times: int | None) -> None:
    assert passes(schedule, tokens, chunk) == times
