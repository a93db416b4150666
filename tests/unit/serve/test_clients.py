"""Clients that hang up, wait, crowd or dawdle. Steps are held by an event where a test needs one to last."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from tests.unit.serve.asgi import calling
from tests.unit.serve.conftest import WAIT_SECONDS, Live, serving
from tests.unit.serve.holding import held, post, until
from uvicorn.server import ServerState

import quaff
from quaff import SamplingParams
from quaff.errors import QueueFullError
from quaff.serve.app import make_app
from quaff.serve.generation import Generation
from quaff.serve.protocol import protocol_class
from quaff.serve.service import Service
from quaff.serve.settings import Settings

QUICK = Settings("tiny", max_tokens=24, queue=2, ping_seconds=0.05, stuck_seconds=2, header_seconds=0.3, body_seconds=0.3, drain_seconds=1)
LONG = [{"role": "user", "content": "word " * 500}]


def body(path: str, text: str, tokens: int = 5) -> dict[str, Any]:
    """A request of a path whose prompt is a text, or a conversation of that text."""
    user = [{"role": "user", "content": text}]
    return {"model": "tiny", "temperature": 0} | {
        "/v1/chat/completions": {"messages": user, "max_tokens": tokens},
        "/v1/completions": {"prompt": text, "max_tokens": tokens},
        "/v1/messages": {"messages": user, "max_tokens": tokens},
        "/v1/responses": {"input": user, "max_output_tokens": tokens},
    }[path]


SAID: dict[str, Callable[[dict[str, Any]], tuple[str, int]]] = {
    "/v1/chat/completions": lambda r: (r["choices"][0]["message"]["content"], r["usage"]["prompt_tokens_details"]["cached_tokens"]),
    "/v1/completions": lambda r: (r["choices"][0]["text"], r["usage"]["prompt_tokens_details"]["cached_tokens"]),
    "/v1/messages": lambda r: (r["content"][0]["text"], r["usage"]["cache_read_input_tokens"]),
    "/v1/responses": lambda r: (r["output"][0]["content"][0]["text"], r["usage"]["input_tokens_details"]["cached_tokens"]),
}
"""Of a path's reply: (text, cached tokens)."""


def cold(live: Live, path: str, text: str) -> str:
    """What the answer is where nothing is cached."""
    path = path if path == "/v1/completions" else "/v1/chat/completions"
    reply = httpx.post(f"{live.url}{path}", json=body(path, text) | {"cache_salt": f"cold {text[:60]}"}, timeout=WAIT_SECONDS)
    said, cached = SAID[path](reply.json())
    assert not cached
    return said


LAST_EVENT = {
    "/v1/chat/completions": "[DONE]",
    "/v1/completions": "[DONE]",
    "/v1/messages": '"type":"message_stop"',
    "/v1/responses": '"output_tokens":',
}


def heard(lines: Iterator[str], pings: int) -> None:
    """Read a stream up to so many pings."""
    while pings:
        pings -= next(lines) in (": ping", "event: ping")


@pytest.fixture(scope="module")
def quick(tiny: Path) -> Iterator[Live]:
    with serving(tiny, QUICK, prefix_cache_bytes=8 << 20) as live:
        yield live


# client gone


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", SAID)
def test_client_gone_is_noticed_within_one_chunk_and_the_retry_goes_on_from_there(quick: Live, path: str, stream: bool) -> None:
    """Client gone (ds4 333): a prefill that nobody waits for ends, what was read is kept, and the retry resumes."""
    text = f"{path} {stream} " * 40
    with held(quick, first=3) as hold:
        sock = post(quick, path, body(path, text) | {"stream": stream})
        until(lambda: hold.steps == 3)
        (request,) = quick.llm.engine._requests.values()
        sock.close()
        until(lambda: request.cancelled)
        hold.let_go()
        until(lambda: request.done)
        assert hold.steps == 3 and request.finish_reason == "cancelled"
        kept = request.computed
        assert request.cached_tokens + 2 * quick.llm.chunk <= kept < request.prompt_tokens
    reply = httpx.post(f"{quick.url}{path}", json=body(path, text), timeout=WAIT_SECONDS)
    assert SAID[path](reply.json()) == (cold(quick, path, text), kept)


