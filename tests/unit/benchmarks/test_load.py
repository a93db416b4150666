"""The load benchmark: its trace is the same every time, and it counts what a stream says, errors included."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import httpx
import pytest
from benchmarks.load import Ask, Watch, complete, evicted_bytes, failures, percentile, quaff_command, trace

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


# Memory


def test_memory_is_sampled_and_the_cache_watched_until_it_is_full() -> None:
    sizes, evicted = iter([100, 150, 200, 203, 202]), iter([0, 0, 5])

    class Process:
        def memory_info(self) -> object:
            return type("Info", (), {"rss": next(sizes) << 20})

    def metrics(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/metrics"
        return httpx.Response(200, text=f'# TYPE x\nquaff:prefix_cache_evicted_bytes_total{{model_name="m"}} {next(evicted)}.0\n')

    async def run() -> Watch:
        watch = Watch(Process(), 0.0)
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(metrics)) as client:
            with pytest.raises(RuntimeError):  # the process has no more sizes
                await watch.sample(client)
        return watch

    report = asyncio.run(run()).report()
    assert report["series_mib"] == [100, 150, 200, 203, 202] and report["samples_since"] == 2
    assert (report["least_bytes"], report["most_bytes"]) == (202 << 20, 203 << 20)
    assert report["spread"] == pytest.approx(1 / 202)


def test_a_server_that_does_not_count_is_no_server_of_ours() -> None:
    with pytest.raises(SystemExit, match="does not count"):
        evicted_bytes("vllm:prefix_cache_hits_total 3.0")


GOOD = {
    "requests": 9,
    "errors": [],
    "p99_gap_seconds": 0.39,
    "repeated_alone": 3,
    "different_alone": 0,
    "resident": {"spread": 0.019, "least_bytes": 1000 << 20, "most_bytes": 1019 << 20},
}


def test_a_good_run_passes() -> None:
    assert failures(GOOD, 200) == failures(GOOD | {"peer": {"ratio": 1.6}}, 200) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"errors": ["boom"]}, "1 of 9 requests failed, the first: boom"),
        ({"different_alone": 1}, "1 of 3 replies differ"),
        ({"repeated_alone": 0}, "0 of 0 replies"),
        ({"p99_gap_seconds": 0.41}, "longer than 0.410 s"),
        ({"resident": {"spread": None}}, "not full before the end"),
        ({"resident": {"spread": 0.021, "least_bytes": 1000 << 20, "most_bytes": 1021 << 20}}, "not flat: 1000 to 1021 MiB"),
        ({"peer": {"ratio": 1.4}}, "1.40 times"),
    ],
)
def test_a_bad_run_fails(change: dict[str, object], words: str) -> None:
    (line,) = failures(GOOD | change, 200)
    assert words in line


def test_the_server_gets_its_options() -> None:
    command = quaff_command("m", 1, 200, 2, "1GiB")
    assert command[command.index("--prefix-cache") + 1] == "1GiB" and command[command.index("--store") + 1] == "off"
