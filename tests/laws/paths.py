"""Runs token sequences along chosen paths and keeps every bit they leave: logits of every row, K and V of every position, recurrent state.

Every step's native counters must equal the prediction for the order that was asked for, so a silent fallback to another path fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.tiny import CASES, Tiny

from quaff import _native
from quaff.batch import PAGE, Batch, Counters, Segment
from quaff.cache.pages import PageCache, page_rows
from quaff.checkpoint import open_checkpoint
from quaff.config import Activations, KVDtype
from quaff.engine.runner import Runner
from quaff.graph.builder import build_graph
from quaff.graph.program import Graph
from quaff.measure.memory import packed_sizes
from quaff.models import read_model
from quaff.schedule import Cell, Order, predict
from quaff.weights.budget import Accountant
from quaff.weights.layout import model_layout
from quaff.weights.plan import Plan
from quaff.weights.resident import ResidentWeights
from quaff.weights.streamed import StreamedWeights

WHOLE = Order("chunk", 1 << 20)
ISAS = _native.available_isas()


@dataclass
class Trace:
    """What a sequence left: logits [rows, vocab], per KV kind [layers, heads, positions, words] of keys, values and scales, positions
    in order, and per kind of recurrent state its bytes after the last step."""

    logits: list[NDArray[np.float32]] = field(default_factory=list)
    kv: list[list[NDArray[np.uint16]]] = field(default_factory=list)
    states: tuple[bytes, ...] = ()

    def bits(self) -> tuple[bytes, ...]:
        kinds = [np.concatenate([step[k] for step in self.kv], axis=2) for k in range(len(self.kv[0]))]
        return (np.concatenate(self.logits).tobytes(), *(kind.tobytes() for kind in kinds), *self.states)

    def difference(self, other: Trace) -> str:
        """Where two traces part, for a message; empty when all bytes are equal."""
        a, b = self.bits(), other.bits()
        if a == b:
            return ""
        rows, expected = np.concatenate(self.logits), np.concatenate(other.logits)
        if rows.shape != expected.shape:
            return f"logits of shape {rows.shape}, expected {expected.shape}"
        different = np.flatnonzero((rows.view(np.uint32) != expected.view(np.uint32)).any(axis=1))
        return f"logits of rows {different[:5]} differ" if len(different) else "bytes of the state differ"

    def after(self, start: int) -> Trace:
        """The part of a one-step trace from a position on."""
        return Trace([self.logits[0][start:]], [[kind[:, :, start:] for kind in self.kv[0]]], self.states)


class Tinyrun:
    """A tiny model with its runner, below the engine: steps are laid out by the test."""

    def __init__(
        self,
        tiny: Tiny | None,
        path: Path,
        activations: Activations = "int8",
        fuse: bool = True,
        graph: Graph | None = None,
        kv_dtype: KVDtype = "int16",
        stream: Callable[[Graph, Mapping[str, int]], Plan] | None = None,
    ) -> None:
        """Write `tiny` to `path` (None: the file is there) and load it, packed by our own reader, or streamed by a plan of the graph and
        the packed bytes of its weights."""
        if tiny is not None:
            tiny.write(path)
        with open_checkpoint(path) as checkpoint:
            model = read_model(checkpoint)
            self.graph = graph or build_graph(model.config, model.family, model.tensors, activations, fuse, kv_dtype)
            accountant = Accountant()
            self.weights: ResidentWeights | StreamedWeights
            if stream is None:
                self.weights = ResidentWeights(model.views, 1, accountant)
            else:
                plan = stream(self.graph, packed_sizes(model.tensors))
                self.weights = StreamedWeights(self.graph, model_layout(model.views), plan, accountant, 1)
        self.vocab = model.config.vocab
        self.pools = [
            _native.PagePool(len(kind.layers), kind.kv_heads, kind.dim, kind.value_dim, kind.value_bytes) for kind in self.graph.kv_kinds
        ]
        self.state_pools = [_native.StatePool(len(kind.layers), kind.size) for kind in self.graph.state_kinds]
        self.cache = PageCache(self.graph.kv_kinds, self.pools, accountant, self.graph.state_kinds, self.state_pools)
        self.runner = Runner(self.graph, self.weights, self.pools, 1, accountant, self.state_pools)
        self.counters = Counters()

    def use(self, isa: str | None = None, threads: int | None = None) -> None:
        if isa is not None:
            _native.set_isa(isa)
            assert _native.isa() == isa
        if threads is not None and threads != self.runner.threads:
            self.runner.set_threads(threads)

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], order: Order | Iterable[Cell], traces: Sequence[Trace], checked: bool = True
    ) -> Counters:
        """One native call for (sequence, its next tokens) pairs; logits of every row. Counters are checked against the prediction."""
        segments = []
        for sequence, tokens in rows:
            segments.append(self.cache.segment(sequence, np.array(tokens, dtype=np.int32), range(len(tokens))))
        batch = Batch(tuple(segments))
        grid = self.runner.grid(batch)
        cells = list(order.cells(grid) if isinstance(order, Order) else order)
        before = self.runner.counters
        result = self.runner.run(batch, order if isinstance(order, Order) else cells)
        spent = self.runner.counters - before
        if checked:
            expected = predict(self.runner.costs, grid.spans, [s.start for s in segments], cells)
            assert spent.fixed == expected.fixed, f"counted {spent}, predicted {expected}"
        assert result.finished == tuple(s.rows for s in segments)
        assert not any(result.poisoned)
        assert len(result.rows) == batch.rows
        for segment, (begin, end), trace in zip(segments, grid.spans, traces, strict=True):
            trace.logits.append(result.values[begin:end].copy())
            trace.kv.append([self._kv(k, segment.tables[k], segment.start, end - begin) for k in range(len(self.pools))])
            trace.states = self._states(segment)
            self.cache.commit(segment.sequence, segment.start + segment.rows)
        self.counters += spent
        return spent

    def _states(self, segment: Segment) -> tuple[bytes, ...]:
        return tuple(pool.array(int(slots[-1])).tobytes() for pool, slots in zip(self.state_pools, segment.states, strict=True))

    def _kv(self, kind: int, table: NDArray[np.int32], start: int, rows: int) -> NDArray[np.uint16]:
        """K and V of positions start .. start + rows - 1, [layers, heads, rows, words], read before any page is given back."""
        k, first, last = self.graph.kv_kinds[kind], start // PAGE, (start + rows - 1) // PAGE
        pages = np.stack([self.pools[kind].array(int(p)) for p in table[first : last + 1]])
        both = page_rows(pages, k)  # [pages, layers, heads, 64, words]
        both = both.transpose(1, 2, 0, 3, 4).reshape(len(k.layers), k.kv_heads, len(pages) * PAGE, -1)
        return both[:, :, start - first * PAGE : start - first * PAGE + rows]

    def read(self, tokens: Sequence[int], order: Order | Iterable[Cell] = WHOLE, cuts: Sequence[int] = (), checked: bool = True) -> Trace:
        """The trace of a fresh sequence, in steps that end at `cuts`."""
        trace, sequence = Trace(), self.cache.create()
        for begin, end in pairs([0, *cuts, len(tokens)]):
            self.step([(sequence, tokens[begin:end])], order, [trace], checked)
        self.cache.free(sequence)
        return trace


def state_hash(model: Tinyrun, tokens: Sequence[int]) -> str:
    """That of a fresh sequence which reads `tokens` at once."""
    sequence = model.cache.create()
    model.step([(sequence, tokens)], WHOLE, [Trace()])
    digest = model.cache.kv_sha256(sequence)
    model.cache.free(sequence)
    return digest


def pairs(cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b)


def prompt(vocab: int, length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]


def tiny_run(name: str, folder: Path, activations: Activations = "int8", fuse: bool = True) -> Tinyrun:
    return Tinyrun(CASES[name], folder / f"{name}.gguf", activations, fuse)
