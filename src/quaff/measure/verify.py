"""Every way of reading one prompt, and the hashes that must not differ: a star of paths around the default, one thing changed at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from quaff import _native
from quaff.batch import Batch, Counters
from quaff.cache.entry import Layout
from quaff.cache.memory import Memory
from quaff.cache.prefix import PrefixCache
from quaff.cache.store import Store
from quaff.errors import NonFiniteError, PromptError, QuaffError
from quaff.measure import counted
from quaff.schedule import Order

if TYPE_CHECKING:
    from quaff.llm import LLM

GENERATED = 24
SCALAR_ROWS = 16
"""Plain C++ needs about a second for so many rows of a small model; they see all earlier positions, so nothing is left out but time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hashes of one path: f32 logits of every row of prompt and answer, KV state after the last, greedy text. `counters` of the prompt."""

    name: str
    isa: str
    logits_sha256: str
    kv_sha256: str
    text_sha256: str
    counters: Counters

    def same_bits(self, other: Outcome) -> bool:
        return (self.logits_sha256, self.kv_sha256, self.text_sha256) == (other.logits_sha256, other.kv_sha256, other.text_sha256)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "isa": self.isa,
            "logits_sha256": self.logits_sha256,
            "kv_sha256": self.kv_sha256,
            "text_sha256": self.text_sha256,
            "counters": self.counters.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All outcomes, the default path first."""

    numerics_version: int
    isa: str
    prompt_tokens: int
    outcomes: tuple[Outcome, ...]

    @property
    def equal(self) -> bool:
        return all(o.same_bits(self.outcomes[0]) for o in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        return {
            "numerics_version": self.numerics_version,
            "isa": self.isa,
            "prompt_tokens": self.prompt_tokens,
            "paths": [o.as_dict() for o in self.outcomes],
            "equal": self.equal,
        }


class Reading:
    """A sequence of known tokens that is read step by step; the logits of all its rows go into one digest, in order of position."""

    def __init__(self, llm: LLM, tokens: Sequence[int], hashed: bool = True) -> None:
        self.llm = llm
        self.tokens = list(tokens)
        self.done = 0
        self.hashed = hashed
        self.digest = hashlib.sha256()
        self.counters = Counters()
        self.next_token = -1
        self.sequence = llm.engine.cache.create()

    def fork(self, tokens: Sequence[int], hashed: bool) -> Reading:
        """A reading of other tokens that shares the positions done so far."""
        twin = Reading.__new__(Reading)
        twin.llm, twin.tokens, twin.done, twin.hashed = self.llm, list(tokens), self.done, hashed
        twin.digest, twin.counters, twin.next_token = self.digest.copy(), self.counters, self.next_token
        twin.sequence = self.llm.engine.cache.fork(self.sequence, self.done)
        return twin

    def free(self) -> None:
        self.llm.engine.cache.free(self.sequence)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


def step(parts: Sequence[tuple[Reading, int]], order: Order) -> None:
    """One native step: the next rows of each reading, in one batch."""
    engine = parts[0][0].llm.engine
    segments = []
    for reading, rows in parts:
        tokens = np.array(reading.tokens[reading.done : reading.done + rows], dtype=np.int32)
        wanted = tuple(range(rows)) if reading.hashed else ()
        segments.append(engine.cache.segment(reading.sequence, tokens, wanted))
    before = engine.runner.counters
    logits = engine.runner.run(Batch(tuple(segments)), order)
    spent = engine.runner.counters - before
    if any(logits.poisoned):
        raise NonFiniteError("the model's values became infinite or NaN while it read the prompt")
    taken = 0
    for reading, rows in parts:
        reading.done += rows
        engine.cache.commit(reading.sequence, reading.done)
        reading.counters += spent
        if reading.hashed:
            values = logits.values[taken : taken + rows]
            reading.digest.update(np.ascontiguousarray(values, dtype="<f4").data)
            # Among equals the lower id, as the sampler takes it.
            reading.next_token = int(values[-1].argmax())
            taken += rows


def prompt_tokens(llm: LLM, count: int) -> list[int]:
    """`count` tokens of a text that ships with quaff, repeated if need be. PromptError when the context is too short for them."""
    if count + GENERATED > llm.context:
        raise PromptError(f"{count} tokens and {GENERATED} generated ones do not fit the context of {llm.context} tokens")
    text = files("quaff.measure").joinpath("verify.txt").read_text(encoding="utf-8")
    tokens = llm.encode(text)[:count]
    while len(tokens) < count:
        tokens += tokens[: count - len(tokens)]
    return tokens


class Verifier:
    """The paths of one loaded model. `tokens` is the prompt's length."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self.llm = llm
        self.tokens = prompt_tokens(llm, tokens)
        self.isa = _native.isa()
        self.threads = llm.threads
        self.order = llm.order if llm.streamed else Order("chunk", llm.chunk)
        # Logits of all rows at once may be more than a budget holds.
        self.step_rows = min(llm.plan.logits_rows, llm.plan.pass_rows) if llm.plan else len(self.tokens)

    @property
    def paths(self) -> tuple[tuple[str, Callable[[], Reading]], ...]:
        """(name, how to read the prompt), the default first."""
        n = len(self.tokens)
        orders = [Order("token")] + [Order("chunk", c) for c in sorted({7, 64, 512, n})] + [Order("layer", 64), Order("layer", 512)]
        paths: list[tuple[str, Callable[[], Reading]]] = [(self._default_name, lambda: self._whole(self.order))]
        paths += [(_order_name(o), lambda o=o: self._whole(o)) for o in orders if o != self.order]  # type: ignore[misc]
        paths += [(counted(t, "thread"), lambda t=t: self._threads(t)) for t in (1, 2, 3) if t != self.threads]  # type: ignore[misc]
        for isa in _native.available_isas():
            if isa == "scalar" and isa != self.isa:
                paths.append((f"scalar for the last {SCALAR_ROWS} rows", self._scalar))
            elif isa != self.isa:
                paths.append((isa, lambda isa=isa: self._isa(isa)))  # type: ignore[misc]
        paths += [
            ("in a batch with three others", self._mixed),
            ("half at once, then row by row", self._decoded),
            ("paused and continued", self._paused),
            ("forked from a shared prefix", self._forked),
            ("found in the prefix tree", self._found),
            ("restored from disk", self._restored),
        ]
        return tuple(paths)

    @property
    def _default_name(self) -> str:
        return f"{_order_name(self.order)}, {counted(self.threads, 'thread')}, {self.isa}"

    def run(self) -> Iterator[Outcome]:
        with self.llm.engine.lock:
            for name, read in self.paths:
                yield self._outcome(name, read)

    def run_default(self, name: str) -> Outcome:
        """The default path alone: for a model that was loaded in another way."""
        with self.llm.engine.lock:
            return self._outcome(name, lambda: self._whole(self.order))

    def _outcome(self, name: str, read: Callable[[], Reading]) -> Outcome:
        reading = read()
        isa, counters = _native.isa(), reading.counters
        try:
            answer = []
            for _ in range(GENERATED):
                answer.append(reading.next_token)
                reading.tokens.append(reading.next_token)
                step([(reading, 1)], self.order)
            text = self.llm.tokenizer.decode(answer, skip_special=False)
            kv = self.llm.engine.cache.kv_sha256(reading.sequence)
            return Outcome(name, isa, reading.digest.hexdigest(), kv, hashlib.sha256(text.encode()).hexdigest(), counters)
        finally:
            reading.free()
            self._restore()

    def _restore(self) -> None:
        if _native.isa() != self.isa or self.llm.threads != self.threads:
            self.llm.configure(isa=self.isa, threads=self.threads)

    # The paths

    def _whole(self, order: Order) -> Reading:
        reading = Reading(self.llm, self.tokens)
        while reading.left:
            step([(reading, min(reading.left, self.step_rows))], order)
        return reading

    def _threads(self, threads: int) -> Reading:
        self.llm.configure(threads=threads)
        return self._whole(self.order)

    def _isa(self, isa: str) -> Reading:
        self.llm.configure(isa=isa)
        return self._whole(self.order)

    def _scalar(self) -> Reading:
        reading = Reading(self.llm, self.tokens)
        step([(reading, reading.left - SCALAR_ROWS)], self.order)
        self.llm.configure(isa="scalar")
        step([(reading, SCALAR_ROWS)], self.order)
        return reading

    def _mixed(self) -> Reading:
        """Our rows between those of three other sequences: first all read prompts, then two of them go on row by row."""
        reading = Reading(self.llm, self.tokens)
        with _others(self.llm, (self.tokens[5:42], self.tokens[::-1][:150], self.tokens[1::2])) as (a, b, c):
            first = reading.left // 2
            step([(a, a.left), (reading, first), (b, b.left - 1), (c, c.left - 1)], self.order)
            step([(b, 1), (reading, reading.left), (c, 1)], self.order)
        return reading

    def _decoded(self) -> Reading:
        reading = Reading(self.llm, self.tokens)
        step([(reading, reading.left // 2)], self.order)
        while reading.left:
            step([(reading, 1)], self.order)
        return reading

    def _paused(self) -> Reading:
        reading = Reading(self.llm, self.tokens)
        step([(reading, reading.left * 3 // 7)], self.order)
        with _others(self.llm, (self.tokens[::-1],)) as (other,):
            step([(other, other.left)], self.order)
        for rows in (1, reading.left // 3):
            step([(reading, rows)], self.order)
        step([(reading, reading.left)], self.order)
        return reading

    def _forked(self) -> Reading:
        """Two forks of one prefix that ends inside a page; the other fork writes first, into its own copy of that page."""
        shared = len(self.tokens) * 2 // 3 // 64 * 64 + 2
        trunk = Reading(self.llm, self.tokens)
        step([(trunk, shared)], self.order)
        other = trunk.fork(self.tokens[:shared] + self.tokens[::-1], hashed=False)
        reading = trunk.fork(self.tokens, hashed=True)
        trunk.free()
        step([(other, 100)], self.order)
        step([(reading, reading.left)], self.order)
        other.free()
        return reading

    def _found(self) -> Reading:
        """What an earlier prompt left in a prefix tree, up to where this one goes on in another way."""
        cache, shared = self.llm.engine.cache, len(self.tokens) * 3 // 5 // 64 * 64 + 7
        earlier = Reading(self.llm, self.tokens[:shared] + self.tokens[::-1][:90])
        cache.snapshot(earlier.sequence, shared)
        while earlier.done < shared:
            step([(earlier, min(shared - earlier.done, self.step_rows))], self.order)
        reading = earlier.fork(self.tokens, hashed=True)
        step([(earlier, 90)], self.order)
        prefix = PrefixCache(cache, 1 << 62)
        prefix.publish(earlier.sequence, earlier.tokens)
        earlier.free()
        reading.free()
        hit = prefix.attach(self.tokens, shared)  # by chance the next token may be the same
        prefix.clear()
        reading.sequence, reading.done = hit.sequence, hit.length
        while reading.left:
            step([(reading, min(reading.left, self.step_rows))], self.order)
        return reading

    def _restored(self) -> Reading:
        """The first part goes to files and is forgotten; its memory then comes from them. The rest of a block lies in a place."""
        reading, cache = Reading(self.llm, self.tokens), self.llm.engine.cache
        part = reading.left * 2 // 3
        while reading.done < part:
            step([(reading, min(part - reading.done, self.step_rows))], self.order)
        with TemporaryDirectory(prefix="quaff-verify-") as folder:
            store = Store(Path(folder), bytes(32), Layout(cache.kinds, cache.states.kinds), 1 << 62)
            store.put(self.tokens[:part], Memory.of(cache, reading.sequence), lambda sequence: None)
            store.flush()
            found = store.find(self.tokens)
            cache.free(reading.sequence)
            reading.sequence = cache.receive(part)
            if found is None or found.full != part or not store.read(found, Memory.of(cache, reading.sequence)):
                raise QuaffError(f"{folder} did not give back what was written to it; set TMPDIR to a folder with more room")
        while reading.left:
            step([(reading, min(reading.left, self.step_rows))], self.order)
        return reading


@contextmanager
def _others(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[Reading]]:
    readings = [Reading(llm, tokens, hashed=False) for tokens in prompts]
    try:
        yield readings
    finally:
        for reading in readings:
            reading.free()


def _order_name(order: Order) -> str:
    return "token-major" if order.name == "token" else f"{order.name}-major({order.chunk})"
