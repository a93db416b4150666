"""What a test will cost, before it runs: the engine's own scheduler and orders, counted by `schedule.predict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quaff.batch import Counters
from quaff.engine.engine import make_scheduler
from quaff.graph.program import LINEAR_KINDS, NONE, Graph, Op, OpKind, StageSpec, bytes_of_position
from quaff.measure.roofline import Work
from quaff.schedule import Cell, Grid, Order, StageCost, predict
from quaff.weights.plan import Plan

LINEAR = (*LINEAR_KINDS, OpKind.EXPERT_LINEAR)


@dataclass(frozen=True, slots=True)
class Trial:
    """`prompt` tokens read at once, or `generate` tokens one by one, for each of `sequences`, with `depth` tokens before them in its state.

    A prompt counts with the logits of its last row: what a user waits for.
    """

    prompt: int = 0
    generate: int = 0
    depth: int = 0
    sequences: int = 1

    @property
    def name(self) -> str:
        """As llama-bench names tests: pp512, tg64, pp512 @ d1024; several sequences as in tg64 np4."""
        base = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return base + (f" np{self.sequences}" if self.sequences > 1 else "") + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Tokens that the test's speed counts."""
        return (self.prompt or self.generate) * self.sequences

    @property
    def positions(self) -> int:
        """Positions that a sequence has at the end."""
        return self.depth + (self.prompt or self.generate)


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Counters of one stage over a whole test (`schedule.predict`), bytes of KV state that it reads, and the work that they mean."""

    counters: Counters
    kv_bytes: int
    work: Work


def forecast(graph: Graph, costs: Sequence[StageCost], order: Order, trial: Trial, plan: Plan | None = None) -> tuple[StageForecast, ...]:
    """One forecast per stage, in grid order; the sum of their counters is what the native module will count, routing apart.

    `plan` is that of the model's memory, where it has one: it bounds the rows of a step.
    """
    kinds = tuple(stage.kind for stage in graph.stages)
    scheduler = make_scheduler(order, graph, plan=plan)
    known = dict.fromkeys(range(trial.sequences), trial.depth + max(1, trial.prompt))
    left = dict.fromkeys(known, max(0, trial.generate - 1))
    for sequence, tokens in known.items():
        scheduler.add(sequence, tokens, trial.depth, tokens - 1)
    counters = [Counters() for _ in kinds]
    kv_bytes = [0.0 for _ in kinds]
    while work := scheduler.plan():
        grid = Grid.of(kinds, tuple((w.rows, tuple(range(w.logits, w.rows))) for w in work))
        cells: list[list[Cell]] = [[] for _ in kinds]
        for cell in order.cells(grid):
            cells[cell.stage].append(cell)
        together = min(order.chunk, max(w.rows for w in work))
        for stage, mine in enumerate(cells):
            spent = predict(costs, grid.spans, [w.start for w in work], mine)
            counters[stage] += spent
            kv_bytes[stage] += kv_bytes_seen(graph, graph.stages[stage], spent.attention_macs) / together
        for w in work:
            scheduler.finish(w.request, w.rows)
            if w.start + w.rows == known[w.request] and left[w.request]:
                scheduler.extend(w.request)
                known[w.request] += 1
                left[w.request] -= 1
    return tuple(
        StageForecast(spent, int(kv), _work(graph, stage, spent, int(kv)))
        for stage, spent, kv in zip(graph.stages, counters, kv_bytes, strict=True)
    )


def total(stages: Sequence[StageForecast]) -> Counters:
    return sum((stage.counters for stage in stages), Counters())


def _work(graph: Graph, stage: StageSpec, spent: Counters, kv_bytes: int) -> Work:
    linear = spent.macs + spent.head_macs
    in_f32 = sum(linear_macs(graph, stage, op) for op in stage.program.ops if op.kind in LINEAR and op.inputs[0] == NONE)
    f32 = linear * in_f32 // max(1, stage.macs_per_row)
    attention = attention_work(graph, spent.attention_macs, kv_bytes)
    return attention + Work(linear - f32, 0, f32 + spent.state_macs, spent.weight_bytes_read)


def attention_work(graph: Graph, macs: int, kv_bytes: int) -> Work:
    """Attention over pages of codes, or of f32 for checking."""
    return Work(int16_macs=macs, stream_bytes=kv_bytes) if graph.kv_value_bytes == 2 else Work(fma_macs=macs, stream_bytes=kv_bytes)


def linear_macs(graph: Graph, stage: StageSpec, op: Op) -> int:
    """Multiply-accumulates of one linear op for one row, of experts for as many as a row goes through."""

    def width(buffer: int) -> int:
        return (graph.config.dim, graph.config.vocab)[buffer] if buffer < 2 else stage.program.buffers[buffer - 2][0]

    source = op.inputs[0] if op.inputs[0] != NONE else op.inputs[1]
    heads = op.ints[2] if op.kind == OpKind.HEAD_LINEAR else 1
    slots = stage.program.slots if op.kind == OpKind.EXPERT_LINEAR else 1
    return slots * width(source) // heads * sum(width(out) for out in op.outputs)


def kv_bytes_seen(graph: Graph, stage: StageSpec, macs: int) -> int:
    """Bytes of keys and values of all positions seen in `macs` multiply-accumulates of attention; rows of a cell read them together."""
    for op in stage.program.ops:
        if op.kind == OpKind.ATTEND:
            _, _, heads, kv_heads, dim, _, value_dim = op.ints
            return macs // (heads * (dim + value_dim)) * kv_heads * bytes_of_position(dim, value_dim, graph.kv_value_bytes)
    return 0
