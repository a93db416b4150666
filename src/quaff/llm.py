"""The public API: load a model; generate, stream, chat, prefill and score with it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from quaff import _native, hub
from quaff.batch import Counters
from quaff.cache.bits_key import bits_key, remembered_content
from quaff.cache.entry import Layout
from quaff.cache.pages import PageCache
from quaff.cache.prefix import PrefixCache
from quaff.cache.store import Store
from quaff.checkpoint import Checkpoint
from quaff.config import (
    Activations,
    EngineConfig,
    KVDtype,
    Memory,
    ModelConfig,
    Quantize,
    Schedule,
    Workload,
    parse_memory,
    rows_per_expert,
)
from quaff.engine.disk import DiskTier
from quaff.engine.embedder import FILE_POOLINGS, Embedder, Pooling
from quaff.engine.engine import Engine, FinishReason, Request
from quaff.engine.pace import Policy
from quaff.engine.reader import Reader
from quaff.engine.runner import Runner
from quaff.engine.sampler import SamplingParams, refused
from quaff.errors import ConfigError, MemoryBudgetError, PromptError, QuaffError, UnsupportedError, located, quote
from quaff.graph.builder import build_graph
from quaff.graph.program import Graph
from quaff.measure.streaming import Streaming, bound_of
from quaff.models import ReadModel, read_model
from quaff.models.huggingface import open_model
from quaff.schedule import Order, choose_order, default_chunk
from quaff.tokenizer import Tokenizer
from quaff.weights.budget import Accountant, human_bytes, memory_limit_bytes, process_memory_bytes, usable_memory_bytes
from quaff.weights.layout import model_layout
from quaff.weights.plan import Plan
from quaff.weights.planner import make_ask, make_plan
from quaff.weights.resident import ResidentWeights
from quaff.weights.sizes import packed_sizes
from quaff.weights.streamed import StreamedWeights

STREAMED_DRAFTS = 8
"""Guesses that a pass over streamed weights checks for a sequence: next to what a pass reads they cost nothing."""
Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
"""A text, or token ids (ints, or a one-dimensional array of integers) that are used as they are."""
Progress = Callable[[int, int], None]
"""(multiply-accumulates done, in all) of reading prompts."""
LoadProgress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all) of fetching and packing a model."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one request. Prefill starts when the first step may run and ends with the step of the last prompt token; the
    first token's time runs from the call, so that waiting and what was read from disk are in it."""

    prefill_seconds: float
    prefill_tokens: int
    ttft_seconds: float
    decode_seconds: float
    decode_tokens: int

    @classmethod
    def of(cls, request: Request, first_at: float) -> Timings:
        """Of a request that is done, whose first token came at `first_at` (perf_counter seconds; 0: none came)."""
        first = first_at or request.finished_at
        return cls(
            prefill_seconds=max(0.0, request.prefilled_at - request.started_at),
            prefill_tokens=min(request.computed, request.prompt_tokens) - request.cached_tokens,
            ttft_seconds=first - request.submitted_at,
            decode_seconds=max(0.0, request.finished_at - first),
            decode_tokens=max(0, request.generated - 1),
        )

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time they took."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What followed a prompt. `tokens` are all generated ids, an end token included; `text` stops before a stop string.

    `counters` cover every step that ran during the request. `error` is set, with reason "error", only when several prompts were given.
    `cache_miss_reason` says in a line why more of the prompt was not cached, where it nearly was.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    timings: Timings
    counters: Counters
    error: Exception | None = None
    cache_miss_reason: str | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)


