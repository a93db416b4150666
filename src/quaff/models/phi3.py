"""Phi-3 and Phi-4: Llama whose q, k and v are one tensor, and gate and up another; long and short rotary factors, part of a head turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.config import ModelConfig
from quaff.models import llama
from quaff.models.family import HuggingFace
from quaff.models.imported import DECODER, IGNORED, decoder_tensors


def parts(c: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    a = c.layers[0].attention
    kv = a.kv_heads * a.head_dim
    return {
        "attn_qkv": {"attn_q": a.heads * a.head_dim, "attn_k": kv, "attn_v": kv},
        "ffn_up": {"ffn_gate": c.ffn_dim, "ffn_up": c.ffn_dim},
    }


ROLES = {role: DECODER[role] for role in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return llama.imported_metadata(config, "phi3", {"attention.sliding_window": config.get("sliding_window") or 0})


FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    config=partial(llama.config, architecture="phi3", interleaved=False),
    table=partial(llama.table, biased={}),
    parts=parts,
    huggingface=HuggingFace(("phi3",), imported_metadata, partial(decoder_tensors, roles=ROLES), IGNORED),
)
