"""/v1/messages, asked by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serve.conftest import WAIT_SECONDS, Live
from tests.unit.serve.holding import until

from quaff import SamplingParams
from quaff.serve.anthropic import PromptBody, messages_of
from quaff.serve.errors import ApiError

MESSAGES: list[Any] = [{"role": "user", "content": "naïve 水?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "messages": MESSAGES, "extra_body": {"temperature": 0.0}}
TOOL = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["town"],
    },
}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 120}


@pytest.fixture(scope="module")
def client(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=WAIT_SECONDS)


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=WAIT_SECONDS) as client:
        yield client


def body_of(**fields: Any) -> PromptBody:
    return PromptBody.model_validate({"model": "m", "messages": MESSAGES} | fields)


# Answers


def test_an_answer_is_that_of_the_model(live: Live, client: anthropic.Anthropic) -> None:
    expected = live.llm.chat([{"role": "system", "content": "Answer."}, *MESSAGES], SamplingParams(max_tokens=16))
    message = client.messages.create(**OPTIONS, system="Answer.")
    assert message.type == "message" and message.role == "assistant" and message.model == "tiny" and message.id.startswith("msg_")
    assert "".join(block.text for block in message.content if block.type == "text") == expected.text
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == expected.prompt_tokens
    assert message.usage.output_tokens == expected.completion_tokens
    assert message.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**OPTIONS)
    with client.messages.stream(**OPTIONS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    raw = [kind for kind in kinds if kind != "text"]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
    assert raw.count("content_block_start") == raw.count("content_block_stop") == len(whole.content)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**OPTIONS).content[0].text
    stop = whole[2:4]
    message = client.messages.create(**OPTIONS, stop_sequences=[stop, "\n"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == whole[: whole.index(stop)]


def test_an_answer_that_the_client_began_goes_on(live: Live, client: anthropic.Anthropic) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    text = live.llm.tokenizer.chat_template.render(MESSAGES) + "It is"
    expected = live.llm.generate(live.llm.tokenizer.encode(text, add_special=False, parse_special=True), SamplingParams(max_tokens=16))
    assert client.messages.create(**OPTIONS | {"messages": begun}).content[0].text == expected.text


def test_count_tokens(live: Live, client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Answer.").input_tokens
    assert count == len(live.llm.encode_chat([{"role": "system", "content": "Answer."}, *MESSAGES]))
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES, tools=[TOOL]).input_tokens > count


def test_a_client_that_leaves_a_stream_ends_it(live: Live, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**OPTIONS | {"max_tokens": 3500, "stop_sequences": []}) as stream:
        next(iter(stream))
        requests = list(live.llm.engine._requests.values())
    until(lambda: all(request.done for request in requests))
    until(lambda: live.service.loop.running == 0)


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id == model.display_name == "tiny" and model.type == "model" and model.created_at.year >= 2020
    assert client.models.retrieve("tiny").id == "tiny"


# Tools


def test_a_call_on_demand(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**OPTIONS | FORCED)
    (call,) = message.content
    assert call.type == "tool_use" and call.name == "weather" and call.id.startswith("toolu_")
    assert call.input["town"] in ("Rome", "Oslo") and message.stop_reason == "tool_use"


def test_a_call_is_streamed_in_pieces(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**OPTIONS | FORCED).content[0]
    with client.messages.stream(**OPTIONS | FORCED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = stream.get_final_message().content
    assert len(pieces) > 3 and json.loads("".join(pieces)) == call.input == whole.input


def test_a_conversation_with_a_tool_goes_on(live: Live, client: anthropic.Anthropic) -> None:
    first = client.messages.create(**OPTIONS | FORCED)
    call = first.content[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    count = client.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL]).input_tokens
    assert count > first.usage.input_tokens + first.usage.output_tokens
    assert client.messages.create(**OPTIONS | {"messages": messages, "tools": [TOOL]}).content


def test_json_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    message = client.messages.create(**OPTIONS, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert isinstance(json.loads(message.content[0].text)["ok"], bool) and message.stop_reason == "end_turn"


# Conversions


HEADER = "x-anthropic-billing-header: cc_version=2.1.{n}.abc; cc_entrypoint=cli; cch={n}f3a;"


def test_volatile_first_line(live: Live, client: anthropic.Anthropic) -> None:
    """Volatile first line (vllm PR 36829, ollama PR 14918): it does not reach the prompt, as a block, a line, or with white space."""
    rules = "You are an agent. " * 40
    want = client.messages.count_tokens(model="tiny", messages=MESSAGES, system=rules).input_tokens
    bodies = [body_of(system=rules)]
    for n in range(3):
        header = HEADER.format(n=n)
        for system in ([header, rules], [header + "\n" + rules], ["\n" + header + "\n" + rules]):
            blocks = [{"type": "text", "text": text} for text in system]
            assert client.messages.count_tokens(model="tiny", messages=MESSAGES, system=blocks).input_tokens == want
            bodies.append(body_of(system=blocks))
    bodies.append(body_of(system=HEADER.format(n=7) + "\n" + rules))
    prompts = {live.service.dialogue.prompt(messages_of(body)) for body in bodies}
    # Routers between the APIs send it on as it is.
    chat = [{"role": "system", "content": HEADER.format(n=8) + "\n\n" + rules}, *MESSAGES]
    assert prompts == {live.service.dialogue.prompt(chat)}
    alone = [{"role": "system", "content": HEADER.format(n=9)}, *MESSAGES]
    assert live.service.dialogue.prompt(alone) == live.service.dialogue.prompt(MESSAGES)


@pytest.mark.parametrize("system", ["Keep x-anthropic-billing-header: this", f"a\n{HEADER}", "x-anthropic-billing: no", ""])
def test_only_that_line_is_taken_away(live: Live, system: str) -> None:
    messages = [{"role": "system", "content": system}, *MESSAGES, {"role": "user", "content": HEADER}]
    assert list(live.service.dialogue.prompt(messages).tokens) == live.llm.encode_chat(messages)


def test_blocks_become_messages() -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}, {"type": "text", "text": "so?"}]},
        {"role": "system", "content": "be brief"},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages_of(body_of(messages=blocks)) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "ok", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "", "name": "f"},
        {"role": "user", "content": "so?"},
        {"role": "system", "content": "be brief"},
    ]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image", "source": {}}], "messages[0].content[0]"),
        ([], "messages[0].content"),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "tool_result", "tool_use_id": 3}], "messages[0].content[0].tool_use_id"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": 3}], "messages[0].content[0].content"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": ["x"]}], "messages[0].content[0].content"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}], "messages[0].content[0].content[0]"),
    ],
)
def test_contents_that_are_refused(content: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        messages_of(body_of(messages=[{"role": "user", "content": content}]))
    assert error.value.param == param and error.value.status == 400


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "user's"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "letters"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "only custom tools"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "JSON schema"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "the context is"),
    ],
)
def test_what_is_refused_has_the_shape_of_this_api(client: anthropic.Anthropic, change: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as error:
        client.messages.create(**OPTIONS | change)
    assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name", "input", "id", "tool_use_id"]), children, max_size=4)
    ),
    max_leaves=12,
)
BLOCKS = st.dictionaries(
    st.sampled_from(["text", "id", "name", "input", "content", "tool_use_id", "thinking", "source"]), JSON_VALUES, max_size=4
)
KINDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "document", "x"])
TYPED = st.builds(lambda kind, block: {"type": kind} | block, KINDS, BLOCKS)
CONTENTS = st.text(max_size=5) | st.lists(TYPED, max_size=3) | JSON_VALUES
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": CONTENTS})
NAMES = st.text(max_size=4) | st.just("f")
CHOICE = st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none", "x"])}, optional={"name": NAMES})
BODIES = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(MESSAGE, max_size=3)},
    optional={
        "system": CONTENTS,
        "tools": st.lists(st.fixed_dictionaries({"name": NAMES}, optional={"input_schema": JSON_VALUES}), max_size=2) | JSON_VALUES,
        "tool_choice": CHOICE | JSON_VALUES,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "x"])}),
        "output_config": st.fixed_dictionaries({"format": JSON_VALUES}),
    },
)


@settings(max_examples=60, deadline=None)
@given(BODIES)
def test_no_body_is_a_fault_of_ours(http: httpx.Client, body: dict[str, Any]) -> None:
    reply = http.post("/v1/messages/count_tokens", json=body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["type"] == "error" and "\n" not in reply.json()["error"]["message"]
