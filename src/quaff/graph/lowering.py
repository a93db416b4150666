"""ggml blocks as true codes, scales and minima, in NumPy: the readable form of native/pack.

Every value of a weight is `scale * code (+ min)` with one rounding; `values` equal gguf.quants.dequantize by bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.errors import UnsupportedError
from quaff.graph import grids

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
I16 = NDArray[np.int16]
Lowered = tuple[I16, F32, F32 | None]

IQ4_BOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16)
# E2M1 values doubled, so that they are integers.
FP4_BOOK = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int16)
IQ2_BOOK = np.array([8, 25, 43], dtype=np.int16)
IQ3_XXS_BOOK = np.array([4, 12, 20, 28, 36, 44, 52, 62], dtype=np.int16)
IQ3_S_BOOK = np.array([1, 3, 5, 7, 9, 11, 13, 15], dtype=np.int16)
# Seven signs are written; the eighth makes the number of negative ones even.
EIGHT_SIGNS = np.array([seven | (seven.bit_count() & 1) << 7 for seven in range(128)], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """Either `values` (f32, any shape) or integer `codes` [rows, cols] with `scale` and perhaps `min` [rows, cols/group].

    Stacked experts are their rows one below the other."""

    values: F32 | None = None
    codes: I8 | None = None
    scale: F32 | None = None
    min: F32 | None = None

    @property
    def is_integer(self) -> bool:
        return self.codes is not None

    @property
    def rows(self) -> int:
        return len(self.values if self.codes is None else self.codes)  # type: ignore[arg-type]

    def part(self, begin: int, count: int) -> ReferenceWeight:
        """Rows begin .. begin + count - 1."""
        if self.values is not None:
            return ReferenceWeight(self.values[begin : begin + count])
        assert self.codes is not None and self.scale is not None
        rows = slice(begin, begin + count)
        return ReferenceWeight(None, self.codes[rows], self.scale[rows], None if self.min is None else self.min[rows])

    def dequantised(self) -> F32:
        """f32 values. Scales and minima are multiples of 2^-48 below 2^26, so float64 holds the product and the sum exactly and
        the conversion is the one rounding."""
        if self.values is not None:
            return self.values
        assert self.codes is not None and self.scale is not None
        group = self.codes.shape[1] // self.scale.shape[1]
        wide = self.codes.astype(np.float64) * np.repeat(self.scale, group, axis=1).astype(np.float64)
        if self.min is not None:
            wide = wide + np.repeat(self.min, group, axis=1).astype(np.float64)
        return wide.astype(np.float32)


def _f16(raw: U8) -> F32:
    """[..., 2] bytes -> [...] f32."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(qs: U8) -> I16:
    """[..., n] bytes -> [..., 2n]: low nibbles first."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1).astype(np.int16)


def _interleaved(raw: U8) -> U8:
    """[..., n] bytes -> [..., 2n] nibbles: both of every byte, the low one first."""
    nibbles: U8 = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    return nibbles


def _four_signs(words: NDArray[np.uint32]) -> U8:
    """[..., n] words -> [..., 4n] signs of eight values: seven bits each, from the lowest."""
    sevens = (words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & 127
    signs: U8 = EIGHT_SIGNS[sevens.reshape(*words.shape[:-1], -1)]
    return signs


def _one_scale(d: U8) -> F32:
    """The f16 scale of 256 values -> eight groups."""
    return np.repeat(_f16(d)[..., None], 8, axis=-1)


def _crumbs(qs: U8) -> I16:
    """[..., n] bytes -> [..., 4n]: bits 0 and 1 of every byte first."""
    return np.concatenate([(qs >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1).astype(np.int16)


def _split(raw: U8, parts: int) -> U8:
    """[..., parts*n] -> [..., parts, n]."""
    return raw.reshape(*raw.shape[:-1], parts, -1)


def _fifth_bits(qh: U8) -> I16:
    """[..., 4] bytes -> [..., 32]: bit j, shifted to the place of 16."""
    word = np.ascontiguousarray(qh).view("<u4")
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int16) << 4


def _bit_planes(qh: U8) -> I16:
    """[..., 32] bytes -> [..., 8, 32]: bit i of byte j at [i, j]."""
    return ((qh[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1).astype(np.int16)


def _six_bit_pairs(raw: U8) -> tuple[F32, F32]:
    """[..., 12] bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit minima."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minimum = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _two_level(d: U8, sub: F32, dmin: U8, sub_min: F32) -> tuple[F32, F32]:
    """Exact products of an f16 factor and small integers (NUMERICS 13)."""
    return _f16(d)[..., None] * sub, -(_f16(dmin)[..., None] * sub_min)


def _q4_0(b: U8) -> Lowered:
    return _nibbles(b[..., 2:]) - 8, _f16(b[..., :2]), None


def _q4_1(b: U8) -> Lowered:
    return _nibbles(b[..., 4:]), _f16(b[..., :2]), _f16(b[..., 2:4])


def _q5_0(b: U8) -> Lowered:
    return (_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])) - 16, _f16(b[..., :2]), None


def _q5_1(b: U8) -> Lowered:
    return _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), _f16(b[..., :2]), _f16(b[..., 2:4])


