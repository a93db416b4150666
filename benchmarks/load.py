"""Many clients at once: a server under streams of completions, beside llama.cpp's server on the same trace.

Every stream sends one request after another: a prompt of 50 to 4,000 tokens (shuffled words of a text, so that no cache of prefixes helps
anyone), greedy or seeded, 16 to 96 new tokens, streamed. Counted: errors, the pauses between pieces of a running stream, resident memory
over time, tokens per second; then some requests are sent again alone, and their replies must be the same.

    python -m benchmarks.load smollm2                    # five minutes, then the comparison
    python -m benchmarks.load smollm2 --seconds 60 --no-peer

Needs the extras serve, test (httpx, psutil) and, for the comparison, peers (xllamacpp). The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
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
SETTLED_SHARE = 0.4  # memory is compared from here on: caches and scratch have reached their sizes
PREFIX_CACHE = "256MiB"  # soon full


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


async def play(
    url: str, asks: Iterator[Ask], streams: int, seconds: float, watch: psutil.Process | None = None
) -> tuple[list[Answer], list[int]]:
    """Requests by `streams` clients until the trace ends or time is up, what is running then included; and resident bytes once a second."""
    answers: list[Answer] = []
    resident: list[int] = []
    end = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=READY_SECONDS, limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def stream() -> None:
            while time.perf_counter() < end and (ask := next(asks, None)) is not None:
                answers.append(await complete(client, ask))

        async def sample() -> None:
            while watch is not None:
                resident.append(watch.memory_info().rss)
                await asyncio.sleep(1)

        sampler = asyncio.create_task(sample())
        await asyncio.gather(*(stream() for _ in range(streams)))
        sampler.cancel()
    return answers, resident


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


def load(model: str, seconds: float, streams: int, stall_ms: int, threads: int) -> dict[str, Any]:
    """The endurance run, and the same requests alone."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(quaff_command(model, port, stall_ms, threads), url) as process:
        began = time.perf_counter()
        answers, resident = asyncio.run(play(url, trace(1), streams, seconds, process))
        took = time.perf_counter() - began
        sound = [a for a in answers if a.error is None]
        again, _ = asyncio.run(play(url, iter([a.ask for a in sound[:: max(1, len(sound) // REPEATED)]]), 1, READY_SECONDS))
    texts = {a.ask: a.text for a in sound}
    settled = resident[int(SETTLED_SHARE * len(resident)) :]
    gaps = [gap for a in sound for gap in a.gaps]
    return {
        "requests": len(answers),
        "errors": [a.error for a in answers if a.error is not None],
        "tokens_per_second": tokens_per_second(sound, took),
        "p99_gap_seconds": percentile(gaps, 0.99),
        "largest_gap_seconds": max(gaps, default=0.0),
        "median_first_seconds": percentile([a.first_seconds for a in sound], 0.5),
        "resident_growth": max(settled) / min(settled) - 1 if settled else 0.0,
        "resident_bytes": settled[-1] if settled else 0,
        "repeated_alone": len(again),
        "different_alone": sum(a.text != texts[a.ask] for a in again),
    }


def quaff_command(model: str, port: int, stall_ms: int, threads: int) -> list[str]:
    more = [
        "--port",
        str(port),
        "--max-stall-ms",
        str(stall_ms),
        "--threads",
        str(threads),
        "--prefix-cache",
        PREFIX_CACHE,
        "--store",
        "off",
    ]
    return [sys.executable, "-m", "quaff", "serve", model, *more]


def compare(model: str, requests: int, streams: int, stall_ms: int, threads: int, rounds: int) -> dict[str, Any]:
    """Both servers on one trace by turns, each in a new process; the median of the paired ratios of tokens per second counts."""
    path, speeds = hub.resolve(model), []
    for round_ in range(rounds):
        asks = [ask for ask, _ in zip(trace(100 + round_), range(requests), strict=False)]
        pair = {}
        for name in ("quaff", "llama_cpp")[:: 1 if round_ % 2 == 0 else -1]:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            peer = [sys.executable, "-c", PEER, str(path), str(port), str(streams), str(threads)]
            with serving(quaff_command(model, port, stall_ms, threads) if name == "quaff" else peer, url):
                began = time.perf_counter()
                answers, _ = asyncio.run(play(url, iter(asks), streams, READY_SECONDS))
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
    parser.add_argument("--requests", type=int, default=48, help="of one round of the comparison")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    args = parser.parse_args()
    result = load(args.model, args.seconds, args.streams, args.max_stall_ms, args.threads)
    for key, value in result.items():
        print(f"{key:>22}: {value}")
    if not args.no_peer:
        result["peer"] = compare(args.model, args.requests, args.streams, args.max_stall_ms, args.threads, args.rounds)
        print(f"llama.cpp's server on the same trace: {result['peer']['ratio']:.2f}x, median of {args.rounds} paired rounds")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
