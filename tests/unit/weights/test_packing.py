"""The order and the places of weights in packed files, and what packing refuses."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from tests.families.cases import FAMILIES
from tests.tiny import CASES

from quaff.checkpoint import Checkpoint, TensorView, open_checkpoint
from quaff.checkpoint.packed import PAGE_BYTES
from quaff.errors import CheckpointError, ConfigError, UnsupportedError
from quaff.graph.builder import build_graph
from quaff.graph.program import Graph
from quaff.models import ReadModel, read_model
from quaff.models.huggingface import open_model
from quaff.weights import packing
from quaff.weights.budget import Accountant
from quaff.weights.layout import Layout, model_layout
from quaff.weights.packing import Group, load_order, place_groups, write_packed
from quaff.weights.resident import ResidentWeights


def graph_of(checkpoint: Checkpoint) -> tuple[ReadModel, Graph]:
    model = read_model(checkpoint)
    return model, build_graph(model.config, model.family, model.tensors)


def pack(path: Path, out: Path) -> Layout:
    """The layout of the packed file."""
    with open_model(path) as checkpoint:
        model, graph = graph_of(checkpoint)
        write_packed(out, checkpoint, model.views, graph)
    with open_checkpoint(out) as checkpoint:
        return model_layout(checkpoint.tensors)


@pytest.mark.parametrize("name", ["llama-odd", "qwen2moe", "gpt-oss", "gemma4", "kimi-linear", "deepseek2-experts"])
def test_weights_lie_as_stages_read_them(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "m.gguf")
    tensors = pack(path, tmp_path / "m.quaff").tensors
    with open_checkpoint(path) as checkpoint:
        model, graph = graph_of(checkpoint)
    assert tensors.keys() == model.views.keys()
    before, tables = 0, {name for stage in graph.stages for name in stage.tables}
    for stage in graph.stages:
        dense = [tensors[name] for name in stage.linear_weights if name not in tables]
        if dense:
            # The unit of a stage is one read: it begins at a page, nothing else lies in it, and it comes after that of the stage before.
            assert dense[0].offset % PAGE_BYTES == 0 and dense[0].offset >= before
            for a, b in zip(dense, dense[1:], strict=False):
                end = a.offset + max(1, a.matrices) * a.matrix_stride
                assert end <= b.offset < end + 64
            before = dense[-1].offset + dense[-1].nbytes
        for names in stage.expert_stacks:
            stacks = [tensors[name] for name in names]
            for e in range(stacks[0].matrices):
                # So is an expert of an op, and the next one follows.
                starts = [t.offset + e * t.matrix_stride for t in stacks]
                assert starts[0] % PAGE_BYTES == 0 and 0 <= starts[0] - before < PAGE_BYTES
                for t, start, following in zip(stacks, starts, [*starts[1:], None], strict=True):
                    before = start + t.matrix_bytes
                    assert following is None or 0 <= following - before < 64
    small = [tensors[name] for stage in graph.stages for name in stage.small_weights]
    assert all(t.offset < min(tensors[n].offset for s in graph.stages for n in s.linear_weights) for t in small)


def test_every_weight_is_in_one_group(tmp_path: Path) -> None:
    with open_checkpoint(CASES["gemma4"].write(tmp_path / "m.gguf")) as checkpoint:
        model, graph = graph_of(checkpoint)
        groups = load_order(graph, model.views)
        names = [name for group in groups for name in group.names]
        assert sorted(names) == sorted(model.views) and all(group.names for group in groups)
        # What no stage reads comes last: factors of rotary frequencies and scales of layers are in the configuration.
        assert "rope_freqs.weight" in groups[-1].names


def test_pieces_of_a_matrix_are_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CASES["llama-odd"].write(tmp_path / "m.gguf")
    pack(path, tmp_path / "whole.quaff")
    monkeypatch.setattr(packing, "BLOCK_BYTES", 1)
    pack(path, tmp_path / "pieces.quaff")
    assert (tmp_path / "whole.quaff").read_bytes() == (tmp_path / "pieces.quaff").read_bytes()


def test_a_folder_is_packed_as_it_is_quantised(tmp_path: Path) -> None:
    folder = FAMILIES["mixtral"].write(tmp_path / "folder")
    out = tmp_path / "m.quaff"
    with open_model(folder, "q4_0") as checkpoint:
        model, graph = graph_of(checkpoint)
        with pytest.raises(UnsupportedError, match="cannot be streamed; pack the model first"):
            model_layout(model.views)
        expected = ResidentWeights(model.views, 1, Accountant())
        write_packed(out, checkpoint, model.views, graph)
        assert checkpoint.metadata.keys()
    with open_model(out) as checkpoint:
        assert checkpoint.quantized == "q4_0" and checkpoint.origin is not None
        assert (checkpoint.origin.name, checkpoint.origin.format) == ("folder", "safetensors")
        model_layout(checkpoint.tensors)
        weights = ResidentWeights(checkpoint.tensors, 1, Accountant())
    assert weights.nbytes == {name: expected.nbytes[name] for name in weights.nbytes}
    for name, view in model.views.items():
        if len(view.shape) == 2:
            assert weights[name].dequantize().tobytes() == expected[name].dequantize().tobytes()


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    out = tmp_path / "m.quaff"
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    pack(path, out)
    with open_checkpoint(out) as checkpoint:
        model, graph = graph_of(checkpoint)
        with pytest.raises(ConfigError, match=r"m\.quaff is packed already"):
            write_packed(tmp_path / "again.quaff", checkpoint, model.views, graph)
    with open_checkpoint(path) as checkpoint:
        model, graph = graph_of(checkpoint)
        with pytest.raises(CheckpointError, match=r"m\.quaff: exists already"):
            write_packed(out, checkpoint, model.views, graph)

    def view(name: str, shape: tuple[int, ...]) -> TensorView:
        return TensorView(name, shape, 2, "Q4_0", 0, lambda: np.zeros(0, np.uint8))

    with pytest.raises(UnsupportedError, match=r"tensor 'a' of shape \(2, 2, 32, 32\) and type Q4_0 cannot be packed"):
        place_groups([Group(("a",))], {"a": view("a", (2, 2, 32, 32))})
    with pytest.raises(ConfigError, match="a, b have different numbers of experts"):
        place_groups([Group(("a", "b"), experts=True)], {"a": view("a", (2, 32, 32)), "b": view("b", (3, 32, 32))})


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        place = checkpoint.tensors["blk.1.ffn_up.weight"].place
        norm = checkpoint.tensors["blk.1.ffn_norm.weight"].place
    for at, said in ((place, r"blk\.1\.ffn_up\.weight': .*row 0 holds a scale"), (norm, r"blk\.1\.ffn_norm\.weight' holds a value")):
        assert at is not None
        content = bytearray(path.read_bytes())
        content[at.offset : at.offset + 4] = b"\x00\x7e\xff\x7f"
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"bad\.gguf: tensor '{said}"):
            pack(tmp_path / "bad.gguf", tmp_path / "out.quaff")
    assert sorted(os.listdir(tmp_path)) == ["bad.gguf", "m.gguf"]


def test_a_disk_without_room_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    monkeypatch.setattr(packing, "_write_tensor", lambda *a: pytest.fail("work before the space is there"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"out\.quaff: cannot be written: File too large"):
            pack(path, tmp_path / "out.quaff")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["m.gguf"]
