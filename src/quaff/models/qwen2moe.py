"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, weights as the softmax gives them, and one gated expert that all rows share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama, qwen2
from quaff.models.experts import imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors
from quaff.models.imported import IGNORED, decoder_tensors, expect


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return llama.config(metadata, tensors, "qwen2moe", interleaved=False, normalise=False)


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "use_sliding_window", (False,), "Qwen2-MoE with sliding windows")
    return llama.imported_metadata(config, "qwen2moe") | imported_experts_metadata(config, "qwen2moe", normalise=False)


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config)
    yield from imported_experts(config)


FAMILY = replace(
    llama.FAMILY,
    name="qwen2moe",
    config=config,
    table=qwen2.table,
    huggingface=HuggingFace(("qwen2_moe",), imported_metadata, imported_tensors, IGNORED),
    layer_kinds=("attention", "experts"),
)
