"""SmolLM3: Llama in which every fourth layer encodes no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.family import HuggingFace, Tensors
from quaff.models.imported import IGNORED, decoder_tensors, expect

STEP = 4


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    c = llama.config(metadata, tensors, "smollm3")
    return replace(c, layers=tuple(layer if (i + 1) % STEP else replace(layer, rope=None) for i, layer in enumerate(c.layers)))


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "no_rope_layer_interval", (STEP,), "SmolLM3 with another step of layers without positions")
    turned = [int((i + 1) % STEP != 0) for i in range(config["num_hidden_layers"])]
    expect(config, "no_rope_layers", (turned,), "SmolLM3 with other layers without positions")
    expect(config, "use_sliding_window", (False,), "SmolLM3 with sliding windows")
    return llama.imported_metadata(config, "smollm3")


FAMILY = replace(
    llama.FAMILY,
    name="smollm3",
    config=config,
    huggingface=HuggingFace(("smollm3",), imported_metadata, partial(decoder_tensors, interleaved=True), IGNORED),
    layer_kinds=("attention", "attention without positions"),
)
