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
    Type.IQ1_S: (0,),
    Type.IQ1_M: (48,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
QUANTISED = (*(t for t in HALVES if t != Type.F16), Type.MXFP4, Type.NVFP4)
TYPES = (Type.F32, Type.F16, Type.BF16, *QUANTISED)


def block_size(kind: Type) -> int:
    return GGML_QUANT_SIZES[kind][0]


def write_half(kind: Type, blocks: U8, at: int, half: NDArray[np.uint16]) -> None:
    """`half` [...] f16 bits into `blocks` [..., block bytes]. IQ1_M spreads them over the high four bits of four 16-bit words."""
    if kind == Type.IQ1_M:
        quarters = (half[..., None] >> np.array([0, 4, 8, 12], np.uint16)) & 15
        blocks[..., at + 1 :: 2] = blocks[..., at + 1 :: 2] & 15 | (quarters << 4).astype(np.uint8)
    else:
        blocks[..., at : at + 2] = half[..., None].view(np.uint8)


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
        write_half(kind, data, at, half.astype(np.uint16))
    if kind == Type.MXFP4:
        data[..., 0] = data[..., 0] % 8 + 120 if tame else data[..., 0] % 252
    if kind == Type.NVFP4:
        scale = data[..., :4]
        data[..., :4] = scale % 32 + 32 if tame else np.where(scale & 127 == 127, 0x80, scale)
    if kind in (Type.F32, Type.BF16):
        data[..., -1] = data[..., -1] & 0x80 | 0x3E if tame else data[..., -1] & 0xBF
    return data.reshape(rows, -1)
