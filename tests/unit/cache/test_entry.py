"""Files of the disk tier: how a prefix is cut, what names it, and that nothing but the right file is believed."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stored import KEY, SHAPES, prompt

from quaff.batch import PAGE
from quaff.cache.entry import (
    BLOCK,
    LONGEST_HEADER_BYTES,
    DamagedError,
    Layout,
    Piece,
    checksum,
    header_bytes,
    pack_header,
    pieces,
    read_header,
    root,
    shared,
)

LENGTHS = [1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 700]


def ids(length: int, seed: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(prompt(length, seed), dtype=np.int32)


def cut(length: int, shape: str = "full", seed: int = 0, salt: str = "") -> list[Piece]:
    return pieces(root(KEY, salt), ids(length, seed), Layout(*SHAPES[shape]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_hold_what_a_row_at_the_end_sees_and_nothing_twice(shape: str, length: int) -> None:
    layout = Layout(*SHAPES[shape])
    files = cut(length, shape)
    assert [(p.start, p.end) for p in files if not p.place] == [(i, i + BLOCK) for i in range(0, length // BLOCK * BLOCK, BLOCK)]
    assert files[-1].end == length
    assert files[-1].place == (not layout.anywhere or length % BLOCK > 0)
    pages = [page for p in files for page in p.pages(layout)]
    assert len(set(pages)) == len(pages)
    for k, kind in enumerate(layout.kinds):
        first = max(0, length - kind.window + 1) // PAGE if kind.window else 0
        assert sorted(p for kind_of, p in pages if kind_of == k) == list(range(min(first, -(-length // PAGE)), -(-length // PAGE)))


def test_a_name_follows_from_the_key_the_salt_and_every_token_from_the_first() -> None:
    names = [p.name for p in cut(700)]
    assert [p.name for p in cut(700)] == names
    assert [p.name for p in cut(600)][:2] == names[:2]
    for other in (cut(700, seed=1), cut(700, salt="a"), pieces(root(bytes(32), ""), ids(700), Layout(*SHAPES["full"]))):
        assert not set(names) & {p.name for p in other}
    changed = ids(700)
    changed[300] += 1
    again = [p.name for p in pieces(root(KEY, ""), changed, Layout(*SHAPES["full"]))]
    assert again[0] == names[0]
    assert not set(again[1:]) & set(names[1:])


def test_layouts_differ_in_everything_that_bytes_depend_on() -> None:
    digests = {Layout(*shape).digest for shape in SHAPES.values()}
    assert len(digests) == len(SHAPES)


@pytest.mark.parametrize(
    ("end", "length", "fits"), [(300, 300, True), (300, 299, True), (300, 163, False), (291, 290, False), (80, 1, True)]
)
def test_a_place_of_a_window_serves_shorter_prefixes_where_its_first_page_is_enough(end: int, length: int, fits: bool) -> None:
    """The window of 100 positions at 300 begins at 201, in page 3, and at 291 on the border of it."""
    assert Layout(*SHAPES["sliding"]).can_shorten(end, length) == fits
    assert Layout(*SHAPES["full"]).can_shorten(end, length)
    assert Layout(*SHAPES["recurrent"]).can_shorten(end, length) == (end == length)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_headers_come_back(shape: str, length: int) -> None:
    layout = Layout(*SHAPES[shape])
    for piece in cut(length, shape):
        payload = checksum([memoryview(piece.name.encode())])
        head = pack_header(piece, KEY, layout, payload)
        assert len(head) == header_bytes(len(piece.tokens)) <= LONGEST_HEADER_BYTES
        assert len(head) + piece.payload_bytes(layout) == piece.file_bytes(layout)
        read, its_payload = read_header(head + b"payload", piece.file_bytes(layout), KEY, layout)
        assert (read.name, read.parent, read.start, read.place, its_payload) == (
            piece.name,
            piece.parent,
            piece.start,
            piece.place,
            payload,
        )
        assert read.tokens.tolist() == piece.tokens.tolist()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_changed_byte_of_a_header_is_believed(data: st.DataObject) -> None:
    layout = Layout(*SHAPES["everything"])
    piece = data.draw(st.sampled_from(cut(300, "everything")))
    head = bytearray(pack_header(piece, KEY, layout, bytes(16)))
    at = data.draw(st.integers(0, len(head) - 1))
    head[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        read_header(bytes(head), piece.file_bytes(layout), KEY, layout)
    with pytest.raises(DamagedError):
        read_header(bytes(head[:at]), piece.file_bytes(layout), KEY, layout)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (1, 1, "its version is 1, expected 2"),
        (2, 2, "cannot be true"),
        (3, BLOCK + 1, "cannot be true"),
        (3, 0xFFFFFFFF, "cannot be true"),
        (3, 3, "cut off|cannot be true|damaged"),
        (4, 1, "cannot be true"),
        (4, 1 << 63, "cannot be true"),
        (5, 7, "its size is not"),
        (5, (1 << 64) - 1, "its size is not"),
        (6, bytes(32), "another model"),
        (7, bytes(32), "another model"),
    ],
)
def test_a_header_that_lies_with_a_right_checksum_is_refused(field: int, value: int | bytes, reason: str) -> None:
    layout = Layout(*SHAPES["full"])
    piece = cut(300)[-1]
    head = pack_header(piece, KEY, layout, bytes(16))
    form = struct.Struct("<8sIIIQQ32s32s32s16s")
    fields = list(form.unpack_from(head))
    fields[field] = value
    body = form.pack(*fields) + head[form.size : -32]
    with pytest.raises(DamagedError, match=reason):
        read_header(body + hashlib.sha256(body).digest(), piece.file_bytes(layout), KEY, layout)


def test_a_file_of_another_size_is_refused() -> None:
    layout = Layout(*SHAPES["full"])
    piece = cut(300)[-1]
    head = pack_header(piece, KEY, layout, bytes(16))
    for size in (0, piece.file_bytes(layout) - 1, piece.file_bytes(layout) + 1, 1 << 62):
        with pytest.raises(DamagedError, match="its size is not"):
            read_header(head, size, KEY, layout)


def test_shared_counts_leading_ids() -> None:
    assert shared([1, 2, 3], [1, 2, 4]) == 2
    assert shared([], [1]) == 0
    assert shared([1, 2], [1, 2, 3]) == 2
    assert shared(np.array([7]), np.array([8])) == 0
