"""Model families, by the architecture name a checkpoint states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quaff.checkpoint import Checkpoint, TensorView
from quaff.config import ModelConfig
from quaff.errors import UnsupportedError, quote
from quaff.models import (
    deepseek2,
    gemma2,
    gemma3,
    gemma4,
    gptoss,
    granite,
    kimilinear,
    lfm2,
    lfm2moe,
    llama,
    mellum,
    mistral3,
    olmo2,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
    smollm3,
)
from quaff.models.family import F32_TYPE, Family, Tensors, in_config
from quaff.models.metadata import CONTEXT

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama,
        qwen2,
        qwen3,
        mistral3,
        smollm3,
        granite,
        olmo2,
        phi3,
        gemma2,
        gemma3,
        gemma4,
        lfm2,
        lfm2moe,
        qwen35,
        qwen35moe,
        qwen3next,
        kimilinear,
        deepseek2,
        qwen2moe,
        qwen3moe,
        gptoss,
        mellum,
    )
}


def family(architecture: str) -> Family:
    """The family of an architecture. UnsupportedError names it and lists those that exist."""
    if architecture not in FAMILIES:
        raise UnsupportedError(f"architecture {quote(architecture)} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[architecture]


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A checkpoint as its family reads it: `views` are the weights by the names that stages use."""

    family: Family
    config: ModelConfig
    views: Mapping[str, TensorView]

    @property
    def tensors(self) -> Tensors:
        return {name: (view.shape, view.ggml_type) for name, view in self.views.items()}


def read_model(checkpoint: Checkpoint, context: int | None = None) -> ReadModel:
    """Read a checkpoint's configuration, to be run with at most `context` tokens (None: the model's own context).

    Raises ConfigError for missing or contradictory metadata, UnsupportedError for an architecture or a feature we lack.
    """
    model_family = family(checkpoint.architecture)
    tensors = {name: (view.shape, view.ggml_type) for name, view in checkpoint.tensors.items()}
    values: dict[str, Any] = {CONTEXT: context or 0}
    for name, (shape, ggml_type) in tensors.items():
        if in_config(name) and len(shape) == 1 and ggml_type == F32_TYPE:
            values[name] = checkpoint.tensors[name].data.view(np.float32)
    config = model_family.config({**checkpoint.metadata, **values}, tensors)
    # A packed file holds what is left when tensors of several parts have been taken apart.
    views = checkpoint.tensors if checkpoint.format == "packed" else model_family.split(config, checkpoint.tensors)
    return ReadModel(model_family, config, views)
