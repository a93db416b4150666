"""Weights that stay in their files: a native source reads and packs what a stage needs while the stages before it compute."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.errors import CheckpointError, MemoryBudgetError, quote
from quaff.graph.program import Graph
from quaff.weights.budget import Accountant
from quaff.weights.layout import Layout, SourceFile, TensorLayout
from quaff.weights.plan import READ_BUFFER_BYTES, Plan, StreamCounters

READERS = 2
"""Threads that read and pack: while one packs, the other keeps the disk busy."""
PANEL_ALIGNMENT = 64


class StreamedWeights:
    """Native weights by tensor name, as `ResidentWeights` has them. Vectors and taps of convolutions are in memory from the start; matrices
    get theirs by `bind`, and their bytes when a step needs them.

    While a step runs, the files must stay what they were when the layout was made: else the step raises CheckpointError.
    """

    def __init__(self, graph: Graph, layout: Layout, plan: Plan, accountant: Accountant, threads: int) -> None:
        """Raises CheckpointError for a file that cannot be read or is not what it was, MemoryBudgetError."""
        self._plan = plan
        self._accountant = accountant
        self._weights: dict[str, _native.Weight] = {}
        self._held_bytes = 0
        self.loaded_bytes = 0
        files = [(str(file.path), file.nbytes, file.mtime_ns) for file in layout.files]
        try:
            self._source = _native.WeightSource(files, READERS, READ_BUFFER_BYTES // READERS)
        except _native.SourceError as error:
            raise CheckpointError(str(error)) from None
        small = dict.fromkeys(name for stage in graph.stages for name in stage.small_weights)
        try:
            self._load_small([layout.tensors[name] for name in small], layout.files, threads)
            for name in graph.weight_names:
                if name not in small:
                    self._weights[name] = self._add(layout.tensors[name])
        except BaseException:
            self.close()
            raise

    def bind(self, model: _native.Model) -> None:
        """Lay out the memory of the plan for the stages of `model`, which were added with these weights; once."""
        plan = self._plan
        block_rows = -(-plan.head_block_rows // 16) * 16
        pinned = sorted(plan.pinned)
        self._source.bind(model, plan.slots, pinned, plan.embedding == "pinned", block_rows, plan.expert_slot_bytes)
        # Nothing of it has been written to yet, so nothing is in use.
        self._take(self._source.memory_bytes, "streaming weights")

    def stream_counters(self) -> StreamCounters:
        """Sums since the weights were opened; any thread may ask."""
        counted = self._source.counters
        return StreamCounters(**{f.name: counted[f.name] for f in fields(StreamCounters)})

    def __getitem__(self, name: str) -> _native.Weight:
        return self._weights[name]

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Packed bytes by tensor name, in memory or not."""
        return {name: weight.nbytes for name, weight in self._weights.items()}

    @property
    def bytes_per_weight(self) -> float:
        """Packed bytes of all matrices over their number of values."""
        matrices = [w for w in self._weights.values() if w.rows > 1]
        return sum(w.nbytes for w in matrices) / max(1, sum(w.experts * w.rows * w.cols for w in matrices))

    def close(self) -> None:
        """End the readers. Steps of a model that is bound to these weights fail afterwards."""
        self._source.stop()
        self._weights.clear()
        self._accountant.give(self._held_bytes)
        self._held_bytes = self.loaded_bytes = 0

    def _take(self, nbytes: int, what: str) -> None:
        self._accountant.take(nbytes, what)
        self._held_bytes += nbytes

    def _load_small(self, tensors: list[TensorLayout], files: tuple[SourceFile, ...], threads: int) -> None:
        for number, file in enumerate(files):
            mine = [tensor for tensor in tensors if tensor.file == number]
            if not mine:
                continue
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for tensor in mine:
                    self._weights[tensor.name] = weight = _small(tensor, fd, file, threads)
                    self._take(weight.nbytes, f"weight {quote(tensor.name)}")
                    self.loaded_bytes += weight.nbytes
            except OSError as error:
                raise CheckpointError(f"{file.path}: cannot be read: {error.strerror or error}") from None
            except MemoryError:
                raise MemoryBudgetError("the system has no memory left for the vectors of the model; use a smaller model") from None
            finally:
                os.close(fd)

    def _add(self, t: TensorLayout) -> _native.Weight:
        return self._source.add(t.name, t.ggml_type, t.matrices, t.rows, t.cols, t.file, t.offset, t.matrix_stride, t.row_stride, t.packed)


def _small(tensor: TensorLayout, fd: int, file: SourceFile, threads: int) -> _native.Weight:
    """A vector, or a small matrix, in memory."""
    where = f"{file.path}: tensor {quote(tensor.name)}"
    if tensor.is_vector:
        values = _read(fd, tensor.offset, tensor.matrix_bytes, where).view(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{where} holds a value that is not finite; the file is damaged")
        return _native.Weight.vector(values)
    try:
        if not tensor.packed:
            place = (fd, tensor.offset, tensor.row_stride, tensor.matrices, tensor.rows, tensor.cols)
            return _native.Weight.read(tensor.ggml_type, *place, threads)
        size = (max(1, tensor.matrices) - 1) * tensor.matrix_stride + tensor.matrix_bytes
        panels = _read(fd, tensor.offset, size, where)
        return _native.Weight.view(tensor.ggml_type, panels, tensor.matrix_stride, tensor.matrices, tensor.rows, tensor.cols)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _read(fd: int, offset: int, size: int, where: str) -> NDArray[np.uint8]:
    whole = np.empty(size + PANEL_ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % PANEL_ALIGNMENT
    values = whole[first : first + size]
    if os.preadv(fd, [values.data], offset) != size:
        raise CheckpointError(f"{where} ends after the end of the file; load the model again")
    return values
