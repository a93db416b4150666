"""Rotary scaling against the formulas of the papers in NumPy, and config.json against GGUF keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quaff.errors import ConfigError, UnsupportedError
from quaff.models.imported import rope_metadata, rope_parameters, rope_tensors
from quaff.models.metadata import MetadataReader
from quaff.models.rope import llama3_factors, longrope_scale, read_rope, yarn_factors, yarn_scale

SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}
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


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"rope_theta": 5e5}, {}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"type": "linear", "factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16}},
            {"type": "yarn", "factor": 4.0, "original_context_length": 4096, "yarn_beta_fast": 16.0, "yarn_attn_factor": 1.5},
        ),
    ],
)
def test_config_json_becomes_the_converters_keys(config: dict[str, Any], scaling: dict[str, Any]) -> None:
    keys = rope_metadata(rope_parameters({**SHAPE, **config}))
    assert keys == {"rope.freq_base": 5e5, "rope.dimension_count": 64} | {f"rope.scaling.{k}": v for k, v in scaling.items()}


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'axial'"):
        rope_metadata(rope_parameters({**SHAPE, "rope_scaling": {"rope_type": "axial"}}))


def test_stored_factors_come_from_the_same_figures() -> None:
    (freqs,) = rope_tensors(rope_parameters({**SHAPE, "head_dim": 128, "rope_theta": 5e5, "rope_scaling": LLAMA3}))
    assert freqs.name == "rope_freqs.weight" and freqs.sources == () and freqs.make is not None
    values = freqs.make()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(llama3_factors(5e5, 128, 8.0, 1.0, 4.0, 8192), np.float32))
    metadata = {"llama.context_length": 131072, "llama.rope.freq_base": 5e5, "rope_freqs.weight": values}
    assert read_rope(MetadataReader(metadata, "llama"), 128, True).factors == tuple(float(v) for v in values)


def test_longrope_of_a_config_json() -> None:
    config = {
        **SHAPE,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 24, "long_factor": [4.0] * 24},
    }
    rope = rope_parameters(config)
    keys = rope_metadata(rope)
    assert keys["rope.dimension_count"] == 48 and keys["rope.scaling.original_context_length"] == 4096
    assert keys["rope.scaling.attn_factor"] == longrope_scale(32.0, 4096)
    long, short = rope_tensors(rope)
    assert (long.name, short.name) == ("rope_factors_long.weight", "rope_factors_short.weight")
    assert long.make is not None and long.make().tolist() == [4.0] * 24
