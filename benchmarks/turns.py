"""Turns of conversations, below the server: every turn reads all of the conversation again, two branches take turns; with which bits, and
how much of it is computed again? (`benchmarks/sessions.py` asks a live server for its times.)

The branches share half of their first prompt. A turn's first token is timed three ways, in one run: from the prefix cache in memory; from
the disk, in a model that was loaded anew and knows nothing; and by the control, `quaff bench -d DEPTH -p NEW`: a prompt of the turn's new
tokens behind a state of all others, with no cache to look into. Logits of some turns are compared with a cold run, byte by byte.

    python -m benchmarks.turns smollm2                              # 12 turns, from 2,000 to 7,500 tokens
    python -m benchmarks.turns tiny --turns 20 --first 2000 --last 40000 --check 20

`tiny` runs random models of every kind of layer. The last line of output is one JSON object. Exit status 1: less than 99 % of the tokens
sent again were cached, or a byte was not that of a cold run. Times are reported, not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import quaff
from quaff import LLM, SamplingParams, _native
from quaff.llm import State

TINY = ("llama-gqa", "gemma3", "gpt-oss", "lfm2", "qwen35", "kimi-linear", "deepseek2")
CACHED_SHARE = 0.99


@dataclass(frozen=True)
class Session:
    """What is played: `turns` of each branch, prompts growing from `first` to `last` tokens, `reply` of which are generated every turn."""

    turns: int
    first: int
    last: int
    reply: int
    branches: int
    check: int

    def length(self, turn: int) -> int:
        """Tokens of the prompt of a turn, 0 the first."""
        return self.first + (self.last - self.first) * turn // max(1, self.turns - 1)

    def checked(self, turn: int) -> bool:
        """True for `check` turns, spread evenly, the last one among them."""
        return self.check > 0 and (turn + 1) * self.check // self.turns > turn * self.check // self.turns


@dataclass(frozen=True)
class Turn:
    """What one prompt cost. Seconds to the first token; `sent` tokens of it had been sent or answered before."""

    branch: int
    turn: int
    tokens: int
    sent: int
    memory_cached: int
    disk_cached: int
    memory_seconds: float
    disk_seconds: float
    control_seconds: float
    equal: bool | None

    @property
    def cached_share(self) -> float:
        """Of the tokens sent again, the worse of both ways."""
        return min(self.memory_cached, self.disk_cached) / self.sent if self.sent else 1.0


@dataclass
class Branch:
    """A conversation: its tokens, `sent` of which were sent or answered before, and the control's state of them."""

    tokens: list[int]
    sent: int = 0
    state: State | None = None


def texts(session: Session, vocab: int, seed: int) -> Iterator[Branch]:
    """Branches that part in the middle of their first prompt."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, session.first // 2).tolist()
    for _ in range(session.branches):
        yield Branch(shared + rng.integers(0, vocab, session.first - len(shared)).tolist())


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
    """The three models that play a session, and the store of the one that goes on all the time."""

    def __init__(
        self, model: Path | str, session: Session, folder: Path, memory_bytes: int, threads: int | None, chunk: int | None
    ) -> None:
        self.session = session
        self._model = model
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._threads = threads
        (folder / "store").mkdir(parents=True)
        self.control = self._load(chunk)
        self._chunk = self.control.chunk
        self.warm = self._load(self._chunk, folder / "store")

    def _load(self, chunk: int | None, store: Path | None = None) -> LLM:
        context = self.session.last + self.session.reply
        if store is None:
            return quaff.load(self._model, threads=self._threads, chunk=chunk, context=context)
        return quaff.load(
            self._model, threads=self._threads, chunk=chunk, context=context, prefix_cache_bytes=self._memory_bytes, store=store
        )

    def restarted(self) -> LLM:
        """The model loaded anew, with what is on disk now; what it writes itself nobody sees."""
        assert self.warm.disk is not None
        self.warm.disk.store.flush()
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._folder / "store", copy, copy_function=os.link)
        return self._load(self._chunk, copy)

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


def play(stage: Stage, seed: int) -> Iterator[Turn]:
    """Every turn of every branch, in order."""
    session, vocab = stage.session, stage.warm.config.vocab
    rng = np.random.default_rng(seed + 1)
    branches = list(texts(session, vocab, seed))
    for turn in range(session.turns):
        for number, branch in enumerate(branches):
            branch.tokens += rng.integers(0, vocab, max(0, session.length(turn) - len(branch.tokens))).tolist()
            yield play_turn(stage, branch, number, turn, seed)


def play_turn(stage: Stage, branch: Branch, number: int, turn: int, seed: int) -> Turn:
    """One prompt all three ways, and the reply that the next one brings along."""
    session, checked = stage.session, stage.session.checked(turn)
    # Of what was sent and answered only the last token was never computed.
    behind = stage.behind(branch, max(0, branch.sent - 1))
    with stage.restarted() as new:
        disk = read(new, branch.tokens, checked)
    memory = read(stage.warm, branch.tokens, checked)
    equal = None
    if checked:
        cold = read(stage.control, branch.tokens, True)
        equal = cold.bits == memory.bits == disk.bits
    params = SamplingParams(max_tokens=session.reply, temperature=0.8, seed=seed, ignore_eos=True)
    tokens, sent = len(branch.tokens), branch.sent
    branch.tokens += stage.warm.generate(branch.tokens, params).tokens
    branch.sent = len(branch.tokens)
    return Turn(number, turn, tokens, sent, memory.cached, disk.cached, memory.seconds, disk.seconds, behind.seconds, equal)


def summary(turns: list[Turn]) -> dict[str, object]:
    """Of the turns that sent something again: the least cached share, the median and the worst ratio of times to the control's."""
    later = [t for t in turns if t.sent]
    out: dict[str, object] = {
        "cached_share": min(t.cached_share for t in later),
        "equal": all(t.equal for t in turns if t.equal is not None),
        "checked": sum(t.equal is not None for t in turns),
    }
    for way in ("memory", "disk"):
        ratios = [getattr(t, f"{way}_seconds") / t.control_seconds for t in later]
        out |= {f"{way}_ratio": statistics.median(ratios), f"{way}_ratio_worst": max(ratios)}
    return out


