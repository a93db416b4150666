"""Qwen3.5 without experts: three layers of gated delta rule to one of gated attention with partial rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, DeltaConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.family import Builder, Family, Tensors, TensorSpec, Value, Weights, vocab_size
from quaff.models.metadata import MetadataReader, head_dim, model_name


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "qwen35")
    m.refuse_unless("expert_count", (0,), "mixture of experts")
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    size, values = head_dim(m, dim, heads), m.integer("ssm.time_step_rank")
    rotary, interval = m.integer("rope.dimension_count", size), m.integer("full_attention_interval", 4)
    # Rows, columns and time of a text are one position: its sections turn as one.
    m.per_layer("rope.dimension_sections", 4, default=0)
    rope = RopeConfig(m.number("rope.freq_base"), rotary, False, m.linear_rope_factor())
    if values < 1 or interval < 1 or m.integer("ssm.inner_size") % values:
        raise ConfigError("qwen35.ssm.time_step_rank, ssm.inner_size and full_attention_interval do not fit together")
    # The converter lays value heads out so that they take key heads by turns.
    delta = DeltaConfig(m.integer("ssm.group_count"), values, m.integer("ssm.state_size"), m.integer("ssm.inner_size") // values, True)
    attention = AttentionConfig(heads, m.integer("attention.head_count_kv", heads), size, 0, float(np.float32(1 / np.sqrt(float(size)))))
    full = LayerConfig("full", attention, rope)
    recurrent = LayerConfig("delta", attention, rope, m.integer("ssm.conv_kernel"), delta)
    c = ModelConfig(
        architecture="qwen35",
        name=model_name(metadata),
        dim=dim,
        ffn_dim=m.integer("feed_forward_length"),
        vocab=vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        context_length=m.integer("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        layers=tuple(full if (i + 1) % interval == 0 else recurrent for i in range(layers)),
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    ffn = {"ffn_gate.weight": (c.ffn_dim, c.dim), "ffn_up.weight": (c.ffn_dim, c.dim), "ffn_down.weight": (c.dim, c.ffn_dim)}
    norms = {"attn_norm.weight": (c.dim,), "post_attention_norm.weight": (c.dim,)}

    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (c.vocab, c.dim))
        yield TensorSpec("output_norm.weight", (c.dim,))
        yield TensorSpec("output.weight", (c.vocab, c.dim), optional=True)
        for i, layer in enumerate(c.layers):
            for name, shape in (norms | mixer_tensors(c, layer) | ffn).items():
                yield TensorSpec(f"blk.{i}.{name}", shape, float32=name == "ssm_conv1d.weight")

    return tuple(specs())


def mixer_tensors(c: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    if d := layer.delta:
        values = d.value_heads * d.value_dim
        qkv = 2 * d.key_heads * d.key_dim + values
        return {
            "attn_qkv.weight": (qkv, c.dim),
            "attn_gate.weight": (values, c.dim),
            "ssm_conv1d.weight": (qkv, layer.conv_taps),
            "ssm_alpha.weight": (d.value_heads, c.dim),
            "ssm_beta.weight": (d.value_heads, c.dim),
            "ssm_a": (d.value_heads,),
            "ssm_dt.bias": (d.value_heads,),
            "ssm_norm.weight": (d.value_dim,),
            "ssm_out.weight": (c.dim, values),
        }
    a = layer.attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {
        "attn_q.weight": (2 * q, c.dim),
        "attn_k.weight": (kv, c.dim),
        "attn_v.weight": (kv, c.dim),
        "attn_q_norm.weight": (a.head_dim,),
        "attn_k_norm.weight": (a.head_dim,),
        "attn_output.weight": (c.dim, q),
    }


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    if layer.delta:
        g.residual += g.linear(delta_net(g, c, layer, layer.delta, w, h), w.ssm_out)
        return
    a = layer.attention
    both, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    q, gate = g.split(both, a.heads, a.head_dim, a.head_dim)
    q = g.rope(g.rms_norm(q, w.attn_q_norm, c.eps), layer.rope)
    k = g.rope(g.rms_norm(k, w.attn_k_norm, c.eps), layer.rope)
    g.residual += g.linear(g.sigmoid_gate(gate, g.attention(q, k, v, a)), w.attn_output)


def delta_net(g: Builder, c: ModelConfig, layer: LayerConfig, d: DeltaConfig, w: Weights, h: Value) -> Value:
    qkv, z = g.linear(h, w.attn_qkv, w.attn_gate)
    alpha, beta = g.linear(h, w.ssm_alpha, w.ssm_beta)
    keys = d.key_heads * d.key_dim
    q, k, v = g.split(g.conv(qkv, w["ssm_conv1d.weight"]), 1, keys, keys, d.value_heads * d.value_dim)
    q = g.unit_norm(q, d.key_dim, c.eps, float(np.float32(1 / np.sqrt(float(d.key_dim)))))
    k = g.unit_norm(k, d.key_dim, c.eps)
    decay, step = g.delta_gates(alpha, beta, w["ssm_a"], w["ssm_dt.bias"])
    return g.swiglu(z, g.rms_norm(g.delta_rule(q, k, v, decay, step, d), w.ssm_norm, c.eps))


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.post_attention_norm, c.eps)
    gate, up = g.linear(h, w.ffn_gate, w.ffn_up)
    g.residual += g.linear(g.swiglu(gate, up), w.ffn_down)


FAMILY = Family("qwen35", config, table, llama.embed, mixer, ffn, llama.head, refused={})
