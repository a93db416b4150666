"""Agents that send all of a conversation every turn: what is computed again, how soon does the first token come, and with which bits?

Agents share the beginning of their first prompt and take turns; each turn appends the answer as it came, and something new.

    python -m benchmarks.sessions smollm2                                    # against a live server
    python -m benchmarks.sessions smollm2 --below                            # in this process
    python -m benchmarks.sessions tiny --turns 20 --last 40000 --check 20    # so too, random models of every kind of layer

The server's times stand beside those of making tokens and of `quaff bench -d DEPTH -p NEW` for the same work; at last it is stopped and
started, and every agent goes on. Below the server each turn is read three ways: from the prefix cache in memory; from the disk, by a model
that was loaded anew; and, what their times stand beside, behind a state of all tokens that were there before. Logits and states of some
turns are compared with those of a cold run.

Needs the extras serve and test (httpx). The last line of output is one JSON object. Exit status 1: less than 99 % of the tokens sent
again were cached, or a byte was not that of a cold run. Times are reported, not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import numpy as np
from benchmarks.load import READY_SECONDS, TEXT, TOKENS_PER_WORD, free_port, serving

import quaff
from quaff import LLM, SamplingParams
from quaff.llm import State

TINY = ("llama-gqa", "gemma3", "gpt-oss", "lfm2", "qwen35", "kimi-linear", "deepseek2")
CACHED_SHARE = 0.99
CACHE_BYTES = 4 << 30
SHARED_SHARE = 0.75  # of the first prompt, by all agents
RESTARTED_TOKENS = 128  # that are new after the restart, at most


@dataclass(frozen=True)
class Session:
    """What is played: `turns` of each agent, prompts of `first` to `last` tokens, answers of `reply`; bits of `check` turns compared."""

    turns: int
    first: int
    last: int
    reply: int = 24
    agents: int = 2
    check: int = 0

    @property
    def shared(self) -> int:
        return round(SHARED_SHARE * self.first)

    def length(self, turn: int) -> int:
        """Tokens of the prompt of a turn, 0 the first."""
        return self.first + (self.last - self.first) * turn // max(1, self.turns - 1)

    def checked(self, turn: int) -> bool:
        """True for `check` turns, spread evenly, the last one among them."""
        return (turn + 1) * self.check // self.turns > turn * self.check // self.turns


@dataclass(frozen=True)
class Turn:
    """What one prompt cost. `sent` of its `tokens` had been sent or answered before. By the way it was read: tokens that were `cached`, and
    `seconds` to the first token. `base_seconds` are those that its new tokens take."""

    agent: int
    turn: int
    tokens: int
    sent: int
    cached: dict[str, int]
    seconds: dict[str, float]
    base_seconds: float
    equal: bool | None = None

    def share(self, way: str) -> float:
        """Of the tokens sent again, those that were cached."""
        return min(1.0, self.cached[way] / self.sent) if self.sent else 1.0


def summary(turns: list[Turn]) -> dict[str, object]:
    """Of the turns that sent something again, for every way: the least cached share, the median and the largest ratio of times."""
    later = [t for t in turns if t.sent]
    ways: dict[str, dict[str, float]] = {}
    for way in dict.fromkeys(way for t in later for way in t.cached):
        those = [t for t in later if way in t.cached]
        ratios = [t.seconds[way] / t.base_seconds for t in those]
        share = min(t.share(way) for t in those)
        ways[way] = {"turns": len(those), "cached_share": share, "ratio": statistics.median(ratios), "largest_ratio": max(ratios)}
    equal = [t.equal for t in turns if t.equal is not None]
    good = all(equal) and all(way["cached_share"] >= CACHED_SHARE for way in ways.values())
    return {"ways": ways, "checked": len(equal), "equal": all(equal), "good": good}


def line(t: Turn) -> str:
    """One turn for people."""
    shares = {way: f" ({t.share(way):.2%})" if t.sent else "" for way in t.cached}
    ways = ", ".join(f"{way} {t.cached[way]} cached{shares[way]}, {t.seconds[way]:.3f} s" for way in t.cached)
    verdict = "" if t.equal is None else ", equal" if t.equal else ", DIFFERENT"
    return f"{t.turn:4d} {'ABCDEFGH'[t.agent]} {t.tokens:7d} tokens, {t.sent} sent before: {ways}{verdict}"


# ---- against a live server ----


class Conversation:
    """One agent's messages, as its client keeps them."""

    def __init__(self, agent: int, session: Session) -> None:
        self.agent, self.session = agent, session
        self.rng = random.Random(agent + 1)
        system = words(random.Random(0), session.shared)
        self.messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": words(self.rng, session.first - session.shared)},
        ]
        self.turns = self.sent = 0

    def turn(self, client: httpx.Client, way: str) -> Turn:
        """Send all of it and keep the answer. The base is what making tokens of it takes."""
        body = {"messages": self.messages, "max_tokens": self.session.reply, "temperature": 0, "ignore_eos": True, "stream": True}
        tokenise_seconds = tokenising(client, self.messages)
        first, text, usage = 0.0, "", {}
        began = time.perf_counter()
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"error: status {reply.status_code}: {reply.read().decode(errors='replace')}")
            for data in reply.iter_lines():
                if not data.startswith("data: {"):
                    continue
                event = json.loads(data[6:])
                usage = event.get("usage") or usage
                if piece := "".join(c["delta"].get("content") or "" for c in event.get("choices", ())):
                    first, text = first or time.perf_counter() - began, text + piece
        tokens, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        done = Turn(self.agent, self.turns, tokens, self.sent, {way: cached}, {way: first}, tokenise_seconds)
        self.sent = tokens + usage["completion_tokens"]
        self.turns += 1
        self.messages.append({"role": "assistant", "content": text})
        return done

    def tool_result(self, tokens: int) -> None:
        self.messages.append({"role": "user", "content": f"Result of the tool:\n{words(self.rng, tokens)}"})


