"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and rotary pairs half a head apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.family import Tensors, TensorSpec


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return llama.config(metadata, tensors, "qwen2", interleaved=False)


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    return llama.table(c, biased={"attn_q": True, "attn_k": True, "attn_v": True})


FAMILY = replace(llama.FAMILY, name="qwen2", config=config, table=table)
