"""One completion on its way from the engine's thread to a client's coroutine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quaff.engine.engine import FinishReason, Request
from quaff.engine.grammar import Grammar
from quaff.engine.loop import EngineLoop, Update
from quaff.engine.reader import Reader
from quaff.engine.sampler import SamplingParams, TokenLogprobs
from quaff.llm import LLM, Timings
from quaff.serve.errors import ApiError

OnStep = Callable[[Update, float], None]
"""Gets every update of a request, and when it was made (perf_counter seconds)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a request asks of the engine. `tokens` is a prompt that `LLM.encode` let pass.

    `progress`: the generation yields Progress too. `shown`: special tokens that are part of the text. `grammar`: what every choice must
    look like. `boundaries`: lengths at which other prompts are likely to part from this one. Only jobs of one `salt` share a prefix.
    """

    tokens: list[int]
    params: SamplingParams
    progress: bool = False
    shown: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    boundaries: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and the tokens chosen since the last one. Text may be held back (half a character, the start of a stop string)."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """`processed` of `total` prompt tokens are read, `cached` of them found. It grows with the work, which later tokens make more of."""

    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """A generation that has ended. `tokens` are all new ids, an end token included; `stop` is the stop string that was met.

    `cache_miss_reason` says why more of the prompt was not cached, where it nearly was.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop: str | None
    prompt_tokens: int
    cached_tokens: int
    cache_miss_reason: str | None
    drafted_tokens: int
    accepted_tokens: int
    queue_seconds: float
    total_seconds: float
    timings: Timings

    def llama_timings(self) -> dict[str, Any]:
        """The block of the same name in llama.cpp's replies. Times in milliseconds; the first token's time belongs to the prompt."""
        t = self.timings
        prompt_ms, reply_ms = 1e3 * t.prefill_seconds, 1e3 * t.decode_seconds
        block = {
            "cache_n": self.cached_tokens,
            "prompt_n": t.prefill_tokens,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, t.prefill_tokens),
            "prompt_per_second": t.prefill_tokens_per_second,
            "predicted_n": len(self.tokens),
            "predicted_ms": reply_ms,
            "predicted_per_token_ms": reply_ms / max(1, t.decode_tokens),
            "predicted_per_second": t.decode_tokens_per_second,
        }
        return block | ({"draft_n": self.drafted_tokens, "draft_n_accepted": self.accepted_tokens} if self.drafted_tokens else {})

    def summary(self) -> str:
        """In a line of the log."""
        t = self.timings
        return (
            f"prompt {self.prompt_tokens} (cached {self.cached_tokens}), {t.prefill_tokens_per_second:.0f} tok/s, "
            f"TTFT {t.ttft_seconds:.2f} s, reply {len(self.tokens)}, {t.decode_tokens_per_second:.1f} tok/s, {self.finish_reason}"
        )


class Generation:
    """Iterate over it for Delta and Progress; `result` is there when the iteration has ended. An error of the request is raised by it."""

    def __init__(self, llm: LLM, loop: EngineLoop, job: Job, reader: Reader, on_step: OnStep) -> None:
        self.result: Result | None = None
        self._llm = llm
        self._engine_loop = loop
        self._job = job
        self._reader = reader
        self._on_step = on_step
        self._request: Request | None = None
        self._error: Exception | None = None
        self._cancelled = False
        self._processed = -1
        self._works: dict[int, int] = {}
        self._inbox: deque[Delta | Progress] = deque()
        self._news = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens from the second on, where asked for; complete with the first token."""
        return tuple(self._request.prompt_logprobs) if self._request is not None else ()

    def summary(self) -> str:
        """How it went, in a line of the log."""
        return self.result.summary() if self.result is not None else "cancelled" if self._error is None else "failed"

    # In the engine's thread

    def hear(self, update: Update) -> None:
        """Take an update of the engine's loop over to the event loop."""
        if update.done:
            self._reader.finish()
        delta = Delta(self._reader.take(), update.tokens, update.logprobs)
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._event_loop.call_soon_threadsafe(self._take, update, delta, time.perf_counter())

    # In the event loop's thread

    def bind(self, request: Request) -> None:
        """The request in the engine; one that was cancelled meanwhile ends now."""
        self._request = request
        if self._cancelled:
            self._engine_loop.cancel(request)

    def cancel(self) -> None:
        """End the request at the next cell; what was read stays in the cache."""
        if self.result is None and self._error is None:
            self._cancelled = True
            if self._request is not None:
                self._engine_loop.cancel(self._request)

    def fail(self, error: Exception) -> None:
        """End with an error of what comes before the request."""
        self.cancel()
        self._error = error
        self._news.set()

    def _take(self, update: Update, delta: Delta, at: float) -> None:
        try:
            self._note(update, delta, at)
        except Exception as error:  # whoever waits for this generation must hear of it
            self._error = error
            self._engine_loop.cancel(update.request)
        self._news.set()

    def _note(self, update: Update, delta: Delta, at: float) -> None:
        request = update.request
        self._on_step(update, at)
        if self._job.progress and self._processed < request.prompt_tokens:
            self._add_progress(update, at)
        if delta.tokens or delta.text:
            self._inbox.append(delta)
        if update.done:
            self._error = self._error or request.error
            if self._error is None:
                self.result = self._result_of(request)

    def _add_progress(self, update: Update, at: float) -> None:
        request, total = update.request, update.request.prompt_tokens
        cached, work = request.cached_tokens, self._work_of
        done = work(update.computed)
        done += int(update.step_share * (work(update.computed + update.step_rows) - done))
        processed = cached + (total - cached) * (done - work(cached)) // max(1, work(total) - work(cached))
        if update.admitted and processed > self._processed:
            self._processed = processed
            seconds = (request.prefilled_at or at) - request.submitted_at
            self._inbox.append(Progress(total, cached, processed, seconds))

    def _work_of(self, tokens: int) -> int:
        """Multiply-accumulates that so many tokens from the start of the prompt take."""
        tokens = min(tokens, len(self._job.tokens))
        if tokens not in self._works:
            self._works[tokens] = self._llm.engine.runner.work(0, tokens, 0) if tokens else 0
        return self._works[tokens]

    def _result_of(self, request: Request) -> Result:
        return Result(
            text="".join(self._reader.parts),
            tokens=tuple(request.tokens[request.prompt_tokens :]),
            logprobs=tuple(request.logprobs),
            prompt_logprobs=tuple(request.prompt_logprobs),
            finish_reason=request.finish_reason or "error",
            stop=self._reader.stopped_by,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            cache_miss_reason=request.miss.reason(self._text_of) if request.miss is not None else None,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
            queue_seconds=max(0.0, request.started_at - request.submitted_at),
            total_seconds=request.finished_at - request.submitted_at,
            timings=Timings.of(request, self._reader.first_at),
        )

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._llm.tokenizer.decode(ids, skip_special=False)

    async def __aiter__(self) -> AsyncIterator[Delta | Progress]:
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._error is not None:
                raise self._error
            if self.result is not None:
                if self.result.finish_reason == "cancelled" and not self._cancelled:
                    raise ApiError(503, "the server ended this request: it is shutting down, or a fault ended all requests; try again")
                return
            self._news.clear()
            await self._news.wait()

    async def end(self) -> Result:
        """Wait for the end, whoever else iterates or not."""
        async for _ in self:
            pass
        assert self.result is not None
        return self.result
