"""Divides a budget of memory: what a model needs at least, then what the rest is best spent on.

When the budget is short, things shrink in this order: the prefix cache, pinned units, memory for experts, rows of logits in a step, the row
block of the head, the chunk, and last the rows of a pass, since every further pass reads the file once more. Each is at its least before
the next one shrinks: so a larger budget never reads more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from quaff.batch import PAGE
from quaff.config import Memory, Workload
from quaff.errors import ConfigError, MemoryBudgetError
from quaff.graph.program import Graph, OpKind
from quaff.weights.budget import human_bytes, process_memory_bytes, usable_memory_bytes
from quaff.weights.plan import EXPERTS_BYTES, PANEL_ROWS, READ_BUFFER_BYTES, SLOTS, Item, Plan, Unit, units_of

MARGIN_BYTES = 32 << 20
"""For what Python, its libraries and the system's allocator take beside what is counted."""
ROUNDING_BYTES = 1 << 20
"""Slots and buffers begin and end at pages of the system."""
CHUNK_ROWS, LEAST_CHUNK_ROWS = 512, 64
HEAD_BLOCK_BYTES, LEAST_HEAD_ROWS = 8 << 20, 64
# Rows that one tile of attention takes at most on any instruction set, and f32 words beside its values.
TILE_ROWS, TILE_WORDS = 6, 48
# Its multiples, modulo one, are spread evenly, however many there are.
GOLDEN_RATIO = 0.6180339887498949
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
    positions = max(1, min(context, asked or POSITIONS))
    return Ask(
        memory_bytes=memory,
        base_bytes=resident + MARGIN_BYTES + workload.spare_bytes,
        positions=positions,
        sequences=workload.sequences,
        logits_rows=max(1, min(positions * workload.sequences, workload.logits_rows or LOGITS_BYTES // (4 * vocab))),
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


@dataclass(frozen=True, slots=True)
class _Pin:
    """A unit that could stay, or the token tables: its bytes, those that a generated token saves, and those of the slot it needs else."""

    stage: int
    nbytes: int
    saved_bytes: int
    slot_bytes: int
    tables: bool = False


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
        draft = self._first(self._residents())
        if draft is None:
            least = self._least()
            if not self._fits(least):
                # Of a model smaller than the reader's buffers, all weights take less than a part of them.
                raise MemoryBudgetError(self._refusal(min(least, *self._residents(), key=self._total)))
            draft = self._streamed(least)
        left = self.ask.memory_bytes - self._total(draft)
        return self._finish(replace(draft, prefix_cache_bytes=min(self.ask.prefix_cache_bytes, left)))

    # Choices

    def _residents(self) -> Iterator[_Draft]:
        """All weights in memory, which small cells are a low price for."""
        for chunk in self._chunks():
            rows = min(self.rows, max(chunk, self.ask.block_rows // chunk * chunk))
            for logits_rows in _halves(self.ask.logits_rows):
                yield _Draft(True, rows, chunk, self.head_rows, logits_rows)

    def _least(self) -> _Draft:
        chunk = self._chunks()[-1]
        experts = SLOTS * max(unit.expert_bytes for unit in self.units)
        return _Draft(False, min(self.rows, max(chunk, PAGE)), chunk, self._head_blocks()[-1], expert_slot_bytes=experts)

    def _streamed(self, least: _Draft) -> _Draft:
        """Each choice as large as the budget allows with the later ones at their least: what is chosen first shrinks last."""
        draft, whole = least, True
        for name, sizes in (
            ("pass_rows", self._passes(least.pass_rows)),
            ("chunk", self._chunks()),
            ("head_rows", self._head_blocks()),
            ("logits_rows", _halves(self.ask.logits_rows)),
            ("expert_slot_bytes", self._expert_sizes(least.expert_slot_bytes)),
        ):
            changes: list[dict[str, Any]] = [{name: size} for size in sizes]
            drafts = [replace(draft, **change) for change in changes]
            draft = self._first(d for d in drafts if d.chunk <= max(d.pass_rows, least.chunk)) or draft
            whole = whole and draft == drafts[0]
        if not whole:
            return draft
        if self.table_bytes > self._slot_bytes(least):
            return self._pinned(draft)
        # A row that is read for every token is a wait at the head of every pass: worth a unit, but not more.
        kept = self._with_tables(draft)
        return self._pinned(kept) if self._fits(kept) else draft

    def _with_tables(self, draft: _Draft) -> _Draft:
        """A head that is a table stays with it."""
        return replace(draft, embedding="pinned", pinned=draft.pinned | ({self.head.stage} if self.tied else set()))

    def _pinned(self, draft: _Draft) -> _Draft:
        """Slots get smaller when all that is larger stays: of every size of slots, that whose pins save most."""
        free = self.ask.memory_bytes - self._total(draft) + SLOTS * self._slot_bytes(draft)
        pins = self._pins(draft)
        best, most = draft, (-1, False)
        for slot_bytes in sorted({0, *(pin.slot_bytes for pin in pins)}, reverse=True):
            left = free - SLOTS * slot_bytes - sum(pin.nbytes for pin in pins if pin.slot_bytes > slot_bytes)
            taken = [pin for pin in pins if pin.slot_bytes > slot_bytes]
            for pin in pins:
                if pin.slot_bytes <= slot_bytes and pin.nbytes <= left:
                    taken.append(pin)
                    left -= pin.nbytes
            saved = sum(pin.saved_bytes for pin in taken), any(pin.tables for pin in taken)
            if left >= 0 and saved > most:
                best, most = replace(draft, pinned=draft.pinned.union(pin.stage for pin in taken if not pin.tables)), saved
                best = self._with_tables(best) if saved[1] else best
        return best

    def _pins(self, draft: _Draft) -> list[_Pin]:
        """What can stay, best first: what saves most for its size, and of that the stages in an order that takes them from all of the model
        by turns: the disk works while what stays computes."""
        units = [unit for unit in self.units if unit.all_bytes and not (unit is self.head and self.tied)]
        pins = [_Pin(unit.stage, unit.kept_bytes, unit.row_bytes, self._in_slot(unit, draft)) for unit in units]
        if draft.embedding == "rows":
            # Rows of tables are next to nothing, but the head, where it is a table, is a unit as others are.
            head = (self.head.row_bytes, self._in_slot(self.head, draft)) if self.tied else (0, 0)
            pins.append(_Pin(self.head.stage, self.table_bytes, *head, tables=True))
        return sorted(pins, key=lambda pin: (-pin.saved_bytes / pin.nbytes, pin.stage * GOLDEN_RATIO % 1))

    def _first(self, drafts: Iterable[_Draft]) -> _Draft | None:
        return next((draft for draft in drafts if self._fits(draft)), None)

    def _passes(self, least: int) -> list[int]:
        """Rows of a pass, all at once first, then as evenly as so many passes allow."""
        passes = range(1, -(-self.rows // least) + 1)
        return [*dict.fromkeys(max(least, _up(-(-self.rows // n), PAGE)) for n in passes), least]

    def _chunks(self) -> list[int]:
        if self.ask.chunk is not None:
            return [self.ask.chunk]
        return [min(chunk, self.rows) for chunk in _halves(CHUNK_ROWS) if chunk >= LEAST_CHUNK_ROWS]

    def _expert_sizes(self, least: int) -> list[int]:
        most = max(least, min(EXPERTS_BYTES, max(unit.experts_bytes for unit in self.units)))
        return [*(size for size in _halves(most) if least < size <= most), least]

    def _head_blocks(self) -> list[int]:
        """Blocks as large as the largest unit cost nothing: the slot is there."""
        row_bytes = max(1, self.head.nbytes // self.head_rows)
        free = max(unit.nbytes for unit in self.units[:-1]) // row_bytes
        least = max(free, LEAST_HEAD_ROWS)
        return [min(self.head_rows, max(rows, least) // PANEL_ROWS * PANEL_ROWS) for rows in (HEAD_BLOCK_BYTES // row_bytes, least)]

    # Prices

    def _slot_bytes(self, draft: _Draft) -> int:
        left = (unit for unit in self.units if unit.stage not in draft.pinned)
        return 0 if draft.resident else max((self._in_slot(unit, draft) for unit in left), default=0)

    def _in_slot(self, unit: Unit, draft: _Draft) -> int:
        return -(-unit.nbytes * draft.head_rows // self.head_rows) if unit is self.head else unit.nbytes

    def _pinned_bytes(self, draft: _Draft) -> int:
        table = {self.head.stage} if self.tied and draft.embedding == "pinned" else set()
        return sum(self.units[stage].kept_bytes for stage in draft.pinned - table)

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
