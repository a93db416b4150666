"""A thread that drives an engine for many clients: requests come in and results go out without anyone waiting for a running step."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, Unpack

from quaff.engine.engine import Engine, Options, Request
from quaff.engine.sampler import TokenLogprobs
from quaff.errors import ClosedError, ConfigError, QueueFullError

T = TypeVar("T")

IDLE_SECONDS = 1.0
"""An idle loop shows so often that it is alive."""
LONGEST_RETRY_SECONDS = 60
TELL_SECONDS = 0.5
"""Those whose prompts a long step reads are told so often how far it is."""
MOST_FAILURES = 3
"""Steps in a row that fail for no request's fault; then the loop ends, falls silent, and is to be restarted."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """What changed for a request since the update before; the last one is `done`.

    `tokens`: new generated ids, end tokens included; `logprobs`: as many, where they were asked for. `computed`: tokens in the KV state,
    those from a cache included, never fewer than before. `admitted`: False while the request waits. While a long step runs: of the work for
    `step_rows` more tokens the share `step_share` is done.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    computed: int
    admitted: bool
    done: bool
    step_rows: int = 0
    step_share: float = 0.0


Listen = Callable[[Update], None]


@dataclass(slots=True)
class _Client:
    """A request and how much of it its listener knows."""

    request: Request
    listen: Listen
    tokens: int
    computed: int = -1
    admitted: bool = False

    def update(self) -> Update | None:
        """What is new; None when nothing is."""
        r = self.request
        done, known, computed = r.done, len(r.tokens), max(r.computed, self.computed)
        if not done and (known, computed, r.admitted) == (self.tokens, self.computed, self.admitted):
            return None
        begin, self.tokens, self.computed, self.admitted = self.tokens, known, computed, r.admitted
        logprobs = r.logprobs[begin - r.prompt_tokens : known - r.prompt_tokens]
        return Update(r, tuple(r.tokens[begin:known]), tuple(logprobs), computed, r.admitted, done)


