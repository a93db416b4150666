"""Encoding and decoding with vocabularies made here, rule by rule; and metadata that cannot be true."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.goldens.tokens.make_tokens import score_ties_metadata
from tests.unit.tokenizer.small_vocabulary import byte_level, sentencepiece

from quaff.errors import CheckpointError, PromptError, UnsupportedError
from quaff.tokenizer import Tokenizer
from quaff.tokenizer.pretokenizers import PRE_TOKENIZERS

GOLDENS = Path(__file__).parents[2] / "goldens" / "tokens"


def words(metadata: dict[str, Any], text: str, **options: bool) -> list[str]:
    tokenizer = Tokenizer.from_metadata(metadata)
    return [tokenizer.vocabulary.tokens[token] for token in tokenizer.encode(text, **options)]


def test_merges_apply_by_rank() -> None:
    assert words(byte_level(), "hello world") == ["hello", "\u0120w", "o", "r", "l", "d"]
    assert words(byte_level(["l o", "h e", "he l"]), "hello") == ["hel", "lo"]
    assert words(byte_level(["a a"]), "aaaaa") == ["aa", "aa", "a"]
    assert words(byte_level(["b a", "a b"]), "aba") == ["a", "ba"]


def test_digits_stay_single_with_smollm_and_group_with_llama3() -> None:
    merges = ["1 2", "12 3", "3 4"]
    assert words(byte_level(merges, ggml__pre="smollm"), "1234") == ["1", "2", "3", "4"]
    assert words(byte_level(merges, ggml__pre="gpt-2"), "1234") == ["123", "4"]
    assert words(byte_level(merges, ggml__pre="qwen2"), "1234") == ["1", "2", "3", "4"]
    assert words(byte_level(merges, ggml__pre="llama-bpe", ggml__add_bos_token=False), "1234") == ["123", "4"]


def test_ignore_merges_takes_a_whole_word_that_no_merge_makes() -> None:
    metadata = byte_level(["a b"], {"abc": 1}, ggml__bos_token_id=0)
    assert words(metadata, "abc", add_special=False) == ["ab", "c"]
    assert words(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, "abc", add_special=False) == ["abc"]


def test_a_byte_without_a_token_is_left_out_and_keeps_its_neighbours_apart() -> None:
    metadata = byte_level(["a b"])
    gap = metadata["tokenizer.ggml.tokens"].index("!")
    metadata["tokenizer.ggml.tokens"][gap] = "[gap]"
    metadata["tokenizer.ggml.pre"] = "deepseek-coder"
    assert words(metadata, "ab!a") == ["ab", "a"]
    metadata = byte_level(["# $"])
    metadata["tokenizer.ggml.tokens"][gap] = "[gap]"
    assert words(metadata, "#!$#$") == ["#", "$", "#$"]


def test_every_byte_decodes_to_itself() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level())
    assert b"".join(tokenizer.token_bytes(token) for token in range(256)) == bytes(range(256))
    spm = Tokenizer.from_metadata(sentencepiece({"a": 0.0}))
    assert b"".join(spm.token_bytes(token) for token in range(3, 259)) == bytes(range(256))


def test_scores_decide_and_ties_go_left() -> None:
    scores = {"a": 0.0, "b": 0.0, "ab": -2.0, "ba": -1.0, "aa": -3.0, "aaa": -3.0}
    metadata = sentencepiece(scores, ggml__add_space_prefix=False, ggml__add_bos_token=False)
    assert words(metadata, "aba") == ["a", "ba"]
    # All pairs of "a" tie: the first two merge, and then their merge with the third is the leftmost of equal candidates.
    assert words(metadata, "aaaaa") == ["aaa", "aa"]


def test_unknown_characters_are_spelled_in_bytes() -> None:
    metadata = sentencepiece({"a": 0.0}, ggml__add_space_prefix=False, ggml__add_bos_token=False)
    assert words(metadata, "a\u00e9\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]
    without = metadata | {"tokenizer.ggml.tokens": [text.replace("<0xC3>", "[none]") for text in metadata["tokenizer.ggml.tokens"]]}
    without["tokenizer.ggml.token_type"] = [1 if kind == 6 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    assert words(without, "\u00e9") == ["<unk>", "<0xA9>"]


def test_the_space_prefix_goes_before_text_that_starts_or_follows_a_special_token() -> None:
    metadata = sentencepiece({"\u2581": -1.0, "a": 0.0, "\u2581a": -2.0}, {"<x>": 3})
    assert words(metadata, "a a<x>a", parse_special=True) == ["<s>", "\u2581a", "\u2581a", "<x>", "\u2581a"]
    assert words(metadata | {"tokenizer.ggml.add_space_prefix": False}, "a a") == ["<s>", "a", "\u2581a"]
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("a a")
    assert tokenizer.decode(ids) == " a a"
    assert tokenizer.decode(ids, start_of_text=True) == "a a"
    assert tokenizer.encode("") == [1] and tokenizer.encode("", add_special=False) == []


def test_ids_of_a_vocabulary_full_of_ties_equal_the_goldens() -> None:
    made = {prefix: Tokenizer.from_metadata(score_ties_metadata(prefix)) for prefix in (True, False)}
    for case in json.loads((GOLDENS / "score_ties.json").read_text()):
        ids = made[case["space_prefix"]].encode(case["text"], case["add_special"], case["parse_special"])
        assert ids == case["ids"], case["text"]


def test_bos_and_eos_are_added_when_the_file_asks() -> None:
    metadata = byte_level(special={"<b>": 3, "<e>": 3}, ggml__bos_token_id=262, ggml__eos_token_id=263)
    assert words(metadata, "a") == ["a"]
    both = metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert words(both, "a") == ["<b>", "a", "<e>"]
    assert words(both, "a", add_special=False) == ["a"]
    assert words(metadata | {"tokenizer.ggml.pre": "tekken"}, "a") == ["<b>", "a"]


def test_control_tokens_need_parse_special_and_user_defined_ones_do_not() -> None:
    metadata = byte_level(special={"<ctl>": 3, "<usr>": 4})
    assert words(metadata, "a<usr>b<ctl>") == ["a", "<usr>", "b", "<", "c", "t", "l", ">"]
    assert words(metadata, "a<usr>b<ctl>", parse_special=True) == ["a", "<usr>", "b", "<ctl>"]


def test_the_longest_special_token_is_taken_first_even_where_a_shorter_one_starts_earlier() -> None:
    metadata = byte_level(special={"xy": 4, "yzz": 4})
    assert words(metadata, "xyzz xy") == ["x", "yzz", "\u0120", "xy"]


def test_end_of_generation_ids() -> None:
    special = {"<|im_end|>": 3, "<e>": 3, "<t>": 3, "<reponame>": 3, "<x>": 3, "<|endoftext|>": 1}
    tokenizer = Tokenizer.from_metadata(byte_level(special=special, ggml__eos_token_id=263, ggml__eot_token_id=264))
    assert tokenizer.end_ids == {262, 263, 264, 265, 267}
    assert tokenizer.decode([267]) == ""  # a well-known end is a control token whatever the file says
    harmony = Tokenizer.from_metadata(byte_level(special={"<|end|>": 3, "<|return|>": 3, "<|call|>": 3, "<|start|>": 3}))
    assert harmony.end_ids == {263, 264}
    assert harmony.decode([265, 262]) == "<|start|><|end|>"


def test_decoding_by_kind() -> None:
    special = {"<ctl>": 3, "<usr>": 4, "<unused>": 5, "<odd>": 0}
    tokenizer = Tokenizer.from_metadata(byte_level(special=special))
    ids = [256, 262, 263, 264, 265]
    assert tokenizer.decode(ids) == "he<usr>"
    assert tokenizer.decode(ids, skip_special=False) == "he<ctl><usr>"
    assert tokenizer.token_text(262) == "<ctl>"
    for bad in (-1, 266):
        with pytest.raises(PromptError, match="outside the vocabulary of 266"):
            tokenizer.decode([bad])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(PromptError, match="lone surrogate at character 1"):
        Tokenizer.from_metadata(byte_level()).encode("a\ud800")


def test_a_panic_of_the_regular_expression_engine_is_an_error_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise PanicException("retry-limit-in-match over")

    tokenizer = Tokenizer.from_metadata(byte_level())
    monkeypatch.setattr(tokenizer._encoder, "_tokenizer", Panicking())
    with pytest.raises(PromptError, match="gave up on a text of 3 characters"):
        tokenizer.encode("AAA")


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    tokenizer, text = Tokenizer.from_metadata(byte_level()), "hello world 12 " * 60_000
    cutting = threading.Thread(target=tokenizer.encode, args=(text,))
    cutting.start()
    turns = 0
    while cutting.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("helo w12\n\u0301\u200d<ctl>usr")), max_size=60)


@given(TEXTS)
@settings(deadline=None)
def test_texts_survive_the_round_trip(text: str) -> None:
    bpe = _made("bpe")
    assert bpe.decode(bpe.encode(text)) == text
    spm = _made("spm")
    assert spm.decode(spm.encode(text), start_of_text=True) == text.replace("\u2581", " ")


@given(st.lists(st.integers(0, 263), max_size=40), st.booleans(), st.sampled_from(["bpe", "spm"]), st.booleans())
@settings(deadline=None)
def test_pushed_parts_add_up_to_decode(ids: list[int], skip_special: bool, kind: str, start: bool) -> None:
    tokenizer = _made(kind)
    decoder = tokenizer.decoder(skip_special, start)
    parts = [decoder.push(token) for token in ids]
    assert "".join(parts) + decoder.finish() == tokenizer.decode(ids, skip_special, start)
    raw = b"".join(tokenizer.token_bytes(token, skip_special) for token in ids)
    if not start:
        assert tokenizer.decode(ids, skip_special) == raw.decode(errors="replace")


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = _made("bpe")
    decoder = tokenizer.decoder()
    flag = "\U0001f1e9\u00e9".encode()
    assert [decoder.push(byte) for byte in flag] == ["", "", "", "\U0001f1e9", "", "\u00e9"]
    assert decoder.push(0xE2) == "" and decoder.push(ord("a")) == "\ufffda"
    assert decoder.push(0xF0) == "" and decoder.finish() == "\ufffd"


_MADE: dict[str, Tokenizer] = {}


def _made(kind: str) -> Tokenizer:
    if not _MADE:
        special = {"<ctl>": 3, "<usr>": 4}
        _MADE["bpe"] = Tokenizer.from_metadata(byte_level(special=special))
        _MADE["spm"] = Tokenizer.from_metadata(sentencepiece({"\u2581": -9.0, "he": -1.0, "llo": -2.0}, special, ggml__add_bos_token=False))
    return _MADE[kind]


def changed(metadata: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in (metadata | {f"tokenizer.ggml.{key}": value}).items() if v is not None}


BPE, SPM = byte_level(), sentencepiece({"a": 0.0})
BAD_SCORES = np.zeros(260, np.float32)
BAD_SCORES[7] = np.nan


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (changed(BPE, "model", None), "tokenizer.ggml.model is missing"),
        (changed(BPE, "tokens", None), "tokens is missing"),
        (changed(BPE, "tokens", []), "is empty"),
        (changed(BPE, "tokens", [1, 2]), "not a list of strings"),
        (changed(BPE, "tokens", ["a", "b", "a"]), "holds 'a' twice, at 0 and 2"),
        (changed(BPE, "token_type", [1, 1]), "token_type has 2 entries for 262 tokens"),
        (changed(BPE, "token_type", ["x"] * 262), "not an integer"),
        (changed(BPE, "merges", None), "merges is missing"),
        (changed(BPE, "merges", [3]), "merges is not a list of strings"),
        (changed(BPE, "merges", ["ab"]), "merges\\[0\\] is 'ab', not two tokens"),
        (changed(BPE, "merges", ["h e", "a zz"]), "merges\\[1\\] is 'a zz', but 'zz' is not in the vocabulary"),
        (changed(BPE, "merges", ["a b"]), "but 'ab' is not in the vocabulary"),
        (changed(BPE, "bos_token_id", 262), "bos_token_id is 262, outside the vocabulary of 262"),
        (changed(BPE, "eos_token_id", -5), "eos_token_id is -5, outside"),
        (changed(BPE, "eot_token_id", "x"), "eot_token_id is 'x', not a token id"),
        (changed(BPE, "add_bos_token", True), "bos_token_id is missing"),
        (changed(BPE, "add_eos_token", "yes"), "neither true nor false"),
        (changed(BPE, "pre", 3), "tokenizer.ggml.pre is not a string"),
        (changed(SPM, "scores", None), "scores is missing"),
        (changed(SPM, "scores", [0.0]), "scores has 1 entries for 260 tokens"),
        (changed(SPM, "scores", BAD_SCORES), "scores is nan for token 7"),
        (changed(SPM, "scores", "abc"), "scores is not a list"),
        (changed(SPM, "token_type", [6] * 260), "token 0 is marked as a byte, but its text is '<unk>'"),
    ],
)
def test_broken_metadata_is_one_clear_line(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_metadata(metadata)
    assert "\n" not in str(caught.value)


def test_unsupported_kinds_are_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedError, match="'bert'; supported: gpt2 .*llama"):
        Tokenizer.from_metadata(changed(BPE, "model", "bert"))
    with pytest.raises(UnsupportedError, match="'nope'.*known: .*llama-bpe.*smollm"):
        Tokenizer.from_metadata(changed(BPE, "pre", "nope"))


def test_none_written_as_minus_one_and_empty_tokens_are_accepted() -> None:
    assert Tokenizer.from_metadata(changed(BPE, "bos_token_id", 0xFFFFFFFF)).bos_id is None
    metadata = byte_level(special={"": 1, "x y": 1})
    assert Tokenizer.from_metadata(metadata).vocabulary.tokens[262] == "[EMPTY_262]"


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(name: str) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(ggml__pre=name, ggml__add_bos_token=False))
    text = "Hello's  W\u00f6rld 12345\t\u4e2d\u6587\u3002\r\n\n \u00a0x~~ IMGIMGABZ \U00013460\u0301 9\u0966 "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_and_marks_that_are_shown() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level([], {"<c>": 3, "<u>": 4}))
    control, user = tokenizer.vocabulary.ids["<c>"], tokenizer.vocabulary.ids["<u>"]
    assert tokenizer.pieces("a<c>b<u><u>") == ["a", control, "b", user, user]
    assert not tokenizer.runs_json
    ids = tokenizer.encode("a<c>b<u>", add_special=False, parse_special=True)
    decoder = tokenizer.decoder(shown={control})
    assert "".join(decoder.push(token) for token in ids) == "a<c>b<u>"
    assert tokenizer.decode(ids) == "ab<u>"
