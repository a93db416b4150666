"""Qwen3: Llama whose queries and keys are normalised head by head before they turn, rotary pairs half a head apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quaff.models import llama

FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    config=partial(llama.config, architecture="qwen3", interleaved=False),
    table=partial(llama.table, biased={}, qk_norm=True),
    huggingface=None,
)
