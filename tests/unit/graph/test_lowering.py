"""Codes and scales of the reference against gguf.quants.dequantize, by bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tests.tiny import random_tensor

from quaff.errors import UnsupportedError
from quaff.graph.lowering import BLOCKS, lower


@pytest.mark.parametrize("ggml_type", BLOCKS, ids=lambda t: BLOCKS[t][0])
def test_values_equal_the_oracle(ggml_type: int) -> None:
    name = BLOCKS[ggml_type][0]
    data = random_tensor(np.random.default_rng(ggml_type), "w", (5, 512), name)
    oracle = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
    weight = lower(ggml_type, np.ascontiguousarray(data).view(np.uint8).reshape(-1), (5, 512))
    assert weight.dequantised().tobytes() == oracle.astype(np.float32).tobytes()
    assert weight.is_integer == (name not in ("F32", "F16", "BF16"))


def test_unknown_type_is_named() -> None:
    with pytest.raises(UnsupportedError, match="ggml type 10"):
        lower(10, np.zeros(84, np.uint8), (1, 256))
