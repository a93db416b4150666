"""Gemma 4: sliding and global layers with heads of their own size, later layers that read the keys and values of earlier ones, and values
of every token that enter each layer beside the residual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, LayerKind, ModelConfig, RopeConfig
from quaff.errors import ConfigError, UnsupportedError
from quaff.models import gemma3
from quaff.models.family import OUTPUT_SCALE, Builder, HuggingFace, Tensors, TensorSpec, Weights, decoder_config
from quaff.models.gemma4_folder import imported_metadata, imported_tensors
from quaff.models.imported import IGNORED
from quaff.models.metadata import MetadataReader
from quaff.models.rope import FREQS, read_rope


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "gemma4")
    m.refuse_unless("expert_count", (0,), "mixture of experts in gemma4")
    m.refuse_unless("expert_used_count", (0,), "mixture of experts in gemma4")
    dim, heads, layers = m.integer("embedding_length"), m.integer("attention.head_count"), m.layers()
    kv_heads, ffn = m.per_layer("attention.head_count_kv", layers, heads), m.per_layer("feed_forward_length", layers)
    sliding, window = m.sliding("attention.sliding_window_pattern", layers, 6), m.integer("attention.sliding_window")
    size = m.integer("attention.key_length")
    sizes = (size, m.integer("attention.key_length_swa", size))
    if (m.integer("attention.value_length", sizes[0]), m.integer("attention.value_length_swa", sizes[1])) != sizes:
        raise UnsupportedError("attention whose keys and values have different lengths is not supported in gemma4")
    theta, rotary = m.number("rope.freq_base_swa", 10000.0), m.integer("rope.dimension_count_swa", sizes[1])
    ropes = (read_rope(m, size, interleaved=False, default_theta=None), RopeConfig(theta, rotary, False))
    own = layers - m.integer("attention.shared_kv_layers", 0)

    def layer(i: int) -> LayerConfig:
        kind = int(sliding[i])
        # Queries and keys are normalised: their products are scores as they are.
        attention = AttentionConfig(heads, kv_heads[i], sizes[kind], window if kind else 0, 1.0)
        source = max((j for j in range(own) if sliding[j] == sliding[i]), default=None) if i >= own else None
        if i >= own and (source is None or kv_heads[source] != kv_heads[i]):
            raise ConfigError(f"gemma4.attention.shared_kv_layers leaves layer {i} no keys and values to read")
        scale = m.vector(f"blk.{i}.{OUTPUT_SCALE}") or (1.0,)
        what: LayerKind = "sliding" if kind else "full"
        return LayerConfig(what, attention, ropes[kind], ffn_dim=ffn[i], kv_layer=source, output_scale=scale[0])

    c = decoder_config(
        m,
        metadata,
        tensors,
        "gemma4",
        tuple(layer(i) for i in range(layers)),
        ffn_dim=ffn[0],
        per_layer_dim=m.integer("embedding_length_per_layer_input", 0),
        embedding_scale=float(np.float32(np.sqrt(float(dim)))),
        logit_softcap=m.number("final_logit_softcapping", 0.0),
    )
    m.finish()
    return c


def parts(c: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    return {"per_layer_model_proj": {f"blk.{i}.per_layer_model_proj": c.per_layer_dim for i in range(len(c.layers))}}


def columns(c: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    return {"per_layer_token_embd": {f"blk.{i}.per_layer_token_embd": c.per_layer_dim for i in range(len(c.layers))}}


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (c.vocab, c.dim))
        yield TensorSpec("output_norm.weight", (c.dim,))
        yield TensorSpec("output.weight", (c.vocab, c.dim), optional=True)
        full = max((layer.attention.head_dim for layer in c.layers if layer.kind == "full"), default=0)
        yield TensorSpec(FREQS, (full // 2,), optional=True)
        if c.per_layer_dim:
            yield TensorSpec("per_layer_proj_norm.weight", (c.per_layer_dim,))
        for i, layer in enumerate(c.layers):
            a, f, d = layer.attention, layer.ffn_dim, c.per_layer_dim
            q, kv, borrowed = a.heads * a.head_dim, a.kv_heads * a.head_dim, layer.kv_layer is not None
            roles: dict[str, tuple[int, ...]] = {"attn_q": (q, c.dim), "attn_q_norm": (a.head_dim,), "attn_output": (c.dim, q)}
            roles |= {"ffn_gate": (f, c.dim), "ffn_up": (f, c.dim), "ffn_down": (c.dim, f)}
            roles |= {role: (c.dim,) for role in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
            if d:
                roles |= {"per_layer_model_proj": (d, c.dim), "per_layer_token_embd": (c.vocab, d)}
                roles |= {"inp_gate": (d, c.dim), "proj": (c.dim, d), "post_norm": (c.dim,)}
            for role, shape in roles.items():
                yield TensorSpec(f"blk.{i}.{role}.weight", shape)
            # Files keep what a layer that borrows does not use; without a value's weight the key is the value too.
            yield TensorSpec(f"blk.{i}.attn_k.weight", (kv, c.dim), optional=borrowed)
            yield TensorSpec(f"blk.{i}.attn_k_norm.weight", (a.head_dim,), optional=borrowed)
            yield TensorSpec(f"blk.{i}.attn_v.weight", (kv, c.dim), optional=borrowed or layer.kind == "full")
            yield TensorSpec(f"blk.{i}.{OUTPUT_SCALE}", (1,), optional=True)

    return tuple(specs())


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    size, k, v = layer.attention.head_dim, None, None
    if layer.kv_layer is not None:
        q = g.linear(h, w.attn_q)
    elif "attn_v" in w:
        q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    else:
        q, k = g.linear(h, w.attn_q, w.attn_k)
        v = g.copy(k)
    if k is not None and v is not None:
        # A norm without weights: x / sqrt(mean + eps) = x * sqrt(n) / sqrt(sum + n*eps).
        v = g.unit_norm(v, size, c.eps * size, math.sqrt(size))
        k = g.rope(g.rms_norm(k, w.attn_k_norm, c.eps), layer.rope)
    q = g.rope(g.rms_norm(q, w.attn_q_norm, c.eps), layer.rope)
    a = g.linear(g.attention(q, k, v, layer.attention), w.attn_output)
    g.residual += g.rms_norm(a, w.post_attention_norm, c.eps)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    gemma3.ffn(g, c, layer, w)
    if c.per_layer_dim:
        embedded = g.token(w.top.token_embd, c.embedding_scale)
        projected = g.scale(g.linear(embedded, w.per_layer_model_proj), 1.0 / math.sqrt(c.dim))
        of_token = g.token(w.per_layer_token_embd, math.sqrt(c.per_layer_dim))
        of_token += g.rms_norm(projected, w.top.per_layer_proj_norm, c.eps)
        gate = g.linear(g.copy(g.residual), w.inp_gate)
        y = g.linear(g.geglu(gate, g.scale(of_token, math.sqrt(0.5))), w.proj)
        g.residual += g.rms_norm(y, w.post_norm, c.eps)
    g.scale(g.residual, layer.output_scale)


FAMILY = replace(
    gemma3.FAMILY,
    name="gemma4",
    config=config,
    table=table,
    mixer=mixer,
    ffn=ffn,
    huggingface=HuggingFace(("gemma4_text",), imported_metadata, imported_tensors, IGNORED),
    parts=parts,
    columns=columns,
    layer_kinds=("sliding attention", "attention", "attention over another layer's keys"),
)
