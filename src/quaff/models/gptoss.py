"""gpt-oss: sliding and full layers by turns with attention sinks, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.models import llama
from quaff.models.experts import experts_config
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config, decoder_table
from quaff.models.imported import DECODER, IGNORED, Array, decoder_metadata, decoder_tensors, expect, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader, head_dim
from quaff.models.rope import read_rope

# Of the gate: what its sigmoid is multiplied by, and the limit of gate and up. Files do not state them.
ALPHA, LIMIT = 1.702, 7.0
# Modules of a Hugging Face folder that are not Llama's, by role.
MODULES = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}


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
    c = decoder_config(
        m,
        metadata,
        tensors,
        "gpt-oss",
        tuple(full if i % 2 else sliding for i in range(m.layers())),
        ffn_dim=ffn_dim,
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    a = c.layers[0].attention
    layer = llama.attention_roles(c, a) | llama.ffn_roles(c)
    layer |= {"attn_norm": (c.dim,), "post_attention_norm": (c.dim,), "attn_sinks": (a.heads,)}
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


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "swiglu_alpha", (ALPHA,), "another slope of the gate")
    expect(config, "swiglu_limit", (LIMIT,), "another limit of the gate")
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(config["num_hidden_layers"])]
    expect(config, "layer_types", (kinds,), "another order of sliding and full layers")
    keys = rope_metadata(rope_parameters(config, theta=150000.0)) | {
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
    }
    return decoder_metadata(config, "gpt-oss") | {f"gpt-oss.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, {role: module for role, module in DECODER.items() if not role.startswith("ffn_")} | MODULES)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield Imported(f"blk.{i}.attn_sinks.weight", (f"{at}self_attn.sinks",))
        # Rows of gate and up lie by turns. The released models hold MXFP4 blocks, others [expert, column, row].
        for role, projection, rows in (
            ("gate", "gate_up_proj", slice(0, None, 2)),
            ("up", "gate_up_proj", slice(1, None, 2)),
            ("down", "down_proj", slice(None)),
        ):
            source, name = f"{at}mlp.experts.{projection}", f"blk.{i}.ffn_{role}_exps"
            yield Imported(f"{name}.weight", (source,), partial(transposed, rows))
            yield Imported(f"{name}.weight", (f"{source}_blocks", f"{source}_scales"), partial(from_mxfp4, rows))
            yield Imported(f"{name}.bias", (f"{source}_bias",), partial(bias_rows, rows))


def transposed(rows: slice, w: Array) -> Array:
    return w.swapaxes(1, 2)[:, rows]


def bias_rows(rows: slice, b: Array) -> Array:
    return b[:, rows]


def from_mxfp4(rows: slice, blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Array:
    """[experts, rows, columns / 32, 16] bytes of two E2M1 values each, the first in the low half, times 2^(scale - 127)."""
    book = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = blocks[:, rows]
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
    values = np.where(pairs & 8, -book[pairs & 7], book[pairs & 7])
    scaled: Array = np.ldexp(values, scales[:, rows, :, None].astype(np.int32) - 127)
    return scaled.reshape(*codes.shape[:2], -1)


FAMILY = Family(
    "gpt-oss",
    config,
    table,
    llama.embed,
    mixer,
    ffn,
    llama.head,
    refused={},
    huggingface=HuggingFace(("gpt_oss",), imported_metadata, imported_tensors, IGNORED),
    layer_kinds=("sliding attention", "attention", "experts"),
    oracle="transformers, llama.cpp",
)
