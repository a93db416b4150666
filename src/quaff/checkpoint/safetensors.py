"""A strict reader of safetensors files, one or a sharded set, as they lie in a Hugging Face folder.

A file is a length (u64, little-endian), a JSON header of that many bytes with name -> dtype, shape and byte range, then the data.
Every number of a header is compared with the file before it is used.
Format: the README of the safetensors repository; shards are named by `model.safetensors.index.json`.
"""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from quaff.checkpoint.file import ModelFile, Place, closed_on_error
from quaff.errors import CheckpointError, located, quote

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
_TEXT_LIMIT = 1 << 29  # bytes of a JSON file beside the tensors; the largest tokenizers in use need about 2^25
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor where it lies in its file: one piece, its values row-major, of the type that `dtype` names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes begin .. end - 1."""
        return self.place.within(begin, end - begin).read()


class TensorFolder:
    """All tensors of a folder, by name, and the files they are in."""

    def __init__(self, tensors: dict[str, StoredTensor], files: tuple[ModelFile, ...]) -> None:
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self.files = files

    def close(self) -> None:
        self.tensors = MappingProxyType({})
        for file in self.files:
            file.close()


def read_text(path: Path) -> str:
    """A text file as UTF-8. CheckpointError, with its name alone, when it cannot be read, is too long or is no such text."""
    try:
        with path.open("rb") as file:
            raw = file.read(_TEXT_LIMIT + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(raw) > _TEXT_LIMIT:
        raise CheckpointError(f"{path.name} is longer than {_TEXT_LIMIT} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The values of a file that must hold one JSON object; CheckpointError likewise."""
    values = parse_json(read_text(path), path.name)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return values


def parse_json(raw: bytes | str, what: str) -> Any:
    """The values of a JSON text called `what` in errors; CheckpointError, also for a key that appears twice."""
    try:
        return json.loads(raw, object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{quote(twice)} appears twice")
    return values


def read_tensors(folder: Path) -> TensorFolder:
    """Open the safetensors files of a folder. Raises CheckpointError, which names the file in it."""
    files = [ONE_FILE] if (folder / ONE_FILE).exists() else None
    owner: dict[str, str] = {}
    if files is None:
        owner = _shards(folder)
        files = list(dict.fromkeys(owner.values()))
    tensors: dict[str, StoredTensor] = {}
    opened: list[ModelFile] = []
    with ExitStack() as stack:
        for name in files:
            with located(name):
                opened.append(stack.enter_context(closed_on_error(ModelFile(folder / name))))
                for tensor in _read(opened[-1]):
                    if owner and owner.get(tensor.name) != name:
                        where = f"says that it is in {quote(owner[tensor.name])}" if tensor.name in owner else "does not name it"
                        raise CheckpointError(f"holds the tensor {quote(tensor.name)}, but {INDEX} {where}")
                    tensors[tensor.name] = tensor
        for missing in owner.keys() - tensors.keys():
            raise CheckpointError(f"{owner[missing]}: has no tensor {quote(missing)}, though {INDEX} says so")
    return TensorFolder(tensors, tuple(opened))


def _shards(folder: Path) -> dict[str, str]:
    """File name by tensor name, from the index."""
    if not (folder / INDEX).exists():
        torch = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        found = "PyTorch files; quaff reads safetensors: convert them first" if torch else f"neither {ONE_FILE} nor {INDEX}"
        raise CheckpointError(f"the folder holds {found}")
    owner = read_object(folder / INDEX).get("weight_map")
    if not isinstance(owner, dict) or not owner or not all(isinstance(file, str) for file in owner.values()):
        raise CheckpointError(f"{INDEX} has no weight_map of tensor names to file names")
    for file in dict.fromkeys(owner.values()):
        if not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise CheckpointError(f"{INDEX} names the file {quote(file)}; expected the name of a .safetensors file in the same folder")
        if not (folder / file).exists():
            raise CheckpointError(f"the shard {quote(file)} is missing; {INDEX} names it")
    return owner


def _damaged(what: str) -> NoReturn:
    raise CheckpointError(f"damaged safetensors file: {what}")


def _read(file: ModelFile) -> list[StoredTensor]:
    size = file.nbytes
    head = file.pread(0, 8)
    if len(head) < 8:
        _damaged(f"it has {size} bytes; its header alone needs more")
    if head.startswith(b"version "):
        raise CheckpointError("a Git LFS pointer, not the model itself; run 'git lfs pull' where it came from")
    length = int.from_bytes(head, "little")
    if length > min(_HEADER_LIMIT, size - 8):
        _damaged(
            f"its header claims {length} bytes, but the file has {size} and {_HEADER_LIMIT} are allowed; it may be an unfinished download"
        )
    header = parse_json(file.read(8, length).tobytes(), "damaged safetensors file: its header")
    if not isinstance(header, dict):
        _damaged("its header is not a JSON object")
    header.pop("__metadata__", None)
    data = size - 8 - length
    table = [_entry(name, entry, data) for name, entry in header.items()]
    at = 0
    for name, _, _, begin, end in sorted(table, key=lambda entry: entry[3:]):
        if begin != at:
            _damaged(f"tensor {quote(name)} begins at byte {begin} of the data, expected {at}: tensors lie without gaps or overlaps")
        at = end
    if at != data:
        _damaged(f"its tensors end at byte {at} of the data, but {data} bytes are there")
    file.check_unchanged()
    return [
        StoredTensor(name, dtype, shape, Place(file, 8 + length + begin, 1, end - begin, end - begin))
        for name, dtype, shape, begin, end in table
    ]


def _entry(name: str, entry: Any, data: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, dtype, shape, first byte, past the last byte), checked alone."""
    tensor = f"tensor {quote(name)}"
    if not isinstance(entry, dict):
        _damaged(f"the entry of {tensor} is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{tensor} has dtype {quote(str(dtype))}; known: {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(n) for n in shape):
        _damaged(f"{tensor} has the shape {quote(str(shape))}; expected at most eight sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        _damaged(f"{tensor} has data_offsets {quote(str(offsets))}; expected two byte positions")
    begin, end = offsets
    if not begin <= end <= data:
        _damaged(f"{tensor} lies at bytes {begin} to {end} of the data, which has {data}; it may be an unfinished download")
    if end - begin != prod(shape) * _ITEM_BYTES[dtype]:
        _damaged(f"{tensor} of shape {tuple(shape)} and dtype {dtype} has {end - begin} bytes")
    return name, dtype, tuple(shape), begin, end


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62
