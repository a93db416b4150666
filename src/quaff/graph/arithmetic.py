"""NUMERICS rules 4 to 12 in NumPy: the f32 operations that the reference is written in, each rounding exactly as the contract says.

Arrays are f32; +, -, *, / and sqrt on them round once per element in every NumPy version. Sums, exp and fma are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

EXP_MIN, EXP_MAX, PROB_MIN = np.float32(-87), np.float32(88), np.float32(-64)
LOG2E = np.float32(float.fromhex("0x1.715476p+0"))
LN2_HI = np.float32(float.fromhex("0x1.62e4p-1"))
LN2_LO = np.float32(float.fromhex("0x1.7f7d1cp-20"))
POWER_C = tuple(np.float32(float.fromhex(c)) for c in ("0x1.5ec866p-10", "0x1.3cbf6p-7", "0x1.c6afeep-5", "0x1.ebfa4cp-3", "0x1.62e43p-1"))
EXP_C = tuple(np.float32(float.fromhex(c)) for c in ("0x1.6d1610p-10", "0x1.121076p-7", "0x1.555516p-5", "0x1.5554d8p-3", "0x1p-1"))
LOG1P_C = tuple(np.float32(float.fromhex(c)) for c in ("0x1.12f598p-3", "0x1.21249ap-3", "0x1.99ad6cp-3", "0x1.55554cp-2"))
GELU_ROOT, GELU_CUBE = np.float32(0.7978845608), np.float32(0.044715)
ONE, ZERO = np.float32(1), np.float32(0)
F16_MAX = np.float32(65504)
KV_CODE, P_CODE = np.float32(4095), np.float32(8191)

LANES = 16
QUANT_GROUP = 32
OUTLIER_BLOCK = 1024
SCALE_FRACTION = np.int32(0xFFFFF)  # bits of an f32 that a scale of one of eight mantissas does not have


def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a*b + c rounded once (rule 4). The product is exact in float64; the sum is rounded to odd there, then to f32."""
    product: F64 = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
    addend: F64 = np.asarray(c, dtype=np.float64)
    total: F64 = np.asarray(product + addend)
    # TwoSum: `error` is what the rounding of `total` lost.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    if error.any():
        bits = total.view(np.int64)
        step = np.where((error > 0) == (total > 0), 1, -1)
        # NaN marks a non-finite row, which is left as it is.
        bits += np.where((error != 0) & (error == error) & (bits & 1 == 0), step, 0)
        total = bits.view(np.float64)
    with np.errstate(over="ignore"):
        result: F32 = total.astype(np.float32)
    return result


def maximum(a: F32 | np.float32, b: F32 | np.float32) -> F32:
    """Rule 5: b where the two compare as neither, so the order of arguments matters for NaN."""
    return np.where(a > b, a, b)


def minimum(a: F32 | np.float32, b: F32 | np.float32) -> F32:
    """Rule 5."""
    return np.where(a < b, a, b)


def exp(x: F32) -> F32:
    """E(x) (rule 9)."""
    x = minimum(EXP_MAX, maximum(EXP_MIN, x))
    n = np.rint(x * LOG2E)
    r = fma(n, -LN2_LO, fma(n, -LN2_HI, x))
    p: F32 = np.broadcast_to(EXP_C[0], r.shape)
    for c in EXP_C[1:]:
        p = fma(p, r, c)
    p = fma(p * r, r, r + ONE)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    result: F32 = p * power
    return result


def probability(x: F32) -> F32:
    """P(x) (rule 9)."""
    return np.where(x < PROB_MIN, ZERO, exp(x))


def sigmoid(x: F32) -> F32:
    return ONE / (ONE + exp(-x))


def silu(x: F32) -> F32:
    return x / (ONE + exp(-x))


def tanh(x: F32) -> F32:
    t = exp(np.float32(-2) * np.abs(x))
    return np.copysign((ONE - t) / (ONE + t), x)


def gelu_tanh(x: F32) -> F32:
    u: F32 = GELU_ROOT * fma((GELU_CUBE * x) * x, x, x)
    return x / (ONE + exp(np.float32(-2) * u))


