"""A strict reader of GGUF versions 2 and 3 (little-endian).

Every count and length is compared with the bytes that are left before anything of that size is made. All text is
UTF-8, tokens too: the vocabularies we support write a token that is not text in letters (byte-level) or as <0xNN> (SentencePiece).
Format: the GGUF specification in the ggml repository, docs/gguf.md.
"""

import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quaff.checkpoint.file import ModelFile, Place, closed_on_error
from quaff.checkpoint.sniff import describe
from quaff.checkpoint.types import GGML_TYPES, OTHER_TYPES, SUPPORTED_TYPES
from quaff.checkpoint.views import Checkpoint, TensorView
from quaff.errors import CheckpointError, UnsupportedError, located, quote

_HEADER_LIMIT = 1 << 29  # bytes before the tensor data; the largest vocabularies in use need about 2^25
_NAME_LIMIT = 65535  # bytes in a key (the specification's limit) or tensor name
_ALIGNMENT_LIMIT = 1 << 24
_PARTS_LIMIT = 65535  # the number is kept in 16 bits
_READ_BYTES = 1 << 20
_MIN_ENTRY = 8 + 1 + 4 + 1  # key length, key, value type, the smallest value
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, number of dimensions, one dimension, type, offset

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value types, by the numbers in files.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {
    0: (struct.Struct("<B"), np.dtype("<u1")),
    1: (struct.Struct("<b"), np.dtype("<i1")),
    2: (struct.Struct("<H"), np.dtype("<u2")),
    3: (struct.Struct("<h"), np.dtype("<i2")),
    4: (_U32, np.dtype("<u4")),
    5: (struct.Struct("<i"), np.dtype("<i4")),
    6: (struct.Struct("<f"), np.dtype("<f4")),
    10: (_U64, np.dtype("<u8")),
    11: (struct.Struct("<q"), np.dtype("<i8")),
    12: (struct.Struct("<d"), np.dtype("<f8")),
}
_UINT32 = 4

_NOT_MODELS = {"adapter": "a LoRA adapter", "mmproj": "a vision or audio projector", "imatrix": "an importance matrix"}


def _unfinished(needed_bytes: int) -> str:
    """The likely cause, where what is missing has the size of a model."""
    return "; it may be an unfinished download" if needed_bytes < 1 << 40 else ""


