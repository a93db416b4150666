"""DeepSeek V2 and V3, and their kin Kimi K2 and GLM 4.7 Flash: latent attention, and experts after a few dense layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.models import llama
from quaff.models.experts import PROJECTIONS, expert_roles, experts_config, stacked
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config, decoder_table
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
from quaff.models.metadata import MetadataReader

# Keys of the mixture, and their names in a config.json.
EXPERT_KEYS = {
    "count": "n_routed_experts",
    "used_count": "num_experts_per_tok",
    "shared_count": "n_shared_experts",
    "feed_forward_length": "moe_intermediate_size",
    "weights_scale": "routed_scaling_factor",
    "weights_norm": "norm_topk_prob",
    "group_count": "n_group",
    "group_used_count": "topk_group",
}


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "deepseek2")
    m.refuse_unless("attention.causal", (True,), "attention without a causal mask")
    layers, dense = m.layers(), m.integer("leading_dense_block_count", 0)
    experts = experts_config(m, normalise=False) if m.integer("expert_count", 0) else None
    if experts and experts.groups > 1 and experts.scoring == "sigmoid":
        # V3 judges a group by its two best experts, V2 by its best.
        experts = replace(experts, group_top=2)
    heads, rope_dim = m.integer("attention.head_count"), m.integer("rope.dimension_count")
    latent = latent_config(m, tensors, rope_dim)
    rope, scale = latent_rope(m, latent, rope_dim)
    attention = AttentionConfig(heads, 1, latent.kv_rank + rope_dim, 0, scale, value_dim=latent.kv_rank)
    c = decoder_config(
        m,
        metadata,
        tensors,
        "deepseek2",
        tuple(LayerConfig("full", attention, rope, latent=latent, experts=None if i < dense else experts) for i in range(layers)),
    )
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    shared = {"attn_norm": (c.dim,), **latent_roles(c, c.layers[0]), "ffn_norm": (c.dim,)}
    return (*decoder_table(c, shared, biased={}), *ffn_table(c))


def ffn_table(c: ModelConfig) -> Iterator[TensorSpec]:
    """A dense network in the first layers, then experts, perhaps with a bias that chooses among them, and a shared one without a gate."""
    for i, layer in enumerate(c.layers):
        dense = {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
        roles = expert_roles(c, layer.experts, gated=False) if layer.experts else dense
        yield from (TensorSpec(f"blk.{i}.{role}.weight", shape) for role, shape in roles.items())
        if layer.experts:
            yield TensorSpec(f"blk.{i}.exp_probs_b.bias", (layer.experts.count,), optional=True)


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    g.residual += latent_attention(g, c, layer, w, g.rms_norm(g.residual, w.attn_norm, c.eps))


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "rope_interleave", (True,), "rotary pairs half a head apart in latent attention")
    keys = latent_metadata(config, rope_parameters(config)) | {"leading_dense_block_count": dense_layers(config)}
    keys["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2  # softmax, sigmoid
    keys |= {f"expert_{key}": config[name] for key, name in EXPERT_KEYS.items() if config.get(name) is not None}
    return decoder_metadata(config, "deepseek2") | {f"deepseek2.{key}": value for key, value in keys.items()}


def dense_layers(config: Mapping[str, Any]) -> int:
    """Layers before the first mixture."""
    layers, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    if not kinds:
        return int(config.get("first_k_dense_replace", 0))
    dense = kinds.index("sparse") if "sparse" in kinds else layers
    expect({"mlp_layer_types": kinds[dense:]}, "mlp_layer_types", (["sparse"] * (layers - dense),), "a dense layer after a mixture")
    return int(dense)


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, DECODER | MODULES)
    for i in range(config["num_hidden_layers"]):
        joined, shape = f"model.layers.{i}.self_attn.kv_b_proj.weight", (config["num_attention_heads"], config["qk_nope_head_dim"])
        yield Imported(f"blk.{i}.attn_k_b.weight", (joined,), partial(key_matrices, *shape))
        yield Imported(f"blk.{i}.attn_v_b.weight", (joined,), partial(value_matrices, *shape))
    for i in range(dense_layers(config), config["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp"
        yield Imported(f"blk.{i}.ffn_gate_inp.weight", (f"{at}.gate.weight",))
        yield Imported(f"blk.{i}.exp_probs_b.bias", (f"{at}.gate.e_score_correction_bias",))
        for role, module in PROJECTIONS.items():
            each = tuple(f"{at}.experts.{e}.{module}.weight" for e in range(config["n_routed_experts"]))
            yield Imported(f"blk.{i}.ffn_{role}_exps.weight", each, stacked)
            yield Imported(f"blk.{i}.ffn_{role}_shexp.weight", (f"{at}.shared_experts.{module}.weight",))


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
    layer_kinds=("latent attention", "experts"),
    oracle="transformers, llama.cpp",
)
