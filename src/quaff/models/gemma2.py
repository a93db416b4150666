"""Gemma 2: Gemma 3 without QK-norm, every other layer sliding, scores and logits softly capped (arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quaff.config import AttentionConfig, LayerConfig, ModelConfig
from quaff.models import gemma3, llama
from quaff.models.family import HuggingFace, Tensors
from quaff.models.imported import IGNORED, decoder_metadata, decoder_tensors, expect, heads_of, rope_metadata, rope_parameters
from quaff.models.metadata import MetadataReader
from quaff.models.rope import read_rope

LAYERS_27B = 46


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    m = MetadataReader(metadata, "gemma2")
    window = m.integer("attention.sliding_window")
    c = llama.read(m, metadata, tensors, "gemma2", interleaved=False)
    a, layers = c.layers[0].attention, len(c.layers)
    # The 27B model divides by the width per head instead of the head dimension.
    scale = float(np.float32(1 / np.sqrt(float(c.dim // a.heads if layers == LAYERS_27B else a.head_dim))))
    cap = m.number("attn_logit_softcapping", 50.0)
    full = AttentionConfig(a.heads, a.kv_heads, a.head_dim, 0, scale, cap)
    rope = read_rope(m, a.head_dim, interleaved=False)
    kinds = (LayerConfig("full", full, rope), LayerConfig("sliding", replace(full, window=window), rope))
    sliding = m.sliding("attention.sliding_window_pattern", layers, 2)
    final = m.number("final_logit_softcapping", 30.0)
    m.finish()
    embedding = float(np.float32(np.sqrt(float(c.dim))))
    return replace(c, layers=tuple(kinds[s] for s in sliding), embedding_scale=embedding, logit_softcap=final)


ROLES = {role: module for role, module in gemma3.ROLES.items() if role not in ("attn_q_norm", "attn_k_norm")}


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, _, size = heads_of(config)
    layers = config["num_hidden_layers"]
    expect(config, "query_pre_attn_scalar", (config["hidden_size"] // heads if layers == LAYERS_27B else size,), "this attention scale")
    types = ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(layers)]
    expect(config, "layer_types", (types,), "other sliding layers than every other one")
    keys = rope_metadata(rope_parameters(config)) | {
        "attention.sliding_window": config["sliding_window"],
        "attn_logit_softcapping": float(config.get("attn_logit_softcapping") or 0.0),
        "final_logit_softcapping": float(config.get("final_logit_softcapping") or 0.0),
    }
    return decoder_metadata(config, "gemma2", ("gelu_pytorch_tanh",)) | {f"gemma2.{key}": value for key, value in keys.items()}


FAMILY = replace(
    gemma3.FAMILY,
    name="gemma2",
    config=config,
    table=partial(gemma3.table, qk_norm=False),
    huggingface=HuggingFace(("gemma2",), imported_metadata, partial(decoder_tensors, roles=ROLES, one_plus_norms=True), IGNORED),
)
