"""RoPE tables against float64 libm and extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quaff.config import RopeConfig
from quaff.elementary import exp64, log64
from quaff.graph.rope_table import rope_rows, sin_cos64


def test_logarithm_and_exponential() -> None:
    for theta in (1.5, 2.0, 10000.0, 100000.0, 500000.0, 1e6, 1e12, math.sqrt(0.5), 1234.567):
        assert log64(theta) == pytest.approx(math.log(theta), rel=2.0**-52, abs=0)
    for y in np.linspace(-30, 5, 5001):
        assert exp64(float(y)) == pytest.approx(math.exp(y), rel=2.0**-51, abs=0)
    assert exp64(0.0) == 1.0 and log64(1.0) == 0.0


def test_sine_and_cosine() -> None:
    rng = np.random.default_rng(0)
    angle = np.concatenate([rng.uniform(0, 1e6, 100_000), np.arange(-50, 50) * (np.pi / 4), [0.0]])
    sin, cos = sin_cos64(angle)
    assert np.abs(sin - np.sin(angle)).max() < 2.0**-51 and np.abs(cos - np.cos(angle)).max() < 2.0**-51
    assert sin[-1] == 0 and cos[-1] == 1


@pytest.mark.parametrize(("theta", "dim", "factor"), [(10000.0, 64, 1.0), (1e6, 256, 1.0), (1e6, 128, 8.0), (100000.0, 16, 4.0)])
def test_rows_are_rounded_once(theta: float, dim: int, factor: float) -> None:
    positions = np.concatenate([np.arange(500), np.random.default_rng(1).integers(0, 10**6, 500)]).astype(np.int32)
    rows = rope_rows(RopeConfig(theta, dim, True, (factor,) * (dim // 2)), positions)
    assert rows.dtype == np.float32 and rows.shape == (1000, dim)
    angle = positions[:, None] * (np.longdouble(theta) ** (-np.arange(0, dim, 2, dtype=np.longdouble) / dim) / factor)
    exact = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    assert np.abs(rows - exact).max() <= 2.0**-25 + 2.0**-32


def test_rows_do_not_depend_on_their_neighbours() -> None:
    positions = np.arange(100, dtype=np.int32)
    rope = RopeConfig(10000.0, 32, True, temperature=0.1, temperature_length=7)
    together = rope_rows(rope, positions)
    assert all(np.array_equal(rope_rows(rope, positions[i : i + 1])[0], together[i]) for i in range(100))


def test_bits_are_fixed() -> None:
    """Values that a change of any step would move; native code is compared with the same function elsewhere."""
    rows = rope_rows(RopeConfig(10000.0, 4, True), np.array([0, 1, 12345]))
    assert rows.view(np.uint32).tolist() == [
        [1065353216, 1065353216, 0, 0],
        [1057640768, 1065352377, 1062693540, 1008981591],
        [1038366834, 3206118040, 3212732369, 3209487371],
    ]
