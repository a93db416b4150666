"""What every checkpoint format becomes: metadata and named views of the tensors' bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.checkpoint.file import ModelFile, Place


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is kept as f32 values, not as panels: a bias is, whatever its shape."""
    return len(shape) == 1 or name.endswith(".bias")


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """A tensor where it lies in a file, or one that is made from files when it is read.

    `shape` is in NumPy order, (rows, cols) for a matrix and (n,) for a vector; `nbytes` is the size of `data`: blocks of `type_name` along
    the last axis, or with `packed` panels as weights have them in memory. Making it takes `scratch_bytes` of memory, the result included; 0
    for a place. `hashes`: what a packed file states about it.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    nbytes: int
    source: Place | Callable[[], NDArray[np.uint8]]
    scratch_bytes: int = 0
    packed: bool = False
    hashes: Hashes | None = None

    @property
    def place(self) -> Place | None:
        """Where it lies; None for one that is made."""
        return self.source if isinstance(self.source, Place) else None

    @property
    def data(self) -> NDArray[np.uint8]:
        """Its bytes, read now. CheckpointError when they cannot be."""
        return self.source.read() if isinstance(self.source, Place) else self.source()

    @property
    def is_vector(self) -> bool:
        return is_vector(self.name, self.shape)

    @property
    def matrices(self) -> int:
        """Of a stack; 0 for a matrix or a vector."""
        return 0 if self.is_vector or len(self.shape) < 3 else prod(self.shape[:-2])


@dataclass(frozen=True, slots=True)
class Hashes:
    """SHA-256 in hexadecimal digits: of a tensor's bytes in a packed file, and of the blocks they were made from."""

    panels: str
    blocks: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What a packed file was made from: the name of the file or folder, its format and bytes, and what matrices of a folder became."""

    name: str
    format: str
    quantized: str | None
    nbytes: int


class Checkpoint:
    """An open model: a file, or a folder of files.

    `metadata` maps keys to int, float, bool, str, list[str] (arrays of strings) or read-only NumPy arrays (arrays of numbers and
    booleans). `tensors` maps names to views, in file order. `format` is "GGUF", "safetensors" or "packed". `quantized` is what matrices of
    a folder become when they are read, or became when it was packed; None for what comes from a GGUF file, which is taken as it is.
    `origin`: what a packed file was made from.

    Files are read when a view is, by plain reads: one that is cut short or rewritten meanwhile is an error or other bytes, no more.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, Any],
        tensors: dict[str, TensorView],
        files: Sequence[ModelFile],
        format: str = "GGUF",
        quantized: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.quantized = quantized
        self.origin = origin
        self.file_bytes = sum(file.nbytes for file in files)
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorView] = MappingProxyType(tensors)
        self.architecture: str = metadata["general.architecture"]
        self.files = tuple(files)

    def close(self) -> None:
        """Forget the tensors and close the files. Arrays that were read stay."""
        self.tensors = MappingProxyType({})
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, architecture={self.architecture!r}, tensors={len(self.tensors)})"
