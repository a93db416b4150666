"""Conversations in the shapes that chat templates take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quaff.errors import PromptError
from quaff.serve.dialects import Dialect
from quaff.serve.tools import arguments_object

Message = dict[str, Any]

BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""What coding agents put first into their system prompt: a line for the vendor's accounts with a hash that is new in every request. It
says nothing to a model, and would make every prompt differ from the one before in its first tokens."""


def plainly(message: Message) -> Message:
    """A message with one name for each thing. PromptError for calls that are none."""
    role = "system" if message["role"] == "developer" else message["role"]
    if message.get("tool_calls"):
        check_calls(message["tool_calls"])
        return {**message, "role": role}
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "role": role, "content": message.get("content") or ""}


def without_billing(messages: Sequence[Message]) -> list[Message]:
    """Messages without the line that differs in every request; a system message that was nothing else is left out."""
    out: list[Message] = []
    for message in messages:
        found = BILLING_LINE.match(message["content"] or "") if message["role"] == "system" else None
        rest = message["content"][found.end() :] if found is not None else None
        if rest is None:
            out.append(message)
        elif rest:
            out.append({**message, "content": rest})
    return out


def shapes(messages: list[Message], dialect: Dialect) -> list[list[Message]]:
    """A conversation in the shapes that templates of a dialect take, the usual one first."""
    if dialect.short_ids:
        messages = [_with_short_ids(message) for message in messages]
    # Templates know reasoning by one name or the other.
    messages = [{**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]
    if dialect.channels:
        messages = [part for message in messages for part in _apart(message)]
    objects = [_with_arguments(message, as_text=False) for message in messages]
    out = [objects]
    if any(message.get("tool_calls") for message in messages):
        # DeepSeek's templates join the arguments to other texts.
        out.append([_with_arguments(message, as_text=True) for message in messages])
    alternating = _alternating(objects)
    if alternating != objects:
        out.append(alternating)
    return out


def check_calls(calls: Any) -> None:
    """PromptError unless `calls` are an assistant's tool calls: [{"function": {"name": ..., "arguments": ...}}]."""
    ok = isinstance(calls, list) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and isinstance(call["function"].get("name"), str)
        for call in calls
    )
    if not ok:
        raise PromptError("tool_calls must be a list of {'function': {'name': ..., 'arguments': ...}}")


def with_responses(messages: Sequence[Message]) -> list[Message]:
    """Results of tools as `tool_responses` of the message that called them: how Gemma 4's template wants them."""
    out: list[Message] = []
    for message in messages:
        caller = out[-1] if out else None
        if message["role"] != "tool" or caller is None or not caller.get("tool_calls"):
            if message.get("tool_calls") and message.get("content"):
                out.append({"role": message["role"], "content": message["content"]})
                message = {**message, "content": ""}
            out.append(message)
            continue
        answered = caller.get("tool_responses", [])
        name = message.get("name") or caller["tool_calls"][min(len(answered), len(caller["tool_calls"]) - 1)]["function"]["name"]
        out[-1] = {**caller, "tool_responses": [*answered, {"name": name, "response": message["content"]}]}
    return out


def object_of(arguments: Any) -> dict[str, Any] | None:
    """The arguments of a call as an object; None when they are text that is none."""
    return arguments_object(arguments) if isinstance(arguments, str) else arguments if isinstance(arguments, dict) else {}


def _apart(message: Message) -> list[Message]:
    """What gpt-oss said before a call as a message of its own: its template takes reasoning or content beside calls, not both."""
    if not (message.get("tool_calls") and message.get("thinking") and message.get("content")):
        return [message]
    return [{"role": message["role"], "content": message["content"]}, {**message, "content": ""}]


def _with_arguments(message: Message, as_text: bool) -> Message:
    """A message whose calls have arguments as JSON text, or as the object that most templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"].get("arguments")
        value = object_of(given)
        arguments: Any = value if value is not None else given
        if as_text:
            arguments = given if isinstance(given, str) else json.dumps(given if given is not None else {}, ensure_ascii=False)
        calls.append({"type": "function", **call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_short_ids(message: Message) -> Message:
    """Ids of nine letters and digits, the same for the same id."""
    out = dict(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in message["tool_calls"]]
    if isinstance(message.get("tool_call_id"), str):
        out["tool_call_id"] = _short(message["tool_call_id"])
    return out


def _short(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """User and assistant by turns: the system's words go before the user's first, neighbours of one role become one."""
    out: list[Message] = []
    system: list[str] = []
    for message in messages:
        if message["role"] == "system":
            system.append(message["content"] or "")
            continue
        if system and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*system, message["content"] or ""])}
            system = []
        last = out[-1] if out else None
        if last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant") and not last.get("tool_calls"):
            out[-1] = {**last, **message, "content": "\n\n".join(filter(None, (last["content"], message["content"])))}
        else:
            out.append(message)
    if system:
        out.append({"role": "user", "content": "\n\n".join(system)})
    return out
