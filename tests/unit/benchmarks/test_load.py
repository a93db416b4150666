"""The load benchmark: its trace is the same every time, and it counts what a stream says, errors included."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import httpx
from benchmarks.load import Ask, complete, percentile, trace

ASK = Ask("a b c", 2, 0.0, 1)


def events(*values: object) -> bytes:
    return b"".join(f"data: {json.dumps(value)}\n\n".encode() for value in values) + b"data: [DONE]\n\n"


def answer(reply: httpx.Response) -> object:
    async def run() -> object:
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(lambda request: reply)) as client:
            return await complete(client, ASK)

    return asyncio.run(run())


def test_the_trace_is_the_same_for_a_seed() -> None:
    one, same, other = (list(islice(trace(seed), 20)) for seed in (1, 1, 2))
    assert one == same != other
    lengths = [len(ask.prompt.split()) for ask in islice(trace(3), 300)]
    assert min(lengths) < 60 and max(lengths) > 2000


def test_a_stream_is_counted() -> None:
    pieces = [{"choices": [{"text": t}]} for t in ("x", "", "y")]
    got = answer(
        httpx.Response(200, content=b": ping\n\n" + events(*pieces, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}))
    )
    assert (got.text, got.prompt_tokens, got.new_tokens, len(got.gaps), got.error) == ("xy", 3, 2, 1, None)


def test_what_goes_wrong_is_an_error() -> None:
    assert "status 429" in answer(httpx.Response(429, content=b"later")).error
    assert "boom" in answer(httpx.Response(200, content=events({"error": {"message": "boom"}}))).error
    assert "without its counts" in answer(httpx.Response(200, content=events({"choices": [{"text": "x"}]}))).error


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(100))), 0.99) == 99.0
