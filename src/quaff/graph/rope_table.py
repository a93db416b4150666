"""RoPE tables in float64 code of our own (NUMERICS 11): only + - * /, rint and powers of two, so every platform gives the same bits.

The steps, which native/runtime/rope.cpp follows one by one (no fused multiply-add anywhere, evaluation as parenthesised):

1. `ln(theta)`: theta = m * 2^e with m in [sqrt(1/2), sqrt(2)); s = (m - 1)/(m + 1); z = s*s;
   p = 1/23, then p = p*z + 1/k for k = 21, 19, ... 1; result e*LN2_HI + (e*LN2_LO + (2*s)*p).
2. `inv_freq[i]` = exp(-(2i/rotary_dim) * ln(theta)) / linear_factor, where exp(y): n = rint(y * LOG2E); r = (y - n*LN2_HI) - n*LN2_LO;
   p = 1/13!, then p = p*r + 1/k! for k = 12 ... 0; result p * 2^n.
3. angle = position * inv_freq[i]; n = rint(angle * TWO_OVER_PI); r = ((angle - n*PIO2_1) - n*PIO2_2) - n*PIO2_3; z = r*r;
   sin r: p = 1/17!, then p = p*z - 1/15!, p = p*z + 1/13! ... p*z - 1/3!; r + (r*z)*p.
   cos r: p = 1/16!, then p = p*z - 1/14! ... p*z + 1/4!; (1 - 0.5*z) + (z*z)*p.
   n mod 4 = 0, 1, 2, 3 gives (sin, cos) = (s, c), (c, -s), (-s, -c), (-c, s); each is rounded once to f32.

Coefficients 1/k and 1/k! are the float64 quotients of exact integers. Error: below 2^-24 + 2^-32 for positions up to 10^6.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LOG2E = float.fromhex("0x1.71547652b82fep+0")
# High parts end in enough zero bits that n times them is exact for |n| < 2^20, that is positions up to 1.6 million.
LN2_HI = float.fromhex("0x1.62e42feep-1")
LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
PIO2_1 = float.fromhex("0x1.921fb544p+0")
PIO2_2 = float.fromhex("0x1.0b4611a6p-34")
PIO2_3 = float.fromhex("0x1.3198a2e037073p-69")


def _inverse_factorial(k: int) -> float:
    return 1.0 / float(math.factorial(k))


def log64(x: float) -> float:
    """Natural logarithm of a positive normal number."""
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1.0 / 23.0
    for k in range(21, 0, -2):
        p = p * z + 1.0 / k
    return e * LN2_HI + (e * LN2_LO + (2.0 * s) * p)


def exp64(y: float) -> float:
    """exp(y) for |y| < 700."""
    n = float(np.rint(y * LOG2E))
    r = (y - n * LN2_HI) - n * LN2_LO
    p = _inverse_factorial(13)
    for k in range(12, -1, -1):
        p = p * r + _inverse_factorial(k)
    return math.ldexp(p, int(n))


def sin_cos64(angle: NDArray[np.float64]) -> tuple[F64, F64]:
    """sin and cos of every element; |angle| below 2^30."""
    n = np.rint(angle * TWO_OVER_PI)
    r = ((angle - n * PIO2_1) - n * PIO2_2) - n * PIO2_3
    z = r * r
    p: Any = _inverse_factorial(17)
    for k in range(15, 1, -2):
        p = p * z + (_inverse_factorial(k) if k % 4 == 1 else -_inverse_factorial(k))
    s = r + (r * z) * p
    p = _inverse_factorial(16)
    for k in range(14, 2, -2):
        p = p * z + (_inverse_factorial(k) if k % 4 == 0 else -_inverse_factorial(k))
    c = (1.0 - 0.5 * z) + (z * z) * p
    quadrant = n.astype(np.int64) & 3
    sin = np.choose(quadrant, [s, c, -s, -c])
    cos = np.choose(quadrant, [c, -s, -c, s])
    return sin, cos


def inverse_frequencies(theta: float, rotary_dim: int, linear_factor: float = 1.0) -> F64:
    """[rotary_dim/2] radians per position: theta^(-2i/rotary_dim) / linear_factor."""
    log_theta = log64(theta)
    return np.array([exp64(-((2.0 * i) / rotary_dim) * log_theta) / linear_factor for i in range(rotary_dim // 2)])


def rope_rows(theta: float, rotary_dim: int, positions: NDArray[np.integer], linear_factor: float = 1.0) -> NDArray[np.float32]:
    """[n, rotary_dim] f32: for every position the cosines of the rotary_dim/2 angles, then their sines."""
    angle = np.asarray(positions, dtype=np.float64)[:, None] * inverse_frequencies(theta, rotary_dim, linear_factor)[None, :]
    sin, cos = sin_cos64(angle)
    return np.concatenate([cos, sin], axis=1).astype(np.float32)
