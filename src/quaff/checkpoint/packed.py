"""Packed files: a header with everything a model needs, then its weights as they lie in memory. Format: docs/formats.md.

The header is checked whole when a file is opened: its hash, and every number in it against the file. Of the weights that follow only
`quaff inspect --check` reads every byte, since loading them is mapping them; no value of theirs can lead outside their own bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, NoReturn

import numpy as np

from quaff import _native
from quaff.checkpoint.file import ModelFile, Place
from quaff.checkpoint.safetensors import parse_json
from quaff.checkpoint.types import GGML_TYPES
from quaff.checkpoint.views import Checkpoint, Hashes, Origin, TensorView, is_vector
from quaff.errors import CheckpointError, UnsupportedError, quote

MAGIC = b"QUAFFPAK"
VERSION = 1
PAGE_BYTES = 4096
"""What begins at a multiple of it can be read directly into memory, past the system's cache."""
PANEL_ALIGNMENT = 64

_PREAMBLE = struct.Struct("<8sIIIIQQ")  # magic, version, of panels, of numerics, 0, bytes of the header, of the file
_HASH_BYTES = 32
_HEADER_LIMIT = 1 << 29
_MATRICES_LIMIT = 1 << 20  # in a file; the largest mixtures in use have about 2^16
_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")
_F32 = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the table. `offset` counts from where data begin; the `matrices` of a stack (else 1), each of `nbytes` bytes, begin
    `stride` bytes apart."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int
    stride: int
    hashes: Hashes

    @property
    def is_vector(self) -> bool:
        return is_vector(self.name, self.shape)

    @property
    def matrices(self) -> int:
        return 1 if self.is_vector else prod(self.shape[:-2])


def align(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def encode_header(origin: Origin, metadata: Mapping[str, Any], entries: Sequence[Entry]) -> tuple[bytes, int, int]:
    """(the first bytes of a file, where its data begin, its size). The length does not depend on the hashes."""
    values = {
        "origin": {"name": origin.name, "format": origin.format, "quantized": origin.quantized, "bytes": origin.nbytes},
        "metadata": {key: _encoded(value) for key, value in metadata.items()},
        "tensors": [
            {
                "name": e.name,
                "shape": e.shape,
                "type": e.ggml_type,
                "offset": e.offset,
                "bytes": e.nbytes,
                "stride": e.stride,
                "sha256": e.hashes.panels,
                "blocks_sha256": e.hashes.blocks,
            }
            for e in entries
        ],
    }
    text = json.dumps(values, separators=(",", ":")).encode()
    data = align(_PREAMBLE.size + _HASH_BYTES + len(text), PAGE_BYTES)
    size = align(data + max(e.offset + (e.matrices - 1) * e.stride + e.nbytes for e in entries), PAGE_BYTES)
    preamble = _PREAMBLE.pack(MAGIC, VERSION, _native.PANEL_VERSION, _native.NUMERICS_VERSION, 0, len(text), size)
    return preamble + sha256(preamble + text).digest() + text, data, size


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"dtype": little.dtype.str, "base64": base64.b64encode(little.tobytes()).decode()}
    return value


def read_packed(file: ModelFile) -> Checkpoint:
    """The packed file as a checkpoint whose tensors are those that stages use.

    Raises CheckpointError for damage, UnsupportedError for another version.
    """
    values, data = _header(file)
    origin = _origin(_member(values, "origin", dict))
    metadata = {key: _decoded(key, value) for key, value in _member(values, "metadata", dict).items()}
    if not isinstance(metadata.get("general.architecture"), str):
        _damaged("its metadata name no architecture")
    entries = [_entry(entry) for entry in _member(values, "tensors", list)]
    _check_places(entries, data, file.nbytes)
    file.check_unchanged()
    tensors = {e.name: _view(file, data, e) for e in entries}
    return Checkpoint(file.path, metadata, tensors, [file], "packed", origin.quantized, origin)


def _view(file: ModelFile, data: int, e: Entry) -> TensorView:
    place = Place(file, data + e.offset, e.matrices, e.nbytes, e.stride)
    return TensorView(
        e.name, e.shape, e.ggml_type, GGML_TYPES[e.ggml_type].name, e.matrices * e.nbytes, place, packed=not e.is_vector, hashes=e.hashes
    )


def _damaged(what: str) -> NoReturn:
    raise CheckpointError(f"damaged packed file: {what}")


def _header(file: ModelFile) -> tuple[dict[str, Any], int]:
    """(values of the header, where data begin)."""
    first = _PREAMBLE.size + _HASH_BYTES
    if file.nbytes < first:
        _damaged(f"it has {file.nbytes} bytes; its header alone needs more")
    raw = file.read(0, first).tobytes()
    _, version, panels, numerics, zero, length, size = _PREAMBLE.unpack_from(raw)
    for what, stated, ours in (
        ("version", version, VERSION),
        ("panels of version", panels, _native.PANEL_VERSION),
        ("numerics version", numerics, _native.NUMERICS_VERSION),
    ):
        if stated != ours:
            raise UnsupportedError(f"a packed file with {what} {stated}; this quaff has {ours}: pack the model again")
    if zero:
        _damaged("its preamble holds a number that should be zero")
    if length > min(_HEADER_LIMIT, file.nbytes - first):
        _damaged(f"its header claims {length} bytes, but the file has {file.nbytes}; it may be an unfinished download")
    text = file.read(first, length).tobytes()
    if sha256(raw[: _PREAMBLE.size] + text).digest() != raw[_PREAMBLE.size :]:
        _damaged("its header is not what was written (its hash differs)")
    if size != file.nbytes:
        _damaged(f"it has {file.nbytes} bytes, but was written with {size}; it may be an unfinished download")
    values = parse_json(text, "damaged packed file: its header")
    if not isinstance(values, dict):
        _damaged("its header is not a JSON object")
    return values, align(first + length, PAGE_BYTES)


