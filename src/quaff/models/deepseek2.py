"""DeepSeek V2 and V3, and their kin Kimi K2 and GLM 4.7 Flash: latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.errors import UnsupportedError
from quaff.models import llama
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_table, vocab_size
from quaff.models.imported import DECODER, IGNORED, decoder_metadata, decoder_tensors, expect, rope_parameters
from quaff.models.latent import (
    MODULES,
    key_matrices,
    latent_attention,
    latent_config,
    latent_metadata,
    latent_roles,
    latent_rope,
    value_matrices,
)
from quaff.models.metadata import MetadataReader, model_name

# Keys of the mixture that every file has, and their names in a config.json.
EXPERT_KEYS = {
    "count": "n_routed_experts",
    "used_count": "num_experts_per_tok",
    "shared_count": "n_shared_experts",
    "feed_forward_length": "moe_intermediate_size",
    "weights_scale": "routed_scaling_factor",
    "weights_norm": "norm_topk_prob",
    "gating_func": "",
    "group_count": "n_group",
    "group_used_count": "topk_group",
}


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "deepseek2")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    layers, dense = m.layers(), m.integer("leading_dense_block_count", 0)
    if m.integer("expert_count", 0) and dense < layers:
        raise UnsupportedError("DeepSeek's mixture of experts is not supported (deepseek2.expert_count)")
    m.skip(*(f"expert_{key}" for key in EXPERT_KEYS))
    heads, rope_dim = m.integer("attention.head_count"), m.integer("rope.dimension_count")
    latent = latent_config(m, tensors, rope_dim)
    rope, scale = latent_rope(m, latent, rope_dim)
    attention = AttentionConfig(heads, 1, latent.kv_rank + rope_dim, 0, scale, value_dim=latent.kv_rank)
    c = ModelConfig(
        architecture="deepseek2",
        name=model_name(metadata),
        dim=m.integer("embedding_length"),
        ffn_dim=m.integer("feed_forward_length"),
        vocab=vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        context_length=m.integer("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        layers=(LayerConfig("full", attention, rope, latent=latent),) * layers,
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    layer = {"attn_norm": (c.dim,), **latent_roles(c, c.layers[0])}
    layer |= {"ffn_norm": (c.dim,), "ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
    return decoder_table(c, layer, biased={})


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    g.residual += latent_attention(g, c, layer, w, g.rms_norm(g.residual, w.attn_norm, c.eps))


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "rope_interleave", (True,), "rotary pairs half a head apart in latent attention")
    layers, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    dense = kinds.index("sparse") if kinds and "sparse" in kinds else layers if kinds else config.get("first_k_dense_replace", 0)
    keys = latent_metadata(config, rope_parameters(config)) | {"leading_dense_block_count": dense}
    keys["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2  # softmax, sigmoid
    keys |= {f"expert_{key}": config[name] for key, name in EXPERT_KEYS.items() if config.get(name) is not None}
    return decoder_metadata(config, "deepseek2") | {f"deepseek2.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, DECODER | MODULES)
    for i in range(config["num_hidden_layers"]):
        joined, shape = f"model.layers.{i}.self_attn.kv_b_proj.weight", (config["num_attention_heads"], config["qk_nope_head_dim"])
        yield Imported(f"blk.{i}.attn_k_b.weight", (joined,), partial(key_matrices, *shape))
        yield Imported(f"blk.{i}.attn_v_b.weight", (joined,), partial(value_matrices, *shape))


TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
# The layer past the last of 61 (V3) or 47 (GLM) predicts a token further on; it takes no part in the next one.
PAST_THE_LAST = (r"model\.layers\.(61|47)\..*",)
FAMILY = Family(
    "deepseek2",
    config,
    table,
    llama.embed,
    mixer,
    llama.ffn,
    llama.head,
    refused={},
    huggingface=HuggingFace(TYPES, imported_metadata, imported_tensors, IGNORED + PAST_THE_LAST),
    layer_kinds=("latent attention",),
    oracle="transformers, llama.cpp",
)
