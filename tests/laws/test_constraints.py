"""Law: an answer that a grammar binds does not depend on guesses, neighbours or chunks, and every token of it was allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import CASES, prompt

import quaff
from quaff import LLM, SamplingParams
from quaff.engine.grammar import Grammar, Grammars, json_rule
from quaff.engine.pace import Policy

PARAMS = SamplingParams(max_tokens=120, temperature=0.9, seed=5)
# Guesses copy what stood there before: a list of equal objects is full of it.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"gauge": {"enum": ["north", "south"]}, "open": {"type": "boolean"}},
        "required": ["gauge", "open"],
    }
    | {"additionalProperties": False},
    "minItems": 3,
    "maxItems": 3,
}


def grammar(llm: LLM) -> Grammar:
    return Grammars(llm.tokenizer, llm.config.vocab).lark(f"start: {json_rule(SCHEMA)}")


def answer(llm: LLM, neighbours: int = 0) -> list[int]:
    tokens = prompt(llm.config.vocab, 40, seed=1)
    others = [llm.engine.submit(prompt(llm.config.vocab, 30 + i, seed=i), params=PARAMS) for i in range(neighbours)]
    request = llm.engine.submit(tokens, params=PARAMS, constraint=grammar(llm).start())
    llm.engine.run([request, *others])
    assert request.error is None and request.finish_reason == "stop"
    return request.tokens[len(tokens) :]


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "lfm2"])
def test_guesses_neighbours_and_chunks_do_not_show(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "tiny.gguf")
    with quaff.load(path, threads=1, chunk=64) as llm:
        expected = answer(llm)
        constraint = grammar(llm).start()
        for token in expected:
            assert constraint.allowed()[token]
            constraint.accept(token)
        assert constraint.ended or constraint.allowed()[list(llm.tokenizer.end_ids)].any()
        assert answer(llm, neighbours=3) == expected
        llm.engine.set_policy(Policy(draft_tokens=8))
        assert answer(llm) == expected
        if not llm.graph.state_kinds:
            assert llm.engine.drafted_tokens > llm.engine.accepted_tokens > 0, "guesses were never right, or never wrong"
        # The law can fail: without the grammar the answer is another.
        free = llm.generate(prompt(llm.config.vocab, 40, seed=1), PARAMS)
        assert list(free.tokens) != expected
    with quaff.load(path, threads=1, chunk=7) as llm:
        assert answer(llm) == expected


def test_a_token_that_was_not_allowed_is_never_chosen(tmp_path: Path) -> None:
    """Whatever the temperature: what is forbidden has no probability."""
    path = CASES["llama-gqa"].write(tmp_path / "tiny.gguf")
    with quaff.load(path, threads=1, chunk=64) as llm:
        found = set()
        for seed in range(6):
            params = SamplingParams(max_tokens=40, temperature=100, seed=seed)
            constraint = Grammars(llm.tokenizer, llm.config.vocab).lark('start: "yes" | "no"').start()
            request = llm.engine.submit(prompt(llm.config.vocab, 9), params=params, constraint=constraint)
            llm.engine.run([request])
            found.add(llm.tokenizer.decode(request.tokens[9:]))
        assert found == {"yes", "no"}
