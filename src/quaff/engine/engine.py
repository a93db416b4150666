"""The loop: requests of known tokens go through the model in batches until each has what it asked for.

One lock covers a step and everything between steps, so any thread may submit, cancel, or drive the loop; whoever drives it drives it
for all requests. What a request may see of a step is committed after the step: an interrupted step can be run again with the same bits.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quaff.batch import Batch, Counters, Logits
from quaff.cache.pages import PageCache
from quaff.engine.runner import Runner
from quaff.engine.sampler import SamplingParams, sample
from quaff.engine.scheduler import NO_LOGITS, Scheduler, Work
from quaff.errors import MemoryBudgetError, NonFiniteError
from quaff.graph.program import Graph
from quaff.schedule import Order

FinishReason = Literal["stop", "length", "cancelled", "error", "prefilled"]

LOGITS_BYTES = 64 << 20
"""Logits of one step take at most this much (or one row): scoring a long text must not need memory for all its rows."""
BLOCK_ROWS = {"token": 256, "chunk": 2048, "layer": 4096}
"""Rows of prompts in one native call. A cancelled layer-major step may lose its whole block; longer blocks only save Python's share."""
LAYER_SCRATCH_BYTES = 1 << 30


@dataclass(eq=False, slots=True)
class Request:
    """A sequence in the engine. `tokens` are known, `computed` of them are in the KV state. Read it freely; only the engine writes."""

    id: int
    tokens: list[int]
    params: SamplingParams | None
    logits_from: int
    accept: Callable[[int], FinishReason | None] | None
    on_logits: Callable[[int, NDArray[np.float32]], None] | None
    keep: bool
    sequence: int
    reused: int
    prompt_tokens: int
    computed: int = 0
    admitted: bool = False
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    prefilled_at: float = 0.0
    finished_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens


