"""All weights in memory: every tensor of a model packed once into panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quaff import _native
from quaff.checkpoint import TensorView
from quaff.errors import CheckpointError, MemoryBudgetError, quote
from quaff.weights.budget import Accountant


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

        Raises MemoryBudgetError, or CheckpointError for values that are not finite.
        """
        self._accountant = accountant
        self._weights: dict[str, _native.Weight] = {}
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
            if len(view.shape) == 1 or view.name.endswith(".bias"):
                values = np.array(view.data.view(np.float32))
                if not np.isfinite(values).all():
                    raise CheckpointError(f"tensor {quote(view.name)} holds a value that is not finite; the file is damaged")
                weight = _native.Weight.vector(values)
            elif len(view.shape) == 3:
                weight = _native.Weight.stack(view.ggml_type, view.data, *view.shape, threads)
            else:
                weight = _native.Weight(view.ggml_type, view.data, view.shape[0], view.shape[1], threads)
        except ValueError as error:
            raise CheckpointError(f"tensor {quote(view.name)}: {error}") from None
        except MemoryError:
            raise MemoryBudgetError(f"the system has no memory left for {what}; use a smaller model") from None
        finally:
            self._accountant.give(view.scratch_bytes)
        self._accountant.take(max(0, weight.nbytes - view.nbytes), what)
        self._accountant.give(max(0, view.nbytes - weight.nbytes))
        self.loaded_bytes += weight.nbytes - view.nbytes
        return weight

    def __getitem__(self, name: str) -> _native.Weight:
        return self._weights[name]

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Packed bytes by tensor name."""
        return {name: weight.nbytes for name, weight in self._weights.items()}

    @property
    def bytes_per_weight(self) -> float:
        """Packed bytes of all matrices over their number of values."""
        matrices = [w for w in self._weights.values() if w.rows > 1]
        return sum(w.nbytes for w in matrices) / max(1, sum(w.experts * w.rows * w.cols for w in matrices))

    def close(self) -> None:
        self._weights.clear()
        self._accountant.give(self.loaded_bytes)
        self.loaded_bytes = 0
