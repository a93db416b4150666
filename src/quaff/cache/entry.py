"""One file of the disk tier: a piece of a prefix, and what is needed to trust it. docs/formats.md draws it.

A prefix is cut into *blocks* of 256 positions from 0 on, and a *place*: its end. A block holds the pages of kinds without a window. A
place holds what a row at the end sees beside them: the pages after the last block, the pages in the window of sliding kinds, recurrent
state. Both are pure functions of the bits key and of the token ids from 0 on, and are named by a hash that chains them.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from quaff.batch import PAGE
from quaff.cache.pages import first_page, pages_for
from quaff.graph.program import KVKind, StateKind

VERSION = 2
BLOCK = 4 * PAGE
"""Positions of a block: few enough to share most of a branch, enough that a file is worth its fsync."""
MAGIC = b"quaffkv\n"
HASH_BYTES = 32
_FIXED = struct.Struct("<8sIIIQQ32s32s32s16s")
LONGEST_HEADER_BYTES = _FIXED.size + 4 * BLOCK + HASH_BYTES

Tokens = NDArray[np.int32]


class DamagedError(Exception):
    """A file that is not what its name says: `str(error)` is the reason."""


@dataclass(frozen=True)
class Layout:
    """Shapes of what a sequence of a model leaves behind."""

    kinds: tuple[KVKind, ...]
    state_kinds: tuple[StateKind, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over everything that decides what the bytes of a file mean."""
        kinds = [(k.layers, k.kv_heads, k.dim, k.value_dim, k.window, k.value_bytes) for k in self.kinds]
        states = [(s.layers, s.size) for s in self.state_kinds]
        return hashlib.sha256(repr((PAGE, BLOCK, sys.byteorder, kinds, states)).encode()).digest()

    @cached_property
    def anywhere(self) -> bool:
        """True when a sequence can be continued from every position it holds: no windows, no recurrent state."""
        return not self.state_kinds and not any(kind.window for kind in self.kinds)

    def page_bytes(self, kind: int) -> int:
        return PAGE * self.kinds[kind].position_bytes

    def can_shorten(self, end: int, length: int) -> bool:
        """True when what a place at `end` holds is enough for a row at `length`."""
        if length == end or self.anywhere:
            return length <= end
        return not self.state_kinds and all(first_page(k.window, length) >= first_page(k.window, end) for k in self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Positions `start` .. `end` - 1 of a prefix as one file, whose hash chain so far is `parent`: a block, or a place."""

    parent: bytes
    tokens: Tokens
    start: int
    place: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def hash(self) -> bytes:
        return chain(self.parent, self.tokens)

    @property
    def name(self) -> str:
        return f"{stem(self.parent)}-{stem(self.hash)}-{self.end}.{'place' if self.place else 'block'}"

    def pages(self, layout: Layout) -> list[tuple[int, int]]:
        """(kind, position // 64) of the pages in the file, in their order there."""
        if not self.place:
            whole = [k for k, kind in enumerate(layout.kinds) if not kind.window]
            return [(k, p) for p in range(self.start // PAGE, self.end // PAGE) for k in whole]
        first = [first_page(kind.window, self.end) if kind.window else self.start // PAGE for kind in layout.kinds]
        return [(k, p) for k in range(len(layout.kinds)) for p in range(first[k], pages_for(self.end))]

    def payload_bytes(self, layout: Layout) -> int:
        states = sum(len(s.layers) * s.size * 4 for s in layout.state_kinds) if self.place else 0
        return sum(layout.page_bytes(k) for k, _ in self.pages(layout)) + states

    def file_bytes(self, layout: Layout) -> int:
        return header_bytes(len(self.tokens)) + self.payload_bytes(layout)


def root(key: bytes, salt: str) -> bytes:
    """Where the hash chain of a model's prefixes begins."""
    return hashlib.sha256(b"quaff prefix\0" + key + salt.encode()).digest()


def chain(parent: bytes, tokens: Tokens) -> bytes:
    return hashlib.sha256(parent + _bytes(tokens)).digest()


def stem(digest: bytes) -> str:
    """A hash as it stands in names: 128 bits of it, the header has all."""
    return digest.hex()[:32]


def pieces(start: bytes, tokens: Tokens, layout: Layout) -> list[Piece]:
    """The files of a prefix: its blocks in order, then the place at its end, unless blocks hold all of it."""
    out: list[Piece] = []
    parent, whole = start, len(tokens) // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        out.append(Piece(parent, tokens[begin : begin + BLOCK], begin, place=False))
        parent = out[-1].hash
    if whole < len(tokens) or not layout.anywhere:
        out.append(Piece(parent, tokens[whole:], whole, place=True))
    return out


def header_bytes(tokens: int) -> int:
    return _FIXED.size + 4 * tokens + HASH_BYTES


def pack_header(piece: Piece, key: bytes, layout: Layout, payload: bytes) -> bytes:
    """The header of a file whose payload has the `checksum` `payload`."""
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        piece.place,
        len(piece.tokens),
        piece.start,
        piece.payload_bytes(layout),
        key,
        layout.digest,
        piece.parent,
        payload,
    )
    head = fixed + _bytes(piece.tokens)
    return head + hashlib.sha256(head).digest()


def read_header(data: bytes, size: int, key: bytes, layout: Layout) -> tuple[Piece, bytes]:
    """What a file of `size` bytes that begins with `data` says, and the `checksum` of its payload; DamagedError when it cannot be used."""
    if len(data) < _FIXED.size or data[: len(MAGIC)] != MAGIC:
        raise DamagedError("it is no file of this cache")
    _, version, place, count, start, nbytes, its_key, its_layout, parent, payload = _FIXED.unpack_from(data)
    if version != VERSION:
        raise DamagedError(f"its version is {version}, expected {VERSION}")
    if place not in (0, 1) or count > BLOCK or not place and count != BLOCK or start % BLOCK or start > 1 << 40:
        raise DamagedError("its header says what cannot be true")
    end = header_bytes(count)
    if len(data) < end:
        raise DamagedError("it is cut off")
    if hashlib.sha256(data[: end - HASH_BYTES]).digest() != data[end - HASH_BYTES : end]:
        raise DamagedError("its header is damaged")
    if its_key != key or its_layout != layout.digest:
        raise DamagedError("it belongs to another model")
    piece = Piece(parent, np.frombuffer(data, "<i4", count, _FIXED.size).astype(np.int32), start, bool(place))
    if nbytes != piece.payload_bytes(layout) or size != end + nbytes:
        raise DamagedError("its size is not the one that its header gives")
    return piece, payload


def checksum(buffers: Iterable[memoryview]) -> bytes:
    """XXH3-128, big endian. It guards against damage, at the speed of memory; what a file holds is said by SHA-256."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def shared(a: Sequence[int] | NDArray[Any], b: Sequence[int] | NDArray[Any]) -> int:
    """Leading items that two rows of ids have in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if len(differ) else n


def _bytes(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()
