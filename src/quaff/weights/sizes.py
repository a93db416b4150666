"""Bytes of weights as they will lie in memory, from a tensor table alone: nothing is loaded."""

from __future__ import annotations

from math import prod

from quaff import _native
from quaff.models.family import Tensors


def packed_bytes(shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a weight as it will lie in memory: a vector is f32, experts are packed one by one. ValueError for an unknown type."""
    if len(shape) == 1:
        return 4 * shape[0]
    return prod(shape[:-2]) * _native.packed_bytes(ggml_type, shape[-2], shape[-1])


def packed_sizes(tensors: Tensors) -> dict[str, int]:
    """`packed_bytes` by name; a bias is a vector whatever its shape."""
    return {name: 4 * prod(shape) if name.endswith(".bias") else packed_bytes(shape, kind) for name, (shape, kind) in tensors.items()}
