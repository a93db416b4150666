"""Gemma 3: norms before and after each half of a layer, QK-norm, five sliding layers to one global, tanh GELU gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.models import llama
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config, decoder_table
from quaff.models.imported import (
    DECODER,
    IGNORED,
    decoder_metadata,
    decoder_tensors,
    expect,
    heads_of,
    rope_metadata,
    rope_parameters,
)
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.rope import read_rope

PATTERN = 6
LAYERS_27B = 62


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "gemma3")
    m.refuse_unless("attention.sliding_window_pattern", (PATTERN,), "a sliding window pattern other than 6")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    m.refuse_unless("attn_logit_softcapping", (0.0,), "attention soft capping in gemma3")
    m.refuse_unless("final_logit_softcapping", (0.0,), "soft capping of logits")
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    kv_heads, size, window = m.integer("attention.head_count_kv", heads), head_dim(m, dim, heads), m.integer("attention.sliding_window")
    # The 27B model divides by the width per head instead of the head dimension.
    scale = float(np.float32(1 / np.sqrt(float(dim // heads if layers == LAYERS_27B else size))))
    # llama.cpp's default for this architecture is 10000 (its base for global layers comes from the file); sliding layers are never scaled.
    rope = read_rope(m, size, interleaved=False, default_theta=None)
    full = LayerConfig("full", AttentionConfig(heads, kv_heads, size, 0, scale), rope)
    plain = RopeConfig(m.number("rope.freq_base_swa", 10000.0), rope.rotary_dim, False)
    sliding = LayerConfig("sliding", AttentionConfig(heads, kv_heads, size, window, scale), plain)
    c = decoder_config(
        m,
        metadata,
        tensors,
        "gemma3",
        tuple(full if (i + 1) % PATTERN == 0 else sliding for i in range(layers)),
        embedding_scale=float(np.float32(np.sqrt(float(dim)))),
    )
    m.finish()
    return c


def table(c: ModelConfig, qk_norm: bool = True) -> tuple[TensorSpec, ...]:
    a = c.layers[0].attention
    layer = llama.attention_roles(c, a) | llama.ffn_roles(c)
    layer |= {norm: (c.dim,) for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
    if qk_norm:
        layer |= {"attn_q_norm": (a.head_dim,), "attn_k_norm": (a.head_dim,)}
    return decoder_table(c, layer, biased={})


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    if "attn_q_norm" in w:
        q, k = g.rms_norm(q, w.attn_q_norm, c.eps), g.rms_norm(k, w.attn_k_norm, c.eps)
    a = g.linear(g.attention(g.rope(q, layer.rope), g.rope(k, layer.rope), v, layer.attention), w.attn_output)
    g.residual += g.rms_norm(a, w.post_attention_norm, c.eps)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.ffn_norm, c.eps)
    gate, up = g.linear(h, w.ffn_gate, w.ffn_up)
    g.residual += g.rms_norm(g.linear(g.geglu(gate, up), w.ffn_down), w.post_ffw_norm, c.eps)


ROLES = DECODER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


# What config.json leaves out where it equals the default of transformers' Gemma3TextConfig.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    return decoder_tensors({**DEFAULTS, **config}, ROLES, one_plus_norms=True)


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**DEFAULTS, **config}
    heads, _, size = heads_of(config)
    layers = config["num_hidden_layers"]
    expect(config, "query_pre_attn_scalar", (config["hidden_size"] // heads if layers == LAYERS_27B else size,), "this attention scale")
    expect(config, "attn_logit_softcapping", (), "attention soft capping in gemma3")
    expect(config, "final_logit_softcapping", (), "soft capping of logits")
    expect(config, "sliding_window_pattern", (PATTERN,), "a sliding window pattern other than 6")
    expect(config, "use_bidirectional_attention", (False,), "attention without a causal mask")
    types = ["full_attention" if (i + 1) % PATTERN == 0 else "sliding_attention" for i in range(layers)]
    expect(config, "layer_types", (types,), "a sliding window pattern other than 6")
    sliding = rope_parameters(config, "sliding_attention")
    if "rope_parameters" not in config:
        sliding = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10000.0)}
    expect(sliding, "rope_type", ("default",), "rope scaling of sliding layers in gemma3")
    keys = rope_metadata(rope_parameters(config, "full_attention", 1e6)) | {
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "attention.sliding_window": config["sliding_window"],
    }
    return decoder_metadata(config, "gemma3", ("gelu_pytorch_tanh",)) | {f"gemma3.{key}": value for key, value in keys.items()}


FAMILY = Family(
    "gemma3",
    config,
    table,
    llama.embed,
    mixer,
    ffn,
    llama.head,
    refused={},
    huggingface=HuggingFace(("gemma3_text",), imported_metadata, imported_tensors, IGNORED),
    layer_kinds=("sliding attention", "attention"),
    oracle="transformers, llama.cpp",
)
