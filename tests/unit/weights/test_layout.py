"""Where weights lie in files: read there, they are the bytes that their views give."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.models import read_model
from quaff.weights.layout import model_layout


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "gemma4", "gpt-oss", "kimi-linear"])
def test_rows_lie_where_they_are_said_to(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "m.gguf")
    content = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        views = read_model(checkpoint).views
        layout = model_layout(views)
        (file,) = layout.files
        assert (file.path, file.nbytes, file.mtime_ns) == (path, len(content), path.stat().st_mtime_ns)
        assert list(layout.tensors) == list(views)
        for tensor, view in zip(layout.tensors.values(), views.values(), strict=True):
            assert (tensor.name, tensor.shape, tensor.ggml_type, tensor.packed) == (view.name, view.shape, view.ggml_type, False)
            assert tensor.nbytes == view.nbytes and tensor.is_vector == view.is_vector
            if tensor.is_vector:
                found = content[tensor.offset : tensor.offset + tensor.matrix_bytes]
            else:
                starts = (
                    tensor.offset + m * tensor.matrix_stride + r * tensor.row_stride
                    for m in range(max(1, tensor.matrices))
                    for r in range(tensor.rows)
                )
                found = b"".join(content[at : at + tensor.row_bytes] for at in starts)
                assert tensor.rows * tensor.row_bytes == tensor.matrix_bytes and tensor.cols == view.shape[-1]
            assert found == view.data.tobytes()
    gaps = [t.name for t in layout.tensors.values() if t.row_stride != t.row_bytes]
    assert gaps == ([f"blk.{i}.per_layer_token_embd.weight" for i in range(5)] if name == "gemma4" else [])