def line(t: Turn) -> str:
    """One turn for people."""
    share = f"{100 * t.cached_share:6.2f} %" if t.sent else "       -"
    times = f"{t.control_seconds:8.3f} {t.memory_seconds:8.3f} {t.disk_seconds:8.3f}"
    verdict = "" if t.equal is None else "  equal" if t.equal else "  DIFFERENT"
    return f"{t.turn:4d} {'ABCDEFGH'[t.branch]} {t.tokens:7d} {share} {times}{verdict}"


def tiny_models(folder: Path, context: int) -> Iterator[tuple[str, Path]]:
    """Random models of every kind of layer, with room for long sessions."""
    from tests.tiny import CASES

    for name in TINY:
        yield name, replace(CASES[name], context=context).write(folder / f"{name}.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="alias, GGUF file, or tiny (default smollm2)")
    parser.add_argument("--turns", type=int, default=12, help="of each branch (default 12)")
    parser.add_argument("--first", type=int, default=2000, help="tokens of the first prompt (default 2000)")
    parser.add_argument("--last", type=int, default=7500, help="tokens of the last prompt (default 7500)")
    parser.add_argument("--reply", type=int, default=32, help="tokens generated every turn (default 32)")
    parser.add_argument("--branches", type=int, default=2, choices=range(1, 9), help="conversations that take turns (default 2)")
    parser.add_argument("--check", type=int, default=3, help="turns whose bytes are compared with a cold run (default 3)")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB of the prefix cache (default 4)")
    parser.add_argument("-t", "--threads", type=int, help="worker threads (default: physical cores it may use)")
    parser.add_argument("--chunk", type=int, help="rows of a cell (default: the engine's choice)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and replies (default 0)")
    args = parser.parse_args()
    session = Session(args.turns, args.first, args.last, args.reply, args.branches, args.check)
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = tiny_models(folder, session.last + session.reply) if args.model == "tiny" else iter([(args.model, args.model)])
        for title, path in models:
            stage = Stage(path, session, folder / f"{title}.d".replace("/", "_"), int(args.memory * (1 << 30)), args.threads, args.chunk)
            print(f"{title}: seconds to the first token, of the control, from memory, from disk")
            turns = []
            for turn in play(stage, args.seed):
                turns.append(turn)
                print(line(turn), flush=True)
            about = {"isa": _native.isa(), "threads": stage.control.threads, "chunk": stage.control.chunk}
            rows[title] = {**about, **summary(turns), "turns": [asdict(t) for t in turns]}
            stage.close()
    good = all(r["equal"] and float(str(r["cached_share"])) >= CACHED_SHARE for r in rows.values())
    print(json.dumps({"benchmark": "turns", "session": asdict(session), "models": rows, "good": good}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