def _q8_0(b: U8) -> Lowered:
    return np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(np.int16), _f16(b[..., :2]), None


def _q2_k(b: U8) -> Lowered:
    packed = b[..., :16]
    scale, minimum = _two_level(b[..., 80:82], (packed & 15).astype(np.float32), b[..., 82:84], (packed >> 4).astype(np.float32))
    return _crumbs(_split(b[..., 16:80], 2)), scale, minimum


def _q3_k(b: U8) -> Lowered:
    raw, high = b[..., 96:108], _bit_planes(b[..., :32])
    low = _crumbs(_split(b[..., 32:96], 2)).reshape(high.shape)
    sub = _nibbles(raw[..., :8]) | (_crumbs(raw[..., 8:]) << 4)
    return low - 4 * (1 - high), _f16(b[..., 108:110])[..., None] * (sub - 32).astype(np.float32), None


def _q4_k(b: U8) -> Lowered:
    sub, sub_min = _six_bit_pairs(b[..., 4:16])
    return _nibbles(_split(b[..., 16:], 4)), *_two_level(b[..., :2], sub, b[..., 2:4], sub_min)


def _q5_k(b: U8) -> Lowered:
    sub, sub_min = _six_bit_pairs(b[..., 4:16])
    high = _bit_planes(b[..., 16:48])
    codes = _nibbles(_split(b[..., 48:], 4)).reshape(high.shape) | (high << 4)
    return codes, *_two_level(b[..., :2], sub, b[..., 2:4], sub_min)


def _q6_k(b: U8) -> Lowered:
    low, high = _nibbles(_split(b[..., :128], 2)), _crumbs(_split(b[..., 128:192], 2))
    sub = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return (low | (high << 4)) - 32, _f16(b[..., 208:210])[..., None] * sub, None


def _iq4_nl(b: U8) -> Lowered:
    return IQ4_BOOK[_nibbles(b[..., 2:])], _f16(b[..., :2]), None


def _iq4_xs(b: U8) -> Lowered:
    low = _interleaved(b[..., 4:8])
    pairs = np.ascontiguousarray(b[..., 2:4]).view("<u2")
    high = (pairs >> (2 * np.arange(8, dtype=np.uint16))) & 3
    sub = (low | (high << 4)).astype(np.float32) - np.float32(32)
    return IQ4_BOOK[_nibbles(_split(b[..., 8:], 8))], _f16(b[..., :2])[..., None] * sub, None


def _mxfp4(b: U8) -> Lowered:
    scale = np.ldexp(1.0, b[..., 0].astype(np.int32) - 128).astype(np.float32)
    return FP4_BOOK[_nibbles(b[..., 1:])], scale, None


def _nvfp4(b: U8) -> Lowered:
    exponent, fraction = (b[..., :4].astype(np.int32) >> 3) & 15, b[..., :4] & 7
    steps = (fraction + np.where(exponent > 0, 8, 0)).astype(np.float32)
    return FP4_BOOK[_nibbles(_split(b[..., 4:], 4))], np.ldexp(steps, np.maximum(exponent, 1) - 11), None


def _iq(d: F32, sub: NDArray[Any], unit: float) -> F32:
    """Scales of the IQ types below IQ4: d times a power of two times an odd number."""
    return (d * np.float32(unit))[..., None] * (2 * sub.astype(np.float32) + np.float32(1))


def _signed(places: I16, values: I16, signs: U8) -> I16:
    """places [..., n, values of a point], a bit of `signs` for each value, first value lowest; set bits are negative."""
    negative = (signs[..., None] >> np.arange(8, dtype=np.uint8)) & 1
    return values[places].reshape(*signs.shape, 8) * (1 - 2 * negative.astype(np.int16))


