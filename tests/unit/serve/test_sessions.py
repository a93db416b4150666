"""Sessions of agents on a model of every layer kind: two branches alternate, each turn sends all that came before and a little more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import CASES
from tests.unit.serve.asgi import Caller, calling

import quaff
from quaff.engine.pace import Policy
from quaff.serve.app import make_app
from quaff.serve.service import Service
from quaff.serve.settings import Settings

KINDS = ("llama-gqa", "gemma3", "lfm2", "qwen35", "kimi-linear", "deepseek2", "gpt-oss")
TURNS = 6
RESULT = "The valve of pump {} reads 3.1 bar at 14:05; the reservoir stands at 71 %. "


@contextmanager
def server(path: Path, store: Path | None = None, prefix_cache_bytes: int = 64 << 20) -> Iterator[Caller]:
    store_options: dict[str, Any] = {"store": store} if store is not None else {}
    with quaff.load(path, threads=1, chunk=64, prefix_cache_bytes=prefix_cache_bytes, **store_options) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200, draft_tokens=8))
        service = Service(Settings("tiny", replies=store / "replies" if store is not None else None))
        service.open(llm)
        with calling(make_app(service)) as caller:
            yield caller
        service.close()


@dataclass
class Branch:
    """A conversation that grows. `sent`: tokens of its last prompt and the reply to it."""

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0

    def body(self, turn: int) -> dict[str, Any]:
        if not self.messages:
            self.messages = [{"role": "system", "content": f"You are {self.name}. " + RESULT.format(0) * 3}]
        self.messages.append({"role": "user", "content": RESULT.format(turn)})
        return {"messages": list(self.messages), "max_tokens": 12, "temperature": 0.7, "seed": turn, "logprobs": True, "top_logprobs": 5}


def reply(call: Caller, body: dict[str, Any]) -> dict[str, Any]:
    answer = call.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reads_only_what_is_new_and_answers_as_if_it_had_read_all(kind: str, tmp_path: Path) -> None:
    path, store = CASES[kind].write(tmp_path / "tiny.gguf"), tmp_path / "store"
    branches = [Branch("the agent"), Branch("its helper")]
    recorded: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def turns(call: Caller, numbers: range) -> None:
        for turn in numbers:
            for branch in branches:
                body = branch.body(turn)
                answer = reply(call, body)
                usage = answer["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 0.99 * branch.sent, (branch.name, turn, branch.sent, usage)
                branch.sent = usage["prompt_tokens"] + usage["completion_tokens"]
                branch.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                recorded.append((body, answer))

    with server(path, store) as call:
        turns(call, range(TURNS - 2))
    with server(path, store) as call:  # the same after a restart, from the disk
        turns(call, range(TURNS - 2, TURNS))
    with server(path, prefix_cache_bytes=0) as call:
        for body, answer in recorded:
            cold = reply(call, body)
            if cold["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]:
                assert cold["choices"] == answer["choices"]
                assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
