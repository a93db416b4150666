"""Replies are found again by all the text before them, also by the next process, and never where a character differs."""

from __future__ import annotations

import stat
import tracemalloc
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quaff.serve.replies as module
from quaff.serve.replies import Replies, Reply


def reply(start: int, end: int, ids: tuple[int, ...], call: str = "") -> Reply:
    return Reply(start, end, array("i", ids), call)


def test_replies_of_one_conversation_are_found_in_order() -> None:
    replies = Replies()
    replies.keep("u1:", "hello", (1, 2))
    replies.keep("u1:hello|u2:", "bye", (3,))
    replies.keep("other", "bye", (4,))
    assert replies.find("u1:hello|u2:bye|u3:") == [reply(3, 8, (1, 2)), reply(12, 15, (3,))]
    assert replies.find("u1:hello|u2:by") == [reply(3, 8, (1, 2))]
    assert replies.find("u1:hellO|u2:bye") == []
    assert replies.find("U1:hello|u2:bye") == []


def test_the_last_ids_of_a_text_count() -> None:
    replies = Replies()
    replies.keep("p", "text", (1,))
    replies.keep("p", "text", (2, 3), "call_1")
    assert replies.find("ptext") == [reply(1, 5, (2, 3), "call_1")]
    assert replies.with_call("call_1") == reply(1, 5, (2, 3), "call_1")
    assert replies.with_call("call_2") is None
    replies.keep("p", "text", (4,))
    assert replies.with_call("call_1") is None


def test_a_reply_inside_another_is_left_out() -> None:
    replies = Replies()
    replies.keep("ab", "cdef", (1,))
    replies.keep("", "abc", (2,))
    assert replies.find("abcdef") == [reply(0, 3, (2,))]


def test_empty_replies_are_not_kept() -> None:
    replies = Replies()
    replies.keep("p", "", (1,))
    replies.keep("p", "text", ())
    assert replies.find("ptext") == []


def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLIES", 3)
    replies = Replies()
    for i in range(3):
        replies.keep(f"{i}", "x", (i + 1,))
    assert replies.find("0x")  # used now, so not the oldest any more
    replies.keep("3", "x", (4,))
    assert [bool(replies.find(f"{i}x")) for i in range(4)] == [True, False, True, True]
    monkeypatch.setattr(module, "MAX_IDS", 5)
    replies.keep("4", "x", (1, 2, 3, 4))
    assert [bool(replies.find(f"{i}x")) for i in range(5)] == [False, False, False, True, True]
    replies.keep("5", "x", tuple(range(6)))
    assert not replies.find("5x")


def test_the_next_process_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "replies"
    first = Replies(path)
    first.keep("p", "caf\u00e9 \U0001f600", (1, 70_000), "call_1")
    first.keep("q", "\ud800", (2,))
    again = Replies(path)
    assert again.find("pcaf\u00e9 \U0001f600!") == [reply(1, 7, (1, 70_000), "call_1")]
    assert again.find("q\ud800") == [reply(1, 2, (2,))]
    assert again.with_call("call_1") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap ignored (ik_llama.cpp 2320): a server that runs for long keeps as many replies in its file as it finds again."""
    monkeypatch.setattr(module, "MAX_REPLIES", 3)
    monkeypatch.setattr(module, "SPARE_LINES", 4)
    path = tmp_path / "replies"
    replies = Replies(path)
    for i in range(50):
        replies.keep(f"{i}", "x", (i,))
        assert sum(map(bool, path.read_bytes().splitlines())) <= 2 * 3 + 4
    replies.keep("last", "x", (7,))
    again = Replies(path)
    assert [again.find(f"{prompt}x") for prompt in (48, 49, "last")] == [[reply(2, 3, (48,))], [reply(2, 3, (49,))], [reply(4, 5, (7,))]]


def test_a_disk_that_fills_up_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "replies"
    Replies(path).keep("p", "text", (1, 2))
    path.write_bytes(path.read_bytes() + b"damaged\n")
    before, write = path.read_bytes(), module.os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    assert Replies(path).find("ptext") == [reply(1, 5, (1, 2))]
    assert path.read_bytes() == before


def test_an_id_takes_four_bytes(tmp_path: Path) -> None:
    """Cap ignored (ik_llama.cpp 2320): numbers of Python's take ten times as much."""
    path = tmp_path / "replies"
    written = Replies(path)
    for i in range(20):
        written.keep(f"{i}", "x", tuple(range(1000, 11_000)))
    tracemalloc.start()
    try:
        replies = Replies(path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert replies.find("19x") and 4 <= held / 200_000 < 6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_costs_replies_and_never_makes_wrong_ones(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "replies"
    written = Replies(path)
    for i in range(4):
        written.keep(f"prompt {i}", " reply", (i, i + 1), f"call_{i}")
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[at:]
    else:
        content[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    path.write_bytes(content)
    replies = Replies(path)
    found = [replies.find(f"prompt {i} reply") for i in range(4)]
    for i, each in enumerate(found):
        assert each in ([], [reply(8, 14, (i, i + 1), f"call_{i}")])
    if kind == "flip":
        assert sum(map(bool, found)) >= 2
    replies.keep("new", " reply", (9,))
    assert Replies(path).find("new reply") == [reply(3, 9, (9,))]


def test_a_file_of_something_else_is_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "replies"
    path.write_bytes(b'\x00\xff\n[1, 2]\n{"a": 1}\n[0, "[]"]\n' + b"[" * 5000 + b"\n")
    assert Replies(path).find("x") == []
    assert len(caplog.records) == 1 and "damaged" in caplog.text


def test_a_folder_that_cannot_be_written_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    replies = Replies(tmp_path / "file" / "replies")
    replies.keep("p", "text", (1,))
    assert replies.find("ptext") and "cannot be written" in caplog.text
