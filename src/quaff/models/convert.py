"""A Hugging Face folder as one GGUF file, which loads here with the same bits and elsewhere as a file of llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from quaff.checkpoint import GGML_TYPES, Checkpoint
from quaff.checkpoint.writing import new_file
from quaff.errors import ConfigError
from quaff.models.huggingface import open_folder
from quaff.tokenizer.huggingface import gguf_keys

FileType = Literal["q8_0", "q4_0", "q4_1", "f16", "f32"]
FILE_TYPES: dict[FileType, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7}  # llama.cpp's numbers (llama_ftype)


def convert(folder: Path, out: Path, matrices: FileType = "q8_0", progress: Callable[[int, int], None] | None = None) -> None:
    """Write `out`, a tensor at a time, into a temporary file beside it that is renamed when it is whole. `progress`: (bytes done, in all).

    Raises as `open_folder` does, UnsupportedError for a tokenizer that GGUF has no name for, CheckpointError when `out` exists.
    """
    if matrices not in get_args(FileType):
        raise ConfigError(f"type is {matrices!r}; expected one of {', '.join(get_args(FileType))}")
    with new_file(out) as temporary, open_folder(folder, matrices) as checkpoint:
        _write(checkpoint, gguf_keys(checkpoint.metadata), temporary, matrices, progress)


def _write(
    checkpoint: Checkpoint, metadata: dict[str, Any], path: Path, matrices: FileType, progress: Callable[[int, int], None] | None
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, checkpoint.architecture)
    writer.add_file_type(FILE_TYPES[matrices])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for view in checkpoint.tensors.values():
        form = GGML_TYPES[view.ggml_type]
        row = view.shape[-1] // form.block * form.nbytes
        writer.add_tensor_info(view.name, (*view.shape[:-1], row), np.dtype(np.uint8), view.nbytes, gguf.GGMLQuantizationType(form.id))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(view.nbytes for view in checkpoint.tensors.values())
        for view in checkpoint.tensors.values():
            writer.write_tensor_data(view.data)
            done += view.nbytes
            if progress is not None:
                progress(done, total)
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """One entry, in the type that llama.cpp expects of such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_int64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
