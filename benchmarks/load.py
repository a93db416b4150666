"""Many clients at once: a server under streams of completions, beside llama.cpp's server on the same trace.

Every stream sends one request after another: a prompt of 50 to 4,000 tokens (shuffled words of a text, so that no cache of prefixes helps
anyone), greedy or seeded, 16 to 96 new tokens, streamed. Counted: errors, the pauses between pieces of a running stream, tokens per second,
and the server's resident memory once a second: it grows until the prefix cache has to give up its first bytes, and is to be flat from then
on. At the end some requests are sent again alone, and their replies must be the same.

    python -m benchmarks.load smollm2                    # five minutes, then the comparison
    python -m benchmarks.load smollm2 --seconds 90 --streams 4 --prefix-cache 512MiB --no-peer

The cache must be larger than what the streams hold at once, or its size is not what bounds the memory. The last line of output is one JSON
object; what does not hold is told before it, and the exit code is 1. Needs the extras serve, test (httpx, psutil) and, for the comparison,
peers (xllamacpp).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from quaff import hub

TEXT = Path(__file__).parents[1] / "examples" / "waterworks.md"
TOKENS_PER_WORD = 1.17  # of shuffled English words
READY_SECONDS = 300
REPEATED = 12
FLAT_SHARE = 0.02
STALLS = 2  # pauses may be so many times --max-stall-ms, all but one in a hundred
PEER_RATIO = 1.5


@dataclass(frozen=True)
class Ask:
    """One request of the trace."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Answer:
    """What came back: text, pauses between its pieces in seconds, and both counts of tokens."""

    ask: Ask
    text: str = ""
    first_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str | None = None


@dataclass
class Watch:
    """Resident bytes of a server, one sample every `seconds`; the first `full` of them came before its prefix cache was full."""

    process: psutil.Process
    seconds: float = 1.0
    resident: list[int] = field(default_factory=list)
    full: int | None = None

    async def sample(self, client: httpx.AsyncClient) -> None:
        """Until it is cancelled."""
        began = time.perf_counter()
        while True:
            self.resident.append(self.process.memory_info().rss)
            if self.full is None and evicted_bytes((await client.get("/metrics")).text):
                self.full = len(self.resident)
            await asyncio.sleep(max(0.0, began + len(self.resident) * self.seconds - time.perf_counter()))

    def report(self) -> dict[str, Any]:
        """`spread`: largest over smallest sample since the cache was full, less one; None when there are no two."""
        flat = self.resident[self.full :] if self.full is not None else []
        return {
            "full_after_seconds": None if self.full is None else self.full * self.seconds,
            "samples_since": len(flat),
            "least_bytes": min(flat, default=None),
            "most_bytes": max(flat, default=None),
            "spread": max(flat) / min(flat) - 1 if len(flat) > 1 else None,
            "series_mib": [n >> 20 for n in self.resident],
        }


def evicted_bytes(metrics: str) -> float:
    """What the prefix cache has given up, from the text of /metrics."""
    found = re.search(r"^quaff:prefix_cache_evicted_bytes_total\S* (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise SystemExit("error: the server does not count what its prefix cache gives up")
    return float(found[1])


def trace(seed: int, shortest: int = 50, longest: int = 4000) -> Iterator[Ask]:
    """Endless, the same for a seed; lengths are spread evenly over their logarithms."""
    rng, words = random.Random(seed), TEXT.read_text(encoding="utf-8").split()
    while True:
        tokens = shortest * (longest / shortest) ** rng.random()
        prompt = " ".join(rng.choices(words, k=max(1, round(tokens / TOKENS_PER_WORD))))
        yield Ask(prompt, rng.randint(16, 96), rng.choice((0.0, 0.8)), rng.getrandbits(31))


async def complete(client: httpx.AsyncClient, ask: Ask) -> Answer:
    answer, began = Answer(ask), time.perf_counter()
    last = 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=ask.body()) as reply:
            if reply.status_code != 200:
                answer.error = f"status {reply.status_code}: {(await reply.aread()).decode(errors='replace')[:200]}"
                return answer
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = json.dumps(event["error"])[:200]
                if usage := event.get("usage"):
                    answer.prompt_tokens, answer.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                if piece := "".join(choice.get("text") or "" for choice in event.get("choices", ())):
                    now = time.perf_counter()
                    if last:
                        answer.gaps.append(now - last)
                    else:
                        answer.first_seconds = now - began
                    last, answer.text = now, answer.text + piece
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.new_tokens and answer.error is None:
        answer.error = "the stream ended without its counts"
    return answer


async def play(url: str, asks: Iterator[Ask], streams: int, seconds: float, watch: Watch | None = None) -> list[Answer]:
    """Requests by `streams` clients until the trace ends or time is up, what is running then included."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=READY_SECONDS, limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def stream() -> None:
            while time.perf_counter() < end and (ask := next(asks, None)) is not None:
                answers.append(await complete(client, ask))

        sampler = asyncio.create_task(watch.sample(client)) if watch is not None else None
        await asyncio.gather(*(stream() for _ in range(streams)))
        if sampler is not None:
            if sampler.done():
                sampler.result()  # why it ended
            sampler.cancel()
    return answers


@contextmanager
def serving(command: list[str], url: str) -> Iterator[psutil.Process]:
    """A server in a process of its own, ready when the block begins."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + READY_SECONDS
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"error: the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def tokens_per_second(answers: list[Answer], seconds: float) -> float:
    """Tokens read and written over the time they took."""
    return sum(a.prompt_tokens + a.new_tokens for a in answers) / seconds


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


