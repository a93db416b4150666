"""Random-weight models: the same bytes every time, readable by the gguf package and by us."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.make_model import BLOCKS, KINDS, PIECE_BYTES, SHAPES, SMALL, Shape, blocks, byte_names, random_bytes, tensors, write_model
from gguf import GGUFReader
from gguf.quants import dequantize

import quaff
from quaff.checkpoint import open_checkpoint
from quaff.models import read_model

# SHA-256 of tensors, seed 1: a change means that speeds measured before and after are of different files.
DATA = {
    ("tiny", "q4_0", "blk.1.ffn_down.weight"): "37304140467dea9dfbf4024026daf62e7257a5fd9ab7a5bb43c36d11928ab8a8",
    ("tiny", "q4_1", "blk.1.ffn_down.weight"): "e1625f351301be714ef5c544eebd945d5b75590d34cc5db59a59bbe64ffabb58",
    ("tiny", "q8_0", "blk.1.ffn_down.weight"): "3d8281a0104ba9eb523fafc82915476f0a536ffa5256b859cf04050e37747bca",
    ("tiny", "q4_k_m", "blk.1.attn_q.weight"): "a720521c3bfdf1fca8f5bf66027162fc65b5eac3831ff38d123488c7c1408713",  # Q5_0
    ("tiny-qwen2", "q4_k_m", "blk.1.ffn_down.weight"): "966ab17ec68305590316b08855d31fbc8112961ecf9112f375ba38d303528823",  # Q6_K
    ("tiny-qwen2", "q4_k_m", "blk.3.ffn_down.weight"): "5e3660de4028c342b86049d0378fe539b365216ac99d9a3b25180167ec65baf4",  # Q4_K
    ("tiny-qwen2", "q4_k_m", "blk.3.attn_q.bias"): "b9d26d5af335d419c7c0f1951cb171fd913504327a5f86f4544b6b45d4cd3370",
}


@pytest.mark.parametrize(("name", "kind", "tensor"), DATA)
def test_same_arguments_same_bytes(tmp_path: Path, name: str, kind: str, tensor: str) -> None:
    one, two, other = tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "other.gguf"
    assert write_model(one, name, kind) == one.stat().st_size
    write_model(two, name, kind)
    write_model(other, name, kind, seed=2)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    with open_checkpoint(one) as checkpoint:
        data = checkpoint.tensors[tensor].data.tobytes()
    assert hashlib.sha256(data).hexdigest() == DATA[name, kind, tensor]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2", "tiny-lfm2", "tiny-qwen3moe", "tiny-qwen35", "tiny-kimi"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_readers_see_the_same_sound_model(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, name, kind)
    shape = SHAPES[name]
    theirs = {t.name: t for t in GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        seen = {n: (view.shape, view.type_name.lower()) for n, view in checkpoint.tensors.items()}
        assert seen == {n: (size, t) for n, size, t in tensors(shape, kind)}
        for n, view in checkpoint.tensors.items():
            assert view.data.tobytes() == theirs[n].data.tobytes()
        model = read_model(checkpoint)
        config = model.config
        model.family.check(config, model.tensors)
    assert (config.architecture, config.dim, config.ffn_dim) == (shape.architecture, shape.dim, shape.dense_dim or shape.ffn_dim)
    assert (len(config.layers), config.vocab) == (shape.layers, shape.vocab)
    experts = config.layers[-1].experts
    assert (experts is not None) == (shape.architecture in ("qwen3moe", "kimi-linear"))
    if experts is not None:
        assert (experts.count, experts.used, experts.ffn_dim) == (shape.experts, shape.used, shape.ffn_dim) == (8, 2, 128)
    for n, t in theirs.items():
        values = dequantize(t.data, t.tensor_type)
        assert np.isfinite(values).all(), n
        if values.squeeze().ndim > 1:  # deviation 1/sqrt(columns), or activations would grow or vanish with depth
            wanted = 0.01 if shape.experts and n.endswith(SMALL) else 1.0
            assert 0.9 * wanted < values.std() * values.shape[-1] ** 0.5 < 1.1 * wanted, n
            assert abs(values.mean()) < 0.1 * values.std(), n


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3moe", "tiny-qwen35", "tiny-kimi"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_deep_random_models_are_sane(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, name, kind)
    with quaff.load(path) as llm:
        logits = llm.prefill(list(range(100)), logits="all").logits
    assert logits is not None
    assert (np.abs(logits) < 30).all()
    assert (logits.std(1) > 0.1).all()


# Checked against the output of llama.cpp's quantiser (llama-cpp-python 0.3.36) on a model of these layer counts and row lengths.
def test_types_are_those_of_llama_cpp() -> None:
    def types(shape: Shape, kind: str) -> dict[str, str]:
        return {name.removesuffix(".weight"): t for name, size, t in tensors(shape, kind) if len(size) == 2}

    mixed = types(SHAPES["qwen2-1.5b"], "q4_k_m")
    six = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for i in range(28):
        assert {mixed[f"blk.{i}.attn_v"], mixed[f"blk.{i}.ffn_down"]} == {"q6_k" if i in six else "q4_k"}
    assert {t for name, t in mixed.items() if name.endswith(("_q", "_k", "_output", "_gate", "_up"))} == {"q4_k"}
    assert mixed["token_embd"] == "q6_k"
    assert set(types(SHAPES["qwen2-1.5b"], "q8_0").values()) == {"q8_0"}
    assert Counter(types(SHAPES["qwen2-1.5b"], "q4_0").values()) == {"q4_0": 28 * 7, "q6_k": 1}
    short = types(SHAPES["smollm2-135m"], "q4_k_m")  # rows of 576; only ffn_down's 1536 are a multiple of 256
    assert (short["token_embd"], short["blk.0.attn_v"], short["blk.0.attn_q"]) == ("q8_0", "q8_0", "q5_0")
    assert (short["blk.0.ffn_down"], short["blk.3.ffn_down"]) == ("q6_k", "q4_k")


def test_nothing_is_left_of_a_file_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("benchmarks.make_model.blocks", fail)
    with pytest.raises(OSError, match="disk full"):
        write_model(tmp_path / "model.gguf", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_pieces_join_without_a_seam() -> None:
    count = 3 * (PIECE_BYTES // BLOCKS["q4_0"][1]) + 5
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
