"""What every checkpoint format becomes: metadata and named read-only views of the tensors' bytes."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """A tensor where it lies in the file, or one that is made from the file when it is read.

    `shape` is in NumPy order, (rows, cols) for a matrix and (n,) for a vector; `data` is a read-only uint8 array of `nbytes`
    bytes, in blocks of `type_name` along the last axis. Reading it takes `scratch_bytes` of memory, the array included; 0 for a view of
    the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    nbytes: int
    read: Callable[[], NDArray[np.uint8]]
    scratch_bytes: int = 0

    @property
    def data(self) -> NDArray[np.uint8]:
        return self.read()


class Checkpoint:
    """An open model: a file, or a folder of files.

    `metadata` maps keys to int, float, bool, str, list[str] (arrays of strings) or read-only NumPy arrays (arrays of numbers and
    booleans). `tensors` maps names to views, in file order. `format` is "GGUF" or "safetensors"; `quantized` is what matrices of a
    folder become when they are read, and None for a GGUF file, which is taken as it is.

    The views are backed by a memory map: while they are used the file must not be cut short or rewritten in place, since the
    system then ends the process (SIGBUS). Replacing the file by a rename is safe.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        tensors: dict[str, TensorView],
        file_bytes: int,
        maps: Sequence[mmap.mmap],
        format: str = "GGUF",
        quantized: str | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.quantized = quantized
        self.file_bytes = file_bytes
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorView] = MappingProxyType(tensors)
        self.architecture: str = metadata["general.architecture"]
        self._maps = tuple(maps)

    def close(self) -> None:
        """Forget the tensors. The file stays mapped until the last view that a caller kept is gone."""
        self.tensors = MappingProxyType({})
        for mapped in self._maps:
            with suppress(BufferError):
                mapped.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, architecture={self.architecture!r}, tensors={len(self.tensors)})"