def make_scheduler(order: Order, graph: Graph) -> Scheduler:
    """An empty scheduler with the step sizes of an order."""
    rows = BLOCK_ROWS[order.name]
    if order.name == "layer":
        rows = min(rows, LAYER_SCRATCH_BYTES // max(1, graph.scratch_bytes_per_row))
    # Whole chunks, so that cutting a prompt into blocks adds no cell.
    block_rows = max(1, rows // order.chunk) * order.chunk
    return Scheduler(block_rows, order.chunk if order.name != "token" else 64, max(1, LOGITS_BYTES // (4 * graph.config.vocab)))


class Engine:
    """Continuous batching over one model. `end_ids` end a completion, `context` bounds the positions of a sequence."""

    def __init__(self, runner: Runner, cache: PageCache, order: Order, context: int, end_ids: frozenset[int]) -> None:
        self.runner = runner
        self.cache = cache
        self.context = context
        self.end_ids = end_ids
        self.counters = Counters(weight_bytes_loaded=runner.loaded_bytes)
        self.steps = 0
        self.lock = threading.RLock()
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._orphans: deque[int] = deque()
        self._next_id = 0
        self._busy = False
        self._closed = False
        self.set_order(order)

    def set_order(self, order: Order) -> None:
        """Walk the grid in another order from the next step on; no bit depends on it. MemoryBudgetError when there is no room for it."""
        with self._working():
            scheduler = make_scheduler(order, self.runner.graph)
            self._reserve_step(scheduler, order)
            self.order = order
            self.block_rows = scheduler.prompt_rows
            for request in self._requests.values():
                if request.admitted:
                    scheduler.add(request.id, len(request.tokens), request.computed, request.logits_from)
            self._scheduler = scheduler

    def submit(
        self,
        tokens: Sequence[int],
        *,
        params: SamplingParams | None = None,
        logits_from: int | None = None,
        accept: Callable[[int], FinishReason | None] | None = None,
        on_logits: Callable[[int, NDArray[np.float32]], None] | None = None,
        base: int | None = None,
        base_tokens: Sequence[int] = (),
        keep: bool = False,
    ) -> Request:
        """Queue a sequence of at least one token. The caller has checked ids and length.

        With `params` it generates; `accept` sees every new token (end tokens too) and may end the request. Without, it is only computed.
        `logits_from`: `on_logits(position, row)` gets every computed row from that position on, in order. `base`: a sequence that holds
        `base_tokens`; the prefix they share is not computed again, but the last token always is. `keep` leaves the sequence to the caller.
        """
        with self._working():
            self._sweep()
            if self._closed:
                raise ValueError("the model is closed")
            return self._submit(tokens, params, logits_from, accept, on_logits, base, base_tokens, keep)

    def _submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None,
        logits_from: int | None,
        accept: Callable[[int], FinishReason | None] | None,
        on_logits: Callable[[int, NDArray[np.float32]], None] | None,
        base: int | None,
        base_tokens: Sequence[int],
        keep: bool,
    ) -> Request:
        reused = self.cache.longest(base, self._shared(tokens, base, base_tokens)) if base is not None else 0
        sequence = self.cache.fork(base, reused) if base is not None and reused else self.cache.create()
        if keep:
            # Where the same tokens asked again start: the last one is always computed.
            self.cache.snapshot(sequence, len(tokens) - 1)
        if params is not None:
            wanted = len(tokens) - 1 if logits_from is None else logits_from
        else:
            wanted = NO_LOGITS if logits_from is None else logits_from
        self._next_id += 1
        request = Request(
            self._next_id, list(tokens), params, wanted, accept, on_logits, keep, sequence, reused, len(tokens), computed=reused
        )
        self._requests[request.id] = request
        self._waiting.append(request)
        if params is not None and params.max_tokens == 0:
            self._finish(request, "length")
        return request

    def _shared(self, tokens: Sequence[int], base: int, base_tokens: Sequence[int]) -> int:
        most = min(len(tokens) - 1, len(base_tokens), self.cache.written(base))
        return next((i for i in range(most) if tokens[i] != base_tokens[i]), most)

    def close(self) -> None:
        """End all requests, accept no more, and let go of the model."""
        # The flags come before the lock, which is held by the step that they end.
        self._closed = True
        self.cancel()
        with self.lock:
            self.cancel()
            self.sweep()
            self.runner.close()

    def cancel(self, request: Request | None = None) -> None:
        """End one request, or all, at the next cell boundary; finished positions stay. May be called from any thread."""
        # Flags first: a step that starts between the two lines sees them before it computes anything.
        for r in [request] if request is not None else list(self._requests.values()):
            r.cancelled = True
        self.runner.control.cancel()

    def release(self, sequence: int) -> None:
        """Free a kept sequence at the next opportunity. Safe in finalizers, which may run inside a step of the same thread."""
        self._orphans.append(sequence)

    def run(
        self, requests: Sequence[Request], on_step: Callable[[], None] | None = None, on_work: Callable[[int], None] | None = None
    ) -> None:
        """Drive the loop until all `requests` are done."""
        while any(not r.done for r in requests):
            self.step(on_work)
            if on_step is not None:
                on_step()

    def step(self, on_work: Callable[[int], None] | None = None) -> None:
        """Run one batch and hand out its results.

        KeyboardInterrupt, and what `on_work` raises, end the step early and are raised after the finished prefix has been committed.
        """
        with self.lock, _interrupts_deferred(self.runner.control.cancel):
            if self._busy:
                raise RuntimeError("a callback of a running step cannot run another one")
            with self._working():
                self._step(on_work)

    def _step(self, on_work: Callable[[int], None] | None) -> None:
        self.runner.control.reset()
        self._sweep()
        self._admit()
        planned = self._scheduler.plan()
        if not planned:
            return
        raised: list[BaseException] = []

        def guarded(done: int) -> None:
            # The step is everyone's: an error of one caller's function must not reach the requests of the others.
            if on_work is None or raised:
                return
            try:
                on_work(done)
            except BaseException as error:
                raised.append(error)
                self.runner.control.cancel()

        work, batch = self._batch(planned)
        if not work:
            return
        try:
            logits = self.runner.run(batch, self.order, guarded if on_work is not None else None)
            self.steps += 1
            self.counters += logits.counters
            self._commit(work, batch, logits)
        except MemoryBudgetError as error:
            # The request that came last made the step too large; without it the others go on.
            self._fail(self._requests[max(w.request for w in work)], error)
        except Exception as error:
            for request in [self._requests[w.request] for w in work if w.request in self._requests]:
                self._fail(request, error)
        if raised:
            raise raised[0]

    def sweep(self, blocking: bool = True) -> None:
        """Finish cancelled requests and free released sequences.

        A finalizer must not block (the lock's holder may wait for its thread) and may run inside a step: then the next one sweeps.
        """
        if not self.lock.acquire(blocking):
            return
        try:
            if not self._busy:
                with self._working():
                    self._sweep()
        finally:
            self.lock.release()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Hold the lock, and keep finalizers of this thread away from what is half changed."""
        with self.lock:
            before, self._busy = self._busy, True
            try:
                yield
            finally:
                self._busy = before

    def _sweep(self) -> None:
        for request in [r for r in self._requests.values() if r.cancelled]:
            self._finish(request, "cancelled")
        while self._orphans:
            self.cache.free(self._orphans.popleft())

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if request.done:
                self._waiting.popleft()
                continue
            positions = len(request.tokens) + (request.params.max_tokens if request.params else 0)
            try:
                self.cache.reserve(request.sequence, min(positions, self.context), self.block_rows)
                try:
                    self._reserve_step(self._scheduler, self.order, request)
                except MemoryBudgetError:
                    self.cache.settle(request.sequence)
                    raise
            except MemoryBudgetError as error:
                # Memory comes back when a running request ends; alone, a request that does not fit never will.
                if any(r.admitted for r in self._requests.values()):
                    return
                self._waiting.popleft()
                self._fail(request, error)
                continue
            self._waiting.popleft()
            request.admitted = True
            request.started_at = time.perf_counter()
            self._scheduler.add(request.id, len(request.tokens), request.computed, request.logits_from)

    def _reserve_step(self, scheduler: Scheduler, order: Order, new: Request | None = None) -> None:
        """Count scratch and logits of the largest step of the admitted requests and a new one: none of them may fail later for it."""
        requests = [r for r in self._requests.values() if r.admitted] + ([new] if new is not None else [])
        pending = [max(1, len(r.tokens) - r.computed) for r in requests]
        logits = [min(n, max(1 if r.params else 0, len(r.tokens) - r.logits_from)) for n, r in zip(pending, requests, strict=True)]
        rows = min(sum(pending), max(scheduler.prompt_rows, scheduler.mixed_rows))
        self.runner.reserve(rows, order, min(sum(max(0, n) for n in logits), scheduler.logits_rows))

    def _batch(self, planned: Sequence[Work]) -> tuple[list[Work], Batch]:
        """The batch of what was planned, less the requests that found no page."""
        segments, work = [], []
        for w in planned:
            request = self._requests[w.request]
            tokens = np.array(request.tokens[w.start : w.start + w.rows], dtype=np.int32)
            try:
                segments.append(self.cache.segment(request.sequence, tokens, range(w.logits, w.rows)))
            except (MemoryBudgetError, MemoryError) as error:
                self._fail(request, self._no_memory(error))
                continue
            work.append(w)
        return work, Batch(tuple(segments))

    @staticmethod
    def _no_memory(error: MemoryBudgetError | MemoryError) -> MemoryBudgetError:
        if isinstance(error, MemoryBudgetError):
            return error
        return MemoryBudgetError("the system has no memory left for KV pages; shorten the prompt or the context")

    def _commit(self, work: Sequence[Work], batch: Batch, logits: Logits) -> None:
        index = {row: i for i, row in enumerate(logits.rows.tolist())}
        now = time.perf_counter()
        for w, (begin, _), finished, poisoned in zip(work, batch.spans, logits.finished, logits.poisoned, strict=True):
            request = self._requests[w.request]
            if poisoned:
                where = f"positions {w.start}..{w.start + w.rows - 1}"
                self._fail(request, NonFiniteError(f"the model's values became infinite or NaN in {where}; the request was dropped"))
                continue
            # A row whose logits are wanted but missing (the step was cancelled before the head) is computed again.
            rows = next((r for r in range(w.logits, finished) if begin + r not in index), finished)
            if rows < finished and self.runner.graph.state_kinds:
                rows = 0  # a recurrent state is known at the end of a step only
            self.cache.commit(request.sequence, w.start + rows)
            self._scheduler.finish(request.id, rows)
            request.computed = w.start + rows
            if request.computed >= request.prompt_tokens and not request.prefilled_at:
                request.prefilled_at = now
            try:
                for r in range(w.logits, rows):
                    self._use(request, w.start + r, logits.values[index[begin + r]])
            except Exception as error:
                self._fail(request, error)
            else:
                if not request.done and request.params is None and request.computed == len(request.tokens):
                    self._finish(request, "prefilled")

    def _use(self, request: Request, position: int, row: NDArray[np.float32]) -> None:
        if request.on_logits is not None:
            request.on_logits(position, row)
        if request.params is None or position != len(request.tokens) - 1:
            return
        token = sample(request.params, row, request.tokens)
        request.tokens.append(token)
        self._scheduler.extend(request.id)
        reason: FinishReason | None = request.accept(token) if request.accept is not None else None
        if reason is None and token in self.end_ids and not request.params.ignore_eos:
            reason = "stop"
        if reason is None and (request.generated >= request.params.max_tokens or len(request.tokens) > self.context):
            reason = "length"
        if reason is not None:
            self._finish(request, reason)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        request.keep = False
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.done:
            return
        request.finish_reason = reason
        request.finished_at = time.perf_counter()
        del self._requests[request.id]
        if request.admitted:
            self._scheduler.remove(request.id)
            self._reserve_step(self._scheduler, self.order)
        if request.keep:
            self.cache.settle(request.sequence)
        else:
            self.cache.free(request.sequence)


@contextmanager
def _interrupts_deferred(cancel: Callable[[], None]) -> Iterator[None]:
    """In the main thread, SIGINT cancels the running step now and raises after the block, when nothing is half done."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        cancel()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught and callable(previous):
            previous(*caught[0])
