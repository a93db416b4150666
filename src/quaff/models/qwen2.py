"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and rotary pairs half a head apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.family import HuggingFace, Tensors, TensorSpec
from quaff.models.imported import IGNORED, decoder_tensors, expect


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return llama.config(metadata, tensors, "qwen2", interleaved=False)


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    return llama.table(c, biased={"attn_q": True, "attn_k": True, "attn_v": True})


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "use_sliding_window", (False,), "Qwen2 with sliding windows")
    return llama.imported_metadata(config, "qwen2")


FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    config=config,
    table=table,
    huggingface=HuggingFace(("qwen2",), imported_metadata, decoder_tensors, IGNORED),
    oracle="transformers, llama.cpp",
)
