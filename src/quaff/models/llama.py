"""Llama: pre-norm decoder with grouped-query attention and a gated SiLU network (SmolLM2, Llama 2, Mistral and their kin)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.models.family import Builder, Family, HuggingFace, Tensors, TensorSpec, Weights, decoder_table, vocab_size
from quaff.models.imported import IGNORED, decoder_metadata, decoder_tensors, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim, model_name

# Biases of the attention's projections, by whether a file must have them: few Llama files do.
BIASES = {"attn_q": False, "attn_k": False, "attn_v": False, "attn_output": False}


def config(metadata: Mapping[str, Any], tensors: Tensors, architecture: str = "llama", interleaved: bool = True) -> ModelConfig:
    m = MetadataReader(metadata, architecture)
    m.refuse_unless("expert_count", (0,), "mixture of experts")
    m.refuse_unless("expert_used_count", (0,), "mixture of experts")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    dim, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    size = head_dim(m, dim, heads)
    # The converter permutes Llama's q and k so that rotary pairs lie side by side.
    rotary, factor = m.integer("rope.dimension_count", size), m.linear_rope_factor()
    rope = RopeConfig(m.number("rope.freq_base", 10000.0), rotary, interleaved, factor)
    attention = AttentionConfig(heads, m.integer("attention.head_count_kv", heads), size, 0, float(np.float32(1 / np.sqrt(float(size)))))
    c = ModelConfig(
        architecture=architecture,
        name=model_name(metadata),
        dim=dim,
        ffn_dim=m.integer("feed_forward_length"),
        vocab=vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        context_length=m.integer("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        layers=(LayerConfig("full", attention, rope),) * m.layers(),
    )
    m.finish()
    return c


def table(c: ModelConfig, biased: Mapping[str, bool] = BIASES) -> tuple[TensorSpec, ...]:
    a = c.layers[0].attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    layer = {
        "attn_norm": (c.dim,),
        "attn_q": (q, c.dim),
        "attn_k": (kv, c.dim),
        "attn_v": (kv, c.dim),
        "attn_output": (c.dim, q),
        "ffn_norm": (c.dim,),
        "ffn_gate": (c.ffn_dim, c.dim),
        "ffn_up": (c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }
    return decoder_table(c, layer, biased)


def embed(g: Builder, c: ModelConfig, w: Weights) -> None:
    g.embed(w.token_embd, c.embedding_scale)


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    a = g.attention(g.rope(q, layer.rope), g.rope(k, layer.rope), v, layer.attention)
    g.residual += g.linear(a, w.attn_output)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.ffn_norm, c.eps)
    gate, up = g.linear(h, w.ffn_gate, w.ffn_up)
    g.residual += g.linear(g.swiglu(gate, up), w.ffn_down)


def head(g: Builder, c: ModelConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.output_norm, c.eps)
    g.logits(h, w.output if "output" in w else w.token_embd)


def imported_metadata(config: Mapping[str, Any], architecture: str = "llama") -> dict[str, Any]:
    rope = rope_metadata(rope_parameters(config))
    return decoder_metadata(config, architecture) | {f"{architecture}.{key}": value for key, value in rope.items()}


FAMILY = Family(
    "llama",
    config,
    table,
    embed,
    mixer,
    ffn,
    head,
    refused={"rope_freqs.weight": "rope scaling by frequency factors (llama3)"},
    huggingface=HuggingFace(("llama",), imported_metadata, partial(decoder_tensors, interleaved=True), IGNORED),
    oracle="transformers, llama.cpp",
)
