"""Qwen3-MoE: Llama with norms on queries and keys, rotary pairs half a head apart, and experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.experts import imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors
from quaff.models.imported import DECODER, IGNORED, decoder_tensors, expect

QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return llama.config(metadata, tensors, "qwen3moe", interleaved=False)


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "use_sliding_window", (False,), "Qwen3-MoE with sliding windows")
    return llama.imported_metadata(config, "qwen3moe") | imported_experts_metadata(config, "qwen3moe")


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, DECODER | QK_NORMS)
    yield from imported_experts(config)


FAMILY = replace(
    llama.FAMILY,
    name="qwen3moe",
    config=config,
    table=partial(llama.table, biased={}, qk_norm=True),
    huggingface=HuggingFace(("qwen3_moe",), imported_metadata, imported_tensors, IGNORED),
    layer_kinds=("attention", "experts"),
)
