"""/v1/responses, asked by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serve.conftest import WAIT_SECONDS, Live

from quaff import SamplingParams
from quaff.serve.errors import ApiError
from quaff.serve.responses import ResponseBody, messages_of

OPTIONS: dict[str, Any] = {"model": "tiny", "input": "naïve 水?", "max_output_tokens": 16, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "description": "of a town", "parameters": PARAMETERS}]
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 100}


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=WAIT_SECONDS) as client:
        yield client


def test_an_answer_is_that_of_the_model(live: Live) -> None:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "naïve 水?"}]
    expected = live.llm.chat(messages, SamplingParams(max_tokens=16))
    response = live.client.responses.create(**OPTIONS, instructions="Answer.")
    assert response.output_text == expected.text and response.object == "response" and response.error is None
    assert response.usage is not None and response.usage.input_tokens == expected.prompt_tokens
    assert response.usage.output_tokens == expected.completion_tokens
    assert response.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    listed = live.client.responses.create(**OPTIONS | {"input": [messages[0], messages[1] | {"type": "message"}]})
    assert listed.output_text == expected.text


def test_a_stream_adds_up_to_the_answer(live: Live) -> None:
    whole = live.client.responses.create(**OPTIONS)
    with live.client.responses.stream(**OPTIONS) as stream:
        events = list(stream)
    final = events[-1].response
    assert final.output_text == whole.output_text and final.status == whole.status
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]


def test_a_call_whole_and_streamed(live: Live) -> None:
    whole = live.client.responses.create(**OPTIONS | FORCED)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments)["town"] in ("Rome", "Oslo")
    assert whole.status == "completed"
    with live.client.responses.stream(**OPTIONS | FORCED) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.output_item.done"]
    assert "".join(pieces) == done.item.arguments == call.arguments and len(pieces) > 3


def test_a_conversation_with_a_tool_goes_on(live: Live) -> None:
    first = live.client.responses.create(**OPTIONS | FORCED)
    (call,) = first.output
    items = [
        {"role": "user", "content": "naïve 水?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    second = live.client.responses.create(**OPTIONS | {"input": items, "tools": TOOLS})
    assert second.output_text and second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_json_of_a_schema(live: Live) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": schema}}
    assert isinstance(json.loads(live.client.responses.create(**OPTIONS, text=text).output_text)["ok"], bool)


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "message", "role": "assistant", "content": "g"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages_of(ResponseBody(input=items, instructions="i")) == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "e", "name": "f"},
        {"role": "assistant", "content": "g"},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "user", "content": 3}, "input[0].content"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"type": "item_reference", "id": "x"}, "input[0]"),
        ({"type": "function_call", "call_id": "x", "name": "f"}, "input[0].arguments"),
        ({"type": "reasoning", "content": [3]}, "input[0].content"),
    ],
)
def test_items_that_are_refused(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        messages_of(ResponseBody(input=[item]))
    assert error.value.param == param and error.value.status == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "x"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_what_is_refused(live: Live, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.client.responses.create(**OPTIONS | change)
    assert error.value.param == param


def test_nothing_is_stored_and_a_client_is_told_so(live: Live) -> None:
    reply = live.client.responses.create(**OPTIONS, store=True)
    assert reply.store is False
    for ask in (live.client.responses.retrieve, live.client.responses.delete, live.client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask(reply.id)


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "content"]), children, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "x"])
KEYS = st.sampled_from(["role", "content", "name", "call_id", "arguments", "output", "summary"])
ITEMS = st.builds(lambda kind, fields: {"type": kind} | fields, KINDS, st.dictionaries(KEYS, VALUES | st.just("user"), max_size=5))


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, max_size=3) | VALUES, VALUES, VALUES)
def test_no_body_is_a_fault_of_ours(http: httpx.Client, items: Any, tools: Any, text: Any) -> None:
    reply = http.post("/v1/responses", json={"input": items, "tools": tools, "text": text, "max_output_tokens": 1})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["type"] == "invalid_request_error" and "\n" not in reply.json()["error"]["message"]