class _Header:
    """A cursor over the first part of a file, which is read as far as it is asked for."""

    def __init__(self, file: ModelFile) -> None:
        self.size = file.nbytes
        self.at = 0
        self.where = "the header"
        self._file = file
        self._buffer = bytearray()

    def damaged(self, what: str) -> NoReturn:
        raise CheckpointError(f"damaged GGUF file: {what}")

    def _fill(self, end: int) -> None:
        """Make the bytes before `end` available."""
        have = len(self._buffer)
        if end <= have:
            return
        if end > self.size:
            self.damaged(f"{self.where} needs {end} bytes of file, but the file ends at {self.size}{_unfinished(end)}")
        if end > _HEADER_LIMIT:
            self.damaged(f"{self.where} makes the header longer than {_HEADER_LIMIT} bytes")
        goal = min(max(end, have + _READ_BYTES), self.size)
        while have < goal:
            piece = self._file.pread(have, goal - have)
            if not piece:
                self.damaged(f"the file became shorter while it was read (it had {self.size} bytes)")
            self._buffer += piece
            have = len(self._buffer)

    def number(self, form: struct.Struct) -> Any:
        end = self.at + form.size
        self._fill(end)
        (value,) = form.unpack_from(self._buffer, self.at)
        self.at = end
        return value

    def u32(self) -> int:
        value: int = self.number(_U32)
        return value

    def u64(self) -> int:
        value: int = self.number(_U64)
        return value

    def count(self, what: str, smallest: int) -> int:
        """A count of things of at least `smallest` bytes each, which must fit into what is left."""
        n = self.u64()
        left = self.size - self.at
        if n * smallest > left:
            self.damaged(f"{self.where} claims {n} {what}, more than the {left} bytes that are left can hold{_unfinished(n * smallest)}")
        return n

    def string(self, limit: int | None = None) -> str:
        n = self.count("bytes of text", 1)
        if limit is not None and not 0 < n <= limit:
            self.damaged(f"{self.where} is {n} bytes long; 1 to {limit} are allowed")
        self._fill(self.at + n)
        raw = bytes(self._buffer[self.at : self.at + n])
        self.at += n
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            seen = quote(raw.decode("utf-8", "replace"), 40)
            self.damaged(f"{self.where} is not valid UTF-8 ({error.reason} at byte {error.start} of {seen})")

    def strings(self, n: int) -> list[str]:
        # A plain loop over local names: a vocabulary has 10^5 to 10^6 entries.
        buffer, unpack, fill = self._buffer, _U64.unpack_from, self._fill
        at, have = self.at, len(self._buffer)
        out: list[str] = []
        append = out.append
        try:
            for _ in range(n):
                if at + 8 > have:
                    fill(at + 8)
                    have = len(buffer)
                (length,) = unpack(buffer, at)
                at += 8
                end = at + length
                if end > have:
                    fill(end)
                    have = len(buffer)
                append(buffer[at:end].decode())
                at = end
        except UnicodeDecodeError as error:
            self.damaged(f"entry {len(out)} of {self.where} is not valid UTF-8 ({error.reason} at byte {error.start})")
        self.at = at
        return out

    def array(self, key: str) -> Any:
        kind = self.u32()
        if kind == _ARRAY:
            raise UnsupportedError(f"metadata {quote(key)} is an array of arrays; arrays of numbers, booleans and strings are supported")
        if kind == _STRING:
            n = self.count("strings", _U64.size)
            return self.strings(n)
        dtype = np.dtype("<u1") if kind == _BOOL else _NUMBERS[kind][1] if kind in _NUMBERS else None
        if dtype is None:
            self.damaged(f"metadata {quote(key)} is an array of value type {kind}, which does not exist")
        n = self.count("numbers", dtype.itemsize)
        end = self.at + n * dtype.itemsize
        self._fill(end)
        values: np.ndarray[Any, Any] = np.frombuffer(self._buffer, dtype, n, self.at).copy()
        self.at = end
        if kind == _BOOL:
            if n and int(values.max()) > 1:
                self.damaged(f"metadata {quote(key)} holds a boolean that is neither 0 nor 1")
            values = values.view(np.bool_)
        values.flags.writeable = False
        return values

    def value(self, key: str) -> tuple[int, Any]:
        kind = self.u32()
        if kind == _STRING:
            return kind, self.string()
        if kind == _ARRAY:
            return kind, self.array(key)
        if kind == _BOOL:
            byte = self.number(_NUMBERS[0][0])
            if byte > 1:
                self.damaged(f"metadata {quote(key)} is a boolean with the value {byte}; only 0 and 1 exist")
            return kind, byte == 1
        if kind not in _NUMBERS:
            self.damaged(f"metadata {quote(key)} has value type {kind}, which does not exist")
        return kind, self.number(_NUMBERS[kind][0])


def _version(header: _Header) -> None:
    version = header.u32()
    if version in (2, 3):
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise UnsupportedError(f"a big-endian GGUF file (version {swapped}); only little-endian files are supported")
    if version == 1:
        raise UnsupportedError("a GGUF file of version 1; versions 2 and 3 are supported: convert the original model again")
    raise UnsupportedError(f"a GGUF file of version {version}; versions 2 and 3 are supported")


