"""LFM2 with experts in all layers but the first few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quaff.config import ModelConfig
from quaff.models import lfm2
from quaff.models.experts import imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return lfm2.config(metadata, tensors, "lfm2moe")


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    # gguf.ExpertGatingFuncType.SIGMOID
    keys: dict[str, Any] = {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if config.get("routed_scaling_factor", 1.0) != 1.0:
        keys["expert_weights_scale"] = float(config["routed_scaling_factor"])
    base = lfm2.imported_metadata(config, "lfm2moe") | imported_experts_metadata(config, "lfm2moe")
    return base | {f"lfm2moe.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from lfm2.imported_tensors(config)
    yield from imported_experts(config, "feed_forward", {"gate": "w1", "up": "w3", "down": "w2"})
    for i in range(config["num_hidden_layers"]):
        yield Imported(f"blk.{i}.exp_probs_b.bias", (f"model.layers.{i}.feed_forward.expert_bias",))


FAMILY = replace(
    lfm2.FAMILY,
    name="lfm2moe",
    config=config,
    huggingface=HuggingFace(("lfm2_moe",), imported_metadata, imported_tensors),
    layer_kinds=("short convolution", "attention", "experts"),
)