def log1p(t: F32) -> F32:
    """log(1 + t) for 0 <= t <= 1 (rule 10)."""
    w: F32 = (np.float32(2) * t) / (np.float32(2) + t)
    z = (w * w) * np.float32(0.25)
    p: F32 = np.broadcast_to(LOG1P_C[0], z.shape)
    for c in LOG1P_C[1:]:
        p = fma(p, z, c)
    return fma(w * z, p, w)


def softplus(x: F32) -> F32:
    """log(1 + e^x) (rule 10)."""
    return maximum(x, ZERO) + log1p(exp(-np.abs(x)))


def tree16(lanes: F32, largest: bool = False) -> F32:
    """Fold 16 lanes on the last axis by w = 8, 4, 2, 1 (rule 6)."""
    for w in (8, 4, 2, 1):
        low, high = lanes[..., :w], lanes[..., w : 2 * w]
        lanes = maximum(low, high) if largest else low + high
    return lanes[..., 0]


def _lanes(x: F32, pad: np.float32) -> F32:
    """[..., n] -> [..., ceil(n/16), 16]."""
    short = -x.shape[-1] % LANES
    filler = np.full((*x.shape[:-1], short), pad, dtype=np.float32)
    return np.concatenate([x, filler], axis=-1).reshape(*x.shape[:-1], -1, LANES)


def sum16(x: F32) -> F32:
    """Width-16 sum of the last axis."""
    blocks = _lanes(x, ZERO)
    lanes = np.zeros((*x.shape[:-1], LANES), dtype=np.float32)
    for i in range(blocks.shape[-2]):
        lanes = lanes + blocks[..., i, :]
    return tree16(lanes)


def max16(x: F32) -> F32:
    """Width-16 maximum of the last axis."""
    blocks = _lanes(x, np.float32(-np.inf))
    lanes = np.full((*x.shape[:-1], LANES), -np.inf, dtype=np.float32)
    for i in range(blocks.shape[-2]):
        lanes = maximum(lanes, blocks[..., i, :])
    return tree16(lanes, largest=True)


def square_sum16(x: F32) -> F32:
    """Width-16 fold of fma(x, x, lane) over the last axis."""
    blocks = _lanes(x, ZERO)
    lanes = np.zeros((*x.shape[:-1], LANES), dtype=np.float32)
    for i in range(blocks.shape[-2]):
        lanes = fma(blocks[..., i, :], blocks[..., i, :], lanes)
    return tree16(lanes)


def dot16(x: F32, w: F32) -> F32:
    """Width-16 fold of fma(x, w, lane) over the last axis."""
    blocks, factors = _lanes(x, ZERO), _lanes(w, ZERO)
    lanes = np.zeros((*x.shape[:-1], LANES), dtype=np.float32)
    for i in range(blocks.shape[-2]):
        lanes = fma(blocks[..., i, :], factors[i], lanes)
    return tree16(lanes)