def _metadata(header: _Header, entries: int) -> tuple[dict[str, Any], int]:
    """All entries, and the alignment of tensor data in bytes."""
    metadata: dict[str, Any] = {}
    alignment = 32
    key = ""
    for i in range(entries):
        header.where = f"the key of metadata entry {i} of {entries}" + (f" (after {quote(key)})" if key else "")
        key = header.string(limit=_NAME_LIMIT)
        if key in metadata:
            header.damaged(f"metadata {quote(key)} appears twice")
        header.where = f"metadata {quote(key)}"
        kind, value = header.value(key)
        metadata[key] = value
        if key == "general.alignment":
            if kind != _UINT32:
                header.damaged("metadata 'general.alignment' is not an unsigned 32-bit number")
            alignment = value
            if not 8 <= alignment <= _ALIGNMENT_LIMIT or alignment & (alignment - 1):
                header.damaged(f"metadata 'general.alignment' is {alignment}; a power of two from 8 to {_ALIGNMENT_LIMIT} is allowed")
    return metadata, alignment


def _check_part(header: _Header, metadata: dict[str, Any], path: Path, wanted: tuple[int, int]) -> int:
    """How many files the model has. `wanted`: which part of how many this file has to be; (0, 0) is the first of any number."""
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _PARTS_LIMIT:
        header.damaged(f"metadata 'split.count' is {quote(str(count))}; 1 to {_PARTS_LIMIT} parts are allowed")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        header.damaged(f"metadata 'split.no' is {quote(str(number))} in a model of {count} parts")
    if wanted[1]:
        if (number, count) != wanted:
            raise CheckpointError(
                f"is part {number + 1} of {count} of a split model, but its name says part {wanted[0] + 1} of {wanted[1]}: "
                "parts are mixed up"
            )
    elif count > 1:
        files = _part_files(path, number, count)
        if number:
            first = f", {quote(files[0].name)}" if files else ""
            raise CheckpointError(f"is part {number + 1} of {count} of a split model; open the first{first}")
        if not files:
            ending = _part_ending(0, count)
            raise CheckpointError(f"is part 1 of {count} of a split model; to find the others, its name has to end with {ending}")
    return count


def _part_ending(number: int, count: int) -> str:
    return f"-{number + 1:05d}-of-{count:05d}.gguf"


def _part_files(path: Path, number: int, count: int) -> list[Path]:
    """Files of all parts, by the name of one; empty when it has not the name of one."""
    ending = _part_ending(number, count)
    if not path.name.endswith(ending):
        return []
    stem = path.name[: -len(ending)]
    return [path.with_name(stem + _part_ending(i, count)) for i in range(count)]


def _check_kind(header: _Header, metadata: dict[str, Any]) -> None:
    kind = metadata.get("general.type")
    if isinstance(kind, str) and kind in _NOT_MODELS:
        raise UnsupportedError(f"{_NOT_MODELS[kind]}, not a model; give the file of the model itself")
    architecture = metadata.get("general.architecture")
    if architecture is None:
        header.damaged("metadata 'general.architecture' is missing")
    if not isinstance(architecture, str) or not architecture:
        header.damaged("metadata 'general.architecture' is not a name")


def _tensor_table(header: _Header, tensors: int, alignment: int) -> list[tuple[str, tuple[int, ...], int, int, int]]:
    """Entries (name, shape in NumPy order, type, offset from the start of the data, bytes), each checked alone."""
    table: dict[str, tuple[str, tuple[int, ...], int, int, int]] = {}
    for i in range(tensors):
        header.where = f"the name of tensor entry {i} of {tensors}"
        name = header.string(limit=_NAME_LIMIT)
        if name in table:
            header.damaged(f"tensor {quote(name)} appears twice")
        tensor = f"tensor {quote(name)}"
        header.where = f"the entry of {tensor}"
        rank = header.u32()
        if not 1 <= rank <= 4:
            header.damaged(f"{tensor} has {rank} dimensions; 1 to 4 are allowed")
        shape = tuple(reversed([header.u64() for _ in range(rank)]))
        kind = header.u32()
        offset = header.u64()
        known = GGML_TYPES.get(kind)
        if known is None:
            if kind in OTHER_TYPES:
                raise UnsupportedError(f"{tensor} has type {OTHER_TYPES[kind]}, which is not supported; supported types: {SUPPORTED_TYPES}")
            header.damaged(f"{tensor} has the unknown type number {kind}; supported types: {SUPPORTED_TYPES}")
        if 0 in shape:
            header.damaged(f"{tensor} has an empty dimension: its shape is {' x '.join(map(str, shape))}")
        if shape[-1] % known.block:
            header.damaged(f"{tensor} has rows of {shape[-1]} values, but type {known.name} needs a multiple of {known.block}")
        count = 1
        for n in shape:
            count *= n
        nbytes = count // known.block * known.nbytes
        if offset % alignment:
            header.damaged(f"{tensor} starts at data offset {offset}, which is not a multiple of {alignment}")
        table[name] = (name, shape, kind, offset, nbytes)
    return list(table.values())


