"""SmolLM3: Llama in which every fourth layer encodes no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.family import Tensors

STEP = 4


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    c = llama.config(metadata, tensors, "smollm3")
    return replace(c, layers=tuple(layer if (i + 1) % STEP else replace(layer, rope=None) for i, layer in enumerate(c.layers)))


FAMILY = replace(llama.FAMILY, name="smollm3", config=config, huggingface=None)
