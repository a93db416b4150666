"""Rotary scaling: what metadata and tensors say becomes one divisor per frequency and one attention factor.

Every figure comes from float64 code of our own (quaff/elementary.py): the same file gives the same table on every machine. Kinds: none,
linear (positions over a factor), llama3 (by wavelength, arXiv 2407.21783), yarn (arXiv 2309.00071) and longrope (arXiv 2402.13753).
NTK scaling changes theta alone, so a file states its result; "dynamic" NTK is plain rotation up to the model's context, and no more is run.
"""

from __future__ import annotations

import math

from quaff.config import RopeConfig
from quaff.elementary import exp64, log64
from quaff.errors import ConfigError, UnsupportedError, quote
from quaff.models.metadata import MetadataReader

PI = 3.141592653589793
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def read_rope(
    m: MetadataReader, head_dim: int, interleaved: bool, default_theta: float | None = 10000.0, truncate: bool = True
) -> RopeConfig:
    """The rotary embedding of a GGUF file's scaled layers, `head_dim` wide unless the file says less.

    Long and short factors: the long ones apply when the context that the model is run with exceeds the original one, whatever the length
    of a prompt. `truncate`: YaRN's correction range is rounded outwards to whole frequencies.
    """
    theta, rotary = m.number("rope.freq_base", default_theta), m.integer("rope.dimension_count", head_dim)
    length = m.integer("context_length")
    original = m.integer("rope.scaling.original_context_length", length) or length
    factor = m.number("rope.scaling.factor", 0.0) or m.number("rope.scale_linear", 0.0)
    stored, long, short = (m.vector(name) for name in (FREQS, LONG, SHORT))
    kind = m.text("rope.scaling.type", "linear" if factor else "none")
    # Converters of Phi-3 store long and short factors and no kind.
    kind = "longrope" if kind == "none" and long else kind
    m.refuse_unless("rope.scaling.yarn_ext_factor", (1.0,), "a YaRN extrapolation factor")
    scale, factors = m.number("rope.scaling.attn_factor", 1.0), (1.0,) * (rotary // 2)
    if kind == "linear":
        factors = (factor or 1.0,) * (rotary // 2)
    elif kind == "yarn":
        fast, slow = m.number("rope.scaling.yarn_beta_fast", 32.0), m.number("rope.scaling.yarn_beta_slow", 1.0)
        factors = yarn_factors(theta, rotary, factor, original, fast, slow, truncate)
        own = yarn_scale(factor, 1.0, m.number("rope.scaling.yarn_log_multiplier", 0.0))
        scale *= m.number("rope.scaling.yarn_attn_factor", 0.0) or own
    elif kind == "longrope":
        if long is None or short is None:
            raise ConfigError(f"rope scaling of type longrope needs the tensors {LONG} and {SHORT}")
        factors = long if min(m.context or length, length) > original else short
    elif kind != "none":
        raise UnsupportedError(f"rope scaling of type {quote(kind)} is not supported; supported: none, linear, yarn, longrope")
    if stored is not None:
        if len(stored) != len(factors):
            raise ConfigError(f"tensor {FREQS} has {len(stored)} values; rope has {len(factors)} frequencies")
        factors = tuple(a * b for a, b in zip(factors, stored, strict=True))
    return RopeConfig(theta, rotary, interleaved, () if set(factors) <= {1.0} else factors, scale)


def yarn_factors(
    theta: float, rotary_dim: int, factor: float, original: int, fast: float = 32.0, slow: float = 1.0, truncate: bool = True
) -> tuple[float, ...]:
    """Divisors: 1 for frequencies that turn more than `fast` times in the original context, `factor` below `slow` turns, a ramp between."""
    if not (factor > 0 and original > 0 and fast > 0 and slow > 0 and theta > 1):
        raise ConfigError(f"yarn needs a scaling factor, an original context and betas above 0, not {factor}, {original}, {fast}, {slow}")

    def frequency(turns: float) -> float:
        return rotary_dim * log64(original / (turns * 2.0 * PI)) / (2.0 * log64(theta))

    low, high = frequency(fast), frequency(slow)
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = (min(1.0, max(0.0, (i - low) / (high - low))) for i in range(rotary_dim // 2))
    return tuple(1.0 / (r / factor + (1.0 - r)) for r in ramp)


def yarn_scale(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's attention factor: 0.1 ln(factor) + 1, over the same of all dimensions where a model states both multipliers."""

    def size(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * log64(factor) + 1.0

    return size(mscale) / size(mscale_all_dim) if mscale and mscale_all_dim else size(1.0)


def llama3_factors(theta: float, rotary_dim: int, factor: float, low: float, high: float, original: int) -> tuple[float, ...]:
    """Divisors: 1 for wavelengths below original/high, `factor` above original/low, between them a mean of the frequencies."""
    out = []
    for i in range(rotary_dim // 2):
        wavelength = 2.0 * PI * exp64((2.0 * i) / rotary_dim * log64(theta))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        out.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(out)


def longrope_scale(factor: float, original: int) -> float:
    """LongRoPE's attention factor for a context of `factor` times the original."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + log64(factor) / log64(float(original)))
