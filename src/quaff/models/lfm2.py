"""LFM2 and LFM2.5: gated short convolutions, and grouped-query attention with QK-norm in a few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.family import Builder, Family, Tensors, TensorSpec, Weights, vocab_size
from quaff.models.metadata import MetadataReader, head_dim, model_name


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "lfm2")
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    size, taps = head_dim(m, dim, heads), m.integer("shortconv.l_cache")
    rope = RopeConfig(m.number("rope.freq_base"), m.integer("rope.dimension_count", size), False, m.linear_rope_factor())
    # A layer without KV heads is a convolution.
    kv_heads = m.per_layer("attention.head_count_kv", layers)
    if not any(kv_heads):
        raise ConfigError("lfm2.attention.head_count_kv gives no layer any heads")

    def layer(heads_kv: int) -> LayerConfig:
        attention = AttentionConfig(heads, heads_kv or max(kv_heads), size, 0, float(np.float32(1 / np.sqrt(float(size)))))
        return LayerConfig("full", attention, rope) if heads_kv else LayerConfig("conv", attention, rope, taps)

    c = ModelConfig(
        architecture="lfm2",
        name=model_name(metadata),
        dim=dim,
        ffn_dim=m.integer("feed_forward_length"),
        vocab=vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        context_length=m.integer("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        layers=tuple(layer(n) for n in kv_heads),
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (c.vocab, c.dim))
        yield TensorSpec("token_embd_norm.weight", (c.dim,))
        yield TensorSpec("output.weight", (c.vocab, c.dim), optional=True)
        for i, layer in enumerate(c.layers):
            for role, shape in (*_mixer_roles(c, layer).items(), *_shared_roles(c).items()):
                yield TensorSpec(f"blk.{i}.{role}.weight", shape, float32=role == "shortconv.conv")

    return tuple(specs())


def _shared_roles(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm": (c.dim,),
        "ffn_norm": (c.dim,),
        "ffn_gate": (c.ffn_dim, c.dim),
        "ffn_up": (c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }


def _mixer_roles(c: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    if layer.kind == "conv":
        return {"shortconv.in_proj": (3 * c.dim, c.dim), "shortconv.conv": (c.dim, layer.conv_taps), "shortconv.out_proj": (c.dim, c.dim)}
    a = layer.attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {
        "attn_q": (q, c.dim),
        "attn_k": (kv, c.dim),
        "attn_v": (kv, c.dim),
        "attn_q_norm": (a.head_dim,),
        "attn_k_norm": (a.head_dim,),
        "attn_output": (c.dim, q),
    }


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    if layer.kind == "conv":
        y = g.gated_conv(g.linear(h, w["shortconv.in_proj.weight"]), w["shortconv.conv.weight"])
        g.residual += g.linear(y, w["shortconv.out_proj.weight"])
        return
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    q = g.rope(g.rms_norm(q, w.attn_q_norm, c.eps), layer.rope)
    k = g.rope(g.rms_norm(k, w.attn_k_norm, c.eps), layer.rope)
    g.residual += g.linear(g.attention(q, k, v, layer.attention), w.attn_output)


def head(g: Builder, c: ModelConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.token_embd_norm, c.eps)
    g.logits(h, w.output if "output" in w else w.token_embd)


FAMILY = Family("lfm2", config, table, llama.embed, mixer, llama.ffn, head, refused={})
