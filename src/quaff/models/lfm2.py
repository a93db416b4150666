"""LFM2 and LFM2.5: gated short convolutions, and grouped-query attention with QK-norm in a few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.experts import expert_roles, experts_config
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config
from quaff.models.imported import decoder_metadata, decoder_tensors, expect, heads_of, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.rope import read_rope


def config(metadata: Mapping[str, Any], tensors: Tensors, architecture: str = "lfm2") -> ModelConfig:
    m = MetadataReader(metadata, architecture)
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    size, taps = head_dim(m, dim, heads), m.integer("shortconv.l_cache")
    rope = read_rope(m, size, interleaved=False, default_theta=None)
    # A layer without KV heads is a convolution.
    kv_heads = m.per_layer("attention.head_count_kv", layers)
    if not any(kv_heads):
        raise ConfigError(f"{architecture}.attention.head_count_kv gives no layer any heads")
    dense = m.integer("leading_dense_block_count", layers)
    mixture = experts_config(m, "sigmoid") if dense < layers else None

    def layer(i: int, heads_kv: int) -> LayerConfig:
        experts = mixture if i >= dense else None
        attention = AttentionConfig(heads, heads_kv or max(kv_heads), size, 0, float(np.float32(1 / np.sqrt(float(size)))))
        return LayerConfig("full" if heads_kv else "conv", attention, rope, conv_taps=0 if heads_kv else taps, experts=experts)

    c = decoder_config(m, metadata, tensors, architecture, tuple(layer(i, n) for i, n in enumerate(kv_heads)))
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (c.vocab, c.dim))
        yield TensorSpec("token_embd_norm.weight", (c.dim,))
        yield TensorSpec("output.weight", (c.vocab, c.dim), optional=True)
        for i, layer in enumerate(c.layers):
            for role, shape in roles(c, layer).items():
                yield TensorSpec(f"blk.{i}.{role}.weight", shape, float32=role == "shortconv.conv")
            if layer.experts:
                yield TensorSpec(f"blk.{i}.exp_probs_b.bias", (layer.experts.count,), optional=True)

    return tuple(specs())


def roles(c: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights."""
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (c.dim,), "ffn_norm": (c.dim,)}
    if layer.experts:
        shapes |= expert_roles(c, layer.experts)
    else:
        shapes |= {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
    if layer.kind == "conv":
        inner = {"in_proj": (3 * c.dim, c.dim), "conv": (c.dim, layer.conv_taps), "out_proj": (c.dim, c.dim)}
        return shapes | {f"shortconv.{part}": shape for part, shape in inner.items()}
    a = layer.attention
    return shapes | llama.attention_roles(c, a) | {"attn_q_norm": (a.head_dim,), "attn_k_norm": (a.head_dim,)}


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


MODULES = {
    "attn_norm": "operator_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}


def imported_metadata(config: Mapping[str, Any], architecture: str = "lfm2") -> dict[str, Any]:
    expect(config, "conv_bias", (False,), "a convolution with biases")
    layers = config["num_hidden_layers"]
    attends = config.get("full_attn_idxs", range(layers))
    types = config.get("layer_types") or ["full_attention" if i in attends else "conv" for i in range(layers)]
    rope = rope_metadata(rope_parameters(config, theta=1e6))
    keys = rope | {
        "feed_forward_length": _ffn_dim(config),
        "attention.head_count_kv": [heads_of(config)[1] if kind == "full_attention" else 0 for kind in types],
        "shortconv.l_cache": config.get("conv_L_cache", 3),
        "vocab_size": config["vocab_size"],
    }
    base = decoder_metadata({**config, "rms_norm_eps": config["norm_eps"], "intermediate_size": 0}, architecture)
    return base | {f"{architecture}.{key}": value for key, value in keys.items()}


def _ffn_dim(config: Mapping[str, Any]) -> int:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", config["model_type"] == "lfm2"):
        return size
    # As transformers' Lfm2MLP: two thirds of what is stated, times a factor, rounded up.
    step = int(config.get("block_multiple_of", 256))
    return -(-int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3)) // step) * step


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, MODULES)
    yield Imported("token_embd_norm.weight", ("model.embedding_norm.weight",))
    for i in range(config["num_hidden_layers"]):
        yield Imported(f"blk.{i}.shortconv.conv.weight", (f"model.layers.{i}.conv.conv.weight",), lambda w: w[:, 0])


FAMILY = Family(
    "lfm2",
    config,
    table,
    llama.embed,
    mixer,
    llama.ffn,
    head,
    refused={},
    huggingface=HuggingFace(("lfm2",), imported_metadata, imported_tensors),
    layer_kinds=("short convolution", "attention"),
    oracle="transformers, llama.cpp",
)
