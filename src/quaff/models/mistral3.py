"""Ministral 3 and Mistral Small 3: Llama whose queries grow with the logarithm of their position beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import ModelConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.family import HuggingFace, Tensors
from quaff.models.imported import IGNORED, decoder_tensors, rope_parameters
from quaff.models.metadata import MetadataReader


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "mistral3")
    c = llama.read(m, metadata, tensors, "mistral3", interleaved=True)
    layer, temperature = c.layers[0], m.number("attention.temperature_scale", 0.0)
    length = m.integer("rope.scaling.original_context_length", 0)
    m.finish()
    if not temperature:
        return c
    if layer.rope is None or not length:
        raise ConfigError("an attention temperature needs mistral3.rope.scaling.original_context_length")
    grown = replace(layer.rope, temperature=temperature, temperature_length=length)
    return replace(c, layers=(replace(layer, query_rope=grown),) * len(c.layers))


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    beta = rope_parameters(config).get("llama_4_scaling_beta")
    return llama.imported_metadata(config, "mistral3", {} if beta is None else {"attention.temperature_scale": float(beta)})


FAMILY = replace(
    llama.FAMILY,
    name="mistral3",
    config=config,
    huggingface=HuggingFace(("ministral3",), imported_metadata, partial(decoder_tensors, interleaved=True), IGNORED),
)