class State:
    """A computed prefix: tokens and the KV pages that hold them. Close it, or drop it, to give the pages back."""

    def __init__(self, engine: Engine, sequence: int, tokens: tuple[int, ...]) -> None:
        self._engine = engine
        self._sequence = sequence
        self.tokens = tokens
        self._close = weakref.finalize(self, engine.release, sequence)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def sequence(self) -> int:
        if self.closed:
            raise ConfigError("the state is closed")
        return self._sequence

    def base(self, engine: Engine) -> tuple[int, tuple[int, ...]]:
        """(sequence, tokens) for a request of the engine that made this state; ConfigError for another, and when closed."""
        if self._engine is not engine:
            raise ConfigError("the state belongs to another model; compute it with the model that is to use it")
        return self.sequence(), self.tokens

    def kv_sha256(self) -> str:
        """Hash of K and V at the positions that a next row can see, per KV kind, layer and head, and of recurrent state."""
        with self._engine.lock:
            return self._engine.cache.kv_sha256(self.sequence())

    def close(self) -> None:
        self._close()
        self._engine.sweep()

    def __enter__(self) -> State:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt that was read. `computed_tokens` < `prompt_tokens` only when it was cancelled; reading it again with `state` goes on.

    `logits`: f32 of the last row [vocab] ("last", "sha256"), of every computed row [rows, vocab] ("all"), or None. `logits_sha256`: of
    every row's bytes in order of position ("all", "sha256"), rows that were reused left out.
    """

    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    cancelled: bool
    logits: NDArray[np.float32] | None
    logits_sha256: str | None
    seconds: float
    counters: Counters
    state: State

    @property
    def kv_sha256(self) -> str:
        return self.state.kv_sha256()

    @property
    def tokens_per_second(self) -> float:
        return (self.computed_tokens - self.cached_tokens) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """`logprobs[i]` is the natural log-probability of `tokens[i + 1]` after the tokens before it; perplexity is exp of minus their mean."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    seconds: float
    counters: Counters

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


class TextStream:
    """Iterator over the pieces of one completion, as they are generated. `completion` is there when it has ended."""

    def __init__(self, llm: LLM, request: Request, reader: Reader, progress: _PrefillProgress | None) -> None:
        self._llm = llm
        self._request = request
        self._reader = reader
        self._progress = progress
        self._before = llm.counters
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            while not self._reader.deltas and not self._request.done:
                self._llm.engine.step(self._progress.on_work if self._progress else None)
                if self._progress:
                    self._progress.on_step()
        except BaseException:
            self.close()
            raise
        if self._request.done and self._completion is None:
            self._reader.finish()
            self._completion = _completion(self._request, self._reader, self._llm.counters - self._before, self._llm.tokenizer)
        if self._reader.deltas:
            return self._reader.deltas.popleft()
        if self._request.error is not None:
            raise self._request.error
        raise StopIteration

    @property
    def completion(self) -> Completion:
        """The whole completion; ValueError before the stream has ended."""
        if self._completion is None:
            raise ValueError("the stream has not ended")
        return self._completion

    def cancel(self) -> None:
        """End the stream after the text that is already generated. May be called from any thread."""
        self._llm.engine.cancel(self._request)

    def close(self) -> None:
        """Forget the request, its pages included."""
        if not self._request.done:
            self._request.cancelled = True
            self._llm.engine.sweep()

    def __del__(self) -> None:
        self._request.cancelled = True
        self._llm.engine.sweep(blocking=False)


class _PrefillProgress:
    """Multiply-accumulates of the prompts of some requests, reported while they are read."""

    def __init__(self, engine: Engine, requests: Sequence[Request], report: Progress) -> None:
        self._engine = engine
        self._requests = requests
        self._report = report
        self._before = engine.counters.work
        self._total = 0
        self._last = -1

    def _work(self) -> int:
        """All that is to be done; known when the first step runs, for then it is known what is cached."""
        rows = [
            (r.cached_tokens, r.prompt_tokens - r.cached_tokens, r.prompt_tokens - max(r.cached_tokens, r.logits_from))
            for r in self._requests
        ]
        return sum(self._engine.runner.work(start, n, max(0, logits)) for start, n, logits in rows)

    def on_work(self, step_work: int) -> None:
        self._say(self._engine.counters.work - self._before + step_work)

    def on_step(self) -> None:
        self._total = self._total or self._work()
        if any(not r.prefilled_at and not r.done for r in self._requests):
            self._say(self._engine.counters.work - self._before)
        elif self._last < self._total:
            self._say(self._total)

    def _say(self, done: int) -> None:
        self._total = self._total or self._work()
        done = max(self._last, min(done, self._total))
        if done != self._last and self._last < self._total:
            self._last = done
            self._report(done, self._total)