def _iq1_s(b: U8) -> Lowered:
    high = np.ascontiguousarray(b[..., 34:]).view("<u2")
    thirds = (high[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & 7
    points = grids.IQ1_S[_split(b[..., 2:34], 8) | (thirds << 8)]
    delta = 1 - 2 * (high >> 15).astype(np.int16)
    return 8 * (points - 1) + delta[..., None, None], _iq(_f16(b[..., :2]), (high >> 12) & 7, 1 / 8), None


def _iq1_m(b: U8) -> Lowered:
    high, parts = _interleaved(b[..., 32:48]), np.ascontiguousarray(b[..., 48:]).view("<u2")
    d = np.bitwise_or.reduce((parts >> 12) << np.array([0, 4, 8, 12], dtype=np.uint16), axis=-1)
    sub = ((parts[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & 7).reshape(*parts.shape[:-1], 16)
    points = grids.IQ1_S[b[..., :32] | ((high & 7).astype(np.uint16) << 8)]
    delta = 1 - 2 * (high >> 3).astype(np.int16)
    return 8 * (points - 1) + delta[..., None], _iq(d.view(np.float16).astype(np.float32), sub, 1 / 8), None


def _iq2_xxs(b: U8) -> Lowered:
    pairs = np.ascontiguousarray(b[..., 2:]).view("<u4").reshape(*b.shape[:-1], 8, 2)
    points = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    return _signed(grids.IQ2_XXS[points], IQ2_BOOK, _four_signs(pairs[..., 1])), _iq(_f16(b[..., :2]), pairs[..., 1] >> 28, 1 / 8), None


def _iq2_xs(b: U8) -> Lowered:
    both = np.ascontiguousarray(b[..., 2:66]).view("<u2")
    codes = _signed(grids.IQ2_XS[both & 511], IQ2_BOOK, EIGHT_SIGNS[both >> 9])
    return codes, _iq(_f16(b[..., :2]), _interleaved(b[..., 66:]), 1 / 8), None


def _iq2_s(b: U8) -> Lowered:
    high = (b[..., 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
    points = grids.IQ2_S[b[..., 2:34] | (high.reshape(*b.shape[:-1], 32).astype(np.uint16) << 8)]
    return _signed(points, IQ2_BOOK, b[..., 34:66]), _iq(_f16(b[..., :2]), _interleaved(b[..., 74:]), 1 / 8), None


def _iq3_xxs(b: U8) -> Lowered:
    words = np.ascontiguousarray(b[..., 66:]).view("<u4")
    codes = _signed(grids.IQ3_XXS[b[..., 2:66]], IQ3_XXS_BOOK, _four_signs(words))
    return codes, _iq(_f16(b[..., :2]), words >> 28, 1 / 4), None


def _iq3_s(b: U8) -> Lowered:
    high = _bit_planes(b[..., 66:74]).swapaxes(-1, -2).reshape(*b.shape[:-1], 64)
    codes = _signed(grids.IQ3_S[b[..., 2:66] | (high << 8)], IQ3_S_BOOK, b[..., 74:106])
    return codes, _iq(_f16(b[..., :2]), _interleaved(b[..., 106:]), 1), None


def _tq1_0(b: U8) -> Lowered:
    """Bytes are fractions in base 3: after t digits are shifted out on the left, what overflows 256 times 3 is the next one."""
    runs = [(b[..., first:past] * np.uint8(3**t)) for first, past, n in ((0, 32, 5), (32, 48, 5), (48, 52, 4)) for t in range(n)]
    codes = np.concatenate(runs, axis=-1).astype(np.int16) * 3 >> 8
    return codes - 1, _one_scale(b[..., 52:]), None


def _tq2_0(b: U8) -> Lowered:
    return _crumbs(_split(b[..., :64], 2)) - 1, _one_scale(b[..., 64:]), None


# ggml type -> (name, bytes per block, lowering of [rows, blocks, bytes])
BLOCKS: dict[int, tuple[str, int, Callable[[U8], Lowered]]] = {
    2: ("Q4_0", 18, _q4_0),
    3: ("Q4_1", 20, _q4_1),
    6: ("Q5_0", 22, _q5_0),
    7: ("Q5_1", 24, _q5_1),
    8: ("Q8_0", 34, _q8_0),
    10: ("Q2_K", 84, _q2_k),
    11: ("Q3_K", 110, _q3_k),
    12: ("Q4_K", 144, _q4_k),
    13: ("Q5_K", 176, _q5_k),
    14: ("Q6_K", 210, _q6_k),
    20: ("IQ4_NL", 18, _iq4_nl),
    23: ("IQ4_XS", 136, _iq4_xs),
    39: ("MXFP4", 17, _mxfp4),
    40: ("NVFP4", 36, _nvfp4),
    19: ("IQ1_S", 50, _iq1_s),
    29: ("IQ1_M", 56, _iq1_m),
    16: ("IQ2_XXS", 66, _iq2_xxs),
    17: ("IQ2_XS", 74, _iq2_xs),
    22: ("IQ2_S", 82, _iq2_s),
    18: ("IQ3_XXS", 98, _iq3_xxs),
    21: ("IQ3_S", 110, _iq3_s),
    34: ("TQ1_0", 54, _tq1_0),
    35: ("TQ2_0", 66, _tq2_0),
}
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}


def lower(ggml_type: int, data: U8, shape: tuple[int, ...]) -> ReferenceWeight:
    """A tensor's bytes as codes and scales, or as f32. `shape` is (rows, cols), (n,) or for stacked experts (experts, rows, cols).

    UnsupportedError for an unknown type."""
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if ggml_type in FLOATS:
        return ReferenceWeight(_floats(FLOATS[ggml_type], data).reshape(shape))
    if ggml_type not in BLOCKS:
        known = [*FLOATS.values(), *(name for name, _, _ in BLOCKS.values())]
        raise UnsupportedError(f"ggml type {ggml_type} is not supported; supported: {', '.join(known)}")
    _, size, lowering = BLOCKS[ggml_type]
    rows, cols = shape
    codes, scale, minimum = lowering(np.ascontiguousarray(data).reshape(rows, -1, size))
    flat_min = None if minimum is None else minimum.reshape(rows, -1)
    return ReferenceWeight(None, codes.astype(np.int8).reshape(rows, cols), scale.reshape(rows, -1), flat_min)


def _floats(name: str, data: U8) -> F32:
    if name == "F32":
        return np.frombuffer(data, np.float32)
    if name == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
