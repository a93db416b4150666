"""Native tables and functions against their NumPy specification, by bytes. Whole models are compared in tests/laws/test_reference.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quaff import _native
from quaff.config import RopeConfig
from quaff.graph import arithmetic
from quaff.graph.rope_table import rope_rows
from quaff.models.rope import llama3_factors, yarn_factors, yarn_scale


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield _native.isa()
    _native.set_isa(before)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(10000.0, 64, True),
        RopeConfig(1e6, 256, True),
        RopeConfig(1e6, 16, True, (8.0,) * 8),
        RopeConfig(500000.0, 128, False, llama3_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192)),
        RopeConfig(1e6, 128, False, yarn_factors(1e6, 128, 4.0, 32768), yarn_scale(4.0)),
        RopeConfig(1e6, 128, False, temperature=0.1, temperature_length=100),
        RopeConfig(1e6, 8, False, (1.0, 1e30, 1.0, 0.5), 0.7),
    ],
)
def test_rope_tables(rope: RopeConfig) -> None:
    positions = np.concatenate([np.arange(300), [1023, 1024, 99_999]]).astype(np.int32)
    native = _native.RopeTable(rope.theta, rope.rotary_dim, rope.factors, rope.scale, rope.temperature, rope.temperature_length)
    assert native.rows(positions).tobytes() == rope_rows(rope, positions).tobytes()


def test_impossible_rope_tables_are_refused() -> None:
    for wrong in ((1e4, 15), (1.0, 16), (1e4, 16, (1.0,) * 7), (1e4, 16, (0.0,) * 8), (1e4, 16, (), 0.0), (1e4, 16, (), 1.0, 0.1, 0)):
        with pytest.raises(ValueError, match="no RoPE table"):
            _native.RopeTable(*wrong)


def test_functions(isa: str) -> None:
    x = np.concatenate([np.linspace(-90, 90, 40_001), np.linspace(-1, 1, 10_001), [0.0, -0.0, 2.0**-140]]).astype(np.float32)
    for native, own in ((_native.exp_row, arithmetic.exp), (_native.sigmoid_row, arithmetic.sigmoid), (_native.tanh_row, arithmetic.tanh)):
        assert native(x).tobytes() == own(x).tobytes()
    # The control: NumPy's own exp is another function.
    x = x[np.abs(x) < 80]
    assert _native.exp_row(x).tobytes() != np.exp(x).tobytes()


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 weight of 1 x 268435456: rows may have 134217728 values at most"):
        _native.Weight(8, np.zeros(34, np.uint8), 1, 1 << 28)


def test_a_row_is_multiplied_in_the_parts_that_it_was_quantised_in() -> None:
    """Every part has outliers of its own."""
    norm, heads, whole = (
        (1, [0], [2, -1], [0], [1], [1e-5]),
        (16, [3, -1], [4], [1, -1], [1, 0, 2], []),
        (3, [3, -1], [4], [1, -1], [1, 0], []),
    )
    buffers = [(64, 0), (64, 1), (64, 0)]

    def quantise(parts: int) -> tuple[int, list[int], list[int], list[int], list[int], list[float]]:
        return (2, [2], [3], [], [parts], [])

    _native.Program(buffers, [norm, quantise(2), heads])
    _native.Program(buffers, [norm, quantise(2), heads, quantise(1), whole])
    for ops, message in (
        ([norm, quantise(1), heads], "head_linear needs heads that were quantised one by one"),
        ([norm, quantise(2), whole], "linear needs rows that were quantised as one"),
        ([(1, [0], [2, 3], [0], [1], [1e-5]), heads], "head_linear needs heads that were quantised one by one"),
        ([norm, quantise(4), heads], "quantize needs parts of a multiple of 32"),
        ([norm, quantise(0), heads], "quantize heads and width disagree"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.Program(buffers, ops)


CHANNELS, TAPS, ROWS = 16, 3, 5


def conv_step(states: list[list[int]], start: int, pool: _native.StatePool) -> None:
    """One step of a model that embeds, convolves and forgets: what it is given of recurrent state is checked before it runs."""
    model = _native.Model(CHANNELS, 8, 8)
    table = _native.Weight(0, np.zeros(8 * CHANNELS * 4, np.uint8), 8, CHANNELS)
    taps = _native.Weight(0, np.ones(CHANNELS * TAPS, np.float32).view(np.uint8), CHANNELS, TAPS)
    model.add_stage(_native.Program([], [(0, [], [0], [0], [], [1.0])]), [table])
    norm = (1, [0], [2, -1], [1], [1], [1e-5])
    conv = (9, [2], [3, -1], [0, -1], [0, 0, CHANNELS, TAPS, 1], [])
    model.add_stage(
        _native.Program([(CHANNELS, 0), (CHANNELS, 0)], [norm, conv]), [taps, _native.Weight.vector(np.ones(CHANNELS, np.float32))]
    )
    ints = [np.array(s, np.int32) for s in states]
    rows = np.array([[0, ROWS]] * 2, np.int32)
    _native.Runtime(1).step(
        model,
        [],
        [pool],
        [(np.zeros(ROWS, np.int32), start, [], ints)],
        np.array([0, 1], np.int32),
        np.array([0, 1, 2], np.int32),
        rows,
        np.zeros(0, np.int32),
        np.zeros((0, 8), np.float32),
        _native.Control(),
        _native.Counters(),
    )


def test_states_that_do_not_fit_a_step_are_refused() -> None:
    pool = _native.StatePool(1, CHANNELS * (TAPS - 1))
    a, b = pool.take(), pool.take()
    conv_step([[-1, 2, a, ROWS, b]], 0, pool)
    conv_step([[a, ROWS, b]], 7, pool)
    for states, start, message in (
        ([[a, ROWS, b]], 0, "exactly when it does not begin"),
        ([[-1, ROWS, b]], 1, "exactly when it does not begin"),
        ([[9, ROWS, b]], 1, "slot 9 is not in use"),
        ([[-1, ROWS, 9]], 0, "in slots that are in use"),
        ([[-1, 2, a, 2, b]], 0, "ascending numbers of rows"),
        ([[-1, ROWS + 1, b]], 0, "ascending numbers of rows"),
        ([[-1, 2, a]], 0, "the last state is the segment's end"),
        ([[-1]], 0, "a slot and pairs"),
        ([[-1, ROWS]], 0, "a slot and pairs"),
        ([], 0, "one list of slots per kind of state"),
        ([[-1, ROWS, b]] * 2, 0, "one list of slots per kind of state"),
        ([[a, ROWS, b]], -3, "position -3 is out of range"),
        ([[a, ROWS, b]], (1 << 31) - 2, "position 2147483646 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            conv_step(states, start, pool)
    with pytest.raises(ValueError, match="no state pool of kind 0 fits layer 0"):
        conv_step([[-1, ROWS, 0]], 0, _native.StatePool(1, CHANNELS))
    with pytest.raises(ValueError, match="no recurrent state of 0 layers"):
        _native.StatePool(0, 1)
    pool.give(a)
    with pytest.raises(ValueError, match="not in use"):
        pool.array(a)
    with pytest.raises(ValueError, match="not in use"):
        pool.give(a)
    assert pool.slots_in_use == 1
