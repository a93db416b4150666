"""Llama: pre-norm decoder with grouped-query attention and a gated SiLU network (SmolLM2, Llama 2 and 3, Mistral) or experts (Mixtral)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import MAX_SIZE, AttentionConfig, LayerConfig, ModelConfig
from quaff.models.experts import (
    MIXTRAL,
    expert_count,
    expert_ffn,
    expert_roles,
    experts_config,
    imported_experts,
    imported_experts_metadata,
)
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config, decoder_table
from quaff.models.imported import IGNORED, decoder_metadata, decoder_tensors, expect, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.rope import read_rope

# Biases of the attention's projections, by whether a file must have them: few Llama files do.
BIASES = {"attn_q": False, "attn_k": False, "attn_v": False, "attn_output": False}


def config(
    metadata: Mapping[str, Any], tensors: Tensors, architecture: str = "llama", interleaved: bool = True, normalise: bool = True
) -> ModelConfig:
    m = MetadataReader(metadata, architecture)
    c = read(m, metadata, tensors, architecture, interleaved, normalise)
    m.finish()
    return c


def read(
    m: MetadataReader, metadata: Mapping[str, Any], tensors: Tensors, architecture: str, interleaved: bool, normalise: bool = True
) -> ModelConfig:
    """The keys that Llama and its kin share. `interleaved`: the converter permutes q and k so that rotary pairs lie side by side.

    `normalise`: whether the weights of a row's experts are made to sum to one, where the file says nothing."""
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    dim, heads, length = m.integer("embedding_length"), m.integer("attention.head_count"), m.integer("context_length")
    size, window = head_dim(m, dim, heads), m.integer("attention.sliding_window", 0)
    # A window that no row can outgrow hides nothing.
    window = 0 if length <= window <= MAX_SIZE else window
    scale = float(np.float32(1 / np.sqrt(float(max(1, size)))))
    attention = AttentionConfig(heads, m.integer("attention.head_count_kv", heads), size, window, scale)
    ffn_dim = m.integer("feed_forward_length")
    experts = experts_config(m, normalise=normalise, ffn_dim=ffn_dim) if m.integer("expert_count", 0) else None
    m.refuse_unless("expert_used_count", (experts.used if experts else 0,), "a number of experts used without experts")
    layer = LayerConfig("sliding" if window else "full", attention, read_rope(m, size, interleaved), experts=experts)
    return decoder_config(
        m,
        metadata,
        tensors,
        architecture,
        (layer,) * m.layers(),
        ffn_dim=ffn_dim,
    )


def table(c: ModelConfig, biased: Mapping[str, bool] = BIASES, qk_norm: bool = False) -> tuple[TensorSpec, ...]:
    """`qk_norm`: queries and keys are normalised head by head before they turn."""
    a = c.layers[0].attention
    layer = attention_roles(c, a) | ffn_roles(c) | {"attn_norm": (c.dim,), "ffn_norm": (c.dim,)}
    if qk_norm:
        layer |= {"attn_q_norm": (a.head_dim,), "attn_k_norm": (a.head_dim,)}
    return decoder_table(c, layer, biased)


def attention_roles(c: ModelConfig, a: AttentionConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices around attention, by role."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {"attn_q": (q, c.dim), "attn_k": (kv, c.dim), "attn_v": (kv, c.dim), "attn_output": (c.dim, q)}


def ffn_roles(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of a feed-forward network, or of a router and its experts, by role."""
    if (experts := c.layers[0].experts) is not None:
        return expert_roles(c, experts)
    return {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}


def embed(g: Builder, c: ModelConfig, w: Weights) -> None:
    g.embed(w.token_embd, c.embedding_scale)


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    if "attn_q_norm" in w:
        q, k = g.rms_norm(q, w.attn_q_norm, c.eps), g.rms_norm(k, w.attn_k_norm, c.eps)
    a = g.attention(g.rope(q, layer.query_rope or layer.rope), g.rope(k, layer.rope), v, layer.attention)
    g.residual += g.linear(a, w.attn_output)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    if layer.experts:
        return expert_ffn(g, c, layer, w)
    h = g.rms_norm(g.residual, w.ffn_norm, c.eps)
    gate, up = g.linear(h, w.ffn_gate, w.ffn_up)
    g.residual += g.linear(g.swiglu(gate, up), w.ffn_down)


def head(g: Builder, c: ModelConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.output_norm, c.eps)
    g.logits(h, w.output if "output" in w else w.token_embd)


def imported_metadata(config: Mapping[str, Any], architecture: str = "llama", more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`more`: keys without the architecture that a family adds to Llama's."""
    keys = rope_metadata(rope_parameters(config)) | dict(more or {})
    if config.get("model_type") in ("mistral", "ministral3") and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    return decoder_metadata(config, architecture) | {f"{architecture}.{key}": value for key, value in keys.items()}


def folder_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of Llama or, with experts, Mixtral."""
    if not expert_count(config):
        return imported_metadata(config)
    expect(config, "sliding_window", (), "Mixtral with sliding windows")
    return imported_metadata(config) | imported_experts_metadata(config, "llama")


def folder_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, interleaved=True)
    yield from imported_experts(config, "block_sparse_moe", MIXTRAL) if expert_count(config) else ()


FAMILY = Family(
    "llama",
    config,
    table,
    embed,
    mixer,
    ffn,
    head,
    refused={},
    huggingface=HuggingFace(("llama", "mistral", "mixtral"), folder_metadata, folder_tensors, IGNORED),
    oracle="transformers, llama.cpp",
)
