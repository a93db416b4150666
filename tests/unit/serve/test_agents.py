"""Agents on /v1/messages: every turn re-sends all that came before, with a new first line, and only what is new is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import CASES
from tests.unit.serve.asgi import Caller
from tests.unit.serve.test_sessions import RESULT, server

HEADER = "x-anthropic-billing-header: cc_version=2.1.{n}.abc; cc_entrypoint=cli; cch={n:05x};"
RULES = "You are an agent of the waterworks. " + RESULT.format(0) * 20
TOOL = {
    "name": "gauge",
    "description": "Reads a gauge.",
    "input_schema": {"type": "object", "properties": {"pump": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["pump"]},
}


def body(messages: list[Any], n: int, **more: Any) -> dict[str, Any]:
    system = [{"type": "text", "text": HEADER.format(n=n)}, {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]
    return {"model": "tiny", "max_tokens": 60, "temperature": 0, "system": system, "messages": messages} | more


def ask(call: Caller, messages: list[Any], n: int, **more: Any) -> dict[str, Any]:
    answer = call.post("/v1/messages", body(messages, n, **more))
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json
    return reply


def prompt_tokens(reply: dict[str, Any]) -> int:
    used: dict[str, int] = reply["usage"]
    return used["input_tokens"] + used["cache_read_input_tokens"]


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma3", "qwen35"])
def test_volatile_first_line(kind: str, tmp_path: Path) -> None:
    """Volatile first line (vllm PR 36829, ollama PR 14918): two bodies that differ only in that line share all but the last token."""
    messages = [{"role": "user", "content": "Read the gauge."}]
    with server(CASES[kind].write(tmp_path / "tiny.gguf")) as call:
        first, second = ask(call, messages, 1), ask(call, messages, 2)
        assert first["usage"]["cache_read_input_tokens"] == 0 and first["content"] == second["content"]
        assert second["usage"]["cache_read_input_tokens"] == prompt_tokens(second) - 1 >= 0.99 * prompt_tokens(second)
        # The control: a line of another name is part of the prompt, costs all of it, and is named.
        other = call.post(
            "/v1/messages", body(messages, 3) | {"system": [{"type": "text", "text": "x-other-header: 3"}, {"type": "text", "text": RULES}]}
        )
        used = other.json["usage"]
        assert used["cache_read_input_tokens"] < 100
        assert "x-other" in used["cache_miss_reason"] and "You are" in used["cache_miss_reason"]
        assert f"{used['input_tokens'] - 1} tokens are computed again" in used["cache_miss_reason"]


@pytest.mark.parametrize("kind", ["llama-gqa", "lfm2", "qwen35"])
def test_calls_come_back_as_they_were_written(kind: str, tmp_path: Path) -> None:
    """Each turn calls a tool and gets its result; from the second on at least 99 % of what is sent again is cached, after a restart too."""
    path, store = CASES[kind].write(tmp_path / "tiny.gguf"), tmp_path / "store"
    messages: list[Any] = [{"role": "user", "content": "Read all gauges."}]
    sent = 0

    def turns(call: Caller, numbers: range) -> None:
        nonlocal sent
        for n in numbers:
            reply = ask(call, messages, n, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
            (use,) = reply["content"]
            assert use["type"] == "tool_use" and use["input"]["pump"] in range(1, 10)
            assert reply["usage"]["cache_read_input_tokens"] >= 0.99 * sent, (n, sent, reply["usage"])
            sent = prompt_tokens(reply) + reply["usage"]["output_tokens"]
            # What clients do to a call on its way: other white space, other order of keys.
            use["input"] = json.loads(json.dumps(use["input"], indent=1))
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": RESULT.format(n)}
            messages.extend([{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])

    with server(path, store) as call:
        turns(call, range(3))
    with server(path, store) as call:
        turns(call, range(3, 5))


DROPS_REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma3", "lfm2", "qwen35", "kimi-linear"])
def test_reasoning_that_the_template_drops(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt parts from the last one behind the user's question: all up to there is found, in models that cannot go back too."""
    monkeypatch.setattr("tests.tiny.CHAT_TEMPLATE", DROPS_REASONING)
    messages: list[Any] = []
    asked = 0
    with server(CASES[kind].write(tmp_path / "tiny.gguf")) as call:
        for n in range(4):
            messages.append({"role": "user", "content": RESULT.format(n)})
            reply = ask(call, messages, n, max_tokens=12)
            (thought,) = reply["content"]
            assert thought["type"] == "thinking"
            assert reply["usage"]["cache_read_input_tokens"] >= asked
            # All but the mark after the question and the start of the answer.
            start = call.post("/tokenize", {"content": "\n<|im_start|>assistant\n<think>\n", "add_special": False}).json["count"]
            asked = prompt_tokens(reply) - start
            messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "So."}]})