def _check_layout(header: _Header, table: list[tuple[str, tuple[int, ...], int, int, int]], data: int) -> None:
    """Every tensor lies inside the file, and no two share a byte."""
    last_name, last_end = "", 0
    for name, _, _, offset, nbytes in sorted(table, key=lambda entry: entry[3]):
        end = data + offset + nbytes
        if end > header.size:
            header.damaged(f"tensor {quote(name)} ends at byte {end}, but the file ends at {header.size}{_unfinished(end)}")
        if offset < last_end:
            header.damaged(f"tensors {quote(last_name)} and {quote(name)} overlap")
        last_name, last_end = name, offset + nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one file of a model holds: the only one, or one of several."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorView]
    parts: int


def _read(file: ModelFile, wanted: tuple[int, int]) -> _Part:
    if not file.nbytes:
        raise CheckpointError("the file is empty")
    head = file.pread(0, 64)
    if head[:4] != b"GGUF":
        raise CheckpointError(describe(head, file.nbytes))

    header = _Header(file)
    header.at = 4
    _version(header)
    tensors = header.u64()
    entries = header.u64()
    least = tensors * _MIN_TENSOR + entries * _MIN_ENTRY
    if least > file.nbytes - header.at:
        claim = f"the header claims {tensors} tensors and {entries} metadata entries"
        header.damaged(f"{claim}, more than a file of {file.nbytes} bytes can hold{_unfinished(least)}")
    metadata, alignment = _metadata(header, entries)
    parts = _check_part(header, metadata, file.path, wanted)
    if not wanted[0]:
        _check_kind(header, metadata)
    table = _tensor_table(header, tensors, alignment)
    data = (header.at + alignment - 1) // alignment * alignment
    _check_layout(header, table, data)
    file.check_unchanged()
    views = {entry[0]: _view(file, data, *entry) for entry in table}
    return _Part(metadata, views, parts)


def _view(file: ModelFile, data: int, name: str, shape: tuple[int, ...], kind: int, offset: int, nbytes: int) -> TensorView:
    form = GGML_TYPES[kind]
    row = nbytes if len(shape) == 1 else shape[-1] // form.block * form.nbytes
    return TensorView(name, shape, kind, form.name, nbytes, Place(file, data + offset, nbytes // row, row, row))


def read_gguf(file: ModelFile) -> Checkpoint:
    """A GGUF file, or all files of a split model by the first. Raises CheckpointError and UnsupportedError."""
    first = _read(file, (0, 0))
    tensors, files = dict(first.tensors), [file]
    with ExitStack() as opened:
        for number, path in enumerate(_part_files(file.path, 0, first.parts)[1:] if first.parts > 1 else (), 1):
            if not path.exists():
                raise CheckpointError(f"part {number + 1} of {first.parts} is missing: {quote(path.name)}")
            with located(path):
                files.append(opened.enter_context(closed_on_error(ModelFile(path))))
                part = _read(files[-1], (number, first.parts))
                twice = next((name for name in part.tensors if name in tensors), None)
                if twice is not None:
                    raise CheckpointError(f"tensor {quote(twice)} is in another part already: parts of two models are mixed up")
            tensors |= part.tensors
        stated = first.metadata.get("split.tensors.count", len(tensors))
        if stated != len(tensors):
            raise CheckpointError(f"the parts hold {len(tensors)} tensors, but {quote(str(stated))} are stated: parts are mixed up")
    return Checkpoint(file.path, first.metadata, tensors, files)
