"""The benchmark of agents' sessions: lengths of turns, which are checked, shares and ratios; the server's own stream and counts; and
sessions played through below the server, with a control that must fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from benchmarks.sessions import Conversation, Session, Stage, Turn, line, play_below, summary, tiny_models
from tests.tiny import CASES

import quaff
import quaff.engine.disk as disk

TURN = Turn(0, 1, 500, 400, {"memory": 399, "disk": 396}, {"memory": 1.0, "disk": 2.0}, 0.5, True)


def test_prompts_grow_evenly_and_the_checked_turns_are_spread() -> None:
    session = Session(12, 2000, 7500, check=3)
    assert [session.length(t) for t in (0, 1, 11)] == [2000, 2500, 7500]
    assert [t for t in range(12) if session.checked(t)] == [3, 7, 11]
    assert [t for t in range(12) if replace(session, check=12).checked(t)] == list(range(12))
    assert not any(replace(session, check=0).checked(t) for t in range(12))


def test_a_summary_leaves_first_turns_out() -> None:
    first = replace(TURN, turn=0, sent=0, cached={"memory": 0, "disk": 0}, seconds={"memory": 99.0, "disk": 99.0}, equal=None)
    faster = replace(TURN, seconds={"memory": 0.25, "disk": 2.0})
    assert summary([first, TURN, faster]) == {
        "ways": {
            "memory": {"turns": 2, "cached_share": 399 / 400, "ratio": 1.25, "largest_ratio": 2.0},
            "disk": {"turns": 2, "cached_share": 0.99, "ratio": 4.0, "largest_ratio": 4.0},
        },
        "checked": 2,
        "equal": True,
        "good": True,
    }
    different, forgotten = replace(TURN, equal=False), replace(TURN, cached={"disk": 395}, seconds={"disk": 1.0})
    for turn in (different, forgotten):
        assert summary([TURN, turn])["good"] is False
    assert "99.00%" in line(TURN) and "equal" in line(TURN)
    assert "DIFFERENT" in line(different)


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
        talk = Conversation(0, Session(2, 100, 110))
        first = talk.turn(client, "server")
        talk.tool_result(10)
        second = talk.turn(client, "server")
    assert (first.turn, first.sent, first.tokens) == (0, 0, 100)
    assert (second.turn, second.sent, second.tokens, second.cached, second.share("server")) == (1, 105, 110, {"server": 84}, 0.8)
    assert sent[1][: len(sent[0])] == sent[0]
    assert [m["role"] for m in sent[1][len(sent[0]) :]] == ["assistant", "user"] and sent[1][2]["content"] == "here"


def test_agents_share_the_beginning_of_their_first_prompt() -> None:
    one, other = (Conversation(agent, Session(2, 2000, 3000)) for agent in (0, 1))
    assert one.messages[0] == other.messages[0] and one.messages[1] != other.messages[1]


def test_a_refusal_ends_it() -> None:
    refuse = httpx.MockTransport(lambda request: httpx.Response(400 if "chat" in request.url.path else 200, json={"prompt": "x"}))
    with httpx.Client(base_url="http://test", transport=refuse) as client, pytest.raises(SystemExit, match="status 400"):
        Conversation(0, Session(2, 100, 110)).turn(client, "server")


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_a_session_is_cached_in_memory_and_on_disk(name: str, tmp_path: Path) -> None:
    stage = Stage(CASES[name].write(tmp_path / "m.gguf"), Session(3, 200, 500, 4, check=3), tmp_path / "d", 1)
    turns = list(play_below(stage))
    stage.close()
    assert [(t.turn, t.agent, t.tokens) for t in turns] == [(t, b, n) for t, n in enumerate((200, 350, 500)) for b in (0, 1)]
    result = summary(turns)
    assert result["good"] is True and result["checked"] == 6
    for t in turns[2:]:
        assert t.cached == {"memory": t.sent - 1, "disk": t.sent - 1}


def test_a_tier_that_finds_nothing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(disk.DiskTier, "restore", lambda self, tokens, salt="": 0)
    stage = Stage(CASES["llama-gqa"].write(tmp_path / "m.gguf"), Session(2, 200, 300, 4, agents=1), tmp_path / "d", 1)
    turns = list(play_below(stage))
    stage.close()
    assert turns[1].cached == {"memory": 203, "disk": 0}
    assert summary(turns)["good"] is False


def test_tiny_models_have_room_for_a_session(tmp_path: Path) -> None:
    for _, path in tiny_models(tmp_path, 50_000):
        with quaff.load(path, threads=1, chunk=64) as llm:
            assert llm.context == 50_000
