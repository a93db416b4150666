"""An answer that must be a call: whatever the grammar lets pass, the reader of the same family reads as that call."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.serve.reading_answers import read
from tests.unit.tokenizer.small_vocabulary import byte_level

from quaff.engine.grammar import Grammars
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


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)
def test_every_walk_is_a_call(dialect: Dialect, special: bool) -> None:
    tokenizer = tokenizer_of(dialect, special)
    assert dialect.demand is not None
    grammar = Grammars(tokenizer, tokenizer.vocab_size).lark("start: calls\n" + dialect.demand(Writer(tokenizer, TOOLS)))
    rng, names = np.random.default_rng(7), set()
    for _ in range(8):
        constraint, ids = grammar.start(), list[int]()
        while not constraint.ended and len(ids) < 400:
            token = int(rng.choice(np.flatnonzero(constraint.allowed())))
            if token in tokenizer.end_ids:
                break
            constraint.accept(token)
            ids.append(token)
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
            constraint, ids = grammar.start(), list[int]()
            while not constraint.ended and len(ids) < 400:
                token = int(rng.choice(np.flatnonzero(constraint.allowed())))
                if token in tokenizer.end_ids:
                    break
                constraint.accept(token)
                ids.append(token)
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
