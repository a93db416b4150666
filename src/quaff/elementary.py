"""Logarithm and exponential in float64 code of our own (NUMERICS 8 and 11): + - * /, rint and powers of two, so every platform agrees.

`log64`: x = m * 2^e with m in [sqrt(1/2), sqrt(2)); s = (m - 1)/(m + 1); z = s*s; p = 1/23, then p = p*z + 1/k for k = 21, 19, ... 1;
result e*LN2_HI + (e*LN2_LO + (2*s)*p).
`exp64`: n = rint(y * LOG2E); r = (y - n*LN2_HI) - n*LN2_LO; p = 1/13!, then p = p*r + 1/k! for k = 12 ... 0; result p * 2^n.
native/runtime/rope.cpp follows the same steps one by one.
"""

from __future__ import annotations

import math

SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LOG2E = float.fromhex("0x1.71547652b82fep+0")
# The high part ends in enough zero bits that n times it is exact for |n| < 2^20.
LN2_HI = float.fromhex("0x1.62e42feep-1")
LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")


def inverse_factorial(k: int) -> float:
    """The float64 quotient 1 / k!."""
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
    n = float(round(y * LOG2E))
    r = (y - n * LN2_HI) - n * LN2_LO
    p = inverse_factorial(13)
    for k in range(12, -1, -1):
        p = p * r + inverse_factorial(k)
    return math.ldexp(p, int(n))
