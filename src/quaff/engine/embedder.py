"""Texts as vectors: the residual after the model's last norm, pooled over the rows of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.cache.pages import PageCache
from quaff.engine.engine import Engine, Request
from quaff.engine.runner import Runner
from quaff.errors import ConfigError, NonFiniteError
from quaff.graph.program import Graph
from quaff.weights.resident import ResidentWeights

Pooling = Literal["mean", "last"]
"""All rows of a text count alike, or its last row alone does."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
FILE_POOLINGS: dict[int, Pooling] = {1: "mean", 3: "last"}
"""GGUF's `<architecture>.pooling_type`."""
MAX_TOGETHER = 32
"""Texts that are in the engine at a time; each holds its KV pages."""


class _Pool:
    """Rows of one text as they come."""

    def __init__(self, dim: int, pooling: Pooling) -> None:
        self._sum = np.zeros(dim, dtype=np.float64)
        self._rows = 0
        self._keeps = pooling == "mean"

    def add(self, position: int, row: NDArray[np.float32]) -> None:
        self._sum = self._sum + row if self._keeps else row.astype(np.float64)
        self._rows = self._rows + 1 if self._keeps else 1

    def vector(self) -> NDArray[np.float32]:
        """f32 [dim] of length 1; zeros stay zeros."""
        mean = self._sum / max(1, self._rows)
        length = float(np.sqrt(np.square(mean).sum()))
        if not np.isfinite(length):
            raise NonFiniteError("an embedding became infinite or NaN")
        return (mean / length if length else mean).astype(np.float32)


class Embedder:
    """An engine of its own over the weights of a model, whose head is left out. For one thread at a time."""

    def __init__(self, graph: Graph, weights: ResidentWeights, beside: Engine) -> None:
        """`graph` is that of the engine `beside`, built with `hidden`. MemoryBudgetError when there is no room for its scratch."""
        accountant = beside.cache.accountant
        pools = [_native.PagePool(len(kind.layers), kind.kv_heads, kind.dim, kind.value_dim, kind.value_bytes) for kind in graph.kv_kinds]
        states = [_native.StatePool(len(kind.layers), kind.size) for kind in graph.state_kinds]
        cache = PageCache(graph.kv_kinds, pools, accountant, graph.state_kinds, states)
        with beside.lock:
            runner = Runner(graph, weights, pools, beside.runner.threads, accountant, states)
            self._engine = Engine(runner, cache, beside.order, beside.context, frozenset(), beside=beside)
            self._engine.set_policy(beside.policy)
        self._dim = graph.config.dim

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, drive: Callable[[Engine], object] = Engine.step
    ) -> NDArray[np.float32]:
        """f32 [texts, dim], every row of length 1, of token ids that the caller has checked. No bit depends on what is embedded together.

        `drive` runs a step of an engine; what it raises ends the work. MemoryBudgetError when there is no room for a text.
        """
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling is {pooling!r}; expected {' or '.join(POOLINGS)}")
        out = np.empty((len(texts), self._dim), dtype=np.float32)
        for begin in range(0, len(texts), MAX_TOGETHER):
            some = texts[begin : begin + MAX_TOGETHER]
            pools = [_Pool(self._dim, pooling) for _ in some]
            requests: list[Request] = []
            try:
                for tokens, pool in zip(some, pools, strict=True):
                    first = 0 if pooling == "mean" else len(tokens) - 1
                    requests.append(self._engine.submit(tokens, logits_from=first, on_logits=pool.add))
                while any(not request.done for request in requests):
                    drive(self._engine)
            except BaseException:
                self._engine.cancel()
                self._engine.sweep()
                raise
            for i, (request, pool) in enumerate(zip(requests, pools, strict=True)):
                if request.error is not None:
                    raise request.error
                out[begin + i] = pool.vector()
        return out

    def close(self) -> None:
        self._engine.close()
