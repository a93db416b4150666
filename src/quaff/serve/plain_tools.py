"""Tools for models whose chat template knows none: described in the system message, called and answered in Hermes' tags as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quaff.serve.tools import arguments_object

_INTRODUCTION = (
    "You may call one or more functions to help with the user's request.\n"
    "The functions, one JSON description per line:\n<tools>\n{tools}\n</tools>\n"
    "To call a function, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)


def with_plain_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """A conversation without tools, calls and their results, all of which have become text. `messages` as `check_messages` returns them."""
    out: list[dict[str, Any]] = []
    for message in with_plain_calls(messages):
        if message["role"] != "tool":
            out.append(message)
            continue
        result = f"<tool_response>\n{message['content'] or ''}\n</tool_response>"
        if out and out[-1].get("results"):
            out[-1]["content"] += "\n" + result
        else:
            out.append({"role": "user", "content": result, "results": True})
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{text}"}
        else:
            out.insert(0, {"role": "system", "content": text})
    return [{key: value for key, value in message.items() if key != "results"} for message in out]


def with_plain_calls(messages: Sequence[Mapping[str, Any]], pythonic: bool = False) -> list[dict[str, Any]]:
    """A conversation whose calls have become text, in Hermes' form or LFM2's: for templates that do not write them."""
    write = _in_python if pythonic else _in_tags
    out: list[dict[str, Any]] = []
    for message in messages:
        content, calls = message.get("content") or "", message.get("tool_calls")
        if calls:
            content = "\n".join(filter(None, (content, write([call["function"] for call in calls]))))
        out.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
    return out


def with_tools_in_system(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """A conversation whose system message has the tools, as JSON: Phi-4's template looks for them there."""
    out = [dict(message) for message in messages]
    if tools:
        if not out or out[0]["role"] != "system":
            out.insert(0, {"role": "system", "content": ""})
        out[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return out


def _in_tags(functions: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": {_json(f["name"])}, "arguments": {_arguments(f)}}}\n</tool_call>' for f in functions)


def _in_python(functions: Sequence[Mapping[str, Any]]) -> str:
    def call(function: Mapping[str, Any]) -> str:
        given = arguments_object(_arguments(function)) or {}
        return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    return f"<|tool_call_start|>[{', '.join(map(call, functions))}]<|tool_call_end|>"


def _arguments(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    return arguments if isinstance(arguments, str) else _json(arguments if arguments is not None else {})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