PEER = """
import sys, xllamacpp
model, port, streams, threads = sys.argv[1], *map(int, sys.argv[2:])
p = xllamacpp.CommonParams()
p.model.path, p.port, p.n_parallel, p.verbosity = model, port, streams, 0
p.n_ctx, p.n_batch = streams * 4608, 2048
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(p)
sys.stdin.read()
"""


def load(model: str, seconds: float, streams: int, stall_ms: int, threads: int, prefix_cache: str) -> dict[str, Any]:
    """The endurance run, and the same requests alone."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(quaff_command(model, port, stall_ms, threads, prefix_cache), url) as process:
        watch, began = Watch(process), time.perf_counter()
        answers = asyncio.run(play(url, trace(1), streams, seconds, watch))
        took = time.perf_counter() - began
        sound = [a for a in answers if a.error is None]
        again = asyncio.run(play(url, iter([a.ask for a in sound[:: max(1, len(sound) // REPEATED)]]), 1, READY_SECONDS))
    texts = {a.ask: a.text for a in sound}
    gaps = [gap for a in sound for gap in a.gaps]
    return {
        "requests": len(answers),
        "errors": [a.error for a in answers if a.error is not None],
        "tokens_per_second": tokens_per_second(sound, took),
        "p99_gap_seconds": percentile(gaps, 0.99),
        "largest_gap_seconds": max(gaps, default=0.0),
        "median_first_seconds": percentile([a.first_seconds for a in sound], 0.5),
        "resident": watch.report(),
        "repeated_alone": len(again),
        "different_alone": sum(a.text != texts[a.ask] for a in again),
    }


def quaff_command(model: str, port: int, stall_ms: int, threads: int, prefix_cache: str) -> list[str]:
    options = {"port": port, "max-stall-ms": stall_ms, "threads": threads, "prefix-cache": prefix_cache, "store": "off"}
    return [sys.executable, "-m", "quaff", "serve", model, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def failures(result: dict[str, Any], stall_ms: int) -> list[str]:
    """What does not hold of a result, one line each."""
    memory, out = result["resident"], []
    if result["errors"]:
        out.append(f"{len(result['errors'])} of {result['requests']} requests failed, the first: {result['errors'][0]}")
    if not result["repeated_alone"] or result["different_alone"]:
        out.append(f"{result['different_alone']} of {result['repeated_alone']} replies differ from those of the same requests alone")
    if result["p99_gap_seconds"] > STALLS * stall_ms / 1000:
        out.append(f"one pause in a hundred is longer than {result['p99_gap_seconds']:.3f} s: more than {STALLS} times {stall_ms} ms")
    if memory["spread"] is None:
        out.append("the prefix cache was not full before the end: run longer, or with a smaller --prefix-cache")
    elif memory["spread"] > FLAT_SHARE:
        out.append(f"resident memory is not flat: {memory['least_bytes'] >> 20} to {memory['most_bytes'] >> 20} MiB with a full cache")
    if (peer := result.get("peer")) is not None and peer["ratio"] < PEER_RATIO:
        out.append(f"{peer['ratio']:.2f} times the tokens per second of llama.cpp's server; {PEER_RATIO} are expected")
    return out


def compare(model: str, requests: int, streams: int, stall_ms: int, threads: int, prefix_cache: str, rounds: int) -> dict[str, Any]:
    """Both servers on one trace by turns, each in a new process; the median of the paired ratios of tokens per second counts."""
    path, speeds = hub.resolve(model), []
    for round_ in range(rounds):
        asks = [ask for ask, _ in zip(trace(100 + round_), range(requests), strict=False)]
        pair = {}
        for name in ("quaff", "llama_cpp")[:: 1 if round_ % 2 == 0 else -1]:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            peer = [sys.executable, "-c", PEER, str(path), str(port), str(streams), str(threads)]
            with serving(quaff_command(model, port, stall_ms, threads, prefix_cache) if name == "quaff" else peer, url):
                began = time.perf_counter()
                answers = asyncio.run(play(url, iter(asks), streams, READY_SECONDS))
                pair[name] = tokens_per_second([a for a in answers if a.error is None], time.perf_counter() - began)
                if errors := [a.error for a in answers if a.error is not None]:
                    print(f"{name}: {len(errors)} errors, the first: {errors[0]}", file=sys.stderr)
        print(f"round {round_ + 1} of {rounds}: quaff {pair['quaff']:.0f}, llama.cpp {pair['llama_cpp']:.0f} tokens/s", file=sys.stderr)
        speeds.append(pair)
    ratios = sorted(pair["quaff"] / pair["llama_cpp"] for pair in speeds)
    return {"rounds": speeds, "ratio": ratios[len(ratios) // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="what `quaff serve` takes")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-stall-ms", type=int, default=200)
    parser.add_argument("--prefix-cache", default="2GiB", help="of the server; more than all streams hold at once")
    parser.add_argument("--requests", type=int, default=48, help="of one round of the comparison")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    args = parser.parse_args()
    options = (args.streams, args.max_stall_ms, args.threads, args.prefix_cache)
    result = load(args.model, args.seconds, *options)
    for key, value in result.items():
        print(f"{key:>22}: {value}")
    if not args.no_peer:
        result["peer"] = compare(args.model, args.requests, *options, args.rounds)
        print(f"llama.cpp's server on the same trace: {result['peer']['ratio']:.2f}x, median of {args.rounds} paired rounds")
    failed = failures(result, args.max_stall_ms)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    print(json.dumps(result))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
