"""An agent's sessions against a live server: every turn sends all of the conversation again, and only what is new may cost.

Two conversations share a system prompt and take turns, a main agent and a helper of its: each turn appends the answer as it came and the
result of a tool. Counted: which share of the tokens that were sent before came from the cache, and the time to the first token beside what
`quaff bench -d DEPTH -p NEW` takes for the same work; then the server is stopped and started, and the last turns are sent again.

    python -m benchmarks.sessions smollm2
    python -m benchmarks.sessions model.gguf --turns 20 --first 2000 --last 40000

Needs the extras serve and test (httpx). The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import httpx
from benchmarks.load import READY_SECONDS, TEXT, TOKENS_PER_WORD, free_port, serving

ANSWER_TOKENS = 24
BRANCHES = ("main", "helper")
SYSTEM_SHARE = 0.75  # of the first turn's tokens


@dataclass
class Turn:
    """`sent_before` of the `prompt` tokens were in the turn before or in its answer; `cached` of all came from the cache."""

    branch: str
    prompt: int
    sent_before: int
    cached: int
    first_seconds: float
    tokenise_seconds: float
    bench_seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        return min(1.0, self.cached / self.sent_before) if self.sent_before else 1.0

    @property
    def ratio(self) -> float:
        """Time to the first token over that of the bench and of tokenising."""
        return self.first_seconds / (self.bench_seconds + self.tokenise_seconds)


class Conversation:
    def __init__(self, branch: str, seed: int, system: str, first_words: int) -> None:
        self.branch = branch
        self.rng = random.Random(seed)
        self.messages = [{"role": "system", "content": system}, {"role": "user", "content": words(self.rng, first_words)}]
        self.sent = 0

    def turn(self, client: httpx.Client, model: str) -> Turn:
        """Send all of it and keep the answer."""
        body = {"model": model, "messages": self.messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        tokenise_seconds = tokenising(client, self.messages)
        first, text, usage = 0.0, "", {}
        began = time.perf_counter()
        with client.stream(
            "POST", "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"error: status {reply.status_code}: {reply.read().decode(errors='replace')}")
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if piece := "".join(c["delta"].get("content") or "" for c in event.get("choices", ())):
                    first, text = first or time.perf_counter() - began, text + piece
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        done = Turn(self.branch, prompt, self.sent, cached, first, tokenise_seconds)
        self.sent = prompt + usage["completion_tokens"]
        self.messages.append({"role": "assistant", "content": text})
        return done

    def tool_result(self, count: int) -> None:
        self.messages.append({"role": "user", "content": f"Result of the tool:\n{words(self.rng, count)}"})


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(TEXT.read_text(encoding="utf-8").split(), k=count))


def tokenising(client: httpx.Client, messages: list[dict[str, str]]) -> float:
    """Seconds that rendering the template and making tokens of it take, by the server's own endpoints."""
    began = time.perf_counter()
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    client.post("/tokenize", json={"content": prompt})
    return time.perf_counter() - began


def bench_seconds(model: str, threads: int, turns: list[Turn]) -> None:
    """What `quaff bench` takes for the tokens that each turn computed, after those that it found."""
    for turn in turns:
        new = max(1, turn.prompt - turn.cached)
        command = [sys.executable, "-m", "quaff", "bench", model, "-p", str(new), "-n", "0", "-d", str(turn.cached), "-r", "3", "--json"]
        done = subprocess.run([*command, "-t", str(threads)], capture_output=True, text=True, check=True)
        rows = json.loads(done.stdout)["results"]
        turn.bench_seconds = new / next(row["median_tokens_per_second"] for row in rows if row["test"].startswith("pp"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--first", type=int, default=2000, help="tokens of the first turn")
    parser.add_argument("--last", type=int, default=7500, help="tokens of the last turn")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    each = round((args.last - args.first) / max(1, args.turns - 1) - ANSWER_TOKENS)
    system = words(random.Random(0), round(SYSTEM_SHARE * args.first / TOKENS_PER_WORD))
    talks = [Conversation(b, i + 1, system, round((1 - SYSTEM_SHARE) * args.first / TOKENS_PER_WORD)) for i, b in enumerate(BRANCHES)]
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as store:
        again = []
        for part in ("session", "restarted"):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = [
                sys.executable,
                "-m",
                "quaff",
                "serve",
                args.model,
                "--port",
                str(port),
                "--threads",
                str(args.threads),
                "--store",
                store,
            ]
            with serving(command, url), httpx.Client(base_url=url, timeout=READY_SECONDS) as client:
                if part == "session":
                    for n in range(args.turns):
                        for talk in talks:
                            if n:
                                talk.tool_result(round(each / TOKENS_PER_WORD))
                            turns.append(talk.turn(client, args.model))
                            show(turns[-1])
                else:
                    for talk in talks:
                        talk.tool_result(round(min(each, 128) / TOKENS_PER_WORD))
                        again.append(talk.turn(client, args.model))
                        show(again[-1])
    bench_seconds(args.model, args.threads, turns + again)
    later = [t for t in turns if t.sent_before]
    report = {
        "turns": len(turns),
        "prompt_tokens": [t.prompt for t in turns],
        "least_cached_share": min(t.cached_share for t in later),
        "ratios": [round(t.ratio, 3) for t in later],
        "median_ratio": sorted(t.ratio for t in later)[len(later) // 2],
        "largest_ratio": max(t.ratio for t in later),
        "restarted_cached_share": min(t.cached_share for t in again),
        "restarted_ratios": [round(t.ratio, 3) for t in again],
    }
    for key, value in report.items():
        print(f"{key:>24}: {value}")
    print(json.dumps(report))


def show(turn: Turn) -> None:
    share = f"{turn.cached_share:.1%} of {turn.sent_before} sent before"
    print(
        f"{turn.branch:>7}: {turn.prompt} tokens, {turn.cached} cached ({share}), first token after {turn.first_seconds:.3f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
