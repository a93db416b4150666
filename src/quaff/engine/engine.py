"""The loop: requests of known tokens go through the model in batches until each has what it asked for.

One lock covers a step and everything between steps, so any thread may submit, cancel, or drive the loop; whoever drives it drives it
for all requests. What a request may see of a step is committed after the step: an interrupted step can be run again with the same bits.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in look-ups of enums that take 13 us a step
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from quaff.batch import Batch, Counters, Logits
from quaff.cache.pages import PageCache
from quaff.cache.prefix import Miss, PrefixCache
from quaff.engine.convoy import Convoy
from quaff.engine.pace import BURST_TOKENS, Pace, Policy
from quaff.engine.runner import Draw, Runner
from quaff.engine.sampler import Constraint, SamplingParams, TokenLogprobs, describe, sample
from quaff.engine.scheduler import NO_LOGITS, Scheduler, Work
from quaff.engine.speculate import Lookup
from quaff.errors import ClosedError, MemoryBudgetError, NonFiniteError
from quaff.graph.program import Graph, OpKind
from quaff.schedule import Order
from quaff.weights.budget import human_bytes, memory_limit_bytes
from quaff.weights.plan import Plan, StreamCounters

T = TypeVar("T")
FinishReason = Literal["stop", "length", "cancelled", "error", "prefilled"]

LOGITS_BYTES = 64 << 20
"""Logits of one step take at most this much (or one row): scoring a long text must not need memory for all its rows."""
BLOCK_ROWS = {"token": 256, "chunk": 2048, "layer": 4096}
"""Rows of prompts in one native call. A cancelled layer-major step may lose its whole block; longer blocks only save Python's share."""
LAYER_SCRATCH_BYTES = 1 << 30
MOST_BOUNDARIES = 4
"""Places of one prompt at which recurrent state is kept: each costs as much as a whole state."""
STEP_DRAFTS = 32
"""Guessed rows of one step, shared out among those that decode in it: they must not cost the others more than a short prompt would."""

AHEAD_TOKENS = 512
"""Memory is counted for so many tokens that are not generated yet: clients allow far more than they use, and others could use it."""

Accept = Callable[[int], FinishReason | None]
OnLogits = Callable[[int, NDArray[np.float32]], None]


class Options(TypedDict, total=False):
    """What a request may have besides its tokens; see `Engine.submit`."""

    params: SamplingParams | None
    logits_from: int | None
    accept: Accept | None
    on_logits: OnLogits | None
    base: int | None
    base_tokens: Sequence[int]
    keep: bool
    constraint: Constraint | None
    share: Request | None
    boundaries: Sequence[int]
    salt: str
    asked_at: float


@dataclass(eq=False, slots=True)
class Request:
    """A sequence in the engine. `tokens` are known, `computed` of them are in the KV state. Read it freely; only the engine writes.

    `cached_tokens` were not computed for it, and `miss` says why they are not more. `version` is that of the prefix tree in which it was
    looked for, -1: not yet. It waits until `leader` has computed the `meeting` tokens that both begin with; `ids` are those of its prompt.
    `reserved`: positions that memory is counted for. `logprobs` has one entry per generated token and `prompt_logprobs` one per prompt
    token after the first, where its parameters ask for them. `drafted` guessed tokens were checked, `accepted` of them were right.
    """

    id: int
    tokens: list[int]
    params: SamplingParams | None
    logits_from: int
    accept: Accept | None
    on_logits: OnLogits | None
    keep: bool
    constraint: Constraint | None
    share: Request | None
    base: int | None
    base_tokens: Sequence[int]
    prompt_tokens: int
    ids: NDArray[np.int32]
    boundaries: tuple[int, ...] = ()
    salt: str = ""
    leader: Request | None = None
    meeting: int = 0
    reserved: int = 0
    sequence: int = 0
    cached_tokens: int = 0
    miss: Miss | None = None
    version: int = -1
    computed: int = 0
    admitted: bool = False
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    lookup: Lookup | None = None
    draft: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
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


def _few(boundaries: Sequence[int]) -> tuple[int, ...]:
    """The first of many and the last ones: what all conversations share, and where this one may go on in another way."""
    return tuple(boundaries if len(boundaries) <= MOST_BOUNDARIES else [boundaries[0], *boundaries[1 - MOST_BOUNDARIES :]])