class EngineLoop:
    """Drives an engine from a thread of its own. All methods may be called from any thread, and from a coroutine.

    At most `max_waiting` requests wait to be admitted; further ones are refused.
    """

    def __init__(self, engine: Engine, max_waiting: int = 64) -> None:
        if max_waiting < 1:
            raise ConfigError(f"max_waiting is {max_waiting}; expected at least 1")
        self.engine = engine
        self.max_waiting = max_waiting
        self._wake = threading.Condition()
        self._inbox: deque[_Client] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._clients: dict[int, _Client] = {}
        self._closing = False
        self._beat = time.monotonic()
        self._pulse: tuple[int, ...] = ()
        self._told = 0.0
        self._request_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="quaff-loop", daemon=True)

    def start(self) -> None:
        self._beat = time.monotonic()
        self._thread.start()

    def submit(self, tokens: Sequence[int], listen: Listen, **options: Unpack[Options]) -> Request:
        """Queue a request (see `Engine.submit`; a `base` must stay as it is until the request is admitted).

        `listen` is called in the loop's thread, in order, and must not wait. QueueFullError when too many wait, ClosedError
        when the loop is closing, ConfigError for parameters that do not fit the model.
        """
        request = self.engine.request(tokens, **options)
        client = _Client(request, listen, len(tokens))
        with self._wake:
            self.check_room()
            self._inbox.append(client)
            self._wake.notify()
        return request

    def check_room(self) -> None:
        """QueueFullError or ClosedError where `submit` would raise it now: before work is done for a request that cannot come in."""
        if self._closing:
            raise ClosedError("the server is shutting down; no more requests are taken")
        if self.waiting >= self.max_waiting:
            raise QueueFullError(f"{self.waiting} requests are waiting, as many as the queue takes; try again later", self._retry_after())

    def cancel(self, request: Request) -> None:
        """End a request; its listener still hears that it is done. A step that computes for it alone ends at the next cell boundary."""
        self.engine.cancel(request)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps, in the loop's thread. ClosedError when the loop is closing."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise ClosedError("the server is shutting down")
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def drive(self, engine: Engine) -> Future[None]:
        """Run a step of another engine between two steps of this one."""
        return self.call(lambda: engine.step(partial(self._moved, engine)))

    def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, give those there are so long to end, cancel the rest, and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is None:
            return
        self._thread.join(drain_seconds)
        while self._thread.is_alive():
            for client in [*self._inbox, *self._clients.values()]:
                self.engine.cancel(client.request)
            self._thread.join(0.1)

    @property
    def silent_seconds(self) -> float:
        """Time since the loop, or the step that it runs, was last seen to move."""
        return time.monotonic() - self._beat

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._inbox) + self.engine.waiting

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return self.engine.running

    def _retry_after(self) -> int:
        """Seconds until about one place in the queue is free, from how long requests took lately."""
        return min(LONGEST_RETRY_SECONDS, max(1, math.ceil(self._request_seconds / max(1, self.running))))

    def _run(self) -> None:
        failures = 0
        try:
            while self._await_work():
                self._take_in()
                self._answer_calls()
                if self._clients:
                    try:
                        self.engine.step(partial(self._moved, self.engine))
                        failures = 0
                    except Exception:
                        failures += 1
                        if failures == MOST_FAILURES:
                            raise
                        # Not one of the errors that end a request: nobody knows what is half done.
                        log.exception("a step failed; all requests are cancelled")
                        self.engine.cancel()
                self._tell()
        except Exception as error:
            log.exception("the engine's loop has ended")
            self._give_up(error)

    def _await_work(self) -> bool:
        with self._wake:
            while True:
                self._beat = time.monotonic()
                if self._inbox or self._calls or self._clients:
                    return True
                if self._closing:
                    return False
                self._wake.wait(IDLE_SECONDS)

    def _take_in(self) -> None:
        while self._inbox:
            client = self._inbox[0]
            self._clients[client.request.id] = client
            try:
                self.engine.enter(client.request)
            except Exception as error:
                self._refuse(client.request, error)
            # It is counted as waiting here until the engine counts it.
            self._inbox.popleft()

    def _answer_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _moved(self, engine: Engine, work_done: int) -> None:
        """Called several times a second while a long step runs; a step that stands still is not alive."""
        pulse = engine.runner.pulse
        if pulse != self._pulse:
            self._pulse = pulse
            self._beat = time.monotonic()
        if engine is self.engine and time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            for request, rows, share in engine.reading(work_done):
                client = self._clients.get(request.id)
                if client is not None:
                    computed = max(request.computed, client.computed)
                    self._pass(client, Update(request, (), (), computed, True, False, rows, share))

    def _tell(self) -> None:
        for client in list(self._clients.values()):
            update = client.update()
            if update is None:
                continue
            if update.done:
                del self._clients[client.request.id]
                self._learn(client.request)
            self._pass(client, update)

    def _pass(self, client: _Client, update: Update) -> None:
        try:
            client.listen(update)
        except Exception:
            log.exception("the listener of a request failed; the request is cancelled")
            self._clients.pop(client.request.id, None)
            self.engine.cancel(client.request)

    def _learn(self, request: Request) -> None:
        if request.started_at and request.finished_at:
            self._request_seconds += (request.finished_at - request.started_at - self._request_seconds) / 8

    @staticmethod
    def _refuse(request: Request, error: Exception) -> None:
        request.error = error
        request.finished_at = time.perf_counter()
        request.finish_reason = "error"

    def _give_up(self, error: Exception) -> None:
        with self._wake:
            self._closing = True
            while self._inbox:
                client = self._inbox.popleft()
                self._clients[client.request.id] = client
        for client in self._clients.values():
            if not client.request.done:
                self._refuse(client.request, error)
        self._tell()
        while self._calls:
            self._calls.popleft()[1].set_exception(error)
