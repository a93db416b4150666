"""tokenizer.json: run as it is, and written in GGUF's keys without changing an id."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tokenizer.small_vocabulary import byte_level, sentencepiece

from quaff.errors import CheckpointError, UnsupportedError
from quaff.tokenizer import Tokenizer
from quaff.tokenizer.huggingface import gguf_keys, pre_tokenizer_name, tokenizer_metadata
from quaff.tokenizer.pretokenizers import PRE_TOKENIZERS, engine_pattern

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
START, UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The expressions as the models' own files spell them.
SPELLED: dict[str, tuple[list[str], bool]] = {
    "llama3": ([rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"], True),
    "qwen2": ([rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"], False),
    "qwen35": ([rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{MARKED}"], False),
    "gpt-4o": (
        [rf"{START}{UPPER}*{LOWER}+{CONTRACTION}?|{START}{UPPER}+{LOWER}*{CONTRACTION}?|\p{{N}}{{1,3}}|{SLASH}"],
        False,
    ),
    "tekken": ([rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}|{SLASH}"], True),
    "deepseek-v3": (
        [
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        False,
    ),
}


def splits(patterns: list[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*parts, last]}


def tokenizer_json(metadata: dict[str, Any], merges: list[str], **parts: Any) -> str:
    """A tokenizer.json of the vocabulary in `metadata`."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": t, "special": k == 3, **flags} for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k in (3, 4)]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges} | parts.pop("model", {})
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model, **parts})


def words(pre_tokenizer: dict[str, Any], ignore_merges: bool = False) -> str:
    metadata = byte_level(special={"<|end|>": 3, "<tool>": 4})
    model = {"ignore_merges": ignore_merges}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return tokenizer_json(metadata, metadata["tokenizer.ggml.merges"], pre_tokenizer=pre_tokenizer, decoder=decoder, model=model)


@pytest.mark.parametrize("name", SPELLED)
def test_rules_are_known_by_what_models_write(name: str) -> None:
    patterns, ignore_merges = SPELLED[name]
    text = words(splits(patterns), ignore_merges)
    assert pre_tokenizer_name(text, ignore_merges) == name
    with pytest.raises(UnsupportedError, match="no name in GGUF"):
        pre_tokenizer_name(words(splits([*patterns, "q"])), ignore_merges)


def test_every_rule_is_told_from_every_other() -> None:
    """The text that decides has something for each: no two rules of the table with equal flags cut it alike, but for one that says the same
    in other words."""
    seen: dict[str, tuple[tuple[str, ...], bool]] = {}
    for rule in (rule for name, rule in PRE_TOKENIZERS.items() if name not in ("bailingmoe", "bailingmoe2", "llada-moe")):
        name = pre_tokenizer_name(words(splits([engine_pattern(p) for p in rule.patterns])), rule.ignore_merges)
        key = (rule.patterns, rule.ignore_merges)
        assert seen.setdefault(name, key) == key


SCORED = {"\u2581": -20.0, "t": -21.0, "h": -22.0, "e": -23.0, "r": -24.0, "th": -1.0, "the": -2.0, "\u2581the": -3.0, "re": -4.0}
SCORED |= {"he": -5.0, "er": -6.0, "\u2581t": -7.0, "ther": -8.0, "there": -9.0, "\u2581there": -10.0, "ee": -11.0, "ré": -12.0, "é": -25.0}


def scored_json(prefix: bool) -> str:
    metadata = sentencepiece(SCORED, special={"<end>": 3, "<tool>": 4})
    pairs = [(left, right) for left in SCORED for right in SCORED if left + right in SCORED]
    pairs.sort(key=lambda pair: (-SCORED[pair[0] + pair[1]], len(pair[0]), pair))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers = [{"type": "Prepend", "prepend": "\u2581"}, spaces] if prefix else [spaces]
    return tokenizer_json(
        metadata,
        [" ".join(pair) for pair in pairs],
        model={"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    )


def both(text: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of the JSON, and the one of the GGUF keys made of it."""
    metadata = tokenizer_metadata(text, {}, [], None, 0)
    return Tokenizer.from_metadata(metadata), Tokenizer.from_metadata(gguf_keys(metadata))


WITH_PREFIX, WITHOUT = both(scored_json(True)), both(scored_json(False))


@given(st.text(alphabet="thre é\u00fcx\n<", max_size=30))
def test_scores_made_of_merges_cut_alike(text: str) -> None:
    for json_ids, gguf_ids in (WITH_PREFIX, WITHOUT):
        if text:
            assert json_ids.encode(text) == gguf_ids.encode(text)
        for tokenizer in (json_ids, gguf_ids):
            assert tokenizer.decode(tokenizer.encode(text), start_of_text=True) == text


WORDS = both(words(splits(SPELLED["qwen2"][0])))


@given(st.text(max_size=30), st.booleans())
def test_merges_cut_alike(text: str, parse_special: bool) -> None:
    text = f"hello{text} hello<|end|>12<tool>"
    ours, theirs = (tokenizer.encode(text, parse_special=parse_special) for tokenizer in WORDS)
    assert ours == theirs and WORDS[0].decode(ours, skip_special=False) == text
    assert (WORDS[0].vocabulary.ids["<|end|>"] in ours) == parse_special


def test_tokens_past_the_rows_are_left_out_and_missing_ones_are_filled() -> None:
    text = words(splits(SPELLED["qwen2"][0]))
    size = len(WORDS[0].vocabulary)
    fewer = tokenizer_metadata(text, {}, [], None, size - 1)
    assert len(fewer["tokenizer.ggml.tokens"]) == size - 1 and "<tool>" not in fewer["tokenizer.ggml.tokens"]
    more = tokenizer_metadata(text, {}, [], None, size + 3)
    assert more["tokenizer.ggml.tokens"][-1] == f"[PAD{size + 2}]" and more["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    with pytest.raises(CheckpointError, match="but the embedding has 40 rows"):
        tokenizer_metadata(text, {}, [], None, 40)