def _completion(request: Request, reader: Reader, counters: Counters, tokenizer: Tokenizer) -> Completion:
    timings = Timings.of(request, reader.first_at)
    reason = request.finish_reason or "error"
    tokens = tuple(request.tokens[request.prompt_tokens :])
    return Completion(
        text="".join(reader.parts),
        tokens=tokens,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        finish_reason=reason,
        timings=timings,
        counters=counters,
        error=request.error,
        cache_miss_reason=request.miss.reason(lambda ids: tokenizer.decode(ids, skip_special=False)) if request.miss else None,
    )


def load(
    model: str | os.PathLike[str],
    *,
    threads: int | None = None,
    chunk: int | None = None,
    schedule: Schedule | None = None,
    activations: Activations = "int8",
    context: int | None = None,
    memory: int | str | None = None,
    workload: Workload | None = None,
    memory_limit_bytes: int | None = None,
    fuse: bool = True,
    isa: str | None = None,
    quantize: Quantize | None = None,
    kv_dtype: KVDtype = "int16",
    prefix_cache_bytes: int = 0,
    store: bool | str | os.PathLike[str] = False,
    store_cap_bytes: int = 16 << 30,
    progress: LoadProgress | None = None,
) -> LLM:
    """Load a model by path (a GGUF or packed file, or a Hugging Face folder), alias, hf:owner/repo or hf:owner/repo/file, and pack its
    weights; those of a packed file are mapped.

    `threads` None: physical cores this process may use. `chunk` rows are computed together, None: chosen from the machine's measured
    ceilings. `schedule` is the order of the work (None: the best one); neither these nor `fuse` and `isa` (for the whole process) change a
    bit.
    `activations="float32"` and `kv_dtype="float32"` (attention in f32, nothing of it rounded to 13 bits) are slower modes for checking
    against other implementations. `context` in tokens, at most the model's.
    `memory` is the resident memory that the whole process may have, interpreter included: bytes, a text such as "2GiB", or "auto" for what
    the system can give. Weights that do not fit into it are streamed from the file, once for a prompt; no bit changes. `workload` says what
    to leave room for. `memory_limit_bytes` bounds weights, KV state and scratch alone and streams nothing; without either it is nine tenths
    of the memory free now. `quantize` is for folders: what matrices of a fitting width become (None: q8_0); a file is taken as it is.
    `prefix_cache_bytes`: what requests leave of so much memory keeps what was computed, for prompts that begin with the same tokens; it
    gives way to requests that need more. 0: only a `state` that is passed on is reused. `store`: a folder, or True for one in the user's
    cache, in which all that is kept in files too, `store_cap_bytes` of them at most, for later and for other processes; the first load of
    a model with it reads the whole file once to know it again.
    Raises a QuaffError for anything wrong with the file, the options or the memory.
    """
    config = EngineConfig(
        threads,
        chunk,
        schedule,
        activations,
        context,
        memory_limit_bytes,
        fuse,
        kv_dtype,
        parse_memory(memory) if isinstance(memory, str) else memory,
        prefix_cache_bytes=prefix_cache_bytes,
        store=_store_folder(store),
        store_cap_bytes=store_cap_bytes,
    )
    if isa is not None:
        set_isa(isa)
    _check_isa()
    path = hub.resolve(model, progress)
    with located(path), open_model(path, quantize) as checkpoint:
        return LLM(checkpoint, config, progress, workload)


def _store_folder(store: bool | str | os.PathLike[str]) -> Path | None:
    if isinstance(store, bool):
        return hub.cache_dir() / "prefixes" if store else None
    try:
        return Path(store).expanduser()
    except (TypeError, RuntimeError):  # no path, or a home folder that is not known
        raise ConfigError(f"store is {store!r}; expected a folder, True or False") from None


