"""Prometheus metrics: names end as vLLM's do, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from quaff.engine.engine import Request
from quaff.engine.loop import EngineLoop, Update
from quaff.llm import LLM
from quaff.serve.generation import OnStep

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (1, 10, 50, 100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


@dataclass(slots=True)
class _Followed:
    """A counter of something that is counted elsewhere; `seen` of it is in the counter."""

    counter: Counter
    read: Callable[[], int]
    seen: int = 0

    def catch_up(self) -> None:
        now = self.read()
        self.counter.inc(max(0, now - self.seen))
        self.seen = now


class Metrics:
    """The metrics of one server, in a registry of its own. Every series has the label `model_name`."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._followed: list[_Followed] = []
        ProcessCollector(registry=self._registry)
        self._running = self._gauge("num_requests_running", "Requests that have been admitted")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be admitted")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the memory left beside the weights that is in use; 1 is all of it")
        self._memory = self._gauge("memory_used_bytes", "Bytes of weights, pages and scratch")
        self._queried = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, cached ones included")
        self._generated = self._counter("generation_tokens", "Generated tokens")
        self._evicted = self._counter("prefix_cache_evicted_bytes", "Bytes that the prefix cache gave up; none until it is full")
        self._restored = self._counter("disk_cache_restored_tokens", "Prompt tokens brought back from the disk tier")
        self._written = self._counter("disk_cache_written_bytes", "Bytes written to the disk tier")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their memory to others for a while")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens that speculation proposed")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens that were the model's")
        self._ended = Counter(
            "quaff:request_success", "Requests that have ended, by reason", ("model_name", "finished_reason"), registry=self._registry
        )
        self._answers = Counter("quaff:http_responses", "Answers by path and status", ("path", "status"), registry=self._registry)
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first token", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of a request", SECONDS)
        self._total = self._histogram("e2e_request_latency_seconds", "From submission to the end", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to admission", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the end of the prompt", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end", SECONDS)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._replies = self._histogram("request_generation_tokens", "Generated tokens of a request", TOKENS)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"quaff:{name}", what, ("model_name",), registry=self._registry).labels(self._model)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"quaff:{name}", what, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"quaff:{name}", what, ("model_name",), registry=self._registry, buckets=buckets).labels(self._model)

    def watch(self, llm: LLM, loop: EngineLoop) -> None:
        """Read the gauges from a model and its loop, whenever they are asked for."""
        accountant, weights = llm.accountant, llm.accountant.total_bytes
        self._running.set_function(lambda: loop.running)
        self._waiting.set_function(lambda: loop.waiting)
        self._memory.set_function(lambda: accountant.total_bytes)
        self._followed.append(_Followed(self._preemptions, lambda: llm.engine.preemptions))
        if (prefix := llm.engine.prefix) is not None:
            self._followed.append(_Followed(self._evicted, lambda: prefix.counters.evicted_bytes))
        if (disk := llm.disk) is not None:
            self._followed.append(_Followed(self._restored, lambda: disk.store.counters.restored_tokens))
            self._followed.append(_Followed(self._written, lambda: disk.store.counters.bytes_written))
        room = (accountant.limit_bytes or 0) - weights
        self._kv_usage.set_function(lambda: (accountant.total_bytes - weights) / room if room > 0 else 0.0)

    def watcher(self) -> OnStep:
        """A function that counts the updates of one request."""
        first = last = 0.0

        def count(update: Update, at: float) -> None:
            nonlocal first, last
            if update.tokens:
                if last:
                    # Several tokens of one step reach the client together.
                    self._gap.observe(at - last)
                first, last = first or at, at
            if update.done:
                self._count_end(update.request, first)

        return count

    def count_answer(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        for followed in self._followed:
            followed.catch_up()
        return generate_latest(self._registry)

    def _count_end(self, request: Request, first_at: float) -> None:
        self._ended.labels(self._model, request.finish_reason or "error").inc()
        self._total.observe(request.finished_at - request.submitted_at)
        if not request.started_at:
            return
        self._prompt.inc(request.prompt_tokens)
        self._queried.inc(request.prompt_tokens)
        self._hits.inc(request.cached_tokens)
        self._generated.inc(request.generated)
        self._drafted.inc(request.drafted)
        self._accepted.inc(request.accepted)
        self._prompts.observe(request.prompt_tokens)
        self._replies.observe(request.generated)
        self._queue.observe(request.started_at - request.submitted_at)
        if request.prefilled_at:
            self._prefill.observe(request.prefilled_at - request.started_at)
        if first_at:
            self._first.observe(first_at - request.submitted_at)
            self._decode.observe(max(0.0, request.finished_at - first_at))
