"""Long use leaves nothing behind: after the same crowd of requests has come again, with clients that hang up, all is as it was before."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import CASES
from tests.unit.serve.asgi import Caller, calling
from tests.unit.serve.holding import until

import quaff
from quaff import LLM
from quaff.engine.engine import Request
from quaff.engine.grammar import Constraint
from quaff.engine.pace import Policy
from quaff.engine.reader import Reader
from quaff.serve.answer import AnswerReader
from quaff.serve.app import make_app
from quaff.serve.generation import Generation
from quaff.serve.service import Service
from quaff.serve.settings import Settings
from quaff.serve.wire import EventStream

TOGETHER = 8
ROUND = 56
OF_ONE_REQUEST = (Request, Generation, Reader, AnswerReader, Constraint, EventStream)
"""What nobody may hold on to once its request has ended."""
SLACK_OBJECTS = 3
"""Fewer than the requests of any sort in a round: what each of them leaves is seen."""
WORDS = ("valve", "pump", "seven", "three", "bar", "reservoir", "seventy", "percent", "height")
PARAMETERS = {"type": "object", "properties": {"pump": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["pump"]}
SAMPLING = {"model": "tiny", "temperature": 0.8, "seed": 5}


@pytest.fixture(autouse=True)
def no_records() -> Iterator[None]:
    """Of a line that is logged the test runner keeps a record: one more object for every request, where another test turned lines on."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def asks(seed: int) -> Iterator[tuple[str, dict[str, Any] | bytes, int | None]]:
    """(path, body, after how many messages the client hangs up) of one round, the same for a seed."""
    rng = random.Random(seed)
    stem = text(rng, 30)
    tool = {"type": "function", "function": {"name": "gauge", "description": "Reads a gauge.", "parameters": PARAMETERS}}
    for i in range(ROUND):
        prompt = (stem if i % 3 else "") + text(rng, rng.choice([1, 12, 60]))
        talk = [{"role": "user", "content": prompt}]
        short = SAMPLING | {"max_tokens": rng.randint(1, 12)}
        # A reply that a client leaves is much longer than what is read of it: it never ends by itself.
        endless = SAMPLING | {"max_tokens": 2000, "ignore_eos": True}
        forced = {"tools": [tool], "tool_choice": "required", "max_tokens": 60, "stream": i % 2 == 0}
        plain = {"model": "tiny", "temperature": 0.0}
        sorts: list[tuple[str, dict[str, Any] | bytes, int | None]] = [
            ("/v1/chat/completions", short | {"messages": talk, "stream": True, "stream_options": {"include_usage": True}}, None),
            ("/v1/chat/completions", endless | {"messages": talk, "stream": True, "return_progress": True}, rng.randint(0, 5)),
            ("/v1/chat/completions", short | {"messages": talk, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["va"]}, None),
            ("/v1/chat/completions", SAMPLING | forced | {"messages": talk}, None),
            ("/v1/chat/completions", b'{"messages": [', None),
            ("/v1/completions", endless | {"prompt": prompt, "n": 3, "stream": True}, rng.randint(1, 6)),
            ("/v1/completions", endless | {"prompt": [prompt, prompt + " and"]}, 0),
            ("/v1/completions", short | {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}, None),
            ("/v1/completions", short | {"prompt": "x " * 5000}, None),
            ("/v1/messages", plain | {"messages": talk, "max_tokens": 6, "stream": True}, rng.choice([None, 2])),
            ("/v1/responses", plain | {"input": prompt, "max_output_tokens": 6, "stream": i % 2 == 1}, None),
            ("/v1/embeddings", {"model": "tiny", "input": [prompt, prompt]}, rng.choice([None, 0])),
        ]
        yield sorts[i % len(sorts)]


@dataclass
class Served:
    """A server without a socket, and its model."""

    call: Caller
    service: Service
    llm: LLM

    def round(self, seed: int) -> Counter[int]:
        """How often each status came; 0 where a client hung up before there was one."""
        queue, statuses = list(asks(seed)), Counter[int]()

        async def client() -> None:
            while queue:
                path, body, most = queue.pop()
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                sent = await self.call.visit("POST", path, data, most=most)
                statuses[sent[0]["status"] if sent else 0] += 1

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(TOGETHER)))

        self.call.loop.run_until_complete(clients())
        until(self.idle)
        return statuses

    def idle(self) -> bool:
        """Whether everything that was begun has ended; what the event loop has to do is done first."""
        self.call.loop.run_until_complete(asyncio.sleep(0))
        loop = self.service.loop
        return not (loop.running or loop.waiting or loop._clients or asyncio.all_tasks(self.call.loop))

    def objects(self) -> Counter[type]:
        """What lives by type, the cached prefixes apart: how much of a reply is cached depends on when its client hung up."""
        prefix = self.llm.engine.prefix
        assert prefix is not None
        self.llm.engine.call(prefix.clear)
        gc.collect()
        until(self.idle)
        gc.collect()
        return Counter(type(o) for o in gc.get_objects())


@pytest.fixture(scope="module", params=["llama-gqa", "lfm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = CASES[request.param].write(tmp_path_factory.mktemp("endurance") / "tiny.gguf")
    with quaff.load(path, threads=1, chunk=64, prefix_cache_bytes=1 << 20) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=200, draft_tokens=8))
        service = Service(Settings("tiny", max_tokens=24))
        service.open(llm)
        with calling(make_app(service)) as call:
            # One thread: others come when they are needed, which may be at any time, and would look like something left behind.
            call.loop.set_default_executor(ThreadPoolExecutor(1))
            yield Served(call, service, llm)
        service.close()


def test_requests_leave_nothing_behind(served: Served) -> None:
    engine, cache = served.llm.engine, served.llm.engine.cache
    assert engine.prefix is not None
    # Twice: caches that hold what comes again are full, and every path has been walked.
    statuses = served.round(1) + served.round(1)
    assert set(statuses) <= {0, 200, 400} and statuses[200] > ROUND and statuses[400] > ROUND // 12
    before, threads, used = served.objects(), threading.active_count(), served.llm.accountant.used_bytes
    totals = [before.total()]
    for _ in range(3):
        served.round(1)
        assert cache.sequences == 0 and not engine._requests and not engine._followers and not engine._orphans
        assert 0 < cache.held_bytes == engine.prefix.used_bytes <= engine.prefix.cap_bytes
        after = served.objects()
        totals.append(after.total())
    assert engine.prefix.counters.evicted_bytes > 0, "the cap was reached"
    assert cache.held_bytes == 0 and served.llm.accountant.used_bytes == used
    assert threading.active_count() <= threads
    assert not [kind.__name__ for kind in OF_ONE_REQUEST if after[kind]]
    # What requests leave behind they leave in every round; what is made once, such as the count of a status that is new, in one of them.
    more = {kind.__name__: n for kind, n in (after - before).items()}
    assert min(b - a for a, b in pairwise(totals)) <= SLACK_OBJECTS, (totals, more)


def test_what_is_left_behind_is_seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one kind of object that someone holds on to, of one sort of request, is more than the slack."""
    served.round(1)
    before, held = served.objects(), []
    keep = Constraint.__init__

    def kept(self: Constraint, *args: Any) -> None:
        keep(self, *args)
        held.append([self])

    monkeypatch.setattr(Constraint, "__init__", kept)
    served.round(1)
    after = served.objects()
    assert after[Constraint] == len(held) > 0
    assert sum(after.values()) - sum(before.values()) > SLACK_OBJECTS
