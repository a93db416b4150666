"""The reader of one completion on a tokenizer whose tokens are bytes: what is shown when, and which stop string ended it."""

from __future__ import annotations

import pytest
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.engine.reader import Reader
from quaff.engine.sampler import SamplingParams
from quaff.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = CASES["llama-gqa"].write(tmp_path_factory.mktemp("reader") / "tiny.gguf")
    with open_checkpoint(path) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata)


def read(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[list[str], Reader]:
    """What `take` gives after every token of the text, and after the end."""
    reader = Reader(tokenizer, SamplingParams(stop=stop))
    shown = []
    for token in tokenizer.encode(text, add_special=False):
        reason = reader.accept(token)
        shown.append(reader.take())
        if reason is not None:
            assert reason == "stop"
            break
    reader.finish()
    return [*shown, reader.take()], reader


def test_text_is_taken_once_and_in_whole_characters(tokenizer: Tokenizer) -> None:
    shown, reader = read(tokenizer, "naïve 水")
    assert "".join(shown) == "".join(reader.parts) == "naïve 水"
    assert all("\ufffd" not in piece for piece in shown)
    assert reader.stopped_by is None and reader.first_at > 0


def test_a_stop_string_ends_the_text_and_is_named(tokenizer: Tokenizer) -> None:
    shown, reader = read(tokenizer, "one END two", "never", "END")
    assert "".join(shown) == "one " and reader.stopped_by == "END"


def test_of_two_stop_strings_the_first_in_the_text_is_met(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, "a b c", "c", "b")[1].stopped_by == "b"


def test_the_start_of_a_stop_string_is_shown_when_the_text_ends(tokenizer: Tokenizer) -> None:
    shown, reader = read(tokenizer, "one EN", "END")
    assert "".join(shown[:-1]) == "one " and shown[-1] == "EN"
    assert reader.stopped_by is None


def test_end_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, SamplingParams())
    end = min(tokenizer.end_ids)
    reader.accept(end)
    reader.finish()
    assert reader.take() == "" and reader.parts == []
