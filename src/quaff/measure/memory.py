"""Memory that a model needs, from its tensor table alone: nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from quaff.engine.engine import make_scheduler
from quaff.graph.program import Graph
from quaff.models.family import Tensors
from quaff.schedule import Order
from quaff.weights.sizes import packed_bytes, packed_sizes


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes: packed weights, KV state of 1,024 positions (with the recurrent state before and after a step), and scratch of the engine's
    largest step of a prompt: `rows` rows in chunks of `chunk`, with one row of logits."""

    weight_bytes: int
    kv_bytes_per_1024_tokens: int
    scratch_bytes: int
    rows: int
    chunk: int

    def as_dict(self) -> dict[str, int]:
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_1024_tokens": self.kv_bytes_per_1024_tokens,
            "scratch_bytes": self.scratch_bytes,
            "rows": self.rows,
            "chunk": self.chunk,
        }


def memory_need(graph: Graph, tensors: Tensors, chunk: int = 512) -> MemoryNeed:
    """What `graph` needs. A sliding layer holds no more positions than its window, a page of 64 and a step."""
    rows = min(make_scheduler(Order("chunk", chunk), graph).prompt_rows, graph.config.context_length)
    kv = sum(2 * 4 * len(kind.layers) * kind.size for kind in graph.state_kinds)
    for kind in graph.kv_kinds:
        positions = min(1024, kind.window + 64 + rows) if kind.window else 1024
        kv += kind.position_bytes * positions
    scratch = graph.scratch_bytes(rows, min(chunk, rows)) + 4 * graph.config.vocab
    return MemoryNeed(sum(packed_sizes(tensors).values()), kv, scratch, rows, chunk)


def bytes_per_weight(tensors: Tensors) -> float:
    """Packed bytes of all matrices over their number of values."""
    named = ((shape, kind) for name, (shape, kind) in tensors.items() if not name.endswith(".bias"))
    matrices = [(shape, kind) for shape, kind in named if len(shape) > 1 and shape[-2] > 1]
    return sum(packed_bytes(shape, kind) for shape, kind in matrices) / max(1, sum(prod(shape) for shape, _ in matrices))


def parameters(tensors: Mapping[str, tuple[tuple[int, ...], int]]) -> int:
    return sum(prod(shape) for shape, _ in tensors.values())
