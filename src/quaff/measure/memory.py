"""Memory that a model needs, from its tensor table alone: nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from quaff.graph.program import Graph
from quaff.models.family import Tensors

_FLOAT_BYTES = {0: 4, 1: 2, 30: 2}
# ggml type -> (bytes of a code, bytes of a scale, scales per group: 2 with a minimum, group), as native/pack keeps them.
_PACKED = {
    2: (0.5, 2, 1, 32),
    3: (0.5, 2, 2, 32),
    6: (1.0, 2, 1, 32),
    7: (1.0, 2, 2, 32),
    8: (1.0, 2, 1, 32),
    10: (1.0, 4, 2, 16),
    11: (1.0, 4, 1, 16),
    12: (0.5, 4, 2, 32),
    13: (1.0, 4, 2, 32),
    14: (1.0, 4, 1, 16),
    20: (0.5, 2, 1, 32),
    23: (0.5, 4, 1, 32),
    39: (0.5, 4, 1, 32),
}


def packed_bytes(shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a weight in panels of 16 rows, codes, scales and minimums; a vector is f32. KeyError for an unknown type."""
    if len(shape) == 1:
        return 4 * shape[0]
    rows, cols = -(-shape[0] // 16) * 16, prod(shape[1:])
    if ggml_type in _FLOAT_BYTES:
        return rows * cols * _FLOAT_BYTES[ggml_type]
    code, scale, per_group, group = _PACKED[ggml_type]
    return int(rows * cols * code) + rows * (cols // group) * scale * per_group


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes: packed weights, KV state of 1,024 positions, and scratch of one chunk of `chunk` rows with one row of logits."""

    weight_bytes: int
    kv_bytes_per_1024_tokens: int
    scratch_bytes: int
    chunk: int

    def as_dict(self) -> dict[str, int]:
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_1024_tokens": self.kv_bytes_per_1024_tokens,
            "scratch_bytes": self.scratch_bytes,
            "chunk": self.chunk,
        }


def memory_need(graph: Graph, tensors: Tensors, chunk: int = 512) -> MemoryNeed:
    """What `graph` needs. A sliding layer holds no more positions than its window, a page of 64 and a chunk."""
    kv = 0
    for kind in graph.kv_kinds:
        positions = min(1024, kind.window + 64 + chunk) if kind.window else 1024
        kv += len(kind.layers) * kind.kv_heads * kind.dim * 2 * 2 * positions
    scratch = graph.scratch_bytes(chunk, chunk) + 4 * graph.config.vocab
    return MemoryNeed(sum(packed_bytes(shape, kind) for shape, kind in tensors.values()), kv, scratch, chunk)


def bytes_per_weight(tensors: Tensors) -> float:
    """Packed bytes of all matrices over their number of values."""
    matrices = [(shape, kind) for shape, kind in tensors.values() if len(shape) > 1 and shape[0] > 1]
    return sum(packed_bytes(shape, kind) for shape, kind in matrices) / max(1, sum(prod(shape) for shape, _ in matrices))


def parameters(tensors: Mapping[str, tuple[tuple[int, ...], int]]) -> int:
    return sum(prod(shape) for shape, _ in tensors.values())
