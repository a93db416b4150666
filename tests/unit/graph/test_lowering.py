"""Codes and scales of the reference against gguf.quants.dequantize, by bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import random_tensor

from quaff.errors import UnsupportedError
from quaff.graph.lowering import BLOCKS, FLOATS, lower

NAMES = FLOATS | {ggml_type: name for ggml_type, (name, _, _) in BLOCKS.items()}


@pytest.mark.parametrize("ggml_type", NAMES, ids=lambda t: NAMES[t])
def test_values_equal_the_oracle(ggml_type: int) -> None:
    for seed in range(3):
        data = random_tensor(np.random.default_rng(seed), "w", (5, 512), NAMES[ggml_type])
        oracle = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
        weight = lower(ggml_type, np.ascontiguousarray(data).view(np.uint8).reshape(-1), (5, 512))
        assert weight.dequantised().tobytes() == oracle.astype(np.float32).tobytes()
        assert weight.is_integer == (ggml_type in BLOCKS)


@pytest.mark.parametrize("ggml_type", BLOCKS, ids=lambda t: NAMES[t])
def test_every_byte_of_a_block_matters(ggml_type: int) -> None:
    """The control: one flipped bit anywhere shows in the codes, scales or minima. The lowest may not (TQ1_0), nor a sign (of zero)."""
    data = random_tensor(np.random.default_rng(7), "w", (1, 256), NAMES[ggml_type]).reshape(-1)

    def parts(raw: NDArray[np.uint8]) -> bytes:
        w = lower(ggml_type, raw, (1, 256))
        assert w.codes is not None and w.scale is not None
        return w.codes.tobytes() + w.scale.tobytes() + (b"" if w.min is None else w.min.tobytes())

    right = parts(data)
    for i in range(len(data)):
        wrong = data.copy()
        wrong[i] ^= 4
        assert parts(wrong) != right, f"byte {i}"


def test_unknown_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="ggml type 41 is not supported; supported: F32, F16, BF16, Q4_0"):
        lower(41, np.zeros(36, np.uint8), (1, 256))
