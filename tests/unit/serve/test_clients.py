"""Clients that hang up, wait, crowd or dawdle. Steps are held by an event where a test needs one to last."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from tests.unit.serve.conftest import WAIT_SECONDS, Live, serving
from tests.unit.serve.holding import held, post, until
from uvicorn.server import ServerState

from quaff import SamplingParams
from quaff.serve.app import make_app
from quaff.serve.protocol import protocol_class
from quaff.serve.service import Service
from quaff.serve.settings import Settings

QUICK = Settings("tiny", max_tokens=24, queue=2, ping_seconds=0.05, stuck_seconds=2, header_seconds=0.3, body_seconds=0.3, drain_seconds=1)
LONG = [{"role": "user", "content": "word " * 500}]


@pytest.fixture(scope="module")
def quick(tiny: Path) -> Iterator[Live]:
    with serving(tiny, QUICK, prefix_cache_bytes=8 << 20) as live:
        yield live


# client gone


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_is_noticed_within_one_chunk_and_the_retry_goes_on_from_there(quick: Live, stream: bool) -> None:
    """Client gone (ds4 333): a prefill that nobody waits for ends, what was read is kept, and the retry resumes."""
    messages = [{"role": "user", "content": f"{stream} " * 100}]
    with held(quick, first=3) as hold:
        sock = post(quick, "/v1/chat/completions", {"messages": messages, "stream": stream})
        until(lambda: hold.steps == 3)
        (request,) = quick.llm.engine._requests.values()
        sock.close()
        until(lambda: request.cancelled)
        hold.let_go()
        until(lambda: request.done)
        assert hold.steps == 3 and request.finish_reason == "cancelled"
        kept = request.computed
        assert request.cached_tokens + 2 * quick.llm.chunk <= kept < request.prompt_tokens
    reply = quick.client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=5)
    assert reply.usage.prompt_tokens_details.cached_tokens == kept
    assert reply.choices[0].message.content == quick.llm.chat(messages, SamplingParams(max_tokens=5)).text


def test_a_client_that_leaves_a_stream_ends_it(quick: Live) -> None:
    with quick.client.chat.completions.create(
        model="tiny", messages=LONG, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        (request,) = quick.llm.engine._requests.values()
    until(lambda: request.done)
    assert request.finish_reason == "cancelled" and request.generated < 3000


# silence


def test_headers_and_pings_come_while_the_prompt_is_read(quick: Live) -> None:
    """Silence (cline 13843, opencode 49044): clients give up on a healthy prefill that says nothing."""
    with held(quick) as hold:
        body = {"messages": LONG, "stream": True, "max_tokens": 2}
        with httpx.stream("POST", f"{quick.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS) as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.iter_lines()
            pings = [line for line, _ in zip((x for x in lines if x), range(3), strict=False)]
            assert pings == [": ping"] * 3
            hold.let_go()
            rest = [line for line in lines if line.startswith("data:")]
    assert rest[-1] == "data: [DONE]" and len(rest) >= 3


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
