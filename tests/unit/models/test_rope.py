"""Rotary scaling against the formulas of the papers in NumPy, and config.json against GGUF keys."""

from __future__ import annotations

import numpy as np
import pytest

from quaff.errors import ConfigError
from quaff.models.rope import llama3_factors, longrope_scale, yarn_factors, yarn_scale

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    factors = np.array(llama3_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192))
    inverse = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wavelength = 2 * np.pi / inverse
    smooth = (8192 / wavelength - 1.0) / 3.0
    expected = np.where(wavelength < 2048, inverse, np.where(wavelength > 8192, inverse / 8, (1 - smooth) * inverse / 8 + smooth * inverse))
    np.testing.assert_allclose(inverse / factors, expected, rtol=1e-13)
    assert factors[0] == 1.0 and factors[-1] == 8.0 and len(set(factors)) > 2


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_betas(truncate: bool) -> None:
    theta, dim, factor, original = 1e6, 128, 4.0, 32768
    low, high = (dim * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(theta)) for beta in (32.0, 1.0))
    low, high = (np.floor(low), np.ceil(high)) if truncate else (low, high)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    inverse = theta ** (-np.arange(0, dim, 2) / dim)
    expected = inverse / factor * ramp + inverse * (1 - ramp)
    np.testing.assert_allclose(inverse / np.array(yarn_factors(theta, dim, factor, original, truncate=truncate)), expected, rtol=1e-13)


def test_attention_factors() -> None:
    assert yarn_scale(4.0) == pytest.approx(0.1 * np.log(4.0) + 1.0, rel=1e-15)
    assert yarn_scale(1.0) == 1.0 and yarn_scale(40.0, 1.0, 1.0) == 1.0
    assert yarn_scale(40.0, 0.707, 1.0) == pytest.approx((0.0707 * np.log(40.0) + 1) / (0.1 * np.log(40.0) + 1), rel=1e-14)
    assert longrope_scale(32.0, 4096) == pytest.approx(np.sqrt(1 + np.log(32.0) / np.log(4096)), rel=1e-15)
    assert longrope_scale(1.0, 4096) == 1.0


def test_impossible_yarn_is_refused() -> None:
    for factor, original in ((0.0, 4096), (4.0, 0)):
        with pytest.raises(ConfigError, match="yarn needs"):
            yarn_factors(1e4, 64, factor, original)
