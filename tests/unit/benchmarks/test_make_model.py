"""Random-weight models: the same bytes every time, readable by the gguf package and by us."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from benchmarks.make_model import BLOCK_BYTES, PIECE_BYTES, SHAPES, blocks, byte_names, random_bytes, tensors, write_model
from gguf import GGUFReader
from gguf.quants import dequantize

from quaff.checkpoint import open_checkpoint
from quaff.models import family

# SHA-256 of blk.1.ffn_down.weight, seed 1: a change means that speeds measured before and after are of different files.
DATA = {
    "q4_0": "37304140467dea9dfbf4024026daf62e7257a5fd9ab7a5bb43c36d11928ab8a8",
    "q4_1": "e1625f351301be714ef5c544eebd945d5b75590d34cc5db59a59bbe64ffabb58",
    "q8_0": "3d8281a0104ba9eb523fafc82915476f0a536ffa5256b859cf04050e37747bca",
}


@pytest.mark.parametrize("kind", sorted(BLOCK_BYTES))
def test_same_arguments_same_bytes(tmp_path: Path, kind: str) -> None:
    one, two, other = tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "other.gguf"
    assert write_model(one, "tiny", kind) == one.stat().st_size
    write_model(two, "tiny", kind)
    write_model(other, "tiny", kind, seed=2)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    with open_checkpoint(one) as checkpoint:
        data = checkpoint.tensors["blk.1.ffn_down.weight"].data.tobytes()
    assert hashlib.sha256(data).hexdigest() == DATA[kind]


@pytest.mark.parametrize("kind", sorted(BLOCK_BYTES))
def test_both_readers_see_the_same_sound_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "tiny", kind)
    shape = SHAPES["tiny"]
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.architecture == "llama"
        assert {name: view.shape for name, view in checkpoint.tensors.items()} == {
            name: size for name, size, _ in tensors(shape, kind, "q8_0")
        }
        for name, view in checkpoint.tensors.items():
            assert view.data.tobytes() == theirs[name].data.tobytes()
        config = family("llama").config(checkpoint.metadata, {n: (v.shape, v.ggml_type) for n, v in checkpoint.tensors.items()})
        assert (config.dim, config.ffn_dim, len(config.layers), config.vocab) == (shape.dim, shape.ffn_dim, shape.layers, shape.vocab)
    for name, t in theirs.items():
        values = dequantize(t.data, t.tensor_type)
        assert np.isfinite(values).all(), name
        if values.ndim == 2:  # deviation 1/sqrt(columns), or activations would grow or vanish with depth
            assert 0.9 < values.std() * values.shape[1] ** 0.5 < 1.1, name
            assert abs(values.mean()) < 0.1 * values.std(), name


def test_pieces_join_without_a_seam() -> None:
    count = 3 * (PIECE_BYTES // BLOCK_BYTES["q4_0"]) + 5
    pieces = list(blocks("q4_0", random_bytes(1, "x"), count, 0.02))
    assert sum(len(p) for p in pieces) == count
    assert len(pieces) == 4
    assert max(p.nbytes for p in pieces) <= PIECE_BYTES
    assert pieces[0][0].tobytes() != pieces[1][0].tobytes()


def test_codes_of_8_bits_stay_in_the_symmetric_range() -> None:
    (piece,) = blocks("q8_0", random_bytes(1, "x"), 1000, 0.02)
    assert piece[:, 2:].view(np.int8).min() == -127


def test_every_byte_has_a_name_of_its_own() -> None:
    names = byte_names()
    assert len(set(names)) == 256
    assert (names[ord("a")], names[ord(" ")], names[ord("\n")]) == ("a", "\u0120", "\u010a")
