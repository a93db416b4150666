"""RoPE tables in float64 code of our own (NUMERICS 11): only + - * /, rint and powers of two, so every platform gives the same bits.

The steps, which native/runtime/rope.cpp follows one by one (no fused multiply-add anywhere, evaluation as parenthesised; ln and exp are
those of quaff/elementary.py):

1. `inv_freq[i]` = exp(-(2i/rotary_dim) * ln(theta)) / factors[i].
2. angle = position * inv_freq[i]; n = rint(angle * TWO_OVER_PI); r = ((angle - n*PIO2_1) - n*PIO2_2) - n*PIO2_3; z = r*r;
   sin r: p = 1/17!, then p = p*z - 1/15!, p = p*z + 1/13! ... p*z - 1/3!; r + (r*z)*p.
   cos r: p = 1/16!, then p = p*z - 1/14! ... p*z + 1/4!; (1 - 0.5*z) + (z*z)*p.
   n mod 4 = 0, 1, 2, 3 gives (sin, cos) = (s, c), (c, -s), (-s, -c), (-c, s).
3. size = scale, or scale * (1 + temperature*ln(1 + position // temperature_length)) where the model has a temperature; sin*size and
   cos*size are rounded once to f32.

Coefficients 1/k and 1/k! are the float64 quotients of exact integers. Error: below 2^-24 + 2^-32 times size for positions up to 10^6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.config import RopeConfig
from quaff.elementary import exp64, inverse_factorial, log64

F64 = NDArray[np.float64]

TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# High parts end in enough zero bits that n times them is exact for |n| < 2^20, that is positions up to 1.6 million.
PIO2_1 = float.fromhex("0x1.921fb544p+0")
PIO2_2 = float.fromhex("0x1.0b4611a6p-34")
PIO2_3 = float.fromhex("0x1.3198a2e037073p-69")


def sin_cos64(angle: NDArray[np.float64]) -> tuple[F64, F64]:
    """sin and cos of every element; |angle| below 2^30."""
    n = np.rint(angle * TWO_OVER_PI)
    r = ((angle - n * PIO2_1) - n * PIO2_2) - n * PIO2_3
    z = r * r
    p: Any = inverse_factorial(17)
    for k in range(15, 1, -2):
        p = p * z + (inverse_factorial(k) if k % 4 == 1 else -inverse_factorial(k))
    s = r + (r * z) * p
    p = inverse_factorial(16)
    for k in range(14, 2, -2):
        p = p * z + (inverse_factorial(k) if k % 4 == 0 else -inverse_factorial(k))
    c = (1.0 - 0.5 * z) + (z * z) * p
    quadrant = n.astype(np.int64) & 3
    sin = np.choose(quadrant, [s, c, -s, -c])
    cos = np.choose(quadrant, [c, -s, -c, s])
    return sin, cos


def inverse_frequencies(rope: RopeConfig) -> F64:
    """[rotary_dim/2] radians per position."""
    log_theta = log64(rope.theta)
    plain = [exp64(-((2.0 * i) / rope.rotary_dim) * log_theta) for i in range(rope.rotary_dim // 2)]
    return np.array([f / factor for f, factor in zip(plain, rope.factors or (1.0,) * len(plain), strict=True)])


def sizes(rope: RopeConfig, positions: NDArray[np.integer]) -> F64:
    """[n] what cosines and sines of every position are multiplied by."""
    if not rope.temperature:
        return np.full(len(positions), rope.scale)
    return np.array([rope.scale * (1.0 + rope.temperature * log64(1.0 + int(p) // rope.temperature_length)) for p in positions])


def rope_rows(rope: RopeConfig, positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """[n, rotary_dim] f32: for every position the cosines of the rotary_dim/2 angles, then their sines."""
    angle = np.asarray(positions, dtype=np.float64)[:, None] * inverse_frequencies(rope)[None, :]
    sin, cos = sin_cos64(angle)
    return (np.concatenate([cos, sin], axis=1) * sizes(rope, positions)[:, None]).astype(np.float32)
