"""Perplexity of a text of 2,000 tokens against llama.cpp's on the same file (goldens/make_perplexity.py states the method)."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quaff

pytestmark = pytest.mark.models

GOLDENS = Path(__file__).parents[1] / "goldens" / "perplexity"
TEXT = GOLDENS / "text.txt"
BOUND = 0.01


def golden(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return values


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity_within_one_percent_of_llama_cpp(name: str) -> None:
    expected = golden(name)
    with quaff.load(name, context=4096) as llm:
        score = llm.score(TEXT.read_text())
    assert list(score.tokens) == expected["tokens"]
    assert len(score.logprobs) == expected["positions_scored"] == len(score.tokens) - 1
    ratio = score.perplexity / expected["perplexity"]
    # Token by token, not only on average: two implementations that round differently, not two that mean something else.
    difference = np.abs(-np.asarray(score.logprobs) - np.asarray(expected["nll"]))
    print(f"{name}: perplexity {score.perplexity:.4f}, {ratio:.5f} times llama.cpp's, mean |dNLL| {difference.mean():.4f}")
    assert abs(ratio - 1) <= BOUND
    assert difference.mean() < 0.15
    # Negative control: scores that are off by one position would fail the line above.
    assert np.abs(-np.asarray(score.logprobs[1:]) - np.asarray(expected["nll"][:-1])).mean() > 1


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_goldens_are_of_this_text_and_consistent(name: str) -> None:
    expected = golden(name)
    assert expected["text_sha256"] == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert len(expected["tokens"]) >= 2000
    assert len(expected["nll"]) == expected["positions_scored"] == len(expected["tokens"]) - 1
    assert math.exp(sum(expected["nll"]) / len(expected["nll"])) == pytest.approx(expected["perplexity"], rel=1e-4)
