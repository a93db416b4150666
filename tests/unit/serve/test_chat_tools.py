"""Tools, forms of answers and kept replies on /v1/chat/completions, asked by the official client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.unit.serve.conftest import Live

from quaff import SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "Will it rain?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 150}
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": PARAMETERS}}]
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}


def test_a_call_on_demand(live: Live) -> None:
    choice = live.client.chat.completions.create(**OPTIONS, **FORCED).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")


def test_a_call_is_streamed_in_pieces(live: Live) -> None:
    whole = live.client.chat.completions.create(**OPTIONS, **FORCED).choices[0].message.tool_calls[0]
    chunks = [c.choices[0] for c in live.client.chat.completions.create(**OPTIONS, **FORCED, stream=True)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert deltas[0].function.name == "weather" and deltas[0].id and {delta.index for delta in deltas} == {0}
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments and len(deltas) > 3
    assert not any(chunk.delta.content for chunk in chunks) and chunks[-1].finish_reason == "tool_calls"


def test_every_choice_follows_the_grammar(live: Live) -> None:
    reply = live.client.chat.completions.create(**OPTIONS | {"temperature": 1, "seed": 3}, **FORCED, n=3)
    arguments = [choice.message.tool_calls[0].function.arguments for choice in reply.choices]
    assert len(set(arguments)) > 1 and all(json.loads(text)["town"] in ("Rome", "Oslo") for text in arguments)


def test_tools_that_are_not_to_be_called_are_not_shown(live: Live) -> None:
    plain = live.client.chat.completions.create(**OPTIONS)
    none = live.client.chat.completions.create(**OPTIONS, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == plain.choices[0].message.content and none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert live.client.chat.completions.create(**OPTIONS, tools=TOOLS).usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_conversation_with_a_tool_goes_on_where_it_was(live: Live) -> None:
    first = live.client.chat.completions.create(**OPTIONS, **FORCED).choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    messages = [*MESSAGES, first.model_dump(exclude_none=True), answer]
    assert live.client.chat.completions.create(**OPTIONS | {"messages": messages}, tools=TOOLS).choices[0].message.content is not None


def test_a_schema_a_pattern_and_a_choice(live: Live) -> None:
    def text(**more: Any) -> str:
        return live.client.chat.completions.create(**OPTIONS, **more).choices[0].message.content

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    assert isinstance(json.loads(text(response_format=wanted))["ok"], bool)
    assert len(text(extra_body={"structured_outputs": {"regex": "[a-f]{7}"}})) == 7
    assert text(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert json.loads(text(extra_body={"structured_outputs": {"json": {"enum": [1, 2]}}})) in (1, 2)


class Verdict(BaseModel):
    rain: bool
    grade: Literal["low", "high"] | None
    parts: list[Literal[1, 2]] = Field(max_length=3)


def test_the_clients_own_parsing_of_answers_and_arguments(live: Live) -> None:
    reply = live.client.chat.completions.parse(**OPTIONS, response_format=Verdict)
    assert isinstance(reply.choices[0].message.parsed, Verdict)
    tool = openai.pydantic_function_tool(Verdict, name="give")
    called = live.client.chat.completions.parse(**OPTIONS, tools=[tool], tool_choice="required")
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Verdict)


def test_an_answer_sent_back_is_the_tokens_that_were_generated(live: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me more."}]
    expected = live.llm.chat(messages, SamplingParams(max_tokens=40))
    text = live.client.chat.completions.create(**OPTIONS | {"messages": messages, "max_tokens": 40}).choices[0].message.content
    assert text == expected.text
    first = live.llm.encode_chat(messages)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    second = list(live.service.dialogue.prompt(messages).tokens)
    assert second[: len(first) + len(expected.tokens)] == [*first, *expected.tokens]
    assert live.llm.encode_chat(messages)[: len(first) + len(expected.tokens)] != [*first, *expected.tokens], "too easy"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_what_is_refused(live: Live, change: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.client.chat.completions.create(**OPTIONS | change)
    assert error.value.param == param and error.value.type == "invalid_request_error"
