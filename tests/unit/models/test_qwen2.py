"""Qwen2 against llama.cpp: committed logits of a tiny model, made by tests/goldens/make_qwen2.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.goldens.make_qwen2 import GOLDEN, MODEL, ROWS, TOKENS

import quaff
from quaff.models import FAMILIES, llama

Matrix = NDArray[np.float64]


def logits(path: Path) -> Matrix:
    with quaff.load(path, activations="float32") as llm:
        rows = llm.prefill(TOKENS, logits="all").logits
    assert rows is not None
    return rows[list(ROWS)].astype(np.float64)


def distance(ours: Matrix, golden: Matrix) -> float:
    """Largest difference of a row, in deviations of its logits."""
    return float((np.abs(ours - golden).max(1) / golden.std(1)).max())


def test_logits_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = json.loads(GOLDEN.read_text())
    path = MODEL.write(tmp_path / "m.gguf")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == golden["sha256"], "the tiny model changed: make the golden again"
    wanted = np.array(golden["logits"])
    assert distance(logits(path), wanted) < 0.02
    # The same file with Llama's rotary pairs is far off.
    monkeypatch.setitem(FAMILIES, "qwen2", replace(FAMILIES["qwen2"], config=partial(llama.config, architecture="qwen2")))
    assert distance(logits(path), wanted) > 0.2
