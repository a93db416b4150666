"""Bytes on disk become named read-only views. Strict: anything that cannot be true about a file raises and says what."""

import os
from pathlib import Path

from quaff.checkpoint.gguf import read_gguf
from quaff.checkpoint.types import GGML_TYPES, SUPPORTED_TYPES, GgmlType
from quaff.checkpoint.views import Checkpoint, TensorView

__all__ = ["GGML_TYPES", "SUPPORTED_TYPES", "Checkpoint", "GgmlType", "TensorView", "open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model file; tensors are mapped, not read.

    Raises CheckpointError (missing, unreadable, damaged or not a model file) and UnsupportedError (a sound file of a kind,
    version or tensor type that is not supported). The message begins with the path.
    """
    return read_gguf(Path(path))
