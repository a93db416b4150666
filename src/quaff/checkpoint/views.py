"""What every checkpoint format becomes: metadata and named read-only views of the tensors' bytes."""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """A tensor where it lies in the file.

    `shape` is in NumPy order, (rows, cols) for a matrix and (n,) for a vector; `data` is a read-only uint8 view of `nbytes`
    bytes, in blocks of `type_name` along the last axis.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Checkpoint:
    """An open model file.

    `metadata` maps keys to int, float, bool, str, list[str] (arrays of strings) or read-only NumPy arrays (arrays of numbers and
    booleans). `tensors` maps names to views, in file order.

    The views are backed by a memory map: while they are used the file must not be cut short or rewritten in place, since the
    system then ends the process (SIGBUS). Replacing the file by a rename is safe.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorView], file_bytes: int, mapped: mmap.mmap) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorView] = MappingProxyType(tensors)
        self.architecture: str = metadata["general.architecture"]
        self._mapped = mapped

    def close(self) -> None:
        """Forget the tensors. The file stays mapped until the last view that a caller kept is gone."""
        self.tensors = MappingProxyType({})
        with suppress(BufferError):
            self._mapped.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, architecture={self.architecture!r}, tensors={len(self.tensors)})"
