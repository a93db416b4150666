"""Qwen3-Next: Qwen3.5 with experts, whose value heads lie beside their key head and whose gates share one projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quaff.config import ModelConfig
from quaff.models import qwen35
from quaff.models.experts import imported_experts, imported_experts_metadata
from quaff.models.family import HuggingFace, Imported, Tensors
from quaff.models.imported import Array, decoder_tensors


def config(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    return qwen35.config(metadata, tensors, "qwen3next", tiled=False)


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return qwen35.imported_metadata(config, "qwen3next") | imported_experts_metadata(config, "qwen3next")


def joined(config: Mapping[str, Any], first: int, last: int, w: Array) -> Array:
    """Rows of parts first .. last - 1 of q, k, v and z; in the folder those of one key head lie together."""
    key_heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    parts = np.split(w.reshape(key_heads, -1, w.shape[1]), np.cumsum([size, size, values]), axis=1)
    return np.concatenate([part.reshape(-1, w.shape[1]) for part in parts[first:last]])


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, qwen35.ROLES, one_plus_norms=True)
    yield from imported_experts(config)
    for i in range(config["num_hidden_layers"]):
        at, of = f"blk.{i}.", f"model.layers.{i}.linear_attn."
        yield Imported(f"{at}attn_qkv.weight", (f"{of}in_proj_qkvz.weight",), partial(joined, config, 0, 3))
        yield Imported(f"{at}attn_gate.weight", (f"{of}in_proj_qkvz.weight",), partial(joined, config, 3, 4))
        yield Imported(f"{at}ssm_ba.weight", (f"{of}in_proj_ba.weight",))
        yield Imported(f"{at}ssm_conv1d.weight", (f"{of}conv1d.weight",), lambda w: w[:, 0])
        yield Imported(f"{at}ssm_a", (f"{of}A_log",), lambda w: -np.exp(w))
        yield Imported(f"{at}ssm_dt.bias", (f"{of}dt_bias",))
        yield Imported(f"{at}ssm_norm.weight", (f"{of}norm.weight",))
        yield Imported(f"{at}ssm_out.weight", (f"{of}out_proj.weight",))


FAMILY = replace(
    qwen35.FAMILY,
    name="qwen3next",
    config=config,
    huggingface=HuggingFace(("qwen3_next",), imported_metadata, imported_tensors),
    layer_kinds=("gated delta rule", "gated attention", "experts"),
)
