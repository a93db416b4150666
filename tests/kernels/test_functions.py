"""The exponential and its relatives, sampling and log-probabilities: accuracy against float64, bytes across instruction sets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from quaff import _native

F32 = NDArray[np.float32]
NO_HISTORY = np.empty(0, dtype=np.int32)


pytestmark = pytest.mark.usefixtures("isa")


def random_bits(seed: int, n: int, low: float, high: float) -> F32:
    """Floats of every exponent (denormals too) that fall into [low, high]."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 4 * n, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(x[(x >= low) & (x <= high)][:n])


def exp_inputs() -> F32:
    rng = np.random.default_rng(1)
    ranges = [rng.uniform(low, high, 40_000) for low, high in ((-87, 88), (-1, 1), (-0.01, 0.01), (-0.0005, 0.0005))]
    halves = (np.arange(-125, 127) + 0.5) * np.log(2)  # where n = rint(x / ln 2) changes
    return np.concatenate([*ranges, halves, [-87, 88, float.fromhex("0x1.6a1002p-12")]]).astype(np.float32)


def relative_error(x: F32, y: F32) -> float:
    want = np.exp(x.astype(np.float64))
    return float(np.max(np.abs(y.astype(np.float64) - want) / want))


def test_exp_is_within_two_units_of_2_to_minus_24() -> None:
    # Every f32 in range was checked once: the worst is 1.9986 at 0x1.6a1002p-12, which is among the inputs.
    x = np.concatenate([exp_inputs(), random_bits(2, 100_000, -87, 88)])
    assert relative_error(x, _native.exp_row(x)) <= 2 * 2.0**-24


def test_the_exp_check_sees_a_wrong_last_bit() -> None:
    x = exp_inputs()
    assert relative_error(x, np.nextafter(_native.exp_row(x), np.float32(np.inf), dtype=np.float32)) > 2 * 2.0**-24


def test_exp_at_its_ends() -> None:
    y = _native.exp_row(np.array([0.0, -0.0, -87, -88, -1e30, 88, 89, 1e30, np.nan], dtype=np.float32))
    assert y[0] == 1 and y[1] == 1
    assert y[2] == y[3] == y[4] > 0 and y[5] == y[6] == y[7] < np.inf
    assert np.isnan(y[8])


def test_sigmoid_and_tanh() -> None:
    x = np.concatenate([exp_inputs(), random_bits(3, 10_000, -50, 50)])
    wide = x.astype(np.float64)
    assert np.max(np.abs(_native.sigmoid_row(x) - 1 / (1 + np.exp(-wide)))) < 2.0**-23
    tanh = _native.tanh_row(x)
    assert np.max(np.abs(tanh - np.tanh(wide))) < 2.0**-22
    assert np.array_equal(np.signbit(tanh), np.signbit(x))
    assert np.array_equal(_native.tanh_row(-x), -tanh)


@pytest.mark.parametrize("row", [_native.exp_row, _native.sigmoid_row, _native.tanh_row])
def test_bytes_do_not_depend_on_the_set_or_on_a_row_s_length(row: Callable[[F32], F32], isa: str) -> None:
    x = random_bits(4, 2000, -1e38, 1e38)
    whole = row(x)
    for n in (1, 2, 15, 16, 17, 31, 33, 100):
        assert row(x[:n].copy()).tobytes() == whole[:n].tobytes()
    _native.set_isa("scalar")
    assert row(x).tobytes() == whole.tobytes()


def philox_uniform(seed: int, position: int, choice: int) -> float:
    """The first word of Philox4x32-10, from the paper's description, as a number in [0, 1)."""
    c, k = [position, choice, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[0] >> 8) * 2.0**-24


def plain_sample(
    logits: F32, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, history: list[int], uniform: float
) -> int:
    """The filters of native/runtime/sample.h one after the other, in plain Python."""
    x = logits.copy()
    for i in set(history):
        x[i] = x[i] / np.float32(penalty) if x[i] > 0 else x[i] * np.float32(penalty)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if temperature == 0:
        return order[0]
    with np.errstate(over="ignore"):
        y = (x - x.max()) / np.float32(temperature)
    p = np.where(y < -64, np.float32(0), _native.exp_row(y))
    keep = order[:top_k] if top_k else order
    weights = [float(p[i]) for i in keep]
    if top_p < 1:
        total, c, n = sum(weights), weights[0], 1
        while c < top_p * total and n < len(keep):
            c += weights[n]
            n += 1
        keep, weights = keep[:n], weights[:n]
    if min_p > 0:
        n = next((i for i, w in enumerate(weights) if w < min_p * weights[0]), len(keep))
        keep, weights = keep[:n], weights[:n]
    bar, c = uniform * sum(weights), 0.0
    for i, w in zip(keep, weights, strict=True):
        c += w
        if c > bar:
            return i
    raise AssertionError("nothing was chosen")


