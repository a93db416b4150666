"""gpt-oss: sliding and full layers by turns with attention sinks, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.models import llama
from quaff.models.experts import expert_roles, experts_config
from quaff.models.family import Builder, Family, Tensors, TensorSpec, Weights, decoder_table, vocab_size
from quaff.models.metadata import MetadataReader, head_dim, model_name
from quaff.models.rope import read_rope

# Of the gate: what its sigmoid is multiplied by, and the limit of gate and up. Files do not state them.
ALPHA, LIMIT = 1.702, 7.0


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "gpt-oss")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    dim, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    kv_heads, size, window = m.integer("attention.head_count_kv", heads), head_dim(m, dim, heads), m.integer("attention.sliding_window")
    scale = float(np.float32(1 / np.sqrt(float(size))))
    rope = read_rope(m, size, interleaved=False, default_theta=None, truncate=False)
    ffn_dim = m.integer("feed_forward_length")
    experts = experts_config(m, "softmax_of_chosen", ffn_dim=ffn_dim)
    full = LayerConfig("full", AttentionConfig(heads, kv_heads, size, 0, scale), rope, experts=experts)
    sliding = LayerConfig("sliding", AttentionConfig(heads, kv_heads, size, window, scale), rope, experts=experts)
    c = ModelConfig(
        architecture="gpt-oss",
        name=model_name(metadata),
        dim=dim,
        ffn_dim=ffn_dim,
        vocab=vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        context_length=m.integer("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        layers=tuple(full if i % 2 else sliding for i in range(m.layers())),
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    a = c.layers[0].attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    layer = {
        "attn_norm": (c.dim,),
        "attn_q": (q, c.dim),
        "attn_k": (kv, c.dim),
        "attn_v": (kv, c.dim),
        "attn_output": (c.dim, q),
        "attn_sinks": (a.heads,),
        "post_attention_norm": (c.dim,),
    } | expert_roles(c)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return decoder_table(c, layer, dict.fromkeys(matrices, True))


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    a = g.attention(g.rope(q, layer.rope), g.rope(k, layer.rope), v, layer.attention, w.attn_sinks)
    g.residual += g.linear(a, w.attn_output)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    assert layer.experts is not None
    h = g.rms_norm(g.residual, w.post_attention_norm, c.eps)
    routing = g.route(h, w.ffn_gate_inp, layer.experts)
    gate, up = g.expert_linear(h, routing, w.ffn_gate_exps, w.ffn_up_exps)
    g.residual += g.combine(g.expert_linear(g.clamped_swiglu(gate, up, ALPHA, LIMIT), routing, w.ffn_down_exps), routing)


FAMILY = Family(
    "gpt-oss",
    config,
    table,
    llama.embed,
    mixer,
    ffn,
    llama.head,
    refused={},
    layer_kinds=("sliding attention", "attention", "experts"),
)
