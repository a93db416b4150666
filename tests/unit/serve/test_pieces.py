"""Texts cut at special tokens: the same ids, or no cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.tokenizer.small_vocabulary import byte_level, sentencepiece
from tests.unit.tokenizer.test_huggingface import tokenizer_json

import quaff.serve.pieces as module
from quaff.serve.dialogue import Dialogue
from quaff.serve.pieces import PieceCache, cuts
from quaff.tokenizer import Tokenizer
from quaff.tokenizer.huggingface import JSON_KEY

MARKS = {"<|im_start|>": 3, "<|im_end|>": 3}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "<|im_start|>user\nhello <|im_end|>\n\n<|im_start|> hello world"


def json_tokenizer(swallows: bool = False) -> Tokenizer:
    """A tokenizer.json that is run as it is; `swallows`: special tokens take the white space behind them."""
    metadata = byte_level(special=MARKS, chat_template=CHATML)
    del metadata["tokenizer.ggml.pre"]
    pre: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    text = tokenizer_json(metadata, metadata["tokenizer.ggml.merges"], pre_tokenizer=pre, decoder=pre)
    if swallows:
        parsed = json.loads(text)
        for token in parsed["added_tokens"]:
            token["rstrip"] = True
        text = json.dumps(parsed)
    return Tokenizer.from_metadata(metadata | {JSON_KEY: text})


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    ids: list[int] = []
    edges: list[tuple[int, int]] = []
    PieceCache(tokenizer).encode(text, 0, ids, edges)
    return ids, edges


def test_a_tokenizer_json_is_asked_before_texts_are_cut() -> None:
    plain, swallowing = json_tokenizer(), json_tokenizer(swallows=True)
    assert plain.runs_json and swallowing.runs_json
    assert cuts(plain, CHATML) and not cuts(swallowing, CHATML) and not cuts(plain, "no marks")
    assert ids_of(plain, TEXT)[0] == plain.encode(TEXT, False, True)
    assert ids_of(swallowing, TEXT)[0] != swallowing.encode(TEXT, False, True)
    messages = [{"role": "user", "content": " hello"}]
    for tokenizer in (plain, swallowing):
        assert list(Dialogue(tokenizer, tokenizer.vocab_size).prompt(messages).tokens) == tokenizer.encode_chat(messages)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_edges_are_around_every_special_token(kind: Any) -> None:
    tokenizer = Tokenizer.from_metadata(kind(None if kind is byte_level else {"\u2581hello": -1.0}, MARKS))
    ids, edges = ids_of(tokenizer, TEXT)
    assert ids == tokenizer.encode(TEXT, False, True)
    marks = [i for i, token in enumerate(ids) if tokenizer.vocabulary.is_special(token)]
    assert [count for _, count in edges] == [edge for i in marks for edge in (i, i + 1)]
    assert all(TEXT[a:b] in MARKS for (a, _), (b, _) in zip(edges[::2], edges[1::2], strict=True))


def test_the_oldest_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED_CHARACTERS", 1000)
    tokenizer = Tokenizer.from_metadata(byte_level(special=MARKS))
    cache = PieceCache(tokenizer)
    for n in range(20):
        text = f"{n} " * 150
        ids: list[int] = []
        cache.encode(text, 0, ids, [])
        assert ids == tokenizer.encode(text, add_special=False)
        assert cache._characters <= 1000
    cache.encode("x" * 5000, 0, [], [])
    assert cache._characters <= 1000
