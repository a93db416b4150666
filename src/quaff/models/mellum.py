"""Mellum 2: Qwen3-MoE whose layers slide or see everything as the file says, each kind with a rotary embedding of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.models import llama
from quaff.models.experts import experts_config, imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors, decoder_config
from quaff.models.imported import DECODER, IGNORED, decoder_metadata, decoder_tensors, expect, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.qwen3moe import QK_NORMS
from quaff.models.rope import read_rope


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "mellum")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    kv_heads, size, window = m.integer("attention.head_count_kv", heads), head_dim(m, dim, heads), m.integer("attention.sliding_window", 0)
    scale = float(np.float32(1 / np.sqrt(float(max(1, size)))))
    rope, ffn_dim = read_rope(m, size, interleaved=False, default_theta=None), m.integer("feed_forward_length")
    experts = experts_config(m)
    full = LayerConfig("full", AttentionConfig(heads, kv_heads, size, 0, scale), rope, experts=experts)
    slides = m.sliding("attention.sliding_window_pattern", layers, 0 if window else 1)
    theta = m.number("rope.freq_base_swa", rope.theta)
    sliding = full
    if any(slides):
        own = RopeConfig(theta, rope.rotary_dim, False)
        sliding = LayerConfig("sliding", AttentionConfig(heads, kv_heads, size, window, scale), own, experts=experts)
    c = decoder_config(
        m,
        metadata,
        tensors,
        "mellum",
        tuple(sliding if slide else full for slide in slides),
        ffn_dim=ffn_dim,
    )
    m.finish()
    return c


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    expect(config, "mlp_layer_types", (["sparse"] * layers,), "a mixture in some layers only")
    expect(config, "attention_bias", (False,), "attention with biases")
    sliding = rope_parameters(config, "sliding_attention")
    expect(sliding, "rope_type", ("default",), "rope scaling of sliding layers")
    keys = rope_metadata(rope_parameters(config, "full_attention", 500000.0)) | {
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "attention.sliding_window": config["sliding_window"] or 0,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }
    own = {f"mellum.{key}": value for key, value in keys.items()}
    return decoder_metadata(config, "mellum") | own | imported_experts_metadata(config, "mellum")


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, DECODER | QK_NORMS)
    yield from imported_experts(config)


FAMILY = replace(
    llama.FAMILY,
    name="mellum",
    config=config,
    table=partial(llama.table, biased={}, qk_norm=True),
    # What predicts several tokens at once is not used.
    huggingface=HuggingFace(("mellum",), imported_metadata, imported_tensors, (*IGNORED, r"mtp\..*")),
    layer_kinds=("sliding attention", "attention", "experts"),
    oracle="transformers",
)
