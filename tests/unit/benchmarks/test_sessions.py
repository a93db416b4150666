"""The benchmark of agents' sessions: it sends all of a conversation again and believes the server's counts, in the server's own stream."""

from __future__ import annotations

import json

import httpx
import pytest
from benchmarks.sessions import Conversation, Turn


def server(sent: list[list[dict[str, str]]], cached: int) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/apply-template":
            return httpx.Response(200, json={"prompt": "x"})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1]})
        sent.append(json.loads(request.content)["messages"])
        usage = {"prompt_tokens": 90 + 10 * len(sent), "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": cached}}
        events = [{"choices": [{"delta": {"content": t}}]} for t in ("he", "re")] + [{"choices": [], "usage": usage}]
        return httpx.Response(200, content=b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n")

    return httpx.MockTransport(answer)


def test_a_turn_sends_everything_and_counts_what_was_sent_before() -> None:
    sent: list[list[dict[str, str]]] = []
    with httpx.Client(base_url="http://test", transport=server(sent, 84)) as client:
        talk = Conversation("main", 1, "system", 5)
        first = talk.turn(client, "m")
        talk.tool_result(3)
        second = talk.turn(client, "m")
    assert (first.sent_before, first.prompt) == (0, 100)
    assert (second.sent_before, second.prompt, second.cached, second.cached_share) == (105, 110, 84, 0.8)
    assert sent[1][: len(sent[0])] == sent[0]
    assert [m["role"] for m in sent[1][len(sent[0]) :]] == ["assistant", "user"] and sent[1][2]["content"] == "here"


def test_a_refusal_ends_it() -> None:
    refuse = httpx.MockTransport(lambda request: httpx.Response(400 if "chat" in request.url.path else 200, json={"prompt": "x"}))
    with httpx.Client(base_url="http://test", transport=refuse) as client, pytest.raises(SystemExit, match="status 400"):
        Conversation("main", 1, "system", 5).turn(client, "m")


def test_the_ratio_has_tokenising_in_its_denominator() -> None:
    assert Turn("main", 10, 8, 8, 3.0, 0.5, 1.5).ratio == 1.5