def row_work(graph: Graph) -> Callable[[int], int]:
    """Multiply-accumulates of one row of a prompt by its position, without the head."""
    last = max((i for i, stage in enumerate(graph.stages) if stage.kind == "mixer"), default=0)
    stages = graph.stages[: last + 1]
    fixed = sum(stage.macs_per_row + stage.state_macs_per_row for stage in stages)
    windows: dict[int, int] = {}
    for op in (op for stage in stages for op in stage.program.ops if op.kind == OpKind.ATTEND):
        _, _, heads, _, dim, window, value_dim = op.ints
        windows[window] = windows.get(window, 0) + heads * (dim + value_dim)
    each = [(macs, window or 1 << 62) for window, macs in windows.items()]
    return lambda position: fixed + sum(macs * min(position + 1, window) for macs, window in each)


def make_scheduler(order: Order, graph: Graph, policy: Policy | None = None, plan: Plan | None = None) -> Scheduler:
    """An empty scheduler with the step sizes of an order, and of a plan. Where weights are streamed a step is a pass, and all share it."""
    rows = BLOCK_ROWS[order.name]
    logits_rows = max(1, LOGITS_BYTES // (4 * graph.outputs))
    if plan is not None:
        rows, logits_rows = min(rows, plan.pass_rows), plan.logits_rows
        if not plan.resident and order.name == "layer":
            return Scheduler(plan.pass_rows, plan.pass_rows, logits_rows, row_work(graph))
    elif order.name == "layer":
        rows = min(rows, LAYER_SCRATCH_BYTES // max(1, graph.scratch_bytes_per_row))
    # Whole chunks, so that cutting a prompt into blocks adds no cell.
    block_rows = max(1, rows // order.chunk) * order.chunk
    mixed_rows = order.chunk if order.name != "token" else 64
    if policy is not None and policy.max_stall_ms is not None and order.name != "layer":
        # What others may have to wait for, and what a cancelled step of a recurrent model may lose.
        block_rows = mixed_rows
    return Scheduler(block_rows, mixed_rows, logits_rows, row_work(graph))


class Engine:
    """Continuous batching over one model. `end_ids` end a completion, `context` bounds the positions of a sequence, `plan` the steps.

    With `prefix`, what was computed for one request is found again by those that begin with the same tokens. `beside` is an engine on the
    same threads and memory: one lock covers both, and no step here holds up its replies longer than its own may. What streamed weights cost
    counts as `prefill_stream` in steps that read a prompt, as `decode_stream` in all others.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PageCache,
        order: Order,
        context: int,
        end_ids: frozenset[int],
        plan: Plan | None = None,
        prefix: PrefixCache | None = None,
        beside: Engine | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.prefix = prefix
        self._convoy = Convoy(cache, prefix) if prefix is not None else None
        if prefix is not None:
            cache.accountant.reclaim = prefix.evict
            cache.make_way = prefix.make_way
        self.context = context
        self.end_ids = end_ids
        self.plan = plan
        self.policy = Policy()
        self.steps = 0
        self.prefill_stream = StreamCounters()
        self.decode_stream = StreamCounters()
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._ends, self._no_ends = np.array(sorted(end_ids), dtype=np.int32), np.empty(0, dtype=np.int32)
        self._row_seconds = math.inf  # of a row of all that decode, in the last step that did nothing else
        self.preemptions = 0
        self.lock: threading.RLock = beside.lock if beside is not None else threading.RLock()
        self._peers: list[Engine] = []
        if beside is not None:
            self._peers.append(beside)
            beside._peers.append(self)
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._followers: dict[int, list[Request]] = {}
        self._running: Sequence[Request] = ()
        self._planned: Sequence[Work] = ()
        self._orphans: deque[int] = deque()
        self._ids = itertools.count(1)
        self._busy = False
        self._deferral = _Deferral(runner.control.cancel)
        self._closed = False
        self._pace: Pace | None = None
        self.set_order(order)

    def set_order(self, order: Order) -> None:
        """Walk the grid in another order from the next step on; no bit depends on it. MemoryBudgetError when there is no room for it."""
        with self._working():
            self._set(order, self.policy)

    def set_policy(self, policy: Policy) -> None:
        """Treat requests in another way from the next step on; no bit depends on it. MemoryBudgetError when there is no room for it."""
        with self._working():
            self._set(self.order, policy)

    def _set(self, order: Order, policy: Policy) -> None:
        scheduler = make_scheduler(order, self.runner.graph, policy, self.plan)
        graph = self.runner.graph
        # Recurrent layers are known at the end of a step only, and f32 keys of a guess that overflows would not stay hidden.
        takes_back = not graph.state_kinds and graph.kv_value_bytes == 2
        drafts = policy.draft_tokens if takes_back else 0
        self._reserve_step(scheduler, order, drafts)
        self.order, self.policy, self._drafts = order, policy, drafts
        self._bursts = takes_back and not self.runner.streamed and policy.burst_ms > 0
        # Layer-major reads all weights once a step: smaller steps would make everyone wait longer, not shorter.
        paced = policy.max_stall_ms is not None and order.name != "layer"
        self._pace = Pace((policy.max_stall_ms or 0) / 1000) if paced else None
        self.block_rows = scheduler.prompt_rows
        for request in self._requests.values():
            if request.admitted:
                scheduler.add(request.id, len(request.tokens), request.computed, request.logits_from)
        self._scheduler = scheduler

    @property
    def counters(self) -> Counters:
        """Everything counted since the model was loaded."""
        return self.runner.counters

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._scheduler)

    @property
    def waiting(self) -> int:
        """Requests that wait for memory, for others to end, or for the prompt that they share."""
        return max(0, len(self._requests) - len(self._scheduler))

    def submit(self, tokens: Sequence[int], **options: Unpack[Options]) -> Request:
        """Queue a sequence of at least one token. The caller has checked ids and length; ConfigError for a biased id that is none.

        With `params` it generates; `accept` sees every new token (end tokens too) and may end the request. Without, it is only computed.
        `logits_from`: `on_logits(position, row)` gets every computed row from that position on, in order. `base`: a sequence that holds
        `base_tokens`; the prefix they share is not computed again, but the last token always is. `keep` leaves the sequence to the caller.
        `constraint` says what may be generated. `share`: a request with the same prompt, most often of another `choice`: its state is used
        as soon as its prompt is computed. `boundaries` are a few lengths at which other prompts may part from this one (the ends of
        messages): models that cannot go back to any position keep their state there. Only requests with the same `salt` share a prefix.
        `asked_at`: when the client came (perf_counter seconds), where something was done for it before.
        """
        request = self.request(tokens, **options)
        self.enter(request)
        return request

    def request(self, tokens: Sequence[int], **options: Unpack[Options]) -> Request:
        """A request that is to `enter`; takes no lock."""
        params = options.get("params")
        wanted = options.get("logits_from")
        if params is not None:
            params.check_vocab(self.runner.graph.config.vocab)
            if wanted is None:
                wanted = len(tokens) - 1 if params.prompt_logprobs is None else 0
        return Request(
            id=next(self._ids),
            tokens=list(tokens),
            params=params,
            logits_from=NO_LOGITS if wanted is None else wanted,
            accept=options.get("accept"),
            on_logits=options.get("on_logits"),
            keep=options.get("keep", False),
            constraint=options.get("constraint"),
            share=options.get("share"),
            base=options.get("base"),
            base_tokens=options.get("base_tokens", ()),
            prompt_tokens=len(tokens),
            ids=np.array(tokens, dtype=np.int32),
            boundaries=_few([b for b in sorted(set(options.get("boundaries", ()))) if 0 < b < len(tokens)]),
            salt=options.get("salt", ""),
            submitted_at=options.get("asked_at") or time.perf_counter(),
        )

    def enter(self, request: Request) -> None:
        """Queue a request that `request` made; ClosedError when the model is closed."""
        with self._working():
            self._sweep()
            if self._closed:
                raise ClosedError("the model is closed")
            if request.base is not None:
                self._fork(request, request.base, request.base_tokens)
                request.base, request.base_tokens = None, ()
            self._requests[request.id] = request
            if request.params is not None and request.params.max_tokens == 0 and request.params.prompt_logprobs is None:
                self._finish(request, "length")
            elif not self._follow(request):
                self._waiting.append(request)

    def _fork(self, request: Request, base: int, base_tokens: Sequence[int]) -> None:
        """Begin with what a sequence of `base_tokens` has; rows whose logits the parameters ask for must be computed, the last one too."""
        wants_all = request.params is not None and request.params.prompt_logprobs is not None
        most = 0 if wants_all else min(request.prompt_tokens - 1, len(base_tokens), self.cache.written(base))
        shared = next((i for i in range(most) if request.tokens[i] != base_tokens[i]), most)
        cached = self.cache.longest(base, shared)
        request.sequence = self.cache.fork(base, cached) if cached else self.cache.create()
        request.cached_tokens = request.computed = cached

    def _follow(self, request: Request) -> bool:
        """Wait for the prompt of the request that this one shares, unless that is computed, or never will be."""
        leader = request.share
        while leader is not None and leader.share is not None and not leader.sequence:
            leader = leader.share  # one that waits as well
        if leader is None or leader.id not in self._requests:
            return False
        if leader.prefilled_at:
            self._inherit(request, leader)
            return False
        self._followers.setdefault(leader.id, []).append(request)
        if leader.sequence:
            self._keep_last(leader)
        return True

    def _keep_last(self, leader: Request) -> None:
        # Where the same tokens asked again start: the last one is always computed.
        self.cache.snapshot(leader.sequence, leader.prompt_tokens - 1)

    def _inherit(self, request: Request, leader: Request) -> None:
        if leader.sequence and not request.sequence:
            try:
                self._fork(request, leader.sequence, leader.tokens[: leader.computed])
            except MemoryBudgetError:
                request.sequence = 0  # it computes the prompt itself when there is room

    def _let_go(self, leader: Request) -> None:
        """The prompt of `leader` is computed, or never will be: those that share it go on from what there is."""
        followers = [r for r in self._followers.pop(leader.id, ()) if not r.done]
        if not followers:
            return
        ready = followers if leader.prefilled_at else followers[:1]
        for request in ready:
            self._inherit(request, leader)
        for request in followers[len(ready) :]:
            request.share = ready[0]
            self._followers.setdefault(ready[0].id, []).append(request)
        # They came with the leader: those who came later do not go first.
        self._waiting.extendleft(reversed(ready))

    def close(self) -> None:
        """End all requests, accept no more, and let go of the model."""
        # The flags come before the lock, which is held by the step that they end.
        self._closed = True
        self.cancel()
        with self.lock:
            self.cancel()
            self.sweep()
            if self.prefix is not None:
                self.prefix.clear()
            self.runner.close()

    def cancel(self, request: Request | None = None) -> None:
        """End one request, or all; finished positions stay. May be called from any thread.

        A step that computes for cancelled requests only ends at the next cell boundary. One that others take part in is finished for them.
        """
        for r in [request] if request is not None else list(self._requests.values()):
            r.cancelled = True
        self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        # Flags first, then the look at who is running; a step does it the other way round: one of the two sees the other.
        running = self._running
        for request in running:
            if not request.cancelled:
                return
        if running:
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
        with self.lock:
            if self._busy:
                raise RuntimeError("a callback of a running step cannot run another one")
            with self._deferral:
                self._busy = True
                try:
                    self._step(on_work)
                finally:
                    self._busy = False

    def _step(self, on_work: Callable[[int], None] | None) -> None:
        self.runner.control.reset()
        self._sweep()
        if self.plan is not None and (self._waiting or not self.plan.resident):
            self._heed_limit(self.plan)
        self._extend()
        if self._waiting:
            self._admit()
        if self._drafts:
            self._guess()
        burst = self._burst()
        pace = self._pace
        awaited = bool(self._peers) and any(peer._scheduler.decoding() for peer in self._peers)
        planned = self._scheduler.plan(pace.work if pace is not None else None, awaited)
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

        work, requests, batch = self._batch(planned)
        if not work:
            return
        draw = [self._draw(request) for request in requests] if burst else []
        self._running = requests
        self._stop_unwanted()
        self._planned = work
        began = time.perf_counter()
        try:
            streamed = self.runner.stream_counters() if self.runner.streamed else None
            logits = self.runner.run(batch, self.order, guarded if on_work is not None else None, draw)
            self._running = ()
            self.steps += 1
            if streamed is not None:
                self._count_stream(work, streamed)
            if burst or all(w.rows == 1 for w in work):
                rows = max(1, logits.finished[0])
                self._row_seconds = math.inf if any(logits.poisoned) else (time.perf_counter() - began) / rows
            self._commit(work, logits)
            if pace is not None and not self.runner.control.cancelled:
                pace.measured(self._scheduler.prompt_work, time.perf_counter() - began, self._scheduler.mixed)
        except MemoryBudgetError as error:
            # The request that came last made the step too large; without it the others go on.
            self._fail(self._requests[max(w.request for w in work)], error)
        except Exception as error:
            for request in requests:
                if not request.done:
                    self._fail(request, error)
        finally:
            self._running = ()
            for request in requests if burst else ():
                self._undraft(request)  # the step may have raised before it was committed
        if raised:
            raise raised[0]

    def _heed_limit(self, plan: Plan) -> None:
        """The system may allow this process less than when the plan was made, or as much again: so does the accountant from now on. Where
        more than that is in use the caches give way, then the requests that came last: better a clear error than to be killed."""
        limit, accountant = memory_limit_bytes(), self.cache.accountant
        allowed = plan.memory_bytes if limit is None else min(limit, plan.memory_bytes)
        accountant.limit_bytes = allowed - plan.base_bytes
        if allowed == plan.memory_bytes:
            return
        if accountant.reclaim is not None and not accountant.fits(0):
            accountant.reclaim(accountant.total_bytes - accountant.limit_bytes)
        while self._requests and not accountant.fits(0):
            used = human_bytes(plan.base_bytes + accountant.total_bytes)
            error = MemoryBudgetError(
                f"the system allows this process {human_bytes(allowed)} by now, but {used} are in use or kept as a margin; "
                "raise the limit of its control group, or load the model again with a smaller memory (--memory)"
            )
            self._fail(max(self._requests.values(), key=lambda r: (r.admitted, r.id)), error)
            self._forget_done()

    def reading(self, work_done: int) -> list[tuple[Request, int, float]]:
        """(request, its rows, share of the step that is done) of the prompts that the running step reads, when so many
        multiply-accumulates of it are done. For `on_work`; never all of it, for nobody has those tokens yet."""
        total = sum(self.runner.work(w.start, w.rows, w.rows - w.logits) for w in self._planned)
        requests = [(self._requests[w.request], w.rows) for w in self._planned]
        return [(request, rows, min(0.999, work_done / max(1, total))) for request, rows in requests if not request.prefilled_at]

    def _guess(self) -> None:
        """Drafts for those that decode, as many as all of them together may have."""
        decoding = [self._requests[r] for r in self._scheduler.decoding()]
        most = min(self._drafts, STEP_DRAFTS // max(1, len(decoding)))
        for request in decoding:
            if request.params is None:
                continue
            if request.lookup is None:
                request.lookup = Lookup(self._drafts)
            # No row beyond what a run without guesses would compute: there is no memory for it.
            limit = min(most, request.params.max_tokens - request.generated - 1, request.reserved - len(request.tokens))
            request.draft = request.lookup.draft(request.tokens, limit) if limit > 0 else []
            self._scheduler.draft(request.id, len(request.draft))

    def _burst(self) -> bool:
        """Where all decode they may compute as many rows each as take `burst_ms`, if nothing but the draw looks at their logits."""
        requests = [r for r in self._requests.values() if r.admitted]
        if not self._bursts or not requests or self.order.cell_rows(len(requests)) < len(requests):
            return False
        # Rows beyond what runs of single rows compute, and more of them at once, would need memory that may not be there.
        room = min(self._scheduler.mixed_rows, self._scheduler.logits_rows, self.runner.rows_with_scratch(len(requests)))
        rows = min(BURST_TOKENS, room // len(requests), int(self.policy.burst_ms / 1000 / self._row_seconds))
        for request in requests if rows > 1 else ():
            params = request.params
            if params is None or params.draw is None or request.on_logits is not None or request.constraint is not None:
                return False
            pending = len(request.tokens) - request.computed
            if pending != 1 or not request.computed or request.draft or request.logits_from > request.computed:
                return False
            rows = min(rows, params.max_tokens - request.generated, request.reserved - request.computed)
        if rows < 2:
            return False
        for request in requests:
            request.draft = [0] * (rows - 1)
            self._scheduler.draft(request.id, rows - 1)
        return True

    def _draw(self, request: Request) -> Draw:
        params = request.params
        assert params is not None and params.draw is not None
        return Draw(params.draw, self._no_ends if params.ignore_eos else self._ends)

    def _count_stream(self, work: Sequence[Work], before: StreamCounters) -> None:
        after = self.runner.stream_counters()
        assert after is not None
        if any(w.start < self._requests[w.request].prompt_tokens for w in work):
            self.prefill_stream += after - before
        else:
            self.decode_stream += after - before

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps: it may read and change the cache. ClosedError when the model is closed."""
        with self._working():
            if self._closed:
                raise ClosedError("the model is closed")
            return function()

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
        swept = False
        for request in list(self._requests.values()):
            if request.cancelled:
                self._finish(request, "cancelled")
                swept = True
        if swept:
            self._forget_done()
        while self._orphans:
            self.cache.free(self._orphans.popleft())

    def _forget_done(self) -> None:
        self._waiting = deque(r for r in self._waiting if not r.done)

    def _admit(self) -> None:
        held_back = []
        while self._waiting and len(self._scheduler) < self.policy.max_running:
            request = self._waiting.popleft()
            self._attach(request)
            if self._convoy is not None:
                readers = [r for r in self._requests.values() if r.admitted and not r.prefilled_at]
                if self._convoy.waits(request, readers, self.block_rows):
                    held_back.append(request)
                    continue
                self._attach(request)
            try:
                self._reserve(request)
            except MemoryBudgetError as error:
                if self._detach(request):
                    self._waiting.appendleft(request)
                    continue
                # Memory comes back when a running request ends; alone, a request that does not fit never will.
                if self._is_held_by_others(request):
                    self._waiting.appendleft(request)
                    break
                self._fail(request, error)
                continue
            request.admitted = True
            if self.prefix is not None and not request.started_at:
                self.prefix.counters.count(request.prompt_tokens, request.cached_tokens)
            request.started_at = request.started_at or time.perf_counter()
            self._scheduler.add(request.id, len(request.tokens), request.computed, request.logits_from)
        self._waiting.extendleft(reversed(held_back))

    def _attach(self, request: Request) -> None:
        """The sequence that a request grows: what it was given, else what the prefix tree has; and marks where its state is to be kept."""
        prefix = self.prefix
        if prefix is not None and request.version != prefix.version and (request.version >= 0 or not request.computed):
            # Rows whose logits are wanted are computed, the last one always. One that had to wait may find more now.
            hit = prefix.attach(request.tokens, min(len(request.tokens) - 1, request.logits_from), request.salt)
            if request.sequence:
                self.cache.free(request.sequence)
            request.sequence, request.computed, request.version = hit.sequence, hit.length, prefix.version
            if not request.started_at:
                request.cached_tokens, request.miss = hit.length, hit.miss
        elif not request.sequence:
            request.sequence = self.cache.create()
        if (prefix is not None or request.keep or request.id in self._followers) and request.computed < request.prompt_tokens:
            self._keep_last(request)
        for place in request.boundaries if prefix is not None else ():
            if place >= request.computed:
                self.cache.snapshot(request.sequence, place)

    def _is_held_by_others(self, request: Request) -> bool:
        """Whether memory will come back that running requests hold, here or in an engine that shares it."""
        return len(self._scheduler) > request.admitted or any(len(peer._scheduler) for peer in self._peers)

    def _detach(self, but: Request) -> bool:
        """Let go of the cached prefixes that waiting requests hold on to, but for one of them: they look again when they are next."""
        waiting = [r for r in self._requests.values() if r.sequence and r.version >= 0 and not r.admitted and r is not but]
        for request in waiting:
            self.cache.free(request.sequence)
            request.sequence = request.computed = 0
            request.version, request.leader = -1, None
        return bool(waiting)

    def _reserve(self, request: Request) -> None:
        """Count the memory of the tokens that a request has and of some more; alone, it gets what fits.

        MemoryBudgetError leaves the count as it was.
        """
        wanted = len(request.tokens)
        if request.params is not None:
            wanted = min(self.context, request.prompt_tokens + request.params.max_tokens, wanted + AHEAD_TOKENS)
        try:
            self._reserve_positions(request, wanted)
            return
        except MemoryBudgetError:
            if self._is_held_by_others(request):
                raise
        # Places to come back to are worth less than the answer.
        self.cache.forget_snapshots(request.sequence)
        least, most = len(request.tokens), wanted + 1
        self._reserve_positions(request, least)
        while most - least > 1:
            middle = (least + most) // 2
            try:
                self._reserve_positions(request, middle)
                least = middle
            except MemoryBudgetError:
                most = middle
        self._reserve_positions(request, least)

    def _extend(self) -> None:
        """Count more memory for those that have used theirs up. Where there is none, those that came last give way until there is."""
        for request in list(self._requests.values()):
            while request.admitted and len(request.tokens) > request.reserved and not request.done:
                try:
                    self._reserve(request)
                except MemoryBudgetError:
                    if self._detach(request):
                        continue
                    if self._is_held_by_others(request):
                        self._give_way(max((r for r in self._requests.values() if r.admitted), key=lambda r: r.id))
                    else:
                        self._finish(request, "length")

    def _give_way(self, request: Request) -> None:
        """Forget the state of a request and queue it again; it is computed anew, to the same bits, when there is memory."""
        self.preemptions += 1
        self._scheduler.remove(request.id)
        self.cache.settle(request.sequence)
        if self.prefix is not None:
            # The tree gives way in its turn; what is left then is not computed again.
            self.prefix.publish(request.sequence, request.tokens[: request.computed], request.salt)
        self.cache.free(request.sequence)
        request.logits_from = max(request.logits_from, request.computed)  # what it has heard it does not hear again
        request.admitted = False
        request.sequence = request.computed = request.reserved = 0
        request.version = -1
        request.draft = []
        self._waiting.appendleft(request)
        self._reserve_step(self._scheduler, self.order, self._drafts)

    def _reserve_positions(self, request: Request, positions: int) -> None:
        self.cache.reserve(request.sequence, positions, self.block_rows)
        try:
            self._reserve_step(self._scheduler, self.order, self._drafts, None if request.admitted else request)
        except MemoryBudgetError:
            self.cache.settle(request.sequence)
            if request.reserved:
                self.cache.reserve(request.sequence, request.reserved, self.block_rows)
            raise
        request.reserved = positions

    def _reserve_step(self, scheduler: Scheduler, order: Order, drafts: int, new: Request | None = None) -> None:
        """Count scratch and logits of the largest step of the admitted requests and a new one: none of them may fail later for it."""
        requests = [r for r in self._requests.values() if r.admitted] + ([new] if new is not None else [])
        most = [1 + drafts if r.params else 0 for r in requests]
        pending = [max(1, n, len(r.tokens) - r.computed) for n, r in zip(most, requests, strict=True)]
        logits = [min(p, max(n, len(r.tokens) - r.logits_from)) for p, n, r in zip(pending, most, requests, strict=True)]
        rows = min(sum(pending), max(scheduler.prompt_rows, scheduler.mixed_rows))
        self.runner.reserve(rows, order, min(sum(max(0, n) for n in logits), scheduler.logits_rows))

    def _batch(self, planned: Sequence[Work]) -> tuple[list[Work], list[Request], Batch]:
        """The batch of what was planned, and its requests, less those that found no page."""
        segments, work, requests = [], [], []
        for w in planned:
            request = self._requests[w.request]
            known = request.tokens[w.start : w.start + w.rows]
            tokens = np.array(known + request.draft[: w.rows - len(known)], dtype=np.int32)
            try:
                segments.append(self.cache.segment(request.sequence, tokens, range(w.logits, w.rows)))
            except (MemoryBudgetError, MemoryError) as error:
                self._fail(request, self._no_memory(error))
                continue
            work.append(w)
            requests.append(request)
        return work, requests, Batch(tuple(segments))

    @staticmethod
    def _no_memory(error: MemoryBudgetError | MemoryError) -> MemoryBudgetError:
        if isinstance(error, MemoryBudgetError):
            return error
        return MemoryBudgetError("the system has no memory left for KV pages; shorten the prompt or the context")

    def _commit(self, work: Sequence[Work], logits: Logits) -> None:
        index = dict(zip(logits.rows.tolist(), itertools.count(), strict=False))
        now = time.perf_counter()
        end = 0
        drawn = logits.drawn or [None] * len(work)
        for s, (w, finished, poisoned, tokens) in enumerate(zip(work, logits.finished, logits.poisoned, drawn, strict=True)):
            begin, end = end, end + w.rows
            request = self._requests[w.request]
            guessed = max(0, w.start + w.rows - len(request.tokens))
            if poisoned and not guessed:
                where = f"positions {w.start}..{w.start + w.rows - 1}"
                self._fail(request, NonFiniteError(f"the model's values became infinite or NaN in {where}; the request was dropped"))
                continue
            # A row whose logits are wanted but missing (the step was cancelled before the head) is computed again.
            rows = min(w.logits, finished)
            while rows < finished and begin + rows in index:
                rows += 1
            if rows < finished and self.runner.graph.state_kinds:
                rows = 0  # a recurrent state is known at the end of a step only
            if poisoned:
                rows = 0  # perhaps a guess did it; without guesses it is the request itself
            reason: FinishReason | None = None
            try:
                if tokens is not None:
                    request.draft = tokens
                for r in range(w.logits, rows):
                    token = tokens[r] if tokens is not None and r < len(tokens) else None
                    row = logits.values[index[begin + r] if tokens is None else s]
                    reason = self._use(request, w.start + r, row, token)
                    cancelled = tokens is not None and request.cancelled
                    if reason is not None or cancelled or (r < guessed and request.tokens[-1] != request.draft[r]):
                        rows = r + 1
                        break
            except Exception as error:
                self._fail(request, error)
                continue
            self.cache.commit(request.sequence, w.start + rows)
            self._scheduler.finish(request.id, rows)
            request.computed = w.start + rows
            if guessed:
                if tokens is None:
                    self._count_guess(request, guessed, rows, poisoned)
                self._undraft(request)
            if request.computed >= request.prompt_tokens and not request.prefilled_at:
                request.prefilled_at = now
                if self.prefix is not None and reason is None and request.params is not None:
                    self.prefix.publish(request.sequence, request.tokens[: request.computed], request.salt, growing=True)
                self._let_go(request)
            if reason is None and request.params is None and request.computed == len(request.tokens):
                reason = "prefilled"
            if reason is not None:
                self._finish(request, reason)

    def _undraft(self, request: Request) -> None:
        """The next step computes no more than is known of the request."""
        if request.draft and not request.done:
            request.draft = []
            self._scheduler.draft(request.id, 0)

    def _count_guess(self, request: Request, guessed: int, rows: int, poisoned: bool) -> None:
        assert request.lookup is not None
        if poisoned:
            request.lookup.stop()
        elif rows:
            request.lookup.judge(guessed, rows - 1, len(request.tokens))
            request.drafted += guessed
            request.accepted += rows - 1
            self.drafted_tokens += guessed
            self.accepted_tokens += rows - 1

    def _use(self, request: Request, position: int, row: NDArray[np.float32], token: int | None) -> FinishReason | None:
        """Hand out one row of logits; where it is the last known token's, draw the next unless the step did, and say whether it ends the
        request."""
        if request.on_logits is not None:
            request.on_logits(position, row)
        params = request.params
        if params is None:
            return None
        if position < request.prompt_tokens - 1:
            if params.prompt_logprobs is not None:
                request.prompt_logprobs.append(describe(row, request.tokens[position + 1], params.prompt_logprobs, position))
            return None
        if not params.max_tokens:
            return "length"
        constraint = request.constraint
        if token is None:
            token = sample(params, row, request.tokens, request.prompt_tokens, constraint.allowed() if constraint is not None else None)
        if params.logprobs is not None:
            request.logprobs.append(describe(row, token, params.logprobs, position))
        request.tokens.append(token)
        self._scheduler.extend(request.id)
        if constraint is not None:
            constraint.accept(token)
        reason = request.accept(token) if request.accept is not None else None
        if reason is not None:
            return reason
        if (token in self.end_ids and not params.ignore_eos) or (constraint is not None and constraint.ended):
            return "stop"
        if request.generated >= params.max_tokens or len(request.tokens) > self.context:
            return "length"
        return None

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
        if request.sequence:
            self.cache.settle(request.sequence)
            if self.prefix is not None and request.admitted and reason != "error":
                self.prefix.publish(request.sequence, request.tokens[: request.computed], request.salt)
        self._let_go(request)
        if request.admitted:
            self._scheduler.remove(request.id)
            self._reserve_step(self._scheduler, self.order, self._drafts)
        if request.keep:
            request.sequence = request.sequence or self.cache.create()
        elif request.sequence:
            self.cache.free(request.sequence)


class _Deferral:
    """In the main thread, SIGINT cancels the running step now and raises after the block, when nothing is half done."""

    __slots__ = ("_cancel", "_caught", "_previous")

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._caught: tuple[int, FrameType | None] | None = None
        self._previous: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread() and callable(previous := _signal.getsignal(_signal.SIGINT)):
            self._previous = previous
            _signal.signal(_signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught = self._caught or (number, frame)
        self._cancel()

    def __exit__(self, *raised: object) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            _signal.signal(_signal.SIGINT, previous)
            caught, self._caught = self._caught, None
            if caught is not None:
                previous(*caught)
