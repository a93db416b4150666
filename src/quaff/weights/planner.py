"""Divides a budget of memory: what a model needs at least, then what the rest is best spent on.

When the budget is short, things shrink in this order: the prefix cache, pinned units, memory for experts, rows of logits in a step, the row
block of the head, the chunk, and last the rows of a pass, since every further pass reads the file once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from quaff.batch import PAGE
from quaff.config import Memory, Workload
from quaff.errors import ConfigError, MemoryBudgetError
from quaff.graph.program import Graph, OpKind
from quaff.weights.budget import human_bytes, process_memory_bytes, usable_memory_bytes
from quaff.weights.plan import PANEL_ROWS, READ_BUFFER_BYTES, SLOTS, Item, Plan, units_of

MARGIN_BYTES = 32 << 20
"""For what Python, its libraries and the system's allocator take beside what is counted."""
ROUNDING_BYTES = 1 << 20
"""Slots and buffers begin and end at pages of the system."""
CHUNK_ROWS, LEAST_CHUNK_ROWS = 512, 64
HEAD_BLOCK_BYTES, LEAST_HEAD_ROWS = 8 << 20, 64
# Rows that one tile of attention takes at most on any instruction set, and f32 words beside its values.
TILE_ROWS, TILE_WORDS = 6, 32
# Of a workload that says nothing else.
POSITIONS, LOGITS_BYTES = 4096, 16 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plan is for: `memory_bytes` of resident memory for the whole process, `base_bytes` of them in use or kept as a margin.

    KV state of `positions` for each of `sequences`, `logits_rows` rows of logits in a step, cells of `chunk` rows (None: chosen), steps of
    at most `block_rows` rows where all weights stay in memory, and a prefix cache of `prefix_cache_bytes` if there is room. Loading all
    weights takes `reading_bytes` more than they do, before there is any other state.
    """

    memory_bytes: int
    base_bytes: int
    positions: int
    sequences: int = 1
    logits_rows: int = 1
    chunk: int | None = None
    threads: int = 1
    block_rows: int = 2048
    prefix_cache_bytes: int = 0
    reading_bytes: int = 0


def make_ask(
    memory: Memory,
    workload: Workload,
    tokenizer: object,
    context: int,
    vocab: int,
    chunk: int | None = None,
    threads: int = 1,
    reading_bytes: int = 0,
) -> Ask:
    """A workload in numbers, for this process as it is now: call it when all is loaded but the weights."""
    resident, _ = process_memory_bytes()
    if memory == "auto":
        usable = usable_memory_bytes()
        if usable is None:
            raise ConfigError("the system does not tell how much memory is free; give a size instead of auto")
        memory = resident + usable
    asked = workload.positions(tokenizer) if callable(workload.positions) else workload.positions
    positions = min(context, asked or POSITIONS)
    return Ask(
        memory_bytes=memory,
        base_bytes=resident + MARGIN_BYTES + workload.spare_bytes,
        positions=max(1, positions),
        sequences=workload.sequences,
        logits_rows=workload.logits_rows or max(1, min(positions, LOGITS_BYTES // (4 * vocab))),
        chunk=chunk,
        threads=threads,
        reading_bytes=reading_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """The choices of a plan."""

    resident: bool
    pass_rows: int
    chunk: int
    head_rows: int = 0
    logits_rows: int = 1
    expert_slot_bytes: int = 0
    embedding: Literal["pinned", "rows"] = "rows"
    pinned: frozenset[int] = frozenset()
    prefix_cache_bytes: int = 0


def make_plan(graph: Graph, sizes: Mapping[str, int], kv_bytes: Callable[[int, int], int], ask: Ask) -> Plan:
    """The plan that reads least from disk. `sizes` are packed bytes by tensor name, `kv_bytes` those of the state of a sequence of so many
    positions in steps of so many rows.

    MemoryBudgetError lists what the least plan takes, and the smallest budget that would do.
    """
    return _Planner(graph, sizes, kv_bytes, ask).plan()


class _Planner:
    def __init__(self, graph: Graph, sizes: Mapping[str, int], kv_bytes: Callable[[int, int], int], ask: Ask) -> None:
        self.graph = graph
        self.ask = ask
        self.units = units_of(graph, sizes)
        self.head = self.units[-1]
        self.kv_bytes = kv_bytes
        self.weight_bytes = sum(sizes[name] for name in graph.weight_names)
        self.small_bytes = sum(sizes[name] for name in {name for stage in graph.stages for name in stage.small_weights})
        tables = {name for stage in graph.stages for name in stage.tables}
        self.table_bytes = sum(sizes[name] for name in tables)
        self.tied = bool(tables.intersection(self.head.names))
        self.mixture = any(unit.experts for unit in self.units)
        self.rows = _up(ask.positions * ask.sequences, PAGE)
        self.head_rows = _up(graph.config.vocab, PANEL_ROWS)

    def plan(self) -> Plan:
        draft = self._resident(self._chunks()[0])
        if not self._fits(draft):
            # Of a model smaller than the reader's buffers, all weights take less than a part of them.
            least = min(self._least(), self._resident(self._chunks()[-1]), key=self._total)
            if not self._fits(least):
                raise MemoryBudgetError(self._refusal(least))
            draft = least if least.resident else self._with_pins(self._grown(least))
        left = self.ask.memory_bytes - self._total(draft)
        return self._finish(replace(draft, prefix_cache_bytes=min(self.ask.prefix_cache_bytes, left)))

    # Choices

    def _resident(self, chunk: int) -> _Draft:
        rows = min(self.rows, max(chunk, self.ask.block_rows // chunk * chunk))
        logits_rows = self.ask.logits_rows if chunk == self._chunks()[0] else 1
        return _Draft(True, rows, chunk, self.head_rows, logits_rows)

    def _least(self) -> _Draft:
        chunk = self._chunks()[-1]
        experts = SLOTS * max(unit.expert_bytes for unit in self.units)
        return _Draft(False, min(self.rows, max(chunk, PAGE)), chunk, self._head_blocks()[-1], expert_slot_bytes=experts)

    def _grown(self, draft: _Draft) -> _Draft:
        """Each choice as large as the budget allows with the later ones at their least: what is chosen first shrinks last."""
        draft = self._first(replace(draft, pass_rows=rows) for rows in self._passes(draft.pass_rows))
        draft = self._first(replace(draft, chunk=chunk) for chunk in self._chunks() if chunk <= max(draft.pass_rows, draft.chunk))
        draft = self._first(replace(draft, head_rows=rows) for rows in self._head_blocks())
        draft = self._first(replace(draft, logits_rows=rows) for rows in _halves(self.ask.logits_rows))
        most = max(unit.experts_bytes for unit in self.units)
        experts = [size for size in _halves(most) if size > draft.expert_slot_bytes]
        draft = self._first(replace(draft, expert_slot_bytes=size) for size in [*experts, draft.expert_slot_bytes])
        tied = draft.pinned | {self.head.stage} if self.tied else draft.pinned
        return self._first(iter((replace(draft, embedding="pinned", pinned=tied), draft)))

    def _with_pins(self, draft: _Draft) -> _Draft:
        for unit in self.units:
            more = replace(draft, pinned=draft.pinned | {unit.stage})
            if unit.all_bytes and self._fits(more):
                draft = more
        return draft

    def _first(self, drafts: Iterator[_Draft]) -> _Draft:
        for draft in drafts:
            if self._fits(draft):
                return draft
        raise AssertionError("the last of the drafts fits")

    def _passes(self, least: int) -> list[int]:
        """Rows of a pass, all at once first, then as evenly as so many passes allow."""
        passes = range(1, -(-self.rows // least) + 1)
        return [*dict.fromkeys(max(least, _up(-(-self.rows // n), PAGE)) for n in passes), least]

    def _chunks(self) -> list[int]:
        if self.ask.chunk is not None:
            return [self.ask.chunk]
        return [min(chunk, self.rows) for chunk in _halves(CHUNK_ROWS) if chunk >= LEAST_CHUNK_ROWS]

    def _head_blocks(self) -> list[int]:
        """Blocks as large as the largest unit cost nothing: the slot is there."""
        row_bytes = max(1, self.head.nbytes // self.head_rows)
        free = max(unit.nbytes for unit in self.units[:-1]) // row_bytes
        least = max(free, LEAST_HEAD_ROWS)
        return [min(self.head_rows, max(rows, least) // PANEL_ROWS * PANEL_ROWS) for rows in (HEAD_BLOCK_BYTES // row_bytes, least)]

    # Prices

    def _slot_bytes(self, draft: _Draft) -> int:
        sizes = [unit.nbytes for unit in self.units[:-1] if unit.stage not in draft.pinned]
        if self.head.stage not in draft.pinned:
            sizes.append(-(-self.head.nbytes * draft.head_rows // self.head_rows))
        return 0 if draft.resident else max(sizes, default=0)

    def _pinned_bytes(self, draft: _Draft) -> int:
        table = {self.head.stage} if self.tied and draft.embedding == "pinned" else set()
        return sum(self.units[stage].all_bytes for stage in draft.pinned - table)

    def _expert_bytes(self, draft: _Draft) -> int:
        """Memory for experts: none where every mixture is pinned."""
        return draft.expert_slot_bytes if any(unit.experts for unit in self.units if unit.stage not in draft.pinned) else 0

    def _kv_bytes(self, draft: _Draft) -> int:
        return self.ask.sequences * self.kv_bytes(self.ask.positions, draft.pass_rows)

    def _scratch_bytes(self, draft: _Draft) -> int:
        """Of a step, by the runner's own formula, and of the threads."""
        cell_rows = draft.pass_rows if self.mixture and not draft.resident else min(draft.chunk, draft.pass_rows)
        return self.graph.scratch_bytes(draft.pass_rows, cell_rows) + self._thread_bytes

    @cached_property
    def _thread_bytes(self) -> int:
        """A tile's unpacked panels per thread (kernels/scratch.cpp), and what is found in shared pages (step_attend.cpp)."""
        widths = [width for stage in self.graph.stages for width, _ in stage.program.buffers]
        panels = 2 * 4 * PANEL_ROWS * max(widths, default=0) + (64 << 10)
        shared = 0
        for stage in self.graph.stages:
            for op in stage.program.ops:
                if op.kind == OpKind.ATTEND:
                    heads, kv_heads, value_dim = op.ints[2], op.ints[3], op.ints[6]
                    tiles = kv_heads * -(-(heads // kv_heads) // TILE_ROWS) * -(-self.ask.positions // PAGE)
                    shared = max(shared, 4 * tiles * (TILE_WORDS + TILE_ROWS * value_dim))
        return self.ask.threads * panels + self.ask.sequences * shared

    def _logits_bytes(self, draft: _Draft) -> int:
        """Of a step, and one row that a caller keeps."""
        return 4 * self.graph.config.vocab * (draft.logits_rows + 1)

    def _items(self, draft: _Draft) -> tuple[Item, ...]:
        step = f"scratch of steps of {draft.pass_rows} rows, {draft.chunk} together"
        kv = f"KV state of {self.ask.positions} tokens" + (f" of {self.ask.sequences} sequences" if self.ask.sequences > 1 else "")
        if draft.resident:
            weights = [Item("weights", self.weight_bytes)]
        else:
            count = sum(1 for unit in self.units if unit.all_bytes)
            weights = [
                Item("norms and biases", self.small_bytes),
                Item(f"{SLOTS} slots of {human_bytes(self._slot_bytes(draft))}", SLOTS * self._slot_bytes(draft)),
                Item("read buffers", READ_BUFFER_BYTES),
                Item("experts in use", self._expert_bytes(draft)),
                Item("token tables", self.table_bytes if draft.embedding == "pinned" else 0),
                Item(f"pinned: {len(draft.pinned)} of {count} units", self._pinned_bytes(draft)),
            ]
        work = (
            Item(step, self._scratch_bytes(draft)),
            Item(kv, self._kv_bytes(draft)),
            Item(f"logits of {draft.logits_rows + 1} rows", self._logits_bytes(draft)),
            Item("rounding to pages", ROUNDING_BYTES),
        )
        reading = self.ask.reading_bytes - sum(item.nbytes for item in work) if draft.resident else 0
        items = (
            Item(f"the process itself and a margin of {human_bytes(MARGIN_BYTES)}", self.ask.base_bytes),
            *weights,
            *work,
            Item("more while weights are read", max(0, reading)),
            Item("prefix cache", draft.prefix_cache_bytes),
        )
        return tuple(item for item in items if item.nbytes)

    def _total(self, draft: _Draft) -> int:
        return sum(item.nbytes for item in self._items(draft))

    def _fits(self, draft: _Draft) -> bool:
        return self._total(draft) <= self.ask.memory_bytes

    # Results

    def _refusal(self, least: _Draft) -> str:
        items = "; ".join(f"{item.what} {human_bytes(item.nbytes)}" for item in self._items(least))
        smallest = -(-self._total(least) >> 20)
        return (
            f"a budget of {human_bytes(self.ask.memory_bytes)} does not hold this model, whether its weights are streamed or not: {items}; "
            f"the smallest budget that will do is {smallest}MiB, or less with a shorter prompt or context"
        )

    def _finish(self, draft: _Draft) -> Plan:
        streamed = not draft.resident
        return Plan(
            memory_bytes=self.ask.memory_bytes,
            base_bytes=self.ask.base_bytes,
            weight_bytes=self.weight_bytes,
            resident=draft.resident,
            units=self.units,
            small_bytes=self.small_bytes,
            slots=SLOTS,
            slot_bytes=self._slot_bytes(draft),
            read_buffer_bytes=READ_BUFFER_BYTES if streamed else 0,
            expert_slot_bytes=self._expert_bytes(draft) if streamed else 0,
            pinned=draft.pinned,
            pinned_bytes=self._pinned_bytes(draft),
            embedding=draft.embedding,
            embedding_bytes=self.table_bytes if streamed and draft.embedding == "pinned" else 0,
            head_block_rows=draft.head_rows,
            chunk=draft.chunk,
            pass_rows=draft.pass_rows,
            positions=self.ask.positions,
            sequences=self.ask.sequences,
            logits_rows=draft.logits_rows,
            kv_bytes=self._kv_bytes(draft),
            scratch_bytes=self._scratch_bytes(draft),
            logits_bytes=self._logits_bytes(draft),
            prefix_cache_bytes=draft.prefix_cache_bytes,
            items=self._items(draft),
        )


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _halves(n: int) -> list[int]:
    """n, n/2, n/4 ... 1."""
    out = [max(1, n)]
    while out[-1] > 1:
        out.append(out[-1] // 2)
    return out
