"""Grammars of answers: what may come next, token by token, on a vocabulary of single bytes."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tokenizer.small_vocabulary import byte_level

from quaff.engine.grammar import MAX_CHARACTERS, Constraint, Grammar, Grammars, json_rule, regex_rule
from quaff.errors import ConfigError
from quaff.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_metadata(byte_level([], {"<|im_start|>": 3, "<|im_end|>": 3}, ggml__eos_token_id=257))
END = 257
VOCAB = TOKENIZER.vocab_size + 6
GRAMMARS = Grammars(TOKENIZER, VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


def json_schema(schema: dict[str, Any]) -> Grammar:
    return GRAMMARS.lark(f"start: {json_rule(schema)}", "the JSON schema")


def regex(pattern: str) -> Grammar:
    return GRAMMARS.lark(f"start: {regex_rule(pattern)}", "the regular expression")


def refused_at(grammar: Grammar, text: str) -> str | None:
    """What is left of `text` where a token of it was not allowed; None when all of it was."""
    constraint = grammar.start()
    ids = TOKENIZER.encode(text, add_special=False)
    for i, token in enumerate(ids):
        if not constraint.allowed()[token]:
            return TOKENIZER.decode(ids[i:])
        constraint.accept(token)
    return None


def may_end(constraint: Constraint) -> bool:
    return bool(constraint.allowed()[END])


def walk(grammar: Grammar, rng: np.random.Generator, most: int) -> str:
    """A text of random allowed tokens, up to the end."""
    constraint, ids = grammar.start(), list[int]()
    while len(ids) < most and not constraint.ended:
        allowed = np.flatnonzero(constraint.allowed())
        token = int(rng.choice(allowed))
        if token in TOKENIZER.end_ids:
            break
        constraint.accept(token)
        ids.append(token)
    return TOKENIZER.decode(ids)


def test_a_schema_lets_its_values_pass_and_nothing_else() -> None:
    grammar = json_schema(SCHEMA)
    assert refused_at(grammar, '{"n": -12, "s": "b"}') is None
    assert refused_at(grammar, '{"n": 1.5') == ".5"
    assert refused_at(grammar, '{"n":1') == "1"
    assert refused_at(grammar, '{"n": 1, "s": "c') == "c"
    assert refused_at(grammar, "Sure!") == "Sure!"


def test_the_end_is_allowed_where_the_value_is_whole() -> None:
    constraint = json_schema(SCHEMA).start()
    for token in TOKENIZER.encode('{"n": 1, "s": "a"}', add_special=False):
        assert not may_end(constraint) and not constraint.ended
        constraint.accept(token)
    assert may_end(constraint) and constraint.ended
    assert set(np.flatnonzero(constraint.allowed())) == TOKENIZER.end_ids


def test_masks_are_as_wide_as_the_logits_and_special_tokens_are_no_text() -> None:
    constraint = json_schema({"type": "object"}).start()
    for token in TOKENIZER.encode('{"', add_special=False):
        constraint.accept(token)
    allowed = constraint.allowed()
    assert allowed.shape == (VOCAB,) and not allowed[TOKENIZER.vocab_size :].any()
    assert not allowed[TOKENIZER.vocabulary.ids["<|im_start|>"]]
    assert allowed[TOKENIZER.vocabulary.ids["x"]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_walk_to_the_end_is_a_value_of_the_schema(seed: int) -> None:
    value = json.loads(
        walk(
            json_schema({**SCHEMA, "properties": {"n": {"type": "integer", "maximum": 99}, "s": {"enum": ["a", "b"]}}}),
            np.random.default_rng(seed),
            200,
        )
    )
    assert set(value) == {"n", "s"} and isinstance(value["n"], int) and value["s"] in ("a", "b")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[a-c]{2}", "ab", "ad"),
        ("a/b", "a/b", "a b"),
        (r"a\/b", "a/b", "a\\"),
        ("x\ny", "x\ny", "xy"),
        (r"\d+\\", "12\\", "1a"),
        ("", "", "x"),
    ],
)
def test_regular_expressions(pattern: str, good: str, bad: str) -> None:
    grammar = regex(pattern)
    constraint = grammar.start()
    for token in TOKENIZER.encode(good, add_special=False):
        constraint.accept(token)
    assert refused_at(grammar, good) is None and may_end(constraint)
    assert refused_at(grammar, bad) is not None


def test_answers_do_not_share_their_way() -> None:
    grammar = regex("ab")
    first, second = grammar.start(), grammar.start()
    first.accept(TOKENIZER.vocabulary.ids["a"])
    assert second.allowed()[TOKENIZER.vocabulary.ids["a"]] and not first.allowed()[TOKENIZER.vocabulary.ids["a"]]
    assert regex("ab") is grammar


def test_a_token_that_was_not_allowed_is_an_error() -> None:
    constraint = regex("ab").start()
    with pytest.raises(ConfigError, match="gave up"):
        constraint.accept(TOKENIZER.vocabulary.ids["z"])


@pytest.mark.parametrize("make", [
    lambda: regex("((("),
    lambda: regex("(" * 100_000),
    lambda: regex("a" * (MAX_CHARACTERS + 1)),
    lambda: json_schema({"type": "wrong"}),
    lambda: json_schema({"$ref": "http://localhost/schema"}),
    lambda: json_schema({"$ref": "file:///etc/passwd"}),
    lambda: json_schema({"type": "object", "not": {}}),
    lambda: GRAMMARS.lark("no rules"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_line(make: object) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
