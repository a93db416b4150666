"""Granite 3: Llama with stated multipliers of embeddings, attention scores, what a layer adds, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import ModelConfig
from quaff.errors import ConfigError
from quaff.models import llama
from quaff.models.family import HuggingFace, Tensors
from quaff.models.imported import IGNORED, decoder_tensors
from quaff.models.metadata import MetadataReader


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "granite")
    m.refuse_unless("rope.scaling.finetuned", (True,), "granite without rotary positions")
    c = llama.read(m, metadata, tensors, "granite", interleaved=True)
    layer, divisor = c.layers[0], m.number("logit_scale")
    # 0 and no key mean the same: the family's plain value.
    attention = replace(layer.attention, scale=m.number("attention.scale", 0.0) or layer.attention.scale)
    embedding, residual = m.number("embedding_scale", 0.0) or 1.0, m.number("residual_scale", 0.0) or 1.0
    m.finish()
    if divisor <= 0:
        raise ConfigError(f"metadata key granite.logit_scale is {divisor}; expected a number above 0")
    layers = (replace(layer, attention=attention),) * len(c.layers)
    return replace(c, layers=layers, embedding_scale=embedding, residual_scale=residual, logit_scale=1.0 / divisor)


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return llama.imported_metadata(config, "granite", {key: float(config.get(name, 1.0)) for key, name in names.items()})


FAMILY = replace(
    llama.FAMILY,
    name="granite",
    config=config,
    huggingface=HuggingFace(("granite",), imported_metadata, partial(decoder_tensors, interleaved=True), IGNORED),
)
