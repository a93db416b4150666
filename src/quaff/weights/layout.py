"""Where the weights of a model lie in its files: what streaming needs to read them without asking Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quaff.checkpoint import ModelFile, Place, TensorView
from quaff.errors import CheckpointError, UnsupportedError, quote


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when its header was read: whoever opens it again compares size and time of modification."""

    path: Path
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One weight, by the name that stages use, in file `file` of its Layout. Sizes in bytes.

    Matrix m of a stack (of `matrices` > 0; else the one matrix) begins at offset + m * matrix_stride. With `packed` it is `matrix_bytes`
    of panels as native/pack leaves them: 16 rows each, one after the other. Without, row r of it is `row_bytes` of ggml blocks at
    r * row_stride, with gaps between rows only where it holds columns of a token table. A vector (a bias whatever its shape) is
    `matrix_bytes` of f32 values.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    file: int
    offset: int
    packed: bool
    is_vector: bool
    matrices: int
    rows: int
    cols: int
    matrix_bytes: int
    matrix_stride: int
    row_bytes: int
    row_stride: int

    @property
    def nbytes(self) -> int:
        """All of it, gaps apart."""
        return max(1, self.matrices) * self.matrix_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Weights by name, in the order of their views; of a packed file in the order of their use."""

    files: tuple[SourceFile, ...]
    tensors: Mapping[str, TensorLayout]


def model_layout(views: Mapping[str, TensorView]) -> Layout:
    """Where `views` lie. UnsupportedError for a tensor that lies nowhere, since it is made when it is read."""
    files: dict[ModelFile, int] = {}
    tensors: dict[str, TensorLayout] = {}
    for name, view in views.items():
        place = view.place
        if place is None:
            raise UnsupportedError(
                f"tensor {quote(name)} is quantised or laid out anew while it is read, so it cannot be streamed; "
                "pack the model first (quaff pack MODEL OUT), or convert it (quaff convert)"
            )
        tensors[name] = _tensor(view, place, files.setdefault(place.file, len(files)))
    return Layout(tuple(SourceFile(file.path.absolute(), file.nbytes, file.mtime_ns) for file in files), tensors)


def _tensor(view: TensorView, place: Place, file: int) -> TensorLayout:
    def layout(rows: int, cols: int, matrix: tuple[int, int], row: tuple[int, int]) -> TensorLayout:
        return TensorLayout(
            view.name, view.shape, view.ggml_type, file, place.offset, view.packed, view.is_vector, view.matrices, rows, cols, *matrix, *row
        )

    if view.is_vector:
        if place.count > 1 and place.stride != place.nbytes:
            raise CheckpointError(f"vector {quote(view.name)} lies in pieces")
        return layout(1, prod(view.shape), (view.nbytes, view.nbytes), (0, 0))
    rows, cols = view.shape[-2:]
    if view.packed:
        return layout(rows, cols, (place.nbytes, place.stride), (0, 0))
    return layout(rows, cols, (rows * place.nbytes, rows * place.stride), (place.nbytes, place.stride))
