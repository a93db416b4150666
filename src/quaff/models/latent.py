"""Latent attention (DeepSeek V2): all heads share one compressed vector per position, which is keys and values at once, and a rotary key
beside it; every head reads the vector through two matrices of its own, k_b and v_b.

They are always absorbed: q goes through k_b and meets compressed keys, v_b is applied to the weighted sum of them. To expand keys and
values first is the same in exact arithmetic but rounds otherwise, so the row count must not choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.config import LatentConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.elementary import log64
from quaff.errors import ConfigError, UnsupportedError
from quaff.models.family import Builder, Tensors, Value, Weights
from quaff.models.imported import expect, rope_metadata
from quaff.models.metadata import MetadataReader
from quaff.models.rope import read_rope

F32 = NDArray[np.float32]


def latent_config(m: MetadataReader, tensors: Tensors, rope_dim: int, kv_heads: int | None = None) -> LatentConfig:
    """Ranks and widths; UnsupportedError for a file that holds k_b and v_b as one matrix, whose k_b would have to be transposed.

    `kv_heads`: of the layers that attend, where each layer has its own number.
    """
    if (joined := "blk.0.attn_kv_b.weight") in tensors:
        raise UnsupportedError(
            f"k_b and v_b in one tensor, as in files from before April 2025, are not supported (tensor {joined}); use a newer file"
        )
    latent = LatentConfig(
        q_rank=m.integer("attention.q_lora_rank", 0),
        kv_rank=m.integer("attention.kv_lora_rank"),
        plain_dim=m.integer("attention.key_length_mla") - rope_dim,
        value_dim=m.integer("attention.value_length_mla"),
    )
    heads = m.integer("attention.head_count_kv") if kv_heads is None else kv_heads
    stored = (heads, m.integer("attention.key_length"), m.integer("attention.value_length"))
    if stored != (1, latent.kv_rank + rope_dim, latent.kv_rank):
        raise ConfigError(
            f"KV heads, key and value length are {stored}; a latent of {latent.kv_rank} and {rope_dim} rotary values has others"
        )
    return latent


def latent_rope(m: MetadataReader, latent: LatentConfig, rope_dim: int) -> tuple[RopeConfig, float]:
    """Rotation of the part that has a position, and the scale of scores, by the width before compression.

    YaRN's attention factor belongs to all dimensions here: it multiplies scores instead of what is turned.
    """
    rope, scale = read_rope(m, rope_dim, True), 1 / np.sqrt(float(latent.plain_dim + rope_dim))
    # The converter writes a tenth of the multiplier.
    multiplier, factor = 10 * m.number("rope.scaling.yarn_log_multiplier", 0.0), m.number("rope.scaling.factor", 1.0)
    if multiplier and factor > 1:
        rope = replace(rope, scale=1.0)
        scale *= (0.1 * multiplier * log64(factor) + 1.0) ** 2
    return rope, float(np.float32(scale))


def latent_roles(c: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one layer's latent attention, the norm before it apart."""
    a, latent = layer.attention, layer.latent
    assert latent is not None
    rope_dim = a.head_dim - latent.kv_rank
    q = a.heads * (latent.plain_dim + rope_dim)
    roles: dict[str, tuple[int, ...]] = {"attn_q": (q, c.dim)}
    if latent.q_rank:
        roles = {"attn_q_a": (latent.q_rank, c.dim), "attn_q_a_norm": (latent.q_rank,), "attn_q_b": (q, latent.q_rank)}
    return roles | {
        "attn_kv_a_mqa": (a.head_dim, c.dim),
        "attn_kv_a_norm": (latent.kv_rank,),
        "attn_k_b": (a.heads, latent.kv_rank, latent.plain_dim),
        "attn_v_b": (a.heads, latent.value_dim, latent.kv_rank),
        "attn_output": (c.dim, a.heads * latent.value_dim),
    }


def latent_attention(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights, h: Value) -> Value:
    a, latent, rope = layer.attention, layer.latent, layer.rope
    assert latent is not None
    rank, plain, turned = latent.kv_rank, latent.plain_dim, a.head_dim - latent.kv_rank
    if latent.q_rank:
        q, kv = g.linear(h, w.attn_q_a, w.attn_kv_a_mqa)
        q = g.linear(g.rms_norm(q, w.attn_q_a_norm, c.eps), w.attn_q_b)
    else:
        q, kv = g.linear(h, w.attn_q, w.attn_kv_a_mqa)
    latent_kv, rotary = g.split(kv, 1, rank, turned)
    v = g.rms_norm(latent_kv, w.attn_kv_a_norm, c.eps)
    k = g.concat(v, g.rope(rotary, rope, turned), 1)
    plain_q, rotary = g.split(q, a.heads, plain, turned)
    q = g.concat(g.head_linear(plain_q, w.attn_k_b), g.rope(rotary, rope, turned), a.heads)
    return g.linear(g.head_linear(g.attention(q, k, v, a), w.attn_v_b), w.attn_output)


# Role in the table -> module of a layer in a Hugging Face folder, beside those of every decoder.
MODULES: dict[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}


def latent_metadata(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without their prefix, from a config.json: what is kept is one head of compressed keys and values."""
    keys = rope_metadata(rope)
    if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
        expect(rope, "mscale", (rope["mscale_all_dim"],), "YaRN with an attention factor beside that of all dimensions")
        keys = {key: value for key, value in keys.items() if key != "rope.scaling.yarn_attn_factor"}
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    ranks = {"attention.kv_lora_rank": rank} | ({"attention.q_lora_rank": config["q_lora_rank"]} if config.get("q_lora_rank") else {})
    return (
        keys
        | ranks
        | {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + turned,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": turned,
        }
    )


def key_matrices(heads: int, plain: int, w: F32) -> F32:
    """k_b of every head, [heads, rank, plain], from rows that make keys and values: turned, since it is applied to queries."""
    return w.reshape(heads, -1, w.shape[-1])[:, :plain].swapaxes(1, 2)


def value_matrices(heads: int, plain: int, w: F32) -> F32:
    """v_b of every head, [heads, value, rank], from the same rows."""
    return w.reshape(heads, -1, w.shape[-1])[:, plain:]