def _member(values: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    """The value of a key. A bool is no int; an int is bounded, so that no sum of a few of them is beyond 64 bits."""
    value = values.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        _damaged(f"its header has no {quote(key)}, or one of another kind")
    if isinstance(value, int) and not 0 <= value < 1 << 56:
        _damaged(f"its header has {quote(key)} {value}, which cannot be")
    return value


def _origin(values: Mapping[str, Any]) -> Origin:
    quantized = values.get("quantized")
    if quantized is not None and not isinstance(quantized, str):
        _damaged("its header has no 'quantized', or one of another kind")
    return Origin(_member(values, "name", str), _member(values, "format", str), quantized, _member(values, "bytes", int))


def _decoded(key: str, value: Any) -> Any:
    """A metadata value as checkpoints have it."""
    if isinstance(value, list) and len(kinds := {type(item) for item in value}) <= 1 and kinds <= {str, int, float, bool}:
        return value
    if isinstance(value, dict):
        dtype, text = value.get("dtype"), value.get("base64")
        if dtype in _DTYPES and isinstance(text, str) and len(value) == 2:
            try:
                array = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype))
            except (binascii.Error, ValueError):
                _damaged(f"metadata {quote(key)} is no array of type {dtype}")
            if dtype == "|b1" and array.size and int(array.view(np.uint8).max()) > 1:
                _damaged(f"metadata {quote(key)} holds a boolean that is neither 0 nor 1")
            return array
    elif isinstance(value, int | float | str):
        return value
    _damaged(f"metadata {quote(key)} is of a kind that does not exist")


def _entry(values: Any) -> Entry:
    """An entry of the table, checked alone."""
    if not isinstance(values, dict):
        _damaged("an entry of its tensor table is not a JSON object")
    name, shape, kind = _member(values, "name", str), _member(values, "shape", list), _member(values, "type", int)
    tensor = f"tensor {quote(name)}"
    if not 1 <= len(shape) <= 4 or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n < 1 << 32 for n in shape):
        _damaged(f"{tensor} has the shape {quote(str(shape))}; expected one to four sizes")
    if kind not in GGML_TYPES:
        _damaged(f"{tensor} has the unknown type number {kind}")
    digests = _member(values, "sha256", str), _member(values, "blocks_sha256", str)
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests):
        _damaged(f"{tensor} has a hash that is none")
    offset, nbytes, stride = (_member(values, key, int) for key in ("offset", "bytes", "stride"))
    e = Entry(name, tuple(shape), kind, offset, nbytes, stride, Hashes(*digests))
    if e.is_vector and kind != _F32:
        _damaged(f"{tensor} is a vector of type {GGML_TYPES[kind].name}; vectors are F32")
    if e.offset % PANEL_ALIGNMENT or (e.matrices > 1 and e.stride % PANEL_ALIGNMENT):
        _damaged(f"{tensor} does not begin at a multiple of {PANEL_ALIGNMENT} bytes")
    if e.stride < e.nbytes or (e.matrices == 1 and e.stride != e.nbytes):
        _damaged(f"{tensor} has matrices of {e.nbytes} bytes that begin {e.stride} bytes apart")
    if e.nbytes != panel_bytes(e.name, e.shape, kind):
        _damaged(f"{tensor} of shape {e.shape} and type {GGML_TYPES[kind].name} has matrices of {e.nbytes} bytes")
    return e


def panel_bytes(name: str, shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of one matrix as it lies in memory, of a vector or bias as f32; 0 for what cannot be packed."""
    if is_vector(name, shape):
        return 4 * prod(shape)
    try:
        return _native.packed_bytes(ggml_type, shape[-2], shape[-1])
    except ValueError:
        return 0


def _check_places(entries: Sequence[Entry], data: int, size: int) -> None:
    """Names are unique, every matrix lies inside the file, and no two share a byte."""
    if len({e.name for e in entries}) != len(entries):
        _damaged("a tensor appears twice in its table")
    if sum(e.matrices for e in entries) > _MATRICES_LIMIT:
        _damaged(f"its tensors are more than {_MATRICES_LIMIT} matrices")
    for e in entries:
        if data + e.offset + (e.matrices - 1) * e.stride + e.nbytes > size:
            _damaged(f"tensor {quote(e.name)} ends beyond the end of the file")
    spans = sorted(_spans(entries))
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            _damaged(f"tensors {quote(name)} and {quote(other)} overlap")


def _spans(entries: Iterable[Entry]) -> Iterable[tuple[int, int, str]]:
    for e in entries:
        for begin in range(e.offset, e.offset + e.matrices * e.stride, e.stride):
            yield begin, begin + e.nbytes, e.name
