"""Phi-3 and Phi-4: Llama whose q, k and v are one tensor, and gate and up another; long and short rotary factors, part of a head turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from quaff.config import ModelConfig
from quaff.models import llama


def parts(c: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    a = c.layers[0].attention
    kv = a.kv_heads * a.head_dim
    return {
        "attn_qkv": {"attn_q": a.heads * a.head_dim, "attn_k": kv, "attn_v": kv},
        "ffn_up": {"ffn_gate": c.ffn_dim, "ffn_up": c.ffn_dim},
    }


FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    config=partial(llama.config, architecture="phi3", interleaved=False),
    table=partial(llama.table, biased={}),
    parts=parts,
    huggingface=None,
)