def words(rng: random.Random, tokens: int) -> str:
    """Words of about so many tokens."""
    return " ".join(rng.choices(TEXT.read_text(encoding="utf-8").split(), k=round(tokens / TOKENS_PER_WORD)))


def tokenising(client: httpx.Client, messages: list[dict[str, str]]) -> float:
    """Seconds that rendering the template and making tokens of it take, by the server's own endpoints."""
    began = time.perf_counter()
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    client.post("/tokenize", json={"content": prompt})
    return time.perf_counter() - began


def play_server(model: str, session: Session, threads: int, store: Path) -> Iterator[Turn]:
    """Every turn of every agent, and after a restart one more of each."""
    talks = [Conversation(agent, session) for agent in range(session.agents)]
    new = session.length(1) - session.first - session.reply
    for way, turns, tokens in (("server", session.turns, new), ("restarted", 1, min(new, RESTARTED_TOKENS))):
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        options = ["--port", str(port), "--threads", str(threads), "--store", str(store)]
        with (
            serving([sys.executable, "-m", "quaff", "serve", model, *options], url),
            httpx.Client(base_url=url, timeout=READY_SECONDS) as client,
        ):
            for _ in range(turns):
                for talk in talks:
                    if talk.turns:
                        talk.tool_result(tokens)
                    yield talk.turn(client, way)


def benched(turn: Turn, model: str, threads: int) -> Turn:
    """With what `quaff bench` takes for the tokens that were computed, after those that were found, in its base."""
    (cached,) = turn.cached.values()
    new = max(1, turn.tokens - cached)
    command = [sys.executable, "-m", "quaff", "bench", model, "-p", str(new), "-n", "0", "-d", str(cached), "-r", "3", "--json"]
    done = subprocess.run([*command, "-t", str(threads)], capture_output=True, text=True, check=True)
    speed = next(row["median_tokens_per_second"] for row in json.loads(done.stdout)["results"] if row["test"].startswith("pp"))
    return replace(turn, base_seconds=turn.base_seconds + new / speed)


# ---- below the server ----


@dataclass
class Branch:
    """A conversation: its tokens, `sent` of which were sent or answered before, and the control's state of them."""

    tokens: list[int]
    sent: int = 0
    state: State | None = None


@dataclass(frozen=True)
class Read:
    """A prompt that was read: seconds to the logits of its last row, tokens not computed, and, where asked for, the bytes of those logits
    and the hash of the state."""

    seconds: float
    cached: int
    bits: tuple[bytes, str] | None


def read(llm: LLM, tokens: list[int], bits: bool, state: State | None = None) -> Read:
    """Read a prompt, behind `state` where given; else with whatever the caches of the model have, on disk too."""
    begin = time.perf_counter()
    result = llm.prefill(tokens, state=state)
    seconds = time.perf_counter() - begin
    assert result.logits is not None
    with result.state:
        return Read(seconds, result.cached_tokens, (result.logits.tobytes(), result.kv_sha256) if bits else None)


