"""Weights in memory: packed from files by plain reads, or mapped where they lie."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from tests.families.cases import FAMILIES
from tests.laws.test_packed import packed
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.errors import CheckpointError, MemoryBudgetError
from quaff.models import read_model
from quaff.models.huggingface import open_model
from quaff.weights.budget import Accountant
from quaff.weights.resident import ResidentWeights


def test_a_packed_file_is_used_where_it_is_mapped(tmp_path: Path) -> None:
    """The mapping outlives the checkpoint, the file's name and the table of weights; what has moved into memory, also the file's bytes."""
    path = CASES["mixtral"].write(tmp_path / "m.gguf")
    out = packed(path)
    accountant = Accountant()
    with open_checkpoint(path) as checkpoint:
        expected = ResidentWeights(read_model(checkpoint).views, 1, Accountant())
    with open_checkpoint(out) as checkpoint:
        weights = ResidentWeights(read_model(checkpoint).views, 1, accountant)
        whole = checkpoint.files[0].map()
        whole.wait()
    assert accountant.used_bytes == weights.loaded_bytes == expected.loaded_bytes
    weights.settle()
    kept, name = weights["blk.1.attn_q.weight"], "blk.1.attn_q.weight"
    weights.close()
    gc.collect()
    assert not accountant.used_bytes
    if whole.moved_bytes == out.stat().st_size:
        os.truncate(out, 0)
    out.unlink()
    assert kept.dequantize().tobytes() == expected[name].dequantize().tobytes()


def test_the_budget_counts_what_is_mapped(tmp_path: Path) -> None:
    out = packed(CASES["llama-gqa"].write(tmp_path / "m.gguf"))
    with open_checkpoint(out) as checkpoint:
        need = sum(view.nbytes for view in checkpoint.tensors.values())
        ResidentWeights(checkpoint.tensors, 1, Accountant(need))
        accountant = Accountant(need - 1)
        with pytest.raises(MemoryBudgetError):
            ResidentWeights(checkpoint.tensors, 1, accountant)
        assert not accountant.used_bytes


@pytest.mark.parametrize("which", ["GGUF", "folder", "packed"])
def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error(which: str, tmp_path: Path) -> None:
    """Not the signal that ends a process which reads a mapping past the end of its file."""
    if which == "folder":
        path = FAMILIES["llama"].write(tmp_path / "folder")
        file = path / "model.safetensors"
    else:
        file = path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
        if which == "packed":
            file = path = packed(path)
    accountant = Accountant()
    with open_model(path) as checkpoint:
        views = read_model(checkpoint).views
        os.truncate(file, file.stat().st_size // 3)
        said = "changed while it was read" if which == "packed" else "became shorter while it was read"
        with pytest.raises(CheckpointError, match=said):
            ResidentWeights(views, 2, accountant)
    assert not accountant.used_bytes


def test_values_that_are_not_finite_name_their_tensor(tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        place = checkpoint.tensors["blk.1.ffn_up.weight"].place
    assert place is not None
    content = bytearray(path.read_bytes())
    content[place.offset + 3 * place.stride : place.offset + 3 * place.stride + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight.*row 3 holds a scale"):
        ResidentWeights(checkpoint.tensors, 2, Accountant())
