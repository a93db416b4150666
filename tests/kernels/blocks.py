"""Random blocks of every ggml type, made by bytes: gguf quantises only some types, and real files hold scales that it never makes."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

# Where a block keeps its f16 scales.
HALVES = {
    Type.F16: (0,),
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
QUANTISED = (*(t for t in HALVES if t != Type.F16), Type.MXFP4)
TYPES = (Type.F32, Type.F16, Type.BF16, *QUANTISED)


def block_size(kind: Type) -> int:
    return GGML_QUANT_SIZES[kind][0]


def random_blocks(kind: Type, rows: int, cols: int, rng: np.random.Generator, tame: bool = False) -> U8:
    """[rows, row bytes]. Every finite scale occurs: zero, denormal, negative, largest. `tame` keeps values near 1."""
    per_block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        half = rng.integers(0, 1 << 16, data.shape[:2], dtype=np.uint16)
        half[(half >> 10) & 31 == 31] &= 0xBBFF  # infinities and NaN lose an exponent bit
        if tame:
            half = (half & 0x83FF) | np.uint16(8 << 10)
        else:
            luck = rng.random(half.shape)
            half = np.where(
                luck < 0.1, half & 0x83FF, np.where(luck < 0.2, half & 0x8000, np.where(luck < 0.25, half & 0x8000 | 0x7BFF, half))
            )
        data[..., at : at + 2] = half.astype(np.uint16)[..., None].view(np.uint8)
    if kind == Type.MXFP4:
        data[..., 0] = data[..., 0] % 8 + 120 if tame else data[..., 0] % 252
    if kind in (Type.F32, Type.BF16):
        data[..., -1] = data[..., -1] & 0x80 | 0x3E if tame else data[..., -1] & 0xBF
    return data.reshape(rows, -1)
