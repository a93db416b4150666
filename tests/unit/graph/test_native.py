"""Native tables and functions against their NumPy specification, by bytes. Whole models are compared in tests/laws/test_reference.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quaff import _native
from quaff.graph import arithmetic
from quaff.graph.rope_table import rope_rows


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield _native.isa()
    _native.set_isa(before)


@pytest.mark.parametrize(("theta", "dim", "factor"), [(10000.0, 64, 1.0), (1e6, 256, 1.0), (1e6, 16, 8.0), (500000.0, 128, 1.0)])
def test_rope_tables(theta: float, dim: int, factor: float) -> None:
    positions = np.concatenate([np.arange(300), [1023, 1024, 99_999]]).astype(np.int32)
    native = _native.RopeTable(theta, dim, factor).rows(positions)
    assert native.tobytes() == rope_rows(theta, dim, positions, factor).tobytes()


def test_functions(isa: str) -> None:
    x = np.concatenate([np.linspace(-90, 90, 40_001), np.linspace(-1, 1, 10_001), [0.0, -0.0, 2.0**-140]]).astype(np.float32)
    for native, own in ((_native.exp_row, arithmetic.exp), (_native.sigmoid_row, arithmetic.sigmoid), (_native.tanh_row, arithmetic.tanh)):
        assert native(x).tobytes() == own(x).tobytes()
    # The control: NumPy's own exp is another function.
    x = x[np.abs(x) < 80]
    assert _native.exp_row(x).tobytes() != np.exp(x).tobytes()
