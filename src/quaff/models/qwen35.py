"""Qwen3.5: three layers of gated delta rule to one of gated attention with partial rotary embeddings; dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.deltanet import delta_config, delta_imported, delta_metadata, delta_net, delta_tensors
from quaff.models.experts import experts_config, mixture
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config
from quaff.models.imported import DECODER, decoder_metadata, decoder_tensors, expect, heads_of, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.rope import read_rope


def config(metadata: Mapping[str, Any], tensors: Tensors, architecture: str = "qwen35", tiled: bool = True) -> ModelConfig:
    """`tiled`: the converter lays value heads out so that they take key heads by turns."""
    m = MetadataReader(metadata, architecture)
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    size, interval = head_dim(m, dim, heads), m.integer("full_attention_interval", 4)
    # Rows, columns and time of a text are one position: its sections turn as one.
    m.per_layer("rope.dimension_sections", 4, default=0)
    rope = read_rope(m, size, interleaved=False, default_theta=None)
    if interval < 1:
        raise ConfigError(f"{architecture}.full_attention_interval is 0; expected how many layers one attends of")
    experts = experts_config(m) if architecture != "qwen35" else None
    attention = AttentionConfig(heads, m.integer("attention.head_count_kv", heads), size, 0, float(np.float32(1 / np.sqrt(float(size)))))
    full = LayerConfig("full", attention, rope, experts=experts)
    taps, delta = m.integer("ssm.conv_kernel"), delta_config(m, tiled)
    recurrent = LayerConfig("delta", attention, rope, conv_taps=taps, delta=delta, experts=experts)
    c = decoder_config(
        m,
        metadata,
        tensors,
        architecture,
        tuple(full if (i + 1) % interval == 0 else recurrent for i in range(layers)),
        ffn_dim=m.integer("feed_forward_length", experts.ffn_dim if experts else None),
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    ffn = {f"{role}.weight": shape for role, shape in llama.ffn_roles(c).items()}
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
        # Qwen3-Next keeps the gates of a key head's value heads together: steps, then decays.
        joined = c.architecture == "qwen3next"
        gates = {"ssm_ba.weight": 2} if joined else {"ssm_alpha.weight": 1, "ssm_beta.weight": 1}
        return {name: (n * d.value_heads, c.dim) for name, n in gates.items()} | delta_tensors(c, d, layer.conv_taps)
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
        g.residual += delta_net(g, c, layer.delta, w, h)
        return
    a = layer.attention
    both, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    q, gate = g.split(both, a.heads, a.head_dim, a.head_dim)
    q = g.rope(g.rms_norm(q, w.attn_q_norm, c.eps), layer.rope)
    k = g.rope(g.rms_norm(k, w.attn_k_norm, c.eps), layer.rope)
    g.residual += g.linear(g.sigmoid_gate(gate, g.attention(q, k, v, a)), w.attn_output)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.post_attention_norm, c.eps)
    if layer.experts:
        return mixture(g, layer, w, h)
    gate, up = g.linear(h, w.ffn_gate, w.ffn_up)
    g.residual += g.linear(g.swiglu(gate, up), w.ffn_down)


ROLES = {role: module for role, module in DECODER.items() if role != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def imported_metadata(config: Mapping[str, Any], architecture: str = "qwen35") -> dict[str, Any]:
    expect(config, "attention_bias", (False,), "attention with biases")
    interval = config.get("full_attention_interval", 4)
    layers, size = config["num_hidden_layers"], heads_of(config)[2]
    types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    expect(config, "layer_types", (types,), "this pattern of layers")
    rope = rope_parameters(config, theta=1e7)
    rotary = int(size * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25)))
    keys = (
        rope_metadata(rope)
        | delta_metadata(config)
        | {
            "rope.dimension_count": rotary,
            "rope.dimension_sections": [*rope.get("mrope_section", (11, 11, 10)), 0],
            "full_attention_interval": interval,
        }
    )
    # A mixture in every layer leaves no dense network.
    base = decoder_metadata({"intermediate_size": config.get("moe_intermediate_size"), **config}, architecture)
    return base | {f"{architecture}.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, ROLES, one_plus_norms=True)
    for i in range(config["num_hidden_layers"]):
        yield from delta_imported(config, i)


FAMILY = Family(
    "qwen35",
    config,
    table,
    llama.embed,
    mixer,
    ffn,
    llama.head,
    refused={},
    huggingface=HuggingFace(("qwen3_5_text",), imported_metadata, imported_tensors),
    layer_kinds=("gated delta rule", "gated attention"),
    oracle="transformers, llama.cpp",
)
