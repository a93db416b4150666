"""Bytes on disk become named views. Strict: anything that cannot be true about a file raises and says what."""

import os
from pathlib import Path

from quaff.checkpoint.file import ModelFile, Place, closed_on_error
from quaff.checkpoint.gguf import read_gguf
from quaff.checkpoint.packed import MAGIC, read_packed
from quaff.checkpoint.types import GGML_TYPES, SUPPORTED_TYPES, GgmlType
from quaff.checkpoint.views import Checkpoint, Hashes, Origin, TensorView
from quaff.errors import CheckpointError, located, quote

__all__ = [
    "GGML_TYPES",
    "SUPPORTED_TYPES",
    "Checkpoint",
    "GgmlType",
    "Hashes",
    "ModelFile",
    "Origin",
    "Place",
    "TensorView",
    "open_checkpoint",
]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model file, GGUF or packed; tensors are read when their views are.

    Raises CheckpointError (missing, unreadable, damaged or not a model file) and UnsupportedError (a sound file of a kind,
    version or tensor type that is not supported). The message begins with the path.
    """
    path = Path(path)
    with located(path):
        if os.path.isdir(path):
            inside = sorted(p.name for p in path.glob("*.gguf"))[:3]
            hint = f" inside it, such as {', '.join(map(quote, inside))}" if inside else ""
            raise CheckpointError(f"is a folder; give a GGUF file{hint}")
        with closed_on_error(ModelFile(path)) as file:
            return read_packed(file) if file.pread(0, len(MAGIC)) == MAGIC else read_gguf(file)
