"""Qwen3: Llama whose queries and keys are normalised head by head before they turn, rotary pairs half a head apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quaff.models import llama
from quaff.models.family import HuggingFace
from quaff.models.imported import DECODER, IGNORED, decoder_tensors, expect

QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "use_sliding_window", (False,), "Qwen3 with sliding windows")
    return llama.imported_metadata(config, "qwen3")


FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    config=partial(llama.config, architecture="qwen3", interleaved=False),
    table=partial(llama.table, biased={}, qk_norm=True),
    huggingface=HuggingFace(("qwen3",), imported_metadata, partial(decoder_tensors, roles=DECODER | QK_NORMS), IGNORED),
)
