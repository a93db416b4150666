"""ggml blocks as true codes, scales and minima, in NumPy: the readable form of native/pack for the types that small models use.

Every value of a weight is `scale * code (+ min)` with one rounding.
Other types: take them from the native module (ReferenceWeight.integer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quaff.errors import UnsupportedError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

# ggml type -> (name, values per block, bytes per block)
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """Either `values` (f32, any shape) or integer `codes` [rows, cols] with `scale` and perhaps `min` [rows, cols/group]."""

    values: F32 | None = None
    codes: I8 | None = None
    scale: F32 | None = None
    min: F32 | None = None

    @staticmethod
    def integer(codes: I8, scale: F32, minimum: F32 | None) -> ReferenceWeight:
        """From the native module: `ReferenceWeight.integer(*weight.codes())`."""
        return ReferenceWeight(None, codes, scale, minimum)

    @property
    def is_integer(self) -> bool:
        return self.codes is not None

    def dequantised(self) -> F32:
        """f32 values. The product is exact in float64, so the sum and the conversion are one rounding each and, since scales are
        f16 products, the float64 sum of a format with a minimum is exact."""
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


def _nibbles(qs: U8) -> NDArray[np.int16]:
    """[..., n] bytes -> [..., 2n]: low nibbles first."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1).astype(np.int16)


def _fifth_bits(qh: U8) -> NDArray[np.int16]:
    """[..., 4] bytes -> [..., 32]: bit j, shifted to the place of 16."""
    word = np.ascontiguousarray(qh).view("<u4")
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int16) << 4


def _q4_k_scales(raw: U8) -> tuple[F32, F32]:
    """[..., 12] bytes -> eight 6-bit scales and eight 6-bit minima."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minimum = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def lower(ggml_type: int, data: U8, shape: tuple[int, ...]) -> ReferenceWeight:
    """A tensor's bytes as codes and scales. `shape` is (rows, cols) or (n,). UnsupportedError for a type not listed in BLOCKS."""
    if ggml_type not in BLOCKS:
        raise UnsupportedError(
            f"the reference cannot lower ggml type {ggml_type}; it knows {', '.join(name for name, _, _ in BLOCKS.values())}"
        )
    name, _, size = BLOCKS[ggml_type]
    if name == "F32":
        return ReferenceWeight(np.frombuffer(data, np.float32).reshape(shape))
    if name == "F16":
        return ReferenceWeight(np.frombuffer(data, np.float16).astype(np.float32).reshape(shape))
    if name == "BF16":
        return ReferenceWeight((np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape))
    rows, cols = shape
    blocks = np.ascontiguousarray(data).reshape(rows, -1, size)
    d = _f16(blocks[..., :2])
    minimum: F32 | None = None
    if name == "Q4_0":
        scale, codes = d, _nibbles(blocks[..., 2:]) - 8
    elif name == "Q4_1":
        scale, minimum, codes = d, _f16(blocks[..., 2:4]), _nibbles(blocks[..., 4:])
    elif name == "Q5_0":
        scale, codes = d, (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])) - 16
    elif name == "Q5_1":
        scale, minimum, codes = d, _f16(blocks[..., 2:4]), _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    elif name == "Q8_0":
        scale, codes = d, np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int16)
    elif name == "Q4_K":
        sub, sub_min = _q4_k_scales(blocks[..., 4:16])
        scale, minimum = d[..., None] * sub, -(_f16(blocks[..., 2:4])[..., None] * sub_min)
        codes = _nibbles(blocks[..., 16:].reshape(rows, -1, 4, 32))
    else:
        ql = blocks[..., :128].reshape(rows, -1, 2, 64)
        qh = blocks[..., 128:192].reshape(rows, -1, 2, 32)
        low = np.concatenate([ql & 15, ql >> 4], axis=-1)
        high = np.concatenate([(qh >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
        codes = (low | (high << 4)).astype(np.int16) - 32
        d = _f16(blocks[..., 208:210])
        scale = d[..., None] * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    flat_min = None if minimum is None else minimum.reshape(rows, -1)
    return ReferenceWeight(None, codes.astype(np.int8).reshape(rows, cols), scale.reshape(rows, -1), flat_min)
