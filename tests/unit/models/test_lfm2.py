"""LFM2's configuration: which layers attend comes from the number of KV heads that each has."""

from pathlib import Path
from typing import Any

import pytest
from tests.tiny import CASES, read

from quaff.errors import ConfigError, QuaffError, UnsupportedError
from quaff.graph.builder import build_graph
from quaff.graph.program import OpKind
from quaff.models import lfm2

KV = "lfm2.attention.head_count_kv"


@pytest.fixture
def model(tmp_path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["lfm2"].write(tmp_path / "m.gguf"))[:2]


def test_layers_and_their_state(model: tuple[Any, Any]) -> None:
    c = lfm2.config(*model)
    assert [(layer.kind, layer.conv_taps) for layer in c.layers] == [("conv", 3), ("full", 0), ("conv", 3), ("conv", 3)]
    g = build_graph(c, lfm2.FAMILY, model[1])
    assert [(k.name, k.layers, k.size) for k in g.state_kinds] == [("conv", (0, 2, 3), 2 * c.dim)]
    assert [(k.name, k.layers) for k in g.kv_kinds] == [("full", (1,))]
    # A last layer that is recurrent runs whole for every row: its result cannot be had without the rows before.
    assert [s.kind for s in g.stages[-3:]] == ["mixer", "ffn", "head"]
    assert [op.kind.name for op in g.stages[-3].program.ops] == ["RMS_NORM", "LINEAR", "CONV", "LINEAR"]
    plain = build_graph(c, lfm2.FAMILY, model[1], fuse=False)
    assert [op.kind for op in plain.stages[1].program.ops].count(OpKind.QUANTIZE) == 2


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({KV: [0, 2, 0]}, ConfigError, "expected 4 integers >= 0"),
        ({KV: [0, 2, 0, "x"]}, ConfigError, "expected 4 integers >= 0"),
        ({KV: [0, -2, 0, 0]}, ConfigError, "expected 4 integers >= 0"),
        ({KV: [0, 0, 0, 0]}, ConfigError, "gives no layer any heads"),
        ({KV: [0, 3, 0, 0]}, ConfigError, "4 attention heads cannot share 3 KV heads"),
        ({KV: 2}, ConfigError, "unexpected tensor 'blk.0.shortconv"),
        ({"lfm2.shortconv.l_cache": 0}, ConfigError, "a conv or delta layer needs taps"),
        ({"lfm2.shortconv.l_cache": 4}, ConfigError, "blk.0.shortconv.conv.weight has shape"),
        ({"lfm2.expert_count": 8}, UnsupportedError, "'lfm2.expert_count' is not known"),
    ],
)
def test_what_does_not_fit_is_refused(model: tuple[Any, Any], changes: dict[str, Any], error: type[QuaffError], match: str) -> None:
    metadata, tensors = model
    with pytest.raises(error, match=match):
        c = lfm2.config(metadata | changes, tensors)
        lfm2.FAMILY.check(c, tensors)


def test_taps_must_be_few_and_f32(model: tuple[Any, Any]) -> None:
    metadata, tensors = model
    wide = {name: ((64, 17), kind) if name.endswith("shortconv.conv.weight") else (shape, kind) for name, (shape, kind) in tensors.items()}
    with pytest.raises(UnsupportedError, match="has 17 taps; 2 to 16 are supported"):
        build_graph(lfm2.config(metadata | {"lfm2.shortconv.l_cache": 17}, wide), lfm2.FAMILY, wide)
    halves = {name: (shape, 1) if name.endswith("shortconv.conv.weight") else (shape, kind) for name, (shape, kind) in tensors.items()}
    with pytest.raises(UnsupportedError, match="ggml type 1; taps of convolutions must be F32"):
        lfm2.FAMILY.check(lfm2.config(metadata, halves), halves)