def route(logits: F32, bias: F32 | None, ints: Sequence[int], scale: float) -> tuple[NDArray[np.int64], F32]:
    """Rule 18: chosen experts [n, used], ascending, and their weights, from logits [n, experts]. `ints` as ROUTE has them."""
    experts, used, scoring, normalise, groups, groups_used, group_top = ints
    scores = sigmoid(logits) if scoring == 1 else logits
    if scoring == 0:
        p = probability(logits - max16(logits)[:, None])
        scores = p / _ascending_sum(p)[:, None]
    key = logits if scoring != 1 and bias is None else scores + (ZERO if bias is None else bias)
    if groups > 1:
        members = key.reshape(len(key), groups, experts // groups)
        best = np.take_along_axis(members, _descending(members)[..., :group_top], axis=-1)
        worth = _ascending_sum(best)
        chosen = _descending(worth)[:, :groups_used]
        mask = np.zeros(worth.shape, dtype=bool)
        np.put_along_axis(mask, chosen, True, axis=1)
        key = np.where(np.repeat(mask, experts // groups, axis=1), key, np.float32(-np.inf))
    ids = np.sort(_descending(key)[:, :used], axis=1)
    w = np.take_along_axis(scores, ids, axis=1)
    if scoring == 2:
        w = probability(w - max16(w)[:, None])
    if scoring == 2 or normalise:
        w = w / maximum(_ascending_sum(w), np.float32(2.0**-64))[:, None]
    return ids, w * np.float32(scale)


def _descending(x: F32) -> NDArray[np.int64]:
    """Indices of the last axis by (value descending, index ascending); -0 equals +0."""
    return np.argsort(-x, axis=-1, kind="stable")


def _ascending_sum(x: F32) -> F32:
    """Chain of additions from +0 over the last axis."""
    total = np.zeros(x.shape[:-1], dtype=np.float32)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    """Rule 15 over the last axis."""
    r: F32 = ONE / np.sqrt(square_sum16(x) / np.float32(x.shape[-1]) + np.float32(eps))
    return (x * r[..., None]) * w


def unit_norm(x: F32, eps: float, scale: float) -> F32:
    """Rule 15 without a weight or a mean: x over the length of the last axis, times `scale`."""
    r: F32 = ONE / np.sqrt(square_sum16(x) + np.float32(eps))
    return (x * r[..., None]) * np.float32(scale)


@dataclass(frozen=True)
class Quantised:
    """Rows after rule 12: codes [n, k], scales [n, k/32], and of every block of 1,024 columns the outlier's column in the row and its
    value, both [n, ceil(k/1024)]."""

    codes: NDArray[np.int8]
    scale: F32
    column: NDArray[np.int64]
    outlier: F32

    def rows(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Quantised:
        return Quantised(self.codes[which], self.scale[which], self.column[which], self.outlier[which])


def quantise(x: F32) -> Quantised:
    """Rule 12 for rows [n, k], k a multiple of 32."""
    x = np.array(x, dtype=np.float32, order="C")
    begins = range(0, x.shape[1], OUTLIER_BLOCK)
    magnitude = x.view(np.int32) & 0x7FFFFFFF
    column = np.stack([begin + magnitude[:, begin : begin + OUTLIER_BLOCK].argmax(axis=1) for begin in begins], axis=1)
    outlier = np.take_along_axis(x, column, axis=1)
    np.put_along_axis(x, column, ZERO, axis=1)
    groups = x.reshape(x.shape[0], -1, QUANT_GROUP)
    amax = (groups.view(np.int32) & 0x7FFFFFFF).max(axis=-1).view(np.float32)
    inside = (amax >= np.float32(2.0**-64)) & (amax < np.float32(2.0**96))
    exact = np.where(inside, amax, ONE) / np.float32(127)
    rounded = ((exact.view(np.int32) + SCALE_FRACTION) & ~SCALE_FRACTION).view(np.float32)
    scale, inverse = np.where(inside, rounded, ZERO), np.where(inside, ONE / rounded, ZERO)
    codes = np.rint(groups * inverse[..., None]).astype(np.int8).reshape(x.shape)
    return Quantised(codes, scale, column, outlier)


def rope(x: F32, cos: F32, sin: F32, interleaved: bool) -> F32:
    """Rule 11: x [n, heads, dim], cos and sin [n, half]; the first 2*half values of every head turn."""
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = cos[:, None, :], sin[:, None, :]
    x0, x1 = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = fma(x0, c, -(x1 * s))
    y[..., second] = fma(x1, c, x0 * s)
    return y


def clamp_f16(x: F32) -> F32:
    """Rule 16: clamped to +-65504."""
    return minimum(maximum(x, -F16_MAX), F16_MAX)


@dataclass(frozen=True, slots=True)
class Coded:
    """Rule 16: `values` [..., n] are codes, int16, with a `scale` [...] each, f32 of eight bits; or f32 without one."""

    values: NDArray[Any]
    scale: F32 | None = None


def encode(x: F32) -> Coded:
    """Rule 16: codes of 13 bits of x [..., n]."""
    largest = np.abs(x).max(axis=-1)
    inside = largest >= np.float32(2.0**-64)
    safe = np.where(inside, largest, ONE)
    rounded = ((safe / KV_CODE).view(np.uint32) + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    scale, factor = np.where(inside, rounded, ZERO), np.where(inside, ONE / rounded, ZERO)
    return Coded(np.rint(x * factor[..., None]).astype(np.int16), scale)


def power(x: F32) -> F32:
    """Rule 16: 2^x for x <= 0, +0 below -92."""
    below = x < np.float32(-92)
    x = np.where(below, ZERO, x)
    n = np.rint(x)
    r = x - n
    p = np.full_like(r, POWER_C[0])
    for c in (*POWER_C[1:], ONE):
        p = fma(p, r, c)
    return np.where(below, ZERO, np.ldexp(p, n.astype(np.int32))).astype(np.float32)