def test_what_a_client_that_is_gone_had_read_serves_those_who_waited_for_it(quick: Live) -> None:
    """Client gone (ds4 333): of two that come with one prompt the first reads it and leaves; the second goes on from there."""
    asked = body("/v1/completions", "together " * 90)
    with held(quick, first=3) as hold, ThreadPoolExecutor(1) as pool:
        sock = post(quick, "/v1/completions", asked)
        until(lambda: hold.steps == 3)
        (request,) = quick.llm.engine._requests.values()
        second = pool.submit(httpx.post, f"{quick.url}/v1/completions", json=asked, timeout=WAIT_SECONDS)
        until(lambda: quick.service.loop.waiting == 1)
        sock.close()
        until(lambda: request.cancelled)
        hold.let_go()
        text, cached = SAID["/v1/completions"](second.result().json())
    assert 2 * quick.llm.chunk <= request.computed == cached < request.prompt_tokens
    assert text == cold(quick, "/v1/completions", asked["prompt"])


def test_client_gone_before_its_turn_is_never_computed(quick: Live) -> None:
    """Client gone (ds4 333), while it waited in the queue."""
    with held(quick) as hold:
        first = post(quick, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        until(lambda: hold.steps == 1)
        sock = post(quick, "/v1/completions", {"prompt": "left " * 90})
        until(lambda: quick.service.loop.waiting == 1)
        request = quick.service.loop._inbox[0].request
        sock.close()
        until(lambda: request.cancelled)
        hold.let_go()
        until(lambda: request.done)
    assert (request.finish_reason, request.computed) == ("cancelled", 0)
    first.close()


def test_a_client_that_leaves_a_stream_ends_it(quick: Live) -> None:
    with quick.client.chat.completions.create(
        model="tiny", messages=LONG, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        (request,) = quick.llm.engine._requests.values()
    until(lambda: request.done)
    assert request.finish_reason == "cancelled" and request.generated < 3000


# silence


@pytest.mark.parametrize("path", SAID)
def test_headers_and_pings_come_while_the_prompt_is_read(quick: Live, path: str) -> None:
    """Silence (cline 13843, opencode 49044): clients give up on a healthy prefill that says nothing."""
    asked = body(path, "word " * 500, tokens=2) | {"stream": True}
    with held(quick) as hold, httpx.stream("POST", f"{quick.url}{path}", json=asked, timeout=WAIT_SECONDS) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        heard(lines, pings=3)
        assert hold.steps <= 1
        hold.let_go()
        rest = [line for line in lines if line.startswith("data:")]
    assert LAST_EVENT[path] in rest[-1] and len(rest) >= 2


class SlowDisk:
    """Prefixes do not come from it until `let_go`."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self._ready = threading.Event(), threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(live.llm, "restore", self._restore)

    def _restore(self, tokens: object, salt: str) -> int:
        self.asked.set()
        assert self._ready.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        return 0

    def let_go(self, error: Exception | None = None) -> None:
        self.error = error
        self._ready.set()


@pytest.mark.parametrize("path", SAID)
def test_headers_and_pings_come_while_a_prefix_comes_from_a_slow_disk(quick: Live, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence (cline 13843, opencode 49044), before the request is in the queue."""
    disk = SlowDisk(quick, monkeypatch)
    asked = body(path, "word " * 50, tokens=2) | {"stream": True}
    with httpx.stream("POST", f"{quick.url}{path}", json=asked, timeout=WAIT_SECONDS) as reply:
        lines = reply.iter_lines()
        heard(lines, pings=2)
        disk.let_go()
        assert LAST_EVENT[path] in [line for line in lines if line.startswith("data:")][-1]


def test_what_goes_wrong_behind_a_slow_disk_is_told(quick: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, url = body("/v1/completions", "x"), f"{quick.url}/v1/completions"
    disk = SlowDisk(quick, monkeypatch)
    with httpx.stream("POST", url, json=asked | {"stream": True}, timeout=WAIT_SECONDS) as reply:
        lines = reply.iter_lines()
        heard(lines, pings=1)
        disk.let_go(QueueFullError("too many", 3))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["error"]["code"] for event in events] == ["queue_full"]
    answer = httpx.post(url, json=asked, timeout=WAIT_SECONDS)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"


def test_client_gone_while_its_prefix_comes_from_a_slow_disk(quick: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client gone (ds4 333): nothing is computed for it when its prefix is there."""
    disk, left = SlowDisk(quick, monkeypatch), threading.Event()
    cancel, submit, requests = Generation.cancel, quick.service.loop.submit, []

    def cancelled(generation: Generation) -> None:
        cancel(generation)
        if generation._request is None:
            left.set()

    def submitted(*args: Any, **options: Any) -> Any:
        requests.append(submit(*args, **options))
        return requests[-1]

    monkeypatch.setattr(Generation, "cancel", cancelled)
    monkeypatch.setattr(quick.service.loop, "submit", submitted)
    sock = post(quick, "/v1/completions", body("/v1/completions", "gone " * 90))
    assert disk.asked.wait(WAIT_SECONDS)
    sock.close()
    assert left.wait(WAIT_SECONDS)
    disk.let_go()
    until(lambda: bool(requests) and requests[0].done)
    assert (requests[0].finish_reason, requests[0].computed) == ("cancelled", 0)


def test_a_wedged_loop_turns_health_to_503(quick: Live) -> None:
    def health() -> httpx.Response:
        return httpx.get(f"{quick.url}/health", timeout=WAIT_SECONDS)

    assert health().status_code == 200 and health().json() == {"status": "ok"}
    with held(quick) as hold:
        sock = post(quick, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        until(lambda: hold.steps == 1 and health().status_code == 503)
        assert "no sign of life" in health().json()["error"]["message"]
        hold.let_go()
        until(lambda: health().status_code == 200)
        sock.close()


# crowds


def test_a_full_queue_is_429_with_a_time_to_come_back(quick: Live) -> None:
    with held(quick) as hold:
        first = post(quick, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        until(lambda: hold.steps == 1)
        waiting = []
        for n in (1, 2):
            waiting.append(post(quick, "/v1/completions", {"prompt": "x", "max_tokens": 1}))
            until(lambda n=n: quick.service.loop.waiting == n)
        with pytest.raises(openai.RateLimitError) as caught:
            quick.client.completions.create(model="tiny", prompt="x")
        assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            quick.client.completions.create(model="tiny", prompt="x", n=2)
    for sock in (first, *waiting):
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        sock.close()


def test_a_reply_is_the_one_that_its_request_gets_alone(live: Live) -> None:
    prompts = ["a b c " * n for n in (1, 90, 3, 200, 7, 40)]
    params = [SamplingParams(max_tokens=16, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(prompts))]
    expected = [live.llm.generate(prompt, p).text for prompt, p in zip(prompts, params, strict=True)]

    def ask(i: int) -> str:
        extra = {"ignore_eos": True}
        reply = live.client.completions.create(model="tiny", prompt=prompts[i], max_tokens=16, temperature=0.9, seed=i, extra_body=extra)
        return reply.choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(ask, range(len(prompts)))) == expected


# slow clients


@pytest.mark.parametrize("head", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: "])
def test_headers_that_never_come_end_the_connection(quick: Live, head: bytes) -> None:
    with socket.create_connection(quick.address, timeout=WAIT_SECONDS) as sock:
        sock.sendall(head)
        assert sock.recv(100) == b""


def test_a_body_that_never_comes_is_408(quick: Live) -> None:
    with socket.create_connection(quick.address, timeout=WAIT_SECONDS) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        answer = b"".join(iter(lambda: sock.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b'"timeout_error"' in answer


def test_a_connection_may_wait_between_two_requests_but_not_within_one(quick: Live) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(quick.address, timeout=WAIT_SECONDS) as sock:
        for _ in range(2):
            sock.sendall(get)
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(2 * QUICK.header_seconds)
        sock.sendall(get[:10])
        assert sock.recv(100) == b""


def test_a_client_that_does_not_read_is_cut_off() -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

        def close(self) -> None:
            pass

    async def run(pauses: float) -> bool:
        config = uvicorn.Config(make_app(Service(QUICK)), log_config=None)
        protocol = protocol_class(Settings("tiny", write_seconds=0.05))(config=config, server_state=ServerState(), app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        protocol.pause_writing()
        await asyncio.sleep(pauses)
        protocol.resume_writing()
        await asyncio.sleep(0.1)
        protocol.connection_lost(None)
        return transport.aborted

    assert asyncio.run(run(0.2)) and not asyncio.run(run(0.0))


# connections that stay, and that break


def generations_of(live: Live) -> int:
    gc.collect()
    return sum(type(o) is Generation and o._llm is live.llm for o in gc.get_objects())


@pytest.mark.parametrize("stream", [True, False])
def test_an_open_connection_keeps_nothing_of_its_last_request(quick: Live, stream: bool) -> None:
    with httpx.Client(base_url=quick.url, timeout=WAIT_SECONDS) as client:
        reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": stream})
        assert reply.status_code == 200
        until(lambda: generations_of(quick) == 0)
        # The control: what is held is seen.
        until(lambda: not quick.service.loop.running)
        with held(quick) as hold:
            sock = post(quick, "/v1/completions", {"prompt": "x", "max_tokens": 2})
            until(lambda: hold.steps == 1)
            assert generations_of(quick) == 1
            sock.close()


def test_a_connection_that_breaks_between_requests_leaves_no_timer() -> None:
    async def run() -> bool:
        config = uvicorn.Config(make_app(Service(QUICK)), log_config=None)
        protocol = protocol_class(QUICK)(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(asyncio.Transport())
        timer = protocol.timeout_keep_alive_task = asyncio.get_running_loop().call_later(60, lambda: None)
        protocol.connection_lost(ConnectionResetError())
        return timer.cancelled()

    assert asyncio.run(run())


# the end


def test_on_the_way_out_an_answer_ends_or_says_that_it_was_cut_off(tiny: Path) -> None:
    with serving(tiny, QUICK) as live, held(live) as hold:
        body = {"messages": LONG, "stream": True, "max_tokens": 2}
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS) as reply:
            until(lambda: hold.steps == 1)
            live.stop()
            until(lambda: live.service._closing)
            hold.let_go()
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        assert events[-1]["error"]["type"] == "overloaded_error" and "shutting down" in events[-1]["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_an_answer_that_is_there_is_sent_whole_though_the_server_is_closed(tiny: Path, path: str) -> None:
    service = Service(QUICK)
    service.open(quaff.load(tiny, threads=1, chunk=64))
    app = make_app(service)
    closed = False

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        async def late(message: Message) -> None:
            nonlocal closed
            if message["type"] == "http.response.body" and not closed:
                closed = True
                while service.loop.waiting or service.loop.running:
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(service.close)
            await send(message)

        await app(scope, receive, late)

    more = {"stream": True, "ignore_eos": True, "logprobs": 1 if path == "/v1/completions" else True}
    with calling(slow) as call:
        answer = call.post(path, body(path, "hi") | more)
    assert closed and answer.status == 200 and b'"error":{' not in answer.body
    assert any(
        end in answer.body for end in (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
    )


def test_what_the_first_grammar_needs_is_made_before_anyone_asks_for_it(quick: Live) -> None:
    until(lambda: quick.service.dialogue.grammars._words is not None)
