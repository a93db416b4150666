"""Kimi Linear: delta rules whose states decay row by row, latent attention without positions in a few layers, and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quaff.checkpoint import TensorView
from quaff.config import AttentionConfig, DeltaConfig, LayerConfig, ModelConfig
from quaff.errors import ConfigError, UnsupportedError
from quaff.models import llama
from quaff.models.deltanet import kda, kda_imported, kda_roles
from quaff.models.experts import MIXTRAL, PROJECTIONS, expert_roles, experts_config, imported_experts
from quaff.models.family import Builder, Family, HuggingFace, Imported, Tensors, TensorSpec, Weights, decoder_config
from quaff.models.imported import DECODER, decoder_metadata, decoder_tensors, expect, rope_parameters
from quaff.models.latent import MODULES, key_matrices, latent_attention, latent_config, latent_metadata, latent_roles, value_matrices
from quaff.models.metadata import MetadataReader

ARCHITECTURE = "kimi-linear"


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, ARCHITECTURE)
    heads, layers = m.integer("attention.head_count"), m.layers()
    # A layer without KV heads is recurrent.
    kv_heads = m.per_layer("attention.head_count_kv", layers)
    if not any(kv_heads):
        raise ConfigError(f"{ARCHITECTURE}.attention.head_count_kv gives no layer any heads")
    rest = m.integer("rope.dimension_count")
    latent = latent_config(m, tensors, rest, max(kv_heads))
    scale = float(np.float32(1 / np.sqrt(float(latent.plain_dim + rest))))
    attention = AttentionConfig(heads, 1, latent.kv_rank + rest, 0, scale, value_dim=latent.kv_rank)
    size, taps = m.integer("kda.head_dim"), m.integer("ssm.conv_kernel")
    delta = DeltaConfig(heads, heads, size, size, tiled=False, decay_each=True)
    dense = m.integer("leading_dense_block_count", 0)
    experts = experts_config(m, "sigmoid", group_top=2) if dense < layers else None
    m.skip("rope.freq_base")

    def layer(i: int, kv: int) -> LayerConfig:
        own = LayerConfig("full", attention, None, latent=latent) if kv else LayerConfig("delta", attention, None, taps, delta)
        return replace(own, experts=experts if i >= dense else None)

    c = decoder_config(m, metadata, tensors, ARCHITECTURE, tuple(layer(i, kv) for i, kv in enumerate(kv_heads)))
    m.finish()
    return c


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (c.vocab, c.dim))
        yield TensorSpec("output_norm.weight", (c.dim,))
        yield TensorSpec("output.weight", (c.vocab, c.dim), optional=True)
        for i, layer in enumerate(c.layers):
            roles: dict[str, tuple[int, ...]] = {"attn_norm": (c.dim,), "ffn_norm": (c.dim,)}
            if layer.experts:
                roles |= expert_roles(c, layer.experts, gated=False)
            else:
                roles |= {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
            for role, shape in (roles | (kda_roles(c, layer.delta, layer.conv_taps) if layer.delta else latent_roles(c, layer))).items():
                yield TensorSpec(f"blk.{i}.{role}.weight", shape, float32=role.startswith("ssm_conv1d"))
            if layer.delta:
                yield TensorSpec(f"blk.{i}.ssm_a", (layer.delta.value_heads,))
                yield TensorSpec(f"blk.{i}.ssm_dt.bias", (layer.delta.decays,))
            if layer.experts:
                yield TensorSpec(f"blk.{i}.exp_probs_b.bias", (layer.experts.count,), optional=True)

    return tuple(specs())


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    h = g.rms_norm(g.residual, w.attn_norm, c.eps)
    g.residual += kda(g, c, layer.delta, w, h) if layer.delta else latent_attention(g, c, layer, w, h)


class KimiLinear(Family):
    """llama.cpp's converter keeps taps as [1, channels, 1, taps] and rates of decay as [1, 1, heads, 1]."""

    def split(self, config: ModelConfig, views: Mapping[str, TensorView]) -> dict[str, TensorView]:
        narrow = {name: view for name, view in views.items() if ".ssm_conv1d" in name or name.endswith(".ssm_a")}
        return {**views, **{name: replace(v, shape=tuple(n for n in v.shape if n > 1) or (1,)) for name, v in narrow.items()}}


ROLES = DECODER | MODULES | {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
ROLES |= {"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm"}


def named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The length of the context by the name that others give it."""
    return {"max_position_embeddings": config["model_max_length"], **config}


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "moe_router_activation_func", ("sigmoid",), "this router")
    linear, layers = config["linear_attn_config"], config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace", 1)
    keys = latent_metadata(config, rope_parameters(named(config))) | {
        "attention.head_count_kv": [int(i + 1 in linear["full_attn_layers"]) for i in range(layers)],
        "kda.head_dim": linear["head_dim"],
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "leading_dense_block_count": dense,
        "vocab_size": config["vocab_size"],
    }
    if linear["num_heads"] != config["num_attention_heads"]:
        raise UnsupportedError(f"{linear['num_heads']} heads of delta rules are not supported beside another number of heads of attention")
    if dense < layers:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_token"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["num_shared_experts"],
            "expert_weights_norm": config["moe_renormalize"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_gating_func": 2,  # gguf.ExpertGatingFuncType.SIGMOID
            "expert_group_count": config.get("num_expert_group", 1),
            "expert_group_used_count": config.get("topk_group", 1),
        }
    return decoder_metadata(named(config), ARCHITECTURE) | {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(named(config), ROLES)
    yield from imported_experts(config, "block_sparse_moe", MIXTRAL)
    heads = (config["num_attention_heads"], config["qk_nope_head_dim"])
    for i in range(config["num_hidden_layers"]):
        at, attention, moe = f"blk.{i}.", f"model.layers.{i}.self_attn.", f"model.layers.{i}.block_sparse_moe."
        yield from kda_imported(i)
        yield Imported(f"{at}attn_k_b.weight", (f"{attention}kv_b_proj.weight",), partial(key_matrices, *heads))
        yield Imported(f"{at}attn_v_b.weight", (f"{attention}kv_b_proj.weight",), partial(value_matrices, *heads))
        yield Imported(f"{at}exp_probs_b.bias", (f"{moe}gate.e_score_correction_bias",))
        for role, projection in PROJECTIONS.items():
            yield Imported(f"{at}ffn_{role}_shexp.weight", (f"{moe}shared_experts.{projection}.weight",))


FAMILY = KimiLinear(
    ARCHITECTURE,
    config,
    table,
    llama.embed,
    mixer,
    llama.ffn,
    llama.head,
    refused={},
    huggingface=HuggingFace(("kimi_linear",), imported_metadata, imported_tensors),
    layer_kinds=("delta rule", "latent attention", "experts"),
)
