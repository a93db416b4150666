"""The f32 operations of the reference against exact rational arithmetic and float64."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quaff.graph import arithmetic as f32
from quaff.graph.reference import attend

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR_ONE = st.integers(0, 2**23 - 1).map(lambda k: float(np.float32(1 + k * 2.0**-23)))


def rounded(x: Fraction) -> float:
    """x rounded to f32, nearest even, denormals kept: integers and fractions only."""
    if x == 0:
        return 0.0
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - 24, -149)
    while abs(x) >= Fraction(2) ** (e + 24):
        e += 1
    value = round(x / Fraction(2) ** e) * Fraction(2) ** e
    return float(value) if abs(value) < Fraction(2) ** 128 else float(np.copysign(np.inf, value.numerator))


def check(a: float, b: float, c: float) -> None:
    got = f32.fma(np.float32(a), np.float32(b), np.float32(c))
    assert float(got) == rounded(Fraction(a) * Fraction(b) + Fraction(c)), (a.hex(), b.hex(), c.hex())


@given(FINITE, FINITE, FINITE)
@settings(max_examples=400, deadline=None)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    check(a, b, c)


@given(NEAR_ONE, NEAR_ONE, NEAR_ONE, st.integers(-60, 60), st.sampled_from([1, -1]))
@settings(max_examples=800, deadline=None)
def test_fma_rounds_once_when_the_product_decides_a_tie(a: float, b: float, c: float, shift: int, sign: int) -> None:
    check(sign * a * 2.0**shift, b, c)


def test_fma_special_values() -> None:
    tiny, least, largest = 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max)
    for a, b, c in (
        (tiny, 0.5, least),
        (least, 0.5, 0.0),
        (least, 0.5, least),
        (least, 1.5, -least),
        (largest, 2.0, -largest),
        (largest, 1.0, largest),
    ):
        check(a, b, c)
    assert np.signbit(f32.fma(np.float32(-0.0), np.float32(1), np.float32(-0.0)))
    assert not np.signbit(f32.fma(np.float32(1), np.float32(1), np.float32(-1)))
    with np.errstate(invalid="ignore"):
        assert np.isnan(f32.fma(np.float32(np.inf), np.float32(0), np.float32(1)))


def test_fma_differs_from_rounding_twice() -> None:
    """The control: the float64 sum ties and then rounds to even; the true value lies below the tie."""
    a, b, c = (np.float32(x) for x in (2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), 1 + 2.0**-23))
    twice = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    assert float(f32.fma(a, b, c)) == float(c) != float(twice)


def test_fma_of_arrays_equals_fma_of_elements() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((3, 50)).astype(np.float32) * 2.0 ** rng.integers(-20, 20, (3, 50)) for _ in range(3))
    a, b, c = (np.float32(x) for x in (a, b, c))
    for i in np.ndindex(a.shape):
        check(float(a[i]), float(b[i]), float(c[i]))
    together = f32.fma(a, b, c)
    assert all(together[i] == f32.fma(a[i], b[i], c[i]) for i in np.ndindex(a.shape))


def test_exp_error_bound() -> None:
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(f32.exp(x) - exact) / exact) <= 2 * 2.0**-24


def test_exp_fixed_points_and_clamps() -> None:
    x = np.array([0.0, -0.0, -100, 100], dtype=np.float32)
    y = f32.exp(x)
    assert y[0] == y[1] == 1
    assert y[2] == f32.exp(np.float32(-87)) > 0 and y[3] == f32.exp(np.float32(88)) < np.inf
    assert f32.probability(np.array([-64.0, -64.00001, 0], dtype=np.float32)).tolist() == [float(f32.exp(np.float32(-64))), 0.0, 1.0]


def test_activations_are_close_to_float64() -> None:
    x = np.linspace(-20, 20, 10_001).astype(np.float32)
    w = x.astype(np.float64)
    gelu = 0.5 * w * (1 + np.tanh(np.sqrt(2 / np.pi) * (w + 0.044715 * w**3)))
    for got, exact in (
        (f32.sigmoid(x), 1 / (1 + np.exp(-w))),
        (f32.silu(x), w / (1 + np.exp(-w))),
        (f32.tanh(x), np.tanh(w)),
        (f32.gelu_tanh(x), gelu),
    ):
        assert np.max(np.abs(got - exact) / (1 + np.abs(exact))) < 3e-7


def test_folds_pair_as_stated() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(53) * 2.0 ** rng.integers(-10, 10, 53)).astype(np.float32)
    lanes = [np.float32(0)] * 16
    for j, value in enumerate(x):
        lanes[j % 16] = lanes[j % 16] + value
    for w in (8, 4, 2, 1):
        lanes = [lanes[j] + lanes[j + w] for j in range(w)]
    assert f32.sum16(x) == lanes[0]
    assert f32.max16(x) == x.max()
    assert any(f32.sum16(np.roll(x, shift)) != f32.sum16(x) for shift in range(1, 16)), "the order shows in the bits"


def test_rms_norm_matches_float64() -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 3, 40)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(f32.rms_norm(x, w, 1e-5), exact, rtol=1e-6)


def test_quantise() -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((5, 96)) * 2.0 ** rng.integers(-30, 30, (5, 1))).astype(np.float32)
    x[1, :32] = 0
    x[2, 32:64] = np.float32(2.0**-65)
    rows = f32.quantise(x)
    q, scale = rows.codes, rows.scale
    assert q.dtype == np.int8 and scale.shape == (5, 3) and 120 < np.abs(q.astype(int)).max() <= 127
    assert scale[1, 0] == 0 and not q[1, :32].any()
    assert scale[2, 1] == 0 and not q[2, 32:64].any()
    values = q.astype(np.float64) * np.repeat(scale, 32, axis=1)
    np.put_along_axis(values, rows.column, rows.outlier.astype(np.float64), axis=1)
    error = np.abs(values - x)
    assert np.all(error <= np.maximum(np.repeat(scale, 32, axis=1) * 0.5001, 2.0**-64))


def test_scales_have_eight_mantissas() -> None:
    """They are the least ones that no code exceeds 127 with, and codes are 0 where values are too small or too large for them."""
    steps = np.arange(1, 2, 1 / 8, dtype=np.float32)
    amax = np.concatenate([np.float32(127) * steps, 2.0 ** np.linspace(-70, 100, 3001, dtype=np.float32)])
    x = np.zeros((len(amax), 64), dtype=np.float32)
    x[:, 0], x[:, 32] = 2.0**127, amax  # the outlier, and a group of one value
    rows = f32.quantise(x)
    scale, code = rows.scale[:, 1], rows.codes[:, 32].astype(int)
    inside = (amax >= np.float32(2.0**-64)) & (amax < np.float32(2.0**96))
    assert scale[:8].tolist() == steps.tolist() and set(code[:8]) == {127}
    assert not scale[~inside].any() and not code[~inside].any() and 0 < inside.sum() < len(amax)
    mantissa, _ = np.frexp(scale[inside])
    assert set((16 * mantissa).tolist()) == set(range(8, 16))
    assert code[inside].max() == 127 and code[inside].min() == round(127 / 1.125)


def test_the_largest_of_1024_activations_is_kept_apart() -> None:
    x = np.random.default_rng(5).uniform(-1, 1, (3, 2144)).astype(np.float32)
    x[0, 1100] = -80  # would leave its neighbours codes of 0 and 1
    x[1, [40, 500]] = 3, -3  # the first one of equals
    x[2, :1024] = 0
    rows = f32.quantise(x)
    assert rows.column.shape == rows.outlier.shape == (3, 3)
    assert rows.column[0, 1] == 1100 and rows.outlier[0, 1] == -80 and rows.codes[0, 1100] == 0
    assert rows.column[1, 0] == 40 and rows.outlier[1, 0] == 3 and rows.codes[1, 500] == -round(3 / (1.625 / 64))
    assert rows.column[2, 0] == 0 and rows.outlier[2, 0] == 0 and not rows.scale[2, :32].any()
    blocks = np.arange(2144) // 1024
    assert all(np.abs(x[i, blocks == b]).max() == abs(rows.outlier[i, b]) for i in range(3) for b in range(3))
    assert rows.scale[0, 34] <= 1 / 128, "the group of the outlier is as fine as its neighbours"


def test_rope_turns_pairs() -> None:
    angle = np.array([[0.3, 1.1]])
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    side, apart = (f32.rope(x, cos, sin, interleaved)[0, 0] for interleaved in (True, False))
    for i in range(2):
        for y, a, b in ((side, 2 * i, 2 * i + 1), (apart, i, i + 2)):
            turned = complex(x[0, 0, a], x[0, 0, b]) * np.exp(1j * angle[0, i])
            np.testing.assert_allclose([y[a], y[b]], [turned.real, turned.imag], rtol=1e-6)
    assert side[4:].tolist() == apart[4:].tolist() == [5, 6], "dimensions after the rotary ones stay"


def test_keys_are_clamped() -> None:
    x = np.array([1e9, -1e9, 65504, -3, np.nan], dtype=np.float32)
    assert f32.clamp_f16(x).tolist() == [65504, -65504, 65504, -3, -65504]


def test_codes_of_13_bits() -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((500, 64)) * 2.0 ** rng.uniform(-60, 12, (500, 1))).astype(np.float32)
    coded = f32.encode(x)
    assert coded.scale is not None and not (coded.scale.view(np.uint32) & 0xFFFF).any(), "scales are bf16"
    tops = np.abs(coded.values).max(axis=1)
    assert tops.max() == 4095 and tops.min() >= 4095 * 128 // 129, (
        "the largest of a row has the largest code, or what rounding scales up leaves"
    )
    assert (np.abs(coded.values * coded.scale[:, None].astype(float) - x) <= 0.5001 * coded.scale[:, None]).all()
    edge = np.array([[2.0**-64, 0], [2.0**-65, 0], [0, 0], [65504, -65504]], dtype=np.float32)
    small = f32.encode(edge)
    assert small.scale is not None
    assert small.values[:, 0].tolist() == [4064, 0, 0, 4094] and (small.scale == 0).tolist() == [False, True, True, False]


def test_powers_of_two() -> None:
    x = np.concatenate([np.linspace(-92, 0, 100_001), [-0.5, -1.5, -91.5]]).astype(np.float32)
    np.testing.assert_allclose(f32.power(x).astype(float), np.exp2(x.astype(float)), rtol=4.4 * 2.0**-24)
    assert f32.power(np.array([0, -1, -92, np.nextafter(np.float32(-92), np.float32(-100)), -np.inf], np.float32)).tolist() == [
        1,
        0.5,
        2.0**-92,
        0,
        0,
    ]


def test_codes_attend_as_well_as_halves() -> None:
    """Against f64: codes of keys, values, q and probabilities err no more than twice what keys and values rounded to f16 do."""
    rng = np.random.default_rng(11)
    for length, spread in ((40, 1.0), (300, 1.0), (300, 4.0)):
        q = (rng.standard_normal((20, 1, 64)) * spread).astype(np.float32)
        k, v = (rng.standard_normal((length, 1, 64)).astype(np.float32) for _ in range(2))
        at = np.full(20, length - 1)

        def exact(k: NDArray[Any], v: NDArray[Any], q: NDArray[Any] = q) -> NDArray[Any]:
            s = q[:, 0].astype(float) @ k[:, 0].astype(float).T / 8
            p = np.exp(s - s.max(axis=1, keepdims=True))
            return p @ v[:, 0].astype(float) / p.sum(axis=1, keepdims=True)

        true = exact(k, v)
        halves = np.abs(exact(k.astype(np.float16), v.astype(np.float16)) - true)
        codes = np.abs(attend(q, at, f32.encode(k), f32.encode(v), 0, 0.125, 0.0)[:, 0] - true)
        wide = np.abs(attend(q, at, f32.Coded(k), f32.Coded(v), 0, 0.125, 0.0)[:, 0] - true)
        assert codes.max() < 2 * halves.max() and np.sqrt((codes**2).mean()) < 2 * np.sqrt((halves**2).mean())
        assert wide.max() < codes.max() / 20


def test_experts_are_chosen_by_score_then_number() -> None:
    logits = np.array([[1.0, 3.0, -0.0, 3.0, 0.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]], np.float32)
    ids, w = f32.route(logits, None, (6, 3, 0, 1, 1, 1, 1), 1.0)
    assert ids.tolist() == [[1, 3, 5], [0, 1, 2]]
    assert w[0, 0] == w[0, 1] > w[0, 2] and np.allclose(w.sum(axis=1), 1, atol=1e-6)
    unnormalised = f32.route(logits, None, (6, 3, 0, 0, 1, 1, 1), 1.0)[1]
    assert np.allclose(unnormalised[0], np.exp([3, 3, 2]) / np.exp(logits[0]).sum(), rtol=1e-6)
    chosen = f32.route(logits, None, (6, 3, 2, 0, 1, 1, 1), 2.0)[1]
    assert np.allclose(chosen[0], 2 * np.exp([3, 3, 2]) / np.exp([3, 3, 2]).sum(), rtol=1e-6)


def test_a_bias_chooses_but_does_not_weigh() -> None:
    logits = np.array([[1.0, 3.0, 0.5, 2.0]], np.float32)
    bias = np.array([0.0, -1.0, 1.0, 0.0], np.float32)
    ids, w = f32.route(logits, bias, (4, 2, 1, 0, 1, 1, 1), 1.0)
    assert ids.tolist() == [[2, 3]]
    assert np.allclose(w[0], 1 / (1 + np.exp(-np.array([0.5, 2.0]))), rtol=1e-6)


def test_experts_come_from_the_best_groups() -> None:
    logits = np.array([[9.0, 0.0, 5.0, 5.0, 6.0, 3.0]], np.float32)
    for top, expected in ((1, [0, 4]), (2, [2, 3])):
        ids, _ = f32.route(logits, None, (6, 2, 2, 0, 3, 1 if top == 2 else 2, top), 1.0)
        assert ids.tolist() == [expected], "by its best expert, or by its two best together"