OPTIONS = [
    (0.0, 0, 1.0, 0.0, 1.0),
    (1.0, 0, 1.0, 0.0, 1.0),
    (0.7, 20, 1.0, 0.0, 1.0),
    (1.5, 0, 0.8, 0.0, 1.0),
    (1.0, 0, 1.0, 0.05, 1.0),
    (0.0, 0, 1.0, 0.0, 1.7),
    (0.9, 50, 0.9, 0.02, 1.3),
    (1e-3, 0, 1.0, 0.0, 1.0),
    (1e-38, 0, 1.0, 0.0, 1.0),
]


@pytest.mark.parametrize("temperature, top_k, top_p, min_p, penalty", OPTIONS)
def test_sampling_follows_its_description(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> None:
    rng = np.random.default_rng(5)
    for vocab in (1, 40, 1000):
        logits = (rng.integers(-64, 64, vocab) / 8).astype(np.float32)  # many equal logits
        history = rng.integers(0, vocab, 30).astype(np.int32)
        for position in range(20):
            seed = int(rng.integers(0, 1 << 63))
            got = _native.sample(logits, temperature, top_k, top_p, min_p, penalty, history, seed, position, 3)
            uniform = philox_uniform(seed, position, 3)
            assert got == plain_sample(logits, temperature, top_k, top_p, min_p, penalty, history.tolist(), uniform)


def test_draws_have_the_right_frequencies() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32)
    draws = [_native.sample(logits, 1.0, 0, 1.0, 0.0, 1.0, NO_HISTORY, 11, position, 0) for position in range(4000)]
    assert np.abs(np.bincount(draws, minlength=4) / 4000 - np.exp(logits)).max() < 0.03


def test_equal_logits_go_to_the_lower_id() -> None:
    assert _native.sample(np.array([-1, 0.0, -0.0, 0.0], dtype=np.float32), 0.0, 0, 1.0, 0.0, 1.0, NO_HISTORY, 0, 0, 0) == 1
    zeros = np.array([-0.0, 0.0], dtype=np.float32)
    assert {_native.sample(zeros, 1.0, 1, 1.0, 0.0, 1.0, NO_HISTORY, 0, n, 0) for n in range(20)} == {0}


@pytest.mark.parametrize("bad", [[0, np.nan], [np.inf, 0], [-np.inf, -np.inf]])
def test_logits_that_are_not_finite_raise(bad: list[float]) -> None:
    logits = np.array(bad, dtype=np.float32)
    with pytest.raises(ValueError, match="not finite"):
        _native.sample(logits, 1.0, 0, 1.0, 0.0, 1.0, NO_HISTORY, 0, 0, 0)
    with pytest.raises(ValueError, match="not finite"):
        _native.logprobs(logits, np.array([0], dtype=np.int32))


def test_ids_out_of_range_raise() -> None:
    logits = np.zeros(4, dtype=np.float32)
    for outside in (-1, 4):
        ids = np.array([outside], dtype=np.int32)
        with pytest.raises(ValueError, match="out of range"):
            _native.sample(logits, 1.0, 0, 1.0, 0.0, 2.0, ids, 0, 0, 0)
        with pytest.raises(ValueError, match="out of range"):
            _native.logprobs(logits, ids)


def test_minus_infinity_forbids_an_id() -> None:
    logits = np.array([5, -np.inf, 5], dtype=np.float32)
    assert {_native.sample(logits, 1.0, 0, 1.0, 0.0, 1.0, NO_HISTORY, 0, n, 0) for n in range(50)} == {0, 2}


@pytest.mark.parametrize("vocab", [1, 2, 4096, 4097, 10_000])
def test_logprobs_are_those_of_float64(vocab: int, isa: str) -> None:
    logits = np.random.default_rng(vocab).normal(0, 4, vocab).astype(np.float32)
    ids = np.arange(0, vocab, 7, dtype=np.int32)
    wide = logits.astype(np.float64)
    want = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    got = _native.logprobs(logits, ids)
    assert np.max(np.abs(got - want[ids])) < 1e-6
    _native.set_isa("scalar")
    assert _native.logprobs(logits, ids).tobytes() == got.tobytes()
