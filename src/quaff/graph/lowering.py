"""ggml blocks as true codes, scales and minima, in NumPy: the readable form of native/pack.

Every value of a weight is `scale * code (+ min)` with one rounding; `values` equal gguf.quants.dequantize by bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quaff.errors import UnsupportedError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
I16 = NDArray[np.int16]
Lowered = tuple[I16, F32, F32 | None]

IQ4_BOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16)
# E2M1 values doubled, so that they are integers.
MXFP4_BOOK = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int16)


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """Either `values` (f32, any shape) or integer `codes` [rows, cols] with `scale` and perhaps `min` [rows, cols/group]."""

    values: F32 | None = None
    codes: I8 | None = None
    scale: F32 | None = None
    min: F32 | None = None

    @property
    def is_integer(self) -> bool:
        return self.codes is not None

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
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    pairs = np.ascontiguousarray(b[..., 2:4]).view("<u2")
    high = (pairs >> (2 * np.arange(8, dtype=np.uint16))) & 3
    sub = (low | (high << 4)).astype(np.float32) - np.float32(32)
    return IQ4_BOOK[_nibbles(_split(b[..., 8:], 8))], _f16(b[..., :2])[..., None] * sub, None


def _mxfp4(b: U8) -> Lowered:
    scale = np.ldexp(1.0, b[..., 0].astype(np.int32) - 128).astype(np.float32)
    return MXFP4_BOOK[_nibbles(b[..., 1:])], scale, None


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
}
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}


def lower(ggml_type: int, data: U8, shape: tuple[int, ...]) -> ReferenceWeight:
    """A tensor's bytes as codes and scales, or as f32. `shape` is (rows, cols) or (n,). UnsupportedError for an unknown type."""
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