class Stage:
    """The models that play a session: the control, the one that goes on all the time, and ones that are loaded anew with its store."""

    def __init__(self, model: Path | str, session: Session, folder: Path, threads: int | None) -> None:
        self.session = session
        self._model, self._folder, self._threads = model, folder, threads
        (folder / "store").mkdir(parents=True)
        self.control = self._load()
        self.warm = self._load(folder / "store")

    def _load(self, store: Path | None = None) -> LLM:
        context = self.session.last + self.session.reply
        cache = {} if store is None else {"prefix_cache_bytes": CACHE_BYTES, "store": store}
        return quaff.load(self._model, threads=self._threads, context=context, **cache)

    def restarted(self) -> LLM:
        """The model loaded anew, with what is on disk now; what it writes itself nobody sees."""
        assert self.warm.disk is not None
        self.warm.disk.store.flush()
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._folder / "store", copy, copy_function=os.link)
        return self._load(copy)

    def behind(self, branch: Branch, depth: int) -> Read:
        """The rest of a branch's prompt behind a state of its first `depth` tokens, which the control has from the turn before."""
        before = branch.state
        if depth:
            branch.state = self.control.prefill(branch.tokens[:depth], logits="none", state=before).state
        if before is not None and before is not branch.state:
            before.close()
        return read(self.control, branch.tokens, False, branch.state)

    def close(self) -> None:
        self.control.close()
        self.warm.close()


def play_below(stage: Stage) -> Iterator[Turn]:
    """Every turn of every agent."""
    session, vocab, rng = stage.session, stage.warm.config.vocab, np.random.default_rng(0)
    shared = rng.integers(0, vocab, session.shared).tolist()
    branches = [Branch(list(shared)) for _ in range(session.agents)]
    for turn in range(session.turns):
        for agent, branch in enumerate(branches):
            branch.tokens += rng.integers(0, vocab, max(0, session.length(turn) - len(branch.tokens))).tolist()
            yield play_turn(stage, branch, agent, turn)


def play_turn(stage: Stage, branch: Branch, agent: int, turn: int) -> Turn:
    """One prompt all three ways, and the reply that the next one brings along."""
    checked = stage.session.checked(turn)
    # Of what was sent and answered only the last token was never computed.
    base = stage.behind(branch, max(0, branch.sent - 1))
    with stage.restarted() as new:
        ways = {"disk": read(new, branch.tokens, checked)}
    ways["memory"] = read(stage.warm, branch.tokens, checked)
    cached, seconds = ({way: getattr(r, name) for way, r in ways.items()} for name in ("cached", "seconds"))
    done = Turn(agent, turn, len(branch.tokens), branch.sent, cached, seconds, base.seconds)
    if checked:
        cold = read(stage.control, branch.tokens, True)
        done = replace(done, equal=all(r.bits == cold.bits for r in ways.values()))
    params = SamplingParams(max_tokens=stage.session.reply, temperature=0.8, seed=turn, ignore_eos=True)
    branch.tokens += stage.warm.generate(branch.tokens, params).tokens
    branch.sent = len(branch.tokens)
    return done


def tiny_models(folder: Path, context: int) -> Iterator[tuple[str, Path]]:
    """Random models of every kind of layer, with room for long sessions."""
    from tests.tiny import CASES

    for name in TINY:
        yield name, replace(CASES[name], context=context).write(folder / f"{name}.gguf")


def shown(turns: Iterator[Turn]) -> list[Turn]:
    out = []
    for turn in turns:
        print(line(turn), flush=True)
        out.append(turn)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="what `quaff serve` takes, or tiny (default smollm2)")
    parser.add_argument("--below", action="store_true", help="play below the server")
    parser.add_argument("--turns", type=int, default=12, help="of each agent (default 12)")
    parser.add_argument("--first", type=int, default=2000, help="tokens of the first prompt (default 2000)")
    parser.add_argument("--last", type=int, default=7500, help="tokens of the last prompt (default 7500)")
    parser.add_argument("--agents", type=int, default=2, choices=range(1, 9), help="that take turns (default 2)")
    parser.add_argument("--check", type=int, default=3, help="turns whose bits are compared, with --below (default 3)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tiny = args.model == "tiny"
    below = args.below or tiny
    session = Session(args.turns, args.first, args.last, agents=args.agents, check=args.check if below else 0)
    models: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = tiny_models(folder, session.last + session.reply) if tiny else iter([(args.model, args.model)])
        for number, (title, path) in enumerate(paths):
            print(title)
            if below:
                stage = Stage(path, session, folder / str(number), args.threads)
                turns = shown(play_below(stage))
                stage.close()
            else:
                turns = shown(play_server(str(path), session, args.threads, folder / str(number)))
                turns = [benched(turn, str(path), args.threads) for turn in turns]
            models[title] = {**summary(turns), "turns": [asdict(t) for t in turns]}
            print(*(f"{way}: {values}" for way, values in summary(turns)["ways"].items()), sep="\n")
    good = all(result["good"] for result in models.values())
    print(json.dumps({"benchmark": "sessions", "session": asdict(session), "models": models, "good": good}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
