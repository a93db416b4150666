"""Configurations refuse what cannot be run, naming the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quaff.config import AttentionConfig, EngineConfig, LayerConfig, ModelConfig, RopeConfig, parse_memory
from quaff.errors import ConfigError

ROPE = RopeConfig(10000.0, 16, True)
FULL = LayerConfig("full", AttentionConfig(4, 2, 16, 0, 0.25), ROPE)
SLIDING = LayerConfig("sliding", AttentionConfig(4, 2, 16, 24, 0.25), ROPE)
MODEL = ModelConfig("llama", "tiny", 64, 96, 300, 4096, 1e-5, (FULL, SLIDING))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True"),
        ({"chunk": -1}, "chunk is -1"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"context": 0}, "context is 0"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes is 0"),
        ({"schedule": "diagonal"}, "schedule is 'diagonal'; expected token, chunk or layer"),
        ({"activations": "int4"}, "activations is 'int4'; expected int8 or float32"),
        ({"memory": 0}, "memory is 0"),
        ({"memory": True}, "memory is True"),
        ({"memory": "2GiB"}, "memory is '2GiB'"),
        ({"memory": 1 << 30, "memory_limit_bytes": 1 << 30}, "memory and memory_limit_bytes"),
        ({"kv_dtype": "float64"}, "kv_dtype is 'float64'; expected int16 or float32"),
    ],
)
def test_engine_options(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**change)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("2 GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        (" 640MiB ", 640 << 20),
        ("512k", 512 << 10),
        ("750000000", 750_000_000),
        ("12B", 12),
        ("auto", "auto"),
        ("AUTO", "auto"),
    ],
)
def test_memory_is_a_size_with_a_unit(text: str, nbytes: int | str) -> None:
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "2GiBs", "2 i", "2ib", "nan", "1..5G", "0x10", "9" * 19, "2XiB", "٣G"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="memory is "):
        parse_memory(text)


def test_engine_defaults_leave_choices_open() -> None:
    c = EngineConfig()
    assert (c.threads, c.chunk, c.context, c.memory_limit_bytes) == (None, None, None, None)
    assert c.memory is None
    assert (c.schedule, c.activations, c.fuse) == (None, "int8", True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dim": 0}, "embedding length is 0"),
        ({"ffn_dim": 1 << 25}, "feed-forward length"),
        ({"vocab": -5}, "vocabulary size is -5"),
        ({"context_length": 0}, "context length is 0"),
        ({"eps": 0.0}, "norm epsilon"),
        ({"eps": float("nan")}, "norm epsilon"),
        ({"layers": ()}, "0 layers"),
        ({"embedding_scale": float("inf")}, "embedding scale"),
        ({"residual_scale": 0.0}, "residual scale"),
        ({"logit_scale": 0.0}, "logit scale"),
        ({"logit_softcap": -1.0}, "logit soft cap"),
    ],
)
def test_model_fields(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(MODEL, **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": 3}, "3 attention heads cannot share 2 KV heads"),
        ({"kv_heads": 0}, "KV head count is 0"),
        ({"head_dim": 40}, "multiple of 16"),
        ({"head_dim": 1040}, "1..1024"),
        ({"window": -1}, "window is -1"),
        ({"scale": 0.0}, "attention scale"),
        ({"softcap": -1.0}, "soft cap"),
    ],
)
def test_attention_fields(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(FULL.attention, **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"theta": 1.0}, "theta"),
        ({"rotary_dim": 7}, "even"),
        ({"rotary_dim": 0}, "dimension count is 0"),
        ({"factors": (0.0,) * 8}, "scaling factor is 0.0"),
        ({"factors": (1.0,) * 7}, "7 rope factors"),
        ({"scale": 0.0}, "attention factor is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 0.1}, "temperature length is 0"),
    ],
)
def test_rope_fields(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(ROPE, **change)


def test_a_layer_is_consistent() -> None:
    with pytest.raises(ConfigError, match="sliding layer needs a window"):
        replace(SLIDING, attention=FULL.attention)
    with pytest.raises(ConfigError, match="sliding layer needs a window"):
        replace(FULL, attention=SLIDING.attention)
    with pytest.raises(ConfigError, match="exceeds the head dimension"):
        replace(FULL, rope=replace(ROPE, rotary_dim=32))
    with pytest.raises(ConfigError, match="temperature needs rope over the whole head"):
        replace(FULL, query_rope=replace(ROPE, rotary_dim=8, temperature=0.1, temperature_length=100))
    assert replace(FULL, rope=None).rope is None
