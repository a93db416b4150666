"""All weights in memory: every tensor of a model packed once into panels, those of a packed file where they are mapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quaff import _native
from quaff.checkpoint import ModelFile, TensorView
from quaff.errors import CheckpointError, MemoryBudgetError, quote
from quaff.weights.budget import Accountant
from quaff.weights.plan import StreamCounters


class ResidentWeights:
    """Native weights by tensor name. Their bytes are taken from the accountant before they are packed, and given back by `close`."""

    def __init__(
        self,
        views: Mapping[str, TensorView],
        threads: int,
        accountant: Accountant,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Pack `views`, tensors by name. `progress` gets (bytes read, bytes in all).

        Raises MemoryBudgetError, or CheckpointError for values that are not finite and for a file that cannot be read to its end.
        """
        self._accountant = accountant
        self._weights: dict[str, _native.Weight] = {}
        self._mapped: dict[ModelFile, _native.MappedFile] = {}
        self.loaded_bytes = 0
        total = sum(view.nbytes for view in views.values())
        done = 0
        try:
            for name, view in views.items():
                self._weights[name] = self._load(view, threads)
                done += view.nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            self.close()
            raise

    def _load(self, view: TensorView, threads: int) -> _native.Weight:
        # Packed forms are never smaller than the file's by more than padding; the difference is settled when it is known.
        what = f"weight {quote(view.name)}"
        self._accountant.take(view.nbytes, what)
        self.loaded_bytes += view.nbytes
        self._accountant.take(view.scratch_bytes, f"reading {what}")
        try:
            weight = self._vector(view) if view.is_vector else self._matrix(view, threads)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"tensor {quote(view.name)}: {error}") from None
        except MemoryError:
            raise MemoryBudgetError(f"the system has no memory left for {what}; use a smaller model") from None
        finally:
            self._accountant.give(view.scratch_bytes)
        self._accountant.take(max(0, weight.nbytes - view.nbytes), what)
        self._accountant.give(max(0, view.nbytes - weight.nbytes))
        self.loaded_bytes += weight.nbytes - view.nbytes
        return weight

    def _vector(self, view: TensorView) -> _native.Weight:
        values = view.data.view(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {quote(view.name)} holds a value that is not finite; the file is damaged")
        return _native.Weight.vector(values)

    def _matrix(self, view: TensorView, threads: int) -> _native.Weight:
        kind, stack, (rows, cols), place = view.ggml_type, view.matrices, view.shape[-2:], view.place
        if place is None:
            if stack:
                return _native.Weight.stack(kind, view.data, stack, rows, cols, threads)
            return _native.Weight(kind, view.data, rows, cols, threads)
        if not view.packed:
            return _native.Weight.read(kind, place.file.fd, place.offset, place.stride, stack, rows, cols, threads)
        if place.file not in self._mapped:
            self._mapped[place.file] = place.file.map()
        panels = self._mapped[place.file].array()[place.offset : place.offset + (place.count - 1) * place.stride + place.nbytes]
        return _native.Weight.view(kind, panels, place.stride, stack, rows, cols)

    def __getitem__(self, name: str) -> _native.Weight:
        return self._weights[name]

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Packed bytes by tensor name."""
        return {name: weight.nbytes for name, weight in self._weights.items()}

    def stream_counters(self) -> StreamCounters | None:
        """None: nothing is streamed."""
        return None

    @property
    def bytes_per_weight(self) -> float:
        """Packed bytes of all matrices over their number of values."""
        matrices = [w for w in self._weights.values() if w.rows > 1]
        return sum(w.nbytes for w in matrices) / max(1, sum(w.experts * w.rows * w.cols for w in matrices))

    def settle(self) -> None:
        """Wait until what is mapped has moved into huge pages, as far as the system has them. Computing need not wait: no bit changes."""
        for file in self._mapped.values():
            file.wait()

    def close(self) -> None:
        self._weights.clear()
        self._mapped.clear()
        self._accountant.give(self.loaded_bytes)
        self.loaded_bytes = 0
