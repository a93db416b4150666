"""Tools for models whose chat template knows none: described in the system message, called and answered in Hermes' tags as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = (
    "You may call one or more functions to help with the user's request.\n"
    "The functions, one JSON description per line:\n<tools>\n{tools}\n</tools>\n"
    "To call a function, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)


def with_plain_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """A conversation without tools, calls and their results, all of which have become text. `messages` as `check_messages` returns them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n" + result
            else:
                out.append({"role": "user", "content": result, "results": True})
        elif role == "assistant" and message.get("tool_calls"):
            calls = [_written(call) for call in message["tool_calls"]]
            out.append({"role": role, "content": "\n".join([content, *calls] if content else calls)})
        else:
            out.append({**message, "content": content})
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{text}"}
        else:
            out.insert(0, {"role": "system", "content": text})
    return [{key: value for key, value in message.items() if key not in ("results", "tool_calls", "tool_call_id")} for message in out]


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {text}}}\n</tool_call>'
