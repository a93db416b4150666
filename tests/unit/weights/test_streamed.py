"""The border of the native weight source: what cannot be is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.streaming import plan
from tests.tiny import CASES

from quaff import _native
from quaff.checkpoint import open_checkpoint
from quaff.engine.runner import bind_model
from quaff.errors import CheckpointError, MemoryBudgetError
from quaff.graph.builder import build_graph
from quaff.models import ReadModel, read_model
from quaff.weights.budget import Accountant
from quaff.weights.layout import Layout, model_layout
from quaff.weights.plan import READ_BUFFER_BYTES
from quaff.weights.sizes import packed_sizes
from quaff.weights.streamed import StreamedWeights

BUFFER = 1 << 16
Q4_0 = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return CASES["llama-mqa"].write(tmp_path / "model.gguf")


def source(path: Path, readers: int = 1, buffer_bytes: int = BUFFER) -> _native.WeightSource:
    status = path.stat()
    return _native.WeightSource([(str(path), status.st_size, status.st_mtime_ns)], readers, buffer_bytes)


def model(path: Path) -> tuple[ReadModel, Layout]:
    with open_checkpoint(path) as checkpoint:
        read = read_model(checkpoint)
        return read, model_layout(read.views)


@pytest.mark.parametrize("readers, buffer_bytes", [(0, BUFFER), (65, BUFFER), (1, 4096), (1, BUFFER + 1), (1, -BUFFER)])
def test_readers_and_buffers_that_cannot_be(path: Path, readers: int, buffer_bytes: int) -> None:
    with pytest.raises(ValueError, match="readers with buffers of whole sectors"):
        source(path, readers, buffer_bytes)


def test_a_file_that_is_not_what_it_was(path: Path) -> None:
    status = path.stat()
    for size, mtime in ((status.st_size - 1, status.st_mtime_ns), (status.st_size, status.st_mtime_ns - 1)):
        with pytest.raises(_native.SourceError, match=r"model\.gguf"):
            _native.WeightSource([(str(path), size, mtime)], 1, BUFFER)
    with pytest.raises(_native.SourceError, match="No such file"):
        _native.WeightSource([(str(path.with_name("none")), 1, 1)], 1, BUFFER)


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 0},
        {"cols": 33},
        {"ggml_type": 99},
        {"matrices": -1},
        {"matrices": 1 << 40},
        {"file": 1},
        {"file": -1},
        {"offset": -1},
        {"offset": 1 << 62},
        {"rows": 1 << 32},
        {"row_stride": 17},
        {"row_stride": 1 << 62},
        {"matrices": 3, "matrix_stride": 100},
        {"matrices": 3, "matrix_stride": 1 << 62},
    ],
    ids=str,
)
def test_places_that_cannot_be(path: Path, changed: dict[str, int]) -> None:
    values: dict[str, Any] = dict(
        name="w", ggml_type=Q4_0, matrices=0, rows=16, cols=32, file=0, offset=0, matrix_stride=0, row_stride=18, packed=False
    )
    assert source(path).add(**values).rows == 16
    with pytest.raises(ValueError, match="'w' (has a shape|does not lie)"):
        source(path).add(**values | changed)


def test_a_weight_without_panels_has_no_values(path: Path) -> None:
    weight = source(path).add("w", Q4_0, 0, 16, 32, 0, 0, 0, 18, False)
    assert (weight.rows, weight.cols, weight.experts) == (16, 32, 1) and weight.nbytes == _native.packed_bytes(Q4_0, 16, 32)
    with pytest.raises(ValueError, match="not in memory"):
        weight.dequantize()


def test_stages_come_before_the_source(path: Path) -> None:
    read, layout = model(path)
    graph = build_graph(read.config, read.family, read.tensors)
    weights = StreamedWeights(graph, layout, plan()(graph, packed_sizes(read.tensors)), Accountant(), 1)
    native = bind_model(graph, weights)
    with pytest.raises(ValueError, match="stages come before it"):
        native.add_stage(_native.Program([], []), [])
    with pytest.raises(ValueError):
        weights.bind(_native.Model(graph.config.dim, graph.config.vocab, graph.config.vocab))  # a source serves one model
    weights.close()


def test_a_model_without_its_source_is_not_run(path: Path) -> None:
    weight = source(path).add("w", Q4_0, 0, 300, 64, 0, 0, 0, 36, False)
    native = _native.Model(64, 300, 300)
    native.add_stage(_native.Program([], [(0, [], [0], [0], [], [1.0])]), [weight])
    one = np.zeros(1, np.int32)
    cells = (one, np.array([0, 1], np.int32), np.array([[0, 1]], np.int32))
    with pytest.raises(ValueError, match="no source"):
        _native.Runtime(1).step(
            native,
            [],
            [],
            [(one, 0, [], [])],
            *cells,
            np.zeros(0, np.int32),
            np.zeros((0, 300), np.float32),
            _native.Control(),
            _native.Counters(),
        )


def test_memory_is_asked_for_before_it_is_taken_and_given_back(path: Path) -> None:
    read, layout = model(path)
    graph = build_graph(read.config, read.family, read.tensors)
    of = plan(pinned=(1,))(graph, packed_sizes(read.tensors))
    accountant = Accountant(READ_BUFFER_BYTES)
    weights = StreamedWeights(graph, layout, of, accountant, 1)
    with pytest.raises(MemoryBudgetError, match="streaming weights needs"):
        bind_model(graph, weights)
    weights.close()
    assert accountant.total_bytes == 0
    accountant = Accountant()
    weights = StreamedWeights(graph, layout, of, accountant, 1)
    bind_model(graph, weights)
    units = [unit for unit in of.units if unit.stage != 1]
    assert accountant.total_bytes < READ_BUFFER_BYTES + of.units[1].nbytes + 2 * max(u.nbytes for u in units) + (1 << 15)
    weights.close()
    assert accountant.total_bytes == 0


def test_a_table_is_not_pinned_as_a_head_alone(tmp_path: Path) -> None:
    """Its rows would be looked for in memory before the head brings it there."""
    read, layout = model(CASES["qwen3"].write(tmp_path / "tied.gguf"))
    graph = build_graph(read.config, read.family, read.tensors)
    weights = StreamedWeights(graph, layout, plan(pinned=(len(graph.stages) - 1,))(graph, packed_sizes(read.tensors)), Accountant(), 1)
    with pytest.raises(ValueError, match=r"'token_embd\.weight' is pinned, and a table whose rows come from the file"):
        bind_model(graph, weights)
    weights.close()


def test_a_vector_that_is_not_finite_is_refused(path: Path) -> None:
    read, layout = model(path)
    offset = layout.tensors["blk.0.attn_norm.weight"].offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\x00\xc0\x7f")
    read, layout = model(path)
    graph = build_graph(read.config, read.family, read.tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_norm\.weight.*not finite"):
        StreamedWeights(graph, layout, plan()(graph, packed_sizes(read.tensors)), Accountant(), 1)
