"""The feed-forward half of a layer with experts: flags in the metadata, tensors, ops. Families use it as they use llama.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quaff.config import ExpertsConfig, LayerConfig, ModelConfig, Scoring
from quaff.errors import UnsupportedError
from quaff.models.family import Builder, Imported, Value, Weights
from quaff.models.imported import Array, expect
from quaff.models.metadata import MetadataReader

GATING: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
"""gguf.ExpertGatingFuncType: what `expert_gating_func` says; 0 or no key is the family's own."""

# Modules of one expert in a Hugging Face folder, by role.
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def experts_config(
    m: MetadataReader, scoring: Scoring = "softmax", normalise: bool = True, ffn_dim: int | None = None, group_top: int = 1
) -> ExpertsConfig:
    """Experts as the metadata describes them; the arguments are what the family does where the file says nothing.

    `ffn_dim`: the width of an expert where the family has no key for it.
    """
    gating = m.integer("expert_gating_func", 0)
    if gating not in (0, *GATING):
        raise UnsupportedError(f"experts with gating function {gating} are not supported; supported: {', '.join(map(str, GATING))}")
    width = m.integer("expert_feed_forward_length", ffn_dim)
    return ExpertsConfig(
        count=m.integer("expert_count"),
        used=m.integer("expert_used_count"),
        ffn_dim=width,
        # Several shared experts lie in one tensor, one below the other: they are one wide expert.
        shared_ffn_dim=m.integer("expert_shared_feed_forward_length", 0) or m.integer("expert_shared_count", 0) * width,
        scoring=GATING.get(gating, scoring),
        normalise=m.flag("expert_weights_norm", normalise),
        scale=m.number("expert_weights_scale", 1.0) or 1.0,
        groups=m.integer("expert_group_count", 0) or 1,
        groups_used=m.integer("expert_group_used_count", 0) or 1,
        group_top=group_top,
    )


def expert_roles(c: ModelConfig, e: ExpertsConfig, gated: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's router and experts by role, in place of the dense network's. `gated`: a shared expert has a gate."""
    roles: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (e.count, c.dim),
        "ffn_gate_exps": (e.count, e.ffn_dim, c.dim),
        "ffn_up_exps": (e.count, e.ffn_dim, c.dim),
        "ffn_down_exps": (e.count, c.dim, e.ffn_dim),
    }
    if e.shared_ffn_dim:
        roles |= {"ffn_gate_inp_shexp": (c.dim,)} if gated else {}
        roles |= {
            "ffn_gate_shexp": (e.shared_ffn_dim, c.dim),
            "ffn_up_shexp": (e.shared_ffn_dim, c.dim),
            "ffn_down_shexp": (c.dim, e.shared_ffn_dim),
        }
    return roles


def expert_ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    mixture(g, layer, w, g.rms_norm(g.residual, w.ffn_norm, c.eps))


def mixture(g: Builder, layer: LayerConfig, w: Weights, h: Value) -> None:
    """Adds what the experts make of `h`, and the shared one where there is one."""
    g.residual += routed(g, layer, w, h)
    if "ffn_gate_shexp" in w:
        gate, up = g.linear(h, w.ffn_gate_shexp, w.ffn_up_shexp)
        shared = g.linear(g.swiglu(gate, up), w.ffn_down_shexp)
        g.residual += g.gate(shared, h, w.ffn_gate_inp_shexp) if "ffn_gate_inp_shexp" in w else shared


def routed(g: Builder, layer: LayerConfig, w: Weights, h: Value) -> Value:
    """What the chosen experts make of `h`."""
    assert layer.experts is not None
    routing = g.route(h, w.ffn_gate_inp, layer.experts, w.bias_of("exp_probs_b"))
    gate, up = g.expert_linear(h, routing, w.ffn_gate_exps, w.ffn_up_exps)
    return g.combine(g.expert_linear(g.swiglu(gate, up), routing, w.ffn_down_exps), routing)


def imported_experts_metadata(config: Mapping[str, Any], architecture: str, normalise: bool = True) -> dict[str, Any]:
    """Keys of a mixture in every layer. `normalise`: the one value of norm_topk_prob that a GGUF file of the family can mean."""
    expect(config, "norm_topk_prob", (normalise,), "this normalisation of expert weights")
    expect(config, "decoder_sparse_step", (1,), "a mixture in some layers only")
    expect(config, "mlp_only_layers", ([],), "a mixture in some layers only")
    keys = {"expert_count": expert_count(config), "expert_used_count": config["num_experts_per_tok"]}
    for key, name in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if config.get(name):
            keys[key] = config[name]
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def expert_count(config: Mapping[str, Any]) -> int:
    """Zero for a dense model."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def imported_experts(config: Mapping[str, Any], module: str = "mlp", projections: Mapping[str, str] = PROJECTIONS) -> Iterator[Imported]:
    """Router, experts and shared expert of every layer; a GGUF file keeps each projection of all experts in one tensor."""
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.{module}"
        yield Imported(f"blk.{i}.ffn_gate_inp.weight", (f"{at}.gate.weight",))
        for role, projection in projections.items():
            each = tuple(f"{at}.experts.{e}.{projection}.weight" for e in range(expert_count(config)))
            yield Imported(f"blk.{i}.ffn_{role}_exps.weight", each, stacked)
            yield Imported(f"blk.{i}.ffn_{role}_shexp.weight", (f"{at}.shared_expert.{projection}.weight",))
        yield Imported(f"blk.{i}.ffn_gate_inp_shexp.weight", (f"{at}.shared_expert_gate.weight",), flat)


def stacked(*matrices: Array) -> Array:
    return np.stack(matrices)


def flat(w: Array) -> Array:
    return w.reshape(-1)
