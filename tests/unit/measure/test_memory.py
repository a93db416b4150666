"""The memory that `inspect` states: packed bytes as the native module makes them, KV and scratch by the formulas."""

import numpy as np
import pytest

from quaff import _native
from quaff.checkpoint import GGML_TYPES
from quaff.measure.memory import packed_bytes


@pytest.mark.parametrize("kind", GGML_TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (16, 512), (33, 256)])
def test_packed_bytes_are_those_of_the_native_module(kind, rows: int, cols: int) -> None:
    data = np.zeros(rows * cols // kind.block * kind.nbytes, dtype=np.uint8)
    assert packed_bytes((rows, cols), kind.id) == _native.Weight(kind.id, data, rows, cols).nbytes


def test_a_vector_is_f32() -> None:
    assert packed_bytes((576,), 0) == _native.Weight.vector(np.zeros(576, np.float32)).nbytes
