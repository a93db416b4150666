"""Hostile bodies: whatever is sent, the answer is one of ours and never the server's fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.serve.asgi import Caller, calling

import quaff
from quaff.engine.pace import Policy
from quaff.serve.anthropic import MessagesBody
from quaff.serve.app import make_app
from quaff.serve.chat import ChatBody
from quaff.serve.completions import CompletionBody
from quaff.serve.embeddings import EmbeddingsBody
from quaff.serve.responses import ResponseBody
from quaff.serve.service import Service
from quaff.serve.settings import Settings
from quaff.serve.tokens import DetokenizeBody
from quaff.serve.wire import Body

CONTEXT = 512
BODIES = 10_000
AT_ONCE = 20
MESSAGE = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            MESSAGE,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 1,
        "logit_bias": {"1": 2.0},
        "stream": False,
        "stream_options": {"include_usage": True},
        "presence_penalty": 0.1,
        "chat_template_kwargs": {"a": 1, "self": 2},
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
        "reasoning_effort": "low",
    },
    "/v1/messages": {
        "model": "tiny",
        "messages": [MESSAGE],
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "description": "d", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
        "stop_sequences": ["x"],
        "temperature": 0.5,
    },
    "/v1/messages/count_tokens": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
        ],
    },
    "/v1/responses": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "i",
        "max_output_tokens": 1,
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        "tool_choice": "none",
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
    },
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "pooling": "last", "dimensions": 64},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1, "logprobs": 1, "echo": True, "n": 1, "stream": False, "min_p": 0.1, "top_k": 3},
    "/tokenize": {"content": "hi", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {
        "messages": [
            {"role": "developer", "content": "d"},
            MESSAGE,
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t"}]},
        ],
        "add_generation_prompt": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "structured_outputs": {"choice": ["a", "b"]},
    },
}


@pytest.fixture(scope="module")
def call(tiny: Path) -> Iterator[Caller]:
    with quaff.load(tiny, threads=1, chunk=16, context=CONTEXT) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200))
        service = Service(Settings("tiny", max_tokens=1))
        service.open(llm)
        with calling(make_app(service)) as caller:
            yield caller
        service.close()


scalars = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=4
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: bytes, JSON of any shape, or a good body in which something is changed, gone, or cut off."""
    path = draw(st.sampled_from(sorted(VALID)))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return path, draw(st.binary(max_size=30))
    body = dict(VALID[path])
    if kind == 1:
        return path, _json(draw(values))
    if kind == 2:
        whole = _json(body)
        return path, whole[: draw(st.integers(0, len(whole) - 1))]
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(body) or ["messages"]))
        if draw(st.booleans()):
            body[name] = draw(values)
        elif isinstance(body.get(name), dict | list) and draw(st.booleans()):
            body[name] = draw(changed(body[name]))
        elif name == "messages":
            body[name] = [draw(values), {"role": draw(values), "content": draw(values)}][: draw(st.integers(0, 2))]
        else:
            del body[name]
    return path, _json(body)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A copy in which one value, at any depth, is another."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 3)) == 0:
        return draw(values)
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    copy: Any = value.copy()
    copy[key] = draw(changed(value[key]))
    return copy


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@settings(max_examples=BODIES // AT_ONCE, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(damaged(), min_size=AT_ONCE, max_size=AT_ONCE))
def test_a_damaged_body_is_refused_in_the_apis_shape(call: Caller, bodies: list[tuple[str, bytes]]) -> None:
    for path, body in bodies:
        answer = call("POST", path, body)
        if answer.status == 200:
            continue  # what was changed did not matter
        assert 400 <= answer.status < 500, (path, body, answer)
        error = answer.json["error"]
        keys = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert error.keys() == keys and error["type"] == "invalid_request_error"
        assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("path", sorted(VALID))
def test_the_good_bodies_are_good(call: Caller, path: str) -> None:
    answer = call("POST", path, _json(VALID[path]))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "messages"),
        (b"{}", "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e400}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 70_000 + b'"}]}', "context"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["a", ""]}', "stop[1]: string should have at least 1 character"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "tool_choice": {"type": "function"}}', "tool_choice.function: field required"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"1": "2"}}', "logit_bias of token 1 is '2'"),
    ],
)
def test_an_error_says_what_is_wrong(call: Caller, body: bytes, words: str) -> None:
    answer = call("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and words in answer.json["error"]["message"], answer.body


TOO_LONG = "word " * 40_000
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [MESSAGE, MESSAGE | {"content": TOO_LONG}]}, {}),
    "text": ("/v1/completions", {"prompt": TOO_LONG}, {"content": TOO_LONG}),
    "ids": ("/v1/completions", {"prompt": [1] * 160_689}, {}),
    "second-text": ("/v1/completions", {"prompt": ["hi", TOO_LONG]}, {"content": TOO_LONG}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [MESSAGE | {"content": TOO_LONG}]}, {}),
    "system": ("/v1/messages", {"model": "tiny", "max_tokens": 1, "system": TOO_LONG, "messages": [MESSAGE]}, {}),
    "responses": ("/v1/responses", {"input": TOO_LONG, "truncation": "auto"}, {}),
    "embeddings": ("/v1/embeddings", {"input": TOO_LONG}, {"content": TOO_LONG}),
    "second-embedding": ("/v1/embeddings", {"input": ["hi", TOO_LONG]}, {"content": TOO_LONG}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_prompt_that_is_too_long_is_never_cut(call: Caller, asked: str, stream: bool) -> None:
    """Silent truncation (ollama 3839): 160,689 tokens in, 16,387 read, 200 OK. Here every path says how many there are and may be."""
    path, body, text = ASKED[asked]
    answer = call.post(path, body | {"stream": stream})
    assert answer.status == 400, answer
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    if path != "/v1/messages":
        field = next(name for name in ("messages", "prompt", "input") if name in body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    count = int(re.fullmatch(rf"the prompt has (\d+) tokens, the context is {CONTEXT} tokens; shorten the prompt", error["message"])[1])
    if text:
        assert count == call.post("/tokenize", text).json["count"]
    assert count >= 40_000


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (ChatBody, "messages"),
        (ChatBody, "tools"),
        (ChatBody, "stop"),
        (CompletionBody, "prompt"),
        (EmbeddingsBody, "input"),
        (ResponseBody, "input"),
        (MessagesBody, "messages"),
        (MessagesBody, "system"),
        (MessagesBody, "stop_sequences"),
        (DetokenizeBody, "tokens"),
    ],
)
def test_a_million_wrong_items_are_not_a_million_errors(model: type[Body], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({field: [None] * 1000})
    errors = caught.value.errors()
    assert any(error["loc"][0] == field and error["loc"][-1] == 0 for error in errors) and len(errors) < 10


@pytest.mark.parametrize("content", ["{{ ''.__class__ }}", "{% include '/etc/passwd' %}", "../../etc/passwd", "file:///etc/passwd"])
def test_a_message_is_text_and_nothing_else(call: Caller, content: str) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    text = call("POST", "/apply-template", _json(body)).json["prompt"]
    assert content in text and "root:" not in text
