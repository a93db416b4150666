"""Qwen3.5 with experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quaff.config import ModelConfig
from quaff.models import qwen35
from quaff.models.experts import imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors
from quaff.models.imported import Array


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return qwen35.config(metadata, tensors, "qwen35moe")


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return qwen35.imported_metadata(config, "qwen35moe") | imported_experts_metadata(config, "qwen35moe")


def gate_half(w: Array) -> Array:
    """Of [experts, gate and up rows, columns]."""
    return np.ascontiguousarray(w[:, : w.shape[1] // 2])


def up_half(w: Array) -> Array:
    return np.ascontiguousarray(w[:, w.shape[1] // 2 :])


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from qwen35.imported_tensors(config)
    yield from imported_experts(config)
    # Some folders keep all experts of a layer together.
    for i in range(config["num_hidden_layers"]):
        both = (f"model.layers.{i}.mlp.experts.gate_up_proj",)
        yield Imported(f"blk.{i}.ffn_gate_exps.weight", both, gate_half)
        yield Imported(f"blk.{i}.ffn_up_exps.weight", both, up_half)
        yield Imported(f"blk.{i}.ffn_down_exps.weight", (f"model.layers.{i}.mlp.experts.down_proj",))


FAMILY = replace(
    qwen35.FAMILY,
    name="qwen35moe",
    config=config,
    huggingface=HuggingFace(("qwen3_5_moe_text",), imported_metadata, imported_tensors),
    layer_kinds=("gated delta rule", "gated attention", "experts"),
)
