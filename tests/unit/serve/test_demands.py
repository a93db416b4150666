"""An answer that must be a call: whatever the grammar lets pass, the reader of the same family reads as that call."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.serve.reading_answers import read
from tests.unit.tokenizer.small_vocabulary import byte_level

from quaff.engine.grammar import Grammar, Grammars
from quaff.errors import ConfigError
from quaff.serve import dialects as d
from quaff.serve.demands import Writer
from quaff.serve.dialects import Dialect
from quaff.tokenizer import Tokenizer

ALL = [
    d.HERMES, d.XML, d.GLM, d.LLAMA3, d.MISTRAL, d.MISTRAL_OLD, d.PHI4, d.GRANITE3, d.LFM2, d.GEMMA4, d.FUNCTION_GEMMA, d.DEEPSEEK3,
    d.DEEPSEEK31, d.KIMI, d.HARMONY,
]  # fmt: skip
SHORT = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}, "t": {"type": "boolean"}},
    "required": ["n"],
}
TOOLS = [("f", SHORT), ("g", {})]


def tokenizer_of(dialect: Dialect, special: bool) -> Tokenizer:
    """Single bytes, and the family's marks as tokens of their own or not."""
    marks = {mark.strip(): 3 for mark in dialect.marks} if special else {}
    return Tokenizer.from_metadata(byte_level([], {**marks, "<|im_end|>": 3}))


def walk(grammar: Grammar, tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Ids of one answer that the grammar allows, each drawn from all that may come next."""
    constraint, ids = grammar.start(), list[int]()
    while not constraint.ended and len(ids) < 400:
        token = int(rng.choice(np.flatnonzero(constraint.allowed())))
        if token in tokenizer.end_ids:
            break
        constraint.accept(token)
        ids.append(token)
    return ids


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)
def test_every_walk_is_a_call(dialect: Dialect, special: bool) -> None:
    tokenizer = tokenizer_of(dialect, special)
    assert dialect.demand is not None
    grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + dialect.demand(Writer(tokenizer, TOOLS)))
    rng, names = np.random.default_rng(7), set()
    for _ in range(8):
        ids = walk(grammar, tokenizer, rng)
        ((kind, name, arguments),) = read(dialect, [tokenizer.decode(ids, skip_special=False)], {"f": SHORT, "g": {}})
        assert kind == "call"
        names.add(name)
        value = json.loads(arguments)
        assert set(value) <= {"a", "n", "t"} and ("n" in value) == (name == "f")
        assert value.get("a", "x") in ("x", "y") and value.get("n", 0) in range(10) and value.get("t", True) in (True, False)
    assert names == {"f", "g"}


@pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)
def test_several_calls_only_where_they_are_allowed(dialect: Dialect) -> None:
    tokenizer = tokenizer_of(dialect, special=False)
    assert dialect.demand is not None
    rng = np.random.default_rng(1)
    counts = {}
    for several in (True, False):
        grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + dialect.demand(Writer(tokenizer, [("g", {})], several)))
        found = set()
        for _ in range(12):
            ids = walk(grammar, tokenizer, rng)
            found.add(len(read(dialect, [tokenizer.decode(ids, skip_special=False)], {"g": {}})))
        counts[several] = found
    assert counts[False] == {1}
    # gpt-oss and Llama answer with one call at a time, whatever is asked.
    assert counts[True] > {1} or dialect in (d.HARMONY, d.LLAMA3)


def test_references_of_a_schema_reach_its_definitions() -> None:
    tokenizer = tokenizer_of(d.HERMES, special=True)
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/digit"}}, "required": ["p"], "$defs": {"digit": {"enum": [1, 2]}}}
    assert d.HERMES.demand is not None
    grammar = Grammars(tokenizer, tokenizer.vocab_size).lark(
        "start: calls\n" + d.HERMES.demand(Writer(tokenizer, [("f", schema), ("f2", schema)]))
    )
    constraint = grammar.start()
    for token in tokenizer.encode('<tool_call>\n{"name": "f2", "arguments": {"p": 2}}\n</tool_call>', False, True):
        assert constraint.allowed()[token]
        constraint.accept(token)


def test_words_that_no_grammar_can_keep_do_not_spoil_a_call() -> None:
    tokenizer = tokenizer_of(d.HERMES, special=True)
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"p": {"oneOf": [{"enum": [1]}, {"enum": [2]}], "title": "P", "default": 1}},
        "required": ["p"],
        "propertyNames": {"pattern": "^p$"},
    }
    assert d.HERMES.demand is not None
    grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + d.HERMES.demand(Writer(tokenizer, [("f", schema)])))
    constraint = grammar.start()
    for token in tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"p": 2}}\n</tool_call>', False, True):
        assert constraint.allowed()[token]
        constraint.accept(token)


WORDS = [
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "additionalProperties",
    "a",
    'é"\\\n',
    "{key}",
]
SCHEMA_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["string", "object", "array", "integer", "#/$defs/a", "", "é<|x|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ALL), st.dictionaries(st.sampled_from(WORDS), SCHEMA_VALUES, max_size=5))
@example(d.XML, {"properties": {"a": {}}, "required": [["a"], {}, 3, "a", "a"]})
@example(d.GEMMA4, {"properties": {"a": {"type": ["string"]}}, "required": ["a"]})
def test_a_schema_is_a_grammar_or_a_refusal(dialect: Dialect, schema: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(dialect, special=True)
    assert dialect.demand is not None
    with suppress(ConfigError):
        grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + dialect.demand(Writer(tokenizer, [("f", schema)])))
        grammar.start().allowed()


@pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)
def test_names_of_parameters_may_be_anything(dialect: Dialect) -> None:
    tokenizer = tokenizer_of(dialect, special=False)
    assert dialect.demand is not None
    key = "ein Schlüssel"
    schema = {"type": "object", "properties": {key: {"enum": [7]}}, "required": [key]}
    if dialect is d.LFM2:
        key = "schlüssel"  # a name in Python
        schema = {"type": "object", "properties": {key: {"enum": [7]}}, "required": [key]}
    grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + dialect.demand(Writer(tokenizer, [("f", schema)])))
    constraint, ids = grammar.start(), list[int]()
    while not constraint.ended and len(ids) < 400:
        allowed = np.flatnonzero(constraint.allowed())
        if tokenizer.end_ids & set(allowed.tolist()):
            break
        constraint.accept(int(allowed[0]))
        ids.append(int(allowed[0]))
    ((_, _, arguments),) = read(dialect, [tokenizer.decode(ids, skip_special=False)], {"f": schema})
    assert json.loads(arguments) == {key: 7}