def set_isa(name: str) -> None:
    """Choose the instruction set of all models in this process; ConfigError lists what this machine has."""
    if not isinstance(name, str):
        raise ConfigError(f"isa is {name!r}; expected one of {', '.join(_native.available_isas())}")
    try:
        _native.set_isa(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_isa() -> None:
    # The first use of the kernels reads QUAFF_ISA; a wrong value is found here, not in the middle of packing weights.
    try:
        _native.isa()
    except ValueError as error:
        raise ConfigError(f"QUAFF_ISA: {error}") from None


def _token_ids(prompt: object) -> list[int]:
    """Plain ints of a sequence of ids; PromptError names the first item that is none. A bool is no id, and a float is never rounded."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1:
            raise PromptError(f"the prompt is an array of {prompt.ndim} dimensions; expected one dimension of token ids")
    elif not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray | memoryview):
        raise PromptError(f"the prompt is of type {type(prompt).__name__}; expected a text or a sequence of token ids")
    for i, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise PromptError(f"item {i} of the prompt is {quote(repr(token))}; expected a token id, an integer")
    return [int(token) for token in prompt]


def _is_several(prompt: object) -> bool:
    """True for a sequence of texts or of id sequences; what is neither is for `encode` to refuse."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray | memoryview) or not len(prompt):
        return False
    return isinstance(prompt[0], str | Sequence | np.ndarray) and not isinstance(prompt[0], bytes | bytearray | memoryview)


def _measured_chunk(bytes_per_weight: float, threads: int, expert_share: float) -> int:
    # The best of three short loops: a neighbour on the machine only ever makes one look slower.
    try:
        macs = max(_native.measure_int8(threads, 0.002) for _ in range(3))
        return default_chunk(bytes_per_weight, macs, _native.measure_bandwidth(threads, 64), expert_share)
    except RuntimeError as error:  # a thread could not be started
        raise ConfigError(str(error)) from None


class LLM:
    """A loaded model. Methods may be called from several threads; their requests share batches. Close it, or use it in a `with` block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine_config: EngineConfig,
        progress: LoadProgress | None = None,
        workload: Workload | None = None,
    ) -> None:
        """`checkpoint` may be closed afterwards: weights are copied, or read from its files when they are needed."""
        began = time.perf_counter()
        model = read_model(checkpoint, engine_config.context)
        self.path: Path = checkpoint.path
        self.quantized: str | None = checkpoint.quantized
        self.config: ModelConfig = model.config
        self.graph: Graph = build_graph(
            model.config, model.family, model.tensors, engine_config.activations, engine_config.fuse, engine_config.kv_dtype
        )
        self._build_hidden = partial(
            build_graph,
            model.config,
            model.family,
            model.tensors,
            engine_config.activations,
            engine_config.fuse,
            engine_config.kv_dtype,
            hidden=True,
        )
        kind = checkpoint.metadata.get(f"{model.config.architecture}.pooling_type")
        self.pooling: Pooling = FILE_POOLINGS.get(int(kind) if kind is not None else 0, "mean")
        self._embedder: Embedder | None = None
        self._embedding = threading.Lock()
        self.tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        self.engine_config = engine_config
        self.context = min(self.config.context_length, engine_config.context or self.config.context_length)
        self._tensor_types = dict(Counter(view.type_name for view in checkpoint.tensors.values()))
        threads = engine_config.threads or _native.default_threads()
        self.accountant = Accountant()
        pools = [
            _native.PagePool(len(kind.layers), kind.kv_heads, kind.dim, kind.value_dim, kind.value_bytes) for kind in self.graph.kv_kinds
        ]
        states = [_native.StatePool(len(kind.layers), kind.size) for kind in self.graph.state_kinds]
        cache = PageCache(self.graph.kv_kinds, pools, self.accountant, self.graph.state_kinds, states)
        self.plan = self._make_plan(model, cache, threads, engine_config.memory, workload or Workload())
        if self.plan is not None:
            self.accountant.limit_bytes = self.plan.memory_bytes - self.plan.base_bytes
        else:
            self.accountant.limit_bytes = engine_config.memory_limit_bytes or usable_memory_bytes()
        self._weights = self._load(model, threads, progress)
        if self.plan is not None:
            self.chunk = self.plan.chunk
        else:
            share = rows_per_expert(self.graph.config)
            self.chunk = engine_config.chunk or _measured_chunk(self._weights.bytes_per_weight, threads, share)
        runner = Runner(self.graph, self._weights, pools, threads, self.accountant, states)
        order = self._order(engine_config.schedule or ("layer" if self.streamed else "chunk"), self.chunk)
        cap = self.plan.prefix_cache_bytes if self.plan is not None else engine_config.prefix_cache_bytes
        prefix = PrefixCache(cache, cap) if cap else None
        self.engine = Engine(runner, cache, order, self.context, self.tokenizer.end_ids, self.plan, prefix)
        if self.streamed:
            self.engine.set_policy(Policy(draft_tokens=STREAMED_DRAFTS))
        self.disk: DiskTier | None = None
        if prefix is not None and engine_config.store is not None:
            report = partial(progress, "hashing weights") if progress else None
            content = remembered_content(checkpoint, model.views, engine_config.store / "content", report)
            key = bits_key(content, model.config, engine_config.activations, engine_config.kv_dtype)
            layout = Layout(cache.kinds, cache.states.kinds)
            store = Store(engine_config.store, key, layout, engine_config.store_cap_bytes, waiting_bytes=cap)
            self.disk = DiskTier(self.engine, prefix, store)
        self.load_seconds = time.perf_counter() - began

    def _make_plan(self, model: ReadModel, cache: PageCache, threads: int, memory: Memory | None, workload: Workload) -> Plan | None:
        if memory is None:
            return None
        limit = memory_limit_bytes()
        if memory != "auto" and limit is not None and limit < memory:
            raise MemoryBudgetError(
                f"the budget is {human_bytes(memory)}, but the control group of this process has {human_bytes(limit)}; give less, or auto"
            )
        reading = max(view.scratch_bytes for view in model.views.values())
        config = self.engine_config
        ask = make_ask(memory, workload, self.tokenizer, self.context, self.config.vocab, config.chunk, threads, reading)
        ask = replace(ask, prefix_cache_bytes=config.prefix_cache_bytes)
        return make_plan(self.graph, packed_sizes(model.tensors), cache.peak_bytes, ask)

    def _load(self, model: ReadModel, threads: int, progress: LoadProgress | None) -> ResidentWeights | StreamedWeights:
        if self.plan is None or self.plan.resident:
            return ResidentWeights(model.views, threads, self.accountant, partial(progress, "packing weights") if progress else None)
        return StreamedWeights(self.graph, model_layout(model.views), self.plan, self.accountant, threads)

    def _order(self, schedule: Schedule, chunk: int) -> Order:
        # An expert is read for every cell that chose it: of a mixture a cell is the whole pass.
        return choose_order(schedule, chunk, cut=self.plan is not None and all(not layer.experts for layer in self.config.layers))

    # What is loaded, and how it runs

    @property
    def order(self) -> Order:
        return self.engine.order

    @property
    def threads(self) -> int:
        return self.engine.runner.threads

    @property
    def counters(self) -> Counters:
        """Everything counted since the model was loaded."""
        return self.engine.counters

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights in memory, or of all weights where they are streamed."""
        return self.plan.weight_bytes if self.plan is not None and self.streamed else self._weights.loaded_bytes

    @property
    def streamed(self) -> bool:
        """Whether some weights are read from the file in every pass."""
        return self.plan is not None and not self.plan.resident

    @property
    def streaming(self) -> Streaming | None:
        """What streaming did since the model was loaded, prompts and generation apart; None where all weights are in memory."""
        if self.plan is None or not self.streamed:
            return None
        peak = self.plan.base_bytes + self.accountant.peak_bytes
        return Streaming(self.plan, self.engine.prefill_stream, self.engine.decode_stream, peak, process_memory_bytes()[1])

    @property
    def bound(self) -> str:
        """ "disk" or "compute": which of the two takes the longer, from what was measured so far, a running step included; "" where nothing
        is streamed."""
        counters = self.engine.runner.stream_counters()
        return "" if counters is None else bound_of(counters)

    def configure(
        self, *, threads: int | None = None, chunk: int | None = None, schedule: Schedule | None = None, isa: str | None = None
    ) -> None:
        """Change how the model runs from the next step on (`isa` for the whole process). None of these changes a bit of any result."""
        EngineConfig(threads=threads, chunk=chunk)
        with self.engine.lock:
            if isa is not None:
                set_isa(isa)
            if threads is not None:
                self.engine.runner.set_threads(threads)
            if chunk is not None or schedule is not None:
                self.engine.set_order(self._order(schedule or self.order.name, chunk or self.chunk))
            self.chunk = chunk or self.chunk

    def describe(self) -> dict[str, Any]:
        """What this model is and how it runs, as plain values for reports."""
        c = self.config
        return {
            "path": str(self.path),
            "architecture": c.architecture,
            "name": c.name,
            "layers": len(c.layers),
            "dim": c.dim,
            "ffn_dim": c.ffn_dim,
            "vocab": c.vocab,
            "model_context": c.context_length,
            "context": self.context,
            "tensor_types": self._tensor_types,
            "quantized": self.quantized,
            "weight_bytes": self.weight_bytes,
            "activations": self.engine_config.activations,
            "kv_dtype": self.engine_config.kv_dtype,
            "prefix_cache_bytes": self.engine_config.prefix_cache_bytes,
            "store": str(self.engine_config.store) if self.disk is not None else None,
            "numerics_version": _native.NUMERICS_VERSION,
            "isa": _native.isa(),
            "threads": self.threads,
            "schedule": self.order.name,
            "chunk": self.order.chunk,
            "memory_bytes": self.plan and self.plan.memory_bytes,
            "streamed": self.streamed,
        }

    def close(self) -> None:
        """Give back the weights, when what is to be kept on disk is there. The model and its states cannot be used afterwards."""
        if self.disk is not None:
            self.disk.close()
        self.engine.close()
        if self._embedder is not None:
            self._embedder.close()
        self._weights.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a text with the special tokens its model wants, ids as they are. PromptError when it cannot be run."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise PromptError("the prompt is empty; give at least one token")
        if len(tokens) > self.context:
            limit = "the model's context" if self.context == self.config.context_length else "the context"
            raise PromptError(f"the prompt has {len(tokens)} tokens, {limit} is {self.context} tokens; shorten the prompt")
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab), None)
        if bad is not None:
            raise PromptError(f"token id {bad} is outside the vocabulary of {self.config.vocab} tokens")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, by the model's chat template (PromptError without one)."""
        return self.encode(self.tokenizer.encode_chat(messages, **variables))

    # Work

    @overload
    def generate(
        self, prompt: str, params: SamplingParams | None = None, *, state: State | None = None, progress: Progress | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, state: State | None = None, progress: Progress | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        state: State | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        state: State | None = None,
        progress: Progress | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several in one batch (a list of texts or of id lists; `params` may be a list too).

        A prefix that prompts share with `state` is not computed again. Every prompt is checked before any work starts. One prompt raises
        its error; of several, those that fail carry theirs.
        """
        single = not _is_several(prompt)
        prompts: list[Prompt] = [prompt] if single else list(prompt)  # type: ignore[list-item, arg-type]
        each = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts need as many sampling parameters, not {len(each)}")
        encoded = [self.encode(p) for p in prompts]
        before = self.counters
        readers = [Reader(self.tokenizer, p) for p in each]
        requests: list[Request] = []
        try:
            for ids, p, reader in zip(encoded, each, readers, strict=True):
                requests.append(self._submit(ids, p, reader, state))
        except BaseException:
            self._abandon(requests)
            raise
        self._run(requests, progress)
        for reader in readers:
            reader.finish()
        spent = self.counters - before
        completions = [_completion(request, reader, spent, self.tokenizer) for request, reader in zip(requests, readers, strict=True)]
        if not single:
            return completions
        if requests[0].error is not None:
            raise requests[0].error
        return completions[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, state: State | None = None, progress: Progress | None = None
    ) -> TextStream:
        """Complete one prompt piece by piece. Pieces are whole characters and never part of a stop string."""
        params = params or SamplingParams()
        tokens = self.encode(prompt)
        reader = Reader(self.tokenizer, params)
        request = self._submit(tokens, params, reader, state)
        return TextStream(self, request, reader, _PrefillProgress(self.engine, [request], progress) if progress else None)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        state: State | None = None,
        progress: Progress | None = None,
        **variables: Any,
    ) -> Completion:
        """The assistant's answer to a conversation of {"role", "content"} messages; `variables` go to the model's chat template."""
        return self.generate(self.encode_chat(messages, **variables), params, state=state, progress=progress)

    def prefill(
        self,
        prompt: Prompt,
        *,
        logits: Literal["none", "last", "all", "sha256"] = "last",
        state: State | None = None,
        progress: Progress | None = None,
    ) -> PrefillResult:
        """Read a prompt and keep its KV state. The prefix it shares with `state` (which stays as it is) is reused, not computed again.

        `logits`: which rows to keep; "sha256" hashes every row without keeping it. The head runs only for rows that are asked for.
        """
        tokens = self.encode(prompt)
        kept = np.empty((0, self.config.vocab), dtype=np.float32)
        filled = 0
        digest = sha256() if logits in ("all", "sha256") else None

        def on_logits(position: int, row: NDArray[np.float32]) -> None:
            nonlocal filled
            filled = filled + 1 if logits == "all" else 1
            kept[filled - 1] = row
            if digest is not None:
                digest.update(np.asarray(row, dtype="<f4").tobytes())

        if logits not in ("none", "last", "all", "sha256"):
            raise ConfigError(f"logits is {logits!r}; expected none, last, all or sha256")
        first = None if logits == "none" else len(tokens) - 1 if logits == "last" else 0
        before, began = self.counters, time.perf_counter()
        if state is None and logits in ("none", "last"):
            self.restore(tokens)
        # Another thread may run the request as soon as the lock is free; the memory of its result comes first.
        with self.engine.lock:
            request = self._submit_prefill(tokens, first, on_logits, state)
            wanted = 0 if logits == "none" else len(tokens) - request.cached_tokens if logits == "all" else 1
            try:
                kept = self._result(wanted)
            except MemoryBudgetError:
                self._abandon([request])
                raise
        try:
            self._run([request], progress)
        finally:
            # A result belongs to the caller, who may hold it as long as it likes.
            with self.engine.lock:
                self.accountant.give(kept.nbytes)
        if request.error is not None:
            raise request.error
        seconds = time.perf_counter() - began
        return PrefillResult(
            prompt_tokens=len(tokens),
            computed_tokens=request.computed,
            cached_tokens=request.cached_tokens,
            cancelled=request.finish_reason == "cancelled",
            logits=None if not filled else kept[:filled] if logits == "all" else kept[0],
            logits_sha256=digest.hexdigest() if digest is not None else None,
            seconds=seconds,
            counters=self.counters - before,
            state=State(self.engine, request.sequence, tuple(tokens[: request.computed])),
        )

    def score(self, prompt: Prompt, *, progress: Progress | None = None) -> Score:
        """Log-probability of every token after the first. Logits are made in blocks of 64 MiB, or of what a memory plan allows."""
        tokens = self.encode(prompt)
        if len(tokens) < 2:
            raise PromptError("scoring needs at least two tokens: the first one is given")
        logprobs: list[float] = []

        def on_logits(position: int, row: NDArray[np.float32]) -> None:
            try:
                logprobs.append(float(_native.logprobs(row, np.array([tokens[position + 1]], dtype=np.int32))[0]))
            except ValueError as error:
                raise refused(error, position) from None

        before, began = self.counters, time.perf_counter()
        request = self.engine.submit(tokens[:-1], logits_from=0, on_logits=on_logits)
        self._run([request], progress)
        if request.error is not None:
            raise request.error
        if len(logprobs) != len(tokens) - 1:
            raise QuaffError(f"scoring was cancelled after {len(logprobs)} of {len(tokens) - 1} tokens")
        return Score(tuple(tokens), tuple(logprobs), time.perf_counter() - began, self.counters - before)

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling | None = None,
        drive: Callable[[Engine], object] = Engine.step,
    ) -> NDArray[np.float32]:
        """Vectors of length 1, f32 [prompts, dim]: the residual after the last norm, pooled over a prompt's rows (None: as the file says,
        or their mean). Every prompt is checked before any work starts. `drive` runs a step of an engine; what it raises ends the work.
        UnsupportedError while weights are streamed.
        """
        if not isinstance(self._weights, ResidentWeights):
            raise UnsupportedError("embeddings need all weights in memory; allow more with memory (--memory)")
        encoded = [self.encode(prompt) for prompt in prompts]
        with self._embedding:
            if self._embedder is None:
                self._embedder = Embedder(self._build_hidden(), self._weights, self.engine)
            return self._embedder.embed(encoded, pooling or self.pooling, drive)

    def cancel(self) -> None:
        """End everything that is running at the next cell boundary; finished positions are kept. May be called from any thread."""
        self.engine.cancel()

    def restore(self, tokens: Sequence[int], salt: str = "") -> int:
        """Bring what the store has of a prompt into the prefix cache, for a request that is submitted next: how many tokens it saves.

        The methods above do so themselves. 0 without a store. Takes as long as reading the files does, in the calling thread.
        """
        return self.disk.restore(tokens, salt) if self.disk is not None else 0

    def restore_recent(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the prefixes that were used last, at most half a GiB of them, from the store into the prefix cache before they are asked
        for; how many tokens. `progress` gets (prefixes restored, prefixes in all), and what it raises ends it. 0 without a store."""
        return self.disk.restore_recent(progress) if self.disk is not None else 0

    # Inside

    def _submit(self, tokens: list[int], params: SamplingParams, reader: Reader, state: State | None) -> Request:
        asked_at = time.perf_counter()
        if state is None and params.prompt_logprobs is None:
            self.restore(tokens)
        base, base_tokens = state.base(self.engine) if state is not None else (None, ())
        return self.engine.submit(tokens, params=params, accept=reader.accept, base=base, base_tokens=base_tokens, asked_at=asked_at)

    def _submit_prefill(
        self,
        tokens: list[int],
        logits_from: int | None,
        on_logits: Callable[[int, NDArray[np.float32]], None],
        state: State | None,
    ) -> Request:
        base, base_tokens = state.base(self.engine) if state is not None else (None, ())
        return self.engine.submit(tokens, logits_from=logits_from, on_logits=on_logits, base=base, base_tokens=base_tokens, keep=True)

    def _result(self, rows: int) -> NDArray[np.float32]:
        need, what = rows * self.config.vocab * 4, f"the result, logits of {rows} rows,"
        self.accountant.take(need, what)
        try:
            return np.empty((rows, self.config.vocab), dtype=np.float32)
        except MemoryError:
            self.accountant.give(need)
            raise MemoryBudgetError(f"the system has no memory left for {what} of {human_bytes(need)}; shorten the prompt") from None

    def _run(self, requests: list[Request], progress: Progress | None) -> None:
        report = _PrefillProgress(self.engine, requests, progress) if progress else None
        try:
            self.engine.run(requests, report.on_step if report else None, report.on_work if report else None)
        except BaseException:
            self._abandon(requests)
            raise

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            if request.keep and request.done:
                self.engine.release(request.sequence)
            request.cancelled, request.keep = True, False
        self.engine.sweep()
