"""The model behind the server: loading, ready, closing; requests in, generations out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from quaff.engine.loop import EngineLoop
from quaff.engine.reader import Reader
from quaff.llm import LLM
from quaff.serve.dialogue import Dialogue
from quaff.serve.errors import RETRY_SECONDS, ApiError, context_exceeded
from quaff.serve.generation import Generation, Job
from quaff.serve.metrics import Metrics
from quaff.serve.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """One model and the loop that drives it. It can be asked before the model is there: then it answers 503."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.metrics = Metrics(settings.name)
        self.embedding = asyncio.Lock()
        """Texts of one request are embedded at a time: others must not wait in the threads that tokenise."""
        self._llm: LLM | None = None
        self._loop: EngineLoop | None = None
        self._dialogue: Dialogue | None = None
        self._closing = False

    # Life

    def open(self, llm: LLM) -> None:
        """Take over a loaded model and start its loop."""
        loop = EngineLoop(llm.engine, max_waiting=self.settings.queue)
        loop.start()
        self._dialogue = Dialogue(llm.tokenizer, llm.config.vocab, self.settings.replies)
        self._llm, self._loop = llm, loop
        self.metrics.watch(llm, loop)

    def prepare(self) -> None:
        """Do beforehand what the first request of its kind would hold up everyone with."""
        if self._dialogue is not None:
            self._dialogue.grammars.prepare()

    def close(self) -> None:
        """Refuse new requests, end the running ones and the loop, and let go of the model. A second call does nothing."""
        self._closing = True
        loop, llm, self._loop, self._llm = self._loop, self._llm, None, None
        if loop is not None:
            loop.close()
        if llm is not None:
            llm.close()

    @property
    def llm(self) -> LLM:
        """The model; ApiError 503 when there is none, or none any more."""
        if self._closing:
            raise ApiError(503, "the server is shutting down", headers=RETRY_SECONDS)
        if self._llm is None:
            raise ApiError(503, "the model is being loaded", headers=RETRY_SECONDS)
        return self._llm

    @property
    def loop(self) -> EngineLoop:
        assert self.llm is not None and self._loop is not None
        return self._loop

    @property
    def dialogue(self) -> Dialogue:
        """What turns conversations into prompts, and answers into replies; ApiError 503 as for `llm`."""
        assert self.llm is not None and self._dialogue is not None
        return self._dialogue

    def check_health(self) -> None:
        """ApiError 503 while the model loads, while the server shuts down, and when the loop is stuck."""
        silent = self.loop.silent_seconds
        if silent > self.settings.stuck_seconds:
            raise ApiError(503, f"the engine has given no sign of life for {silent:.0f} s")

    # Work

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that computes for more than an instant, such as tokenising a conversation."""
        return await asyncio.to_thread(function, *args, **kwargs)

    async def start(self, job: Job, n: int = 1, field: str = "messages") -> tuple[Generation, ...]:
        """Queue `n` completions of one prompt; they share its state. `field` of the body holds it.

        ApiError 400 for a prompt that is longer than the context or parameters that do not fit the model, 429 when the queue is full. What
        is found to be wrong after `ping_seconds` is raised by the generations.
        """
        llm, loop = self.llm, self.loop
        if len(job.tokens) > llm.context:
            raise context_exceeded(len(job.tokens), llm.context, field)
        readers = [Reader(llm.tokenizer, job.params, job.shown) for _ in range(n)]
        generations = tuple(Generation(llm, loop, job, reader, self.metrics.watcher()) for reader in readers)

        def submit() -> None:
            tokens, first, asked_at = llm.encode(job.tokens), None, time.perf_counter()
            if job.params.prompt_logprobs is None:
                loop.check_room()
                llm.restore(tokens, job.salt)
            for choice, (generation, reader) in enumerate(zip(generations, readers, strict=True)):
                params = replace(job.params, choice=choice)
                request = loop.submit(
                    tokens,
                    generation.hear,
                    params=params,
                    accept=reader.accept,
                    constraint=job.grammar.start() if job.grammar is not None else None,
                    share=first,
                    salt=job.salt,
                    boundaries=job.boundaries,
                    asked_at=asked_at,
                )
                first = first or request
                generation.bind(request)

        async def submitted() -> Exception | None:
            try:
                await asyncio.to_thread(submit)
            except Exception as error:
                for generation in generations:
                    generation.fail(error)
                return error
            return None

        submitting = asyncio.ensure_future(submitted())
        try:
            # A prefix may be long in coming from a slow disk: its client is told that someone is there, and may hang up.
            await asyncio.wait((submitting,), timeout=self.settings.ping_seconds)
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        if submitting.done() and (error := submitting.result()) is not None:
            raise error
        return generations


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
