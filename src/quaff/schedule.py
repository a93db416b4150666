"""The grid of a forward pass, orders to walk it in, their legality and their costs.

Down the grid are stages (embed, mixer and ffn of every layer, head), across it the rows of a batch. A stage needs the stage above
for the same rows; a mixer also needs all earlier rows of the same sequence. Every order that respects both gives the same bits.
The last mixer ends once its state is written; all stages after it run only for rows whose logits are wanted.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quaff.batch import Counters, Shape
from quaff.config import Schedule
from quaff.errors import ConfigError, ScheduleError
from quaff.graph.program import Graph, StageKind, StageSpec

Range = tuple[int, int]
"""Rows begin .. end - 1 of a batch."""


class Cell(NamedTuple):
    """One stage over some rows; ranges ascend and do not touch rows twice. All rows of a mixer cell are written before any attends."""

    stage: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Stages of a model times rows of a batch. `spans` are the rows of each sequence, back to back from 0; `logits_rows` ascend."""

    stages: tuple[StageKind, ...]
    spans: tuple[Range, ...]
    logits_rows: tuple[int, ...]

    @staticmethod
    def of(stages: tuple[StageKind, ...], shape: Shape) -> Grid:
        """The grid of a batch."""
        ends = list(accumulate(rows for rows, _ in shape))
        spans = tuple((end - rows, end) for end, (rows, _) in zip(ends, shape, strict=True))
        return Grid(stages, spans, tuple(begin + row for (begin, _), (_, logits) in zip(spans, shape, strict=True) for row in logits))

    @property
    def rows(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    @property
    def last_mixer(self) -> int:
        """Index of the last mixer (embed without one). A row that has passed it is finished: nothing after it is remembered."""
        return max((i for i, kind in enumerate(self.stages) if kind == "mixer"), default=0)

    def needed(self) -> tuple[tuple[Range, ...], ...]:
        """Ranges of rows that each stage must compute: after the last mixer only rows whose logits are wanted matter."""
        everything: tuple[Range, ...] = ((0, self.rows),) if self.rows else ()
        wanted = _merge(self.logits_rows)
        last = self.last_mixer
        return tuple(everything if stage <= last else wanted for stage in range(len(self.stages)))


def _merge(rows: Sequence[int]) -> tuple[Range, ...]:
    out: list[Range] = []
    for row in rows:
        if out and out[-1][1] == row:
            out[-1] = (out[-1][0], row + 1)
        else:
            out.append((row, row + 1))
    return tuple(out)


def _within(ranges: tuple[Range, ...], begin: int, end: int) -> tuple[Range, ...]:
    if len(ranges) == 1 and ranges[0][0] <= begin and end <= ranges[0][1]:
        return ((begin, end),)
    first = max(0, bisect_right(ranges, (begin, begin)) - 1)
    out = []
    for lo, hi in ranges[first:]:
        if lo >= end:
            break
        if max(lo, begin) < min(hi, end):
            out.append((max(lo, begin), min(hi, end)))
    return tuple(out)


def chunk_major(grid: Grid, chunk: int) -> Iterator[Cell]:
    """`chunk` rows at a time through all stages: weight bytes ceil(rows / chunk) x model, scratch of one chunk."""
    needed = grid.needed()
    for begin in range(0, grid.rows, chunk):
        end = min(begin + chunk, grid.rows)
        for stage, rows in enumerate(needed):
            if part := _within(rows, begin, end):
                yield Cell(stage, part)


def token_major(grid: Grid) -> Iterator[Cell]:
    """One row at a time through all stages: the control that every other order is compared with."""
    return chunk_major(grid, 1)


def layer_major(grid: Grid, chunk: int, cut: bool = False) -> Iterator[Cell]:
    """One stage at a time: mixers in cells of `chunk` rows (attention scratch stays small), other stages over all their rows at once, or
    with `cut` in such cells too."""
    for stage, rows in enumerate(grid.needed()):
        if cut or grid.stages[stage] == "mixer":
            for begin in range(0, grid.rows, chunk):
                if part := _within(rows, begin, min(begin + chunk, grid.rows)):
                    yield Cell(stage, part)
        elif rows:
            yield Cell(stage, rows)


@dataclass(frozen=True, slots=True)
class Order:
    """A named order of cells with its chunk in rows (token-major has none).

    `cut`, of layer-major: all stages in cells of `chunk` rows. Scratch is that of one chunk, and weights that are streamed stay where they
    are from cell to cell; a mixture would read an expert once for every cell that chose it.
    """

    name: Schedule
    chunk: int = 1
    cut: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("token", "chunk", "layer"):
            raise ConfigError(f"schedule is {self.name!r}; expected token, chunk or layer")
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ConfigError(f"chunk is {self.chunk!r}; expected a number of rows, at least 1")

    def cells(self, grid: Grid) -> Iterator[Cell]:
        if self.name == "token":
            return token_major(grid)
        return chunk_major(grid, self.chunk) if self.name == "chunk" else layer_major(grid, self.chunk, self.cut)

    def cell_rows(self, rows: int) -> int:
        """Rows of the largest cell of a step of `rows` rows."""
        return rows if self.name == "layer" and not self.cut else min(rows, self.chunk)


def choose_order(schedule: Schedule, chunk: int, cut: bool = False) -> Order:
    """The order asked for, or token-major when the environment says QUAFF_BATCHED_PREFILL=0."""
    if os.environ.get("QUAFF_BATCHED_PREFILL", "1") == "0":
        return Order("token")
    return Order("token") if schedule == "token" else Order(schedule, chunk, cut and schedule == "layer")


def check_schedule(grid: Grid, cells: Iterable[Cell]) -> None:
    """Raise ScheduleError unless the cells compute every needed row of every stage once, after what it depends on.

    Linear in the rows of all cells. `level[row]` is the next stage of a row: stages form a chain, so one number says what is done.
    """
    level = [0] * grid.rows
    starts = [begin for begin, _ in grid.spans]
    next_row: list[list[int]] = [list(starts) if kind == "mixer" else [] for kind in grid.stages]
    for cell in cells:
        stage, ranges = cell
        if not 0 <= stage < len(grid.stages):
            raise ScheduleError(f"a cell names stage {stage} of a grid of {len(grid.stages)} stages")
        if not ranges:
            raise ScheduleError(f"a cell of stage {stage} has no rows")
        previous = 0
        for begin, end in ranges:
            if not previous <= begin < end <= grid.rows:
                raise ScheduleError(f"rows {begin}..{end - 1} of a cell of stage {stage} are empty, out of order, or outside the batch")
            previous = end
            if level[begin:end].count(stage) != end - begin:
                row = next(r for r in range(begin, end) if level[r] != stage)
                if level[row] > stage:
                    raise ScheduleError(f"stage {stage} computes row {row} twice")
                raise ScheduleError(f"stage {stage} needs row {row} of stage {level[row]}, which is not done")
            level[begin:end] = [stage + 1] * (end - begin)
            if grid.stages[stage] == "mixer":
                _advance(grid, starts, next_row[stage], stage, begin, end)
    for stage, ranges in enumerate(grid.needed()):
        for begin, end in ranges:
            if min(level[begin:end]) <= stage:
                row = next(r for r in range(begin, end) if level[r] <= stage)
                raise ScheduleError(f"row {row} of stage {stage} is never computed")
    extra = {row for row, reached in enumerate(level) if reached > grid.last_mixer + 1} - set(grid.logits_rows)
    if extra:
        raise ScheduleError(f"row {min(extra)} passes the last mixer, but its logits are not wanted")


def _advance(grid: Grid, starts: list[int], next_row: list[int], stage: int, begin: int, end: int) -> None:
    segment = bisect_right(starts, begin) - 1
    while begin < end:
        part_end = min(end, grid.spans[segment][1])
        if next_row[segment] != begin:
            raise ScheduleError(f"mixer {stage} computes row {begin} before row {next_row[segment]} of the same sequence")
        next_row[segment] = begin = part_end
        segment += 1


@dataclass(frozen=True, slots=True)
class CompiledSchedule:
    """A checked order of a grid as the arrays of a native step: `stage` [cells], `offsets` [cells + 1] into `ranges` [n, 2], and
    `logits_rows`, all int32.

    `largest` is the number of rows of the largest cell, `lengths` are those of the sequences, `rows` is their sum.
    """

    grid: Grid
    stage: NDArray[np.int32]
    offsets: NDArray[np.int32]
    ranges: NDArray[np.int32]
    logits_rows: NDArray[np.int32]
    largest: int
    lengths: tuple[int, ...]
    rows: int

    @property
    def cells(self) -> int:
        return len(self.stage)

    def cell_ranges(self, cell: int) -> NDArray[np.int32]:
        """Ranges [n, 2] of one cell."""
        return self.ranges[self.offsets[cell] : self.offsets[cell + 1]]


def compile_cells(grid: Grid, cells: Iterable[Cell]) -> CompiledSchedule:
    """Check any order and lay it out for the native step; there is no other way to get a CompiledSchedule."""
    listed = list(cells)
    check_schedule(grid, listed)
    ranges = [r for cell in listed for r in cell.ranges]
    return CompiledSchedule(
        grid,
        np.array([cell.stage for cell in listed], dtype=np.int32),
        np.cumsum([0] + [len(cell.ranges) for cell in listed], dtype=np.int32),
        np.array(ranges, dtype=np.int32).reshape(len(ranges), 2),
        np.array(grid.logits_rows, dtype=np.int32),
        max((sum(end - begin for begin, end in cell.ranges) for cell in listed), default=0),
        tuple(end - begin for begin, end in grid.spans),
        grid.rows,
    )


@lru_cache(maxsize=64)
def compile_burst(stages: tuple[StageKind, ...], shape: Shape) -> CompiledSchedule:
    """The order in which tokens can be drawn within a step: the first row of every segment through all stages, then the second ones."""
    grid = Grid.of(stages, shape)
    rows = range(min(end - begin for begin, end in grid.spans))
    parts = [tuple((begin + row, begin + row + 1) for begin, _ in grid.spans) for row in rows]
    return compile_cells(grid, [Cell(stage, part) for part in parts for stage in range(len(stages))])


@lru_cache(maxsize=64)
def compile_order(stages: tuple[StageKind, ...], shape: Shape, order: Order) -> CompiledSchedule:
    """`compile_cells` of a named order; decode steps repeat one shape for ever, so their cells are made and checked once."""
    grid = Grid.of(stages, shape)
    return compile_cells(grid, order.cells(grid))


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a cell of a stage costs: `launches` and `weight_bytes` per cell, `macs`, `state_macs` and `kv_bytes` per row.

    Of its embedding tables, each of `table_bytes`, a row reads one row of `table_rows`.
    Of `experts` experts, `expert_bytes` each, a cell reads those that its rows choose, `experts_used` a row.
    """

    spec: StageSpec
    launches: int
    weight_bytes: int
    macs: int
    state_macs: int
    kv_bytes: int
    table_bytes: tuple[int, ...]
    table_rows: int
    experts: int = 0
    experts_used: int = 0
    expert_bytes: int = 0


def stage_costs(graph: Graph, weight_bytes: Mapping[str, int], vocab_rows: int) -> tuple[StageCost, ...]:
    """Costs of every stage of a graph; `weight_bytes` are packed bytes by tensor name, `vocab_rows` the rows of the embedding table."""
    return tuple(
        StageCost(
            spec=spec,
            launches=spec.launches,
            weight_bytes=sum(weight_bytes[name] for name in spec.linear_weights),
            macs=spec.macs_per_row,
            state_macs=spec.state_macs_per_row,
            kv_bytes=spec.kv_bytes_per_row(graph.kv_value_bytes),
            table_bytes=tuple(weight_bytes[name] for name in spec.tables),
            table_rows=vocab_rows,
            experts=spec.experts[0],
            experts_used=spec.experts[1],
            expert_bytes=sum(weight_bytes[name] for name in spec.expert_weights) // max(1, spec.experts[0]),
        )
        for spec in graph.stages
    )


def predict(costs: Sequence[StageCost], spans: Sequence[Range], starts: Sequence[int], cells: Iterable[Cell]) -> Counters:
    """Counters of a step: what the native executor counts must equal this, `starts` are the positions of the spans' first rows.

    Distinct experts and their bytes, which the routing decides, are expectations (`expected_experts`); `Counters.fixed` leaves them out.
    """
    first_rows = [begin for begin, _ in spans]
    last_mixer = max((i for i, cost in enumerate(costs) if cost.spec.kind == "mixer"), default=0)
    touched = embedding = head_bytes = launches = macs = attention = state_macs = head_macs = head_rows = kv_bytes = expert_rows = 0
    experts = expert_bytes = 0.0
    for stage, ranges in cells:
        cost = costs[stage]
        rows = sum(end - begin for begin, end in ranges)
        launches += cost.launches
        embedding += sum(rows * nbytes // cost.table_rows for nbytes in cost.table_bytes)
        if cost.experts:
            distinct = expected_experts(cost.experts, cost.experts_used, rows)
            expert_rows += rows * cost.experts_used
            experts += distinct
            expert_bytes += distinct * cost.expert_bytes
        if stage > last_mixer:
            head_bytes += cost.weight_bytes
            head_macs += rows * cost.macs
            head_rows += rows if cost.spec.kind == "head" else 0
        else:
            touched += cost.weight_bytes
            macs += rows * cost.macs
            state_macs += rows * cost.state_macs
            kv_bytes += rows * cost.kv_bytes
        if cost.spec.kind in ("mixer", "attend"):
            for begin, end in ranges:
                segment = bisect_right(first_rows, begin) - 1
                while begin < end:
                    part = min(end, spans[segment][1])
                    attention += cost.spec.attention_macs(starts[segment] + begin - spans[segment][0], part - begin)
                    begin, segment = part, segment + 1
    return Counters(
        weight_bytes_touched=touched,
        embedding_bytes_touched=embedding,
        head_bytes_touched=head_bytes,
        launches=launches,
        macs=macs,
        attention_macs=attention,
        state_macs=state_macs,
        head_macs=head_macs,
        head_rows=head_rows,
        kv_bytes_written=kv_bytes,
        expert_rows=expert_rows,
        experts_touched=round(experts),
        expert_bytes_touched=round(expert_bytes),
    )


def expected_experts(experts: int, used: int, rows: int) -> float:
    """Distinct experts that `rows` rows choose together, on average, when every row chooses any `used` of `experts`.

    One is left out by a row with probability 1 - used/experts; it is never more than min(used * rows, experts).
    """
    return experts * (1.0 - (1.0 - used / experts) ** rows)


MIN_CHUNK, MAX_CHUNK, MAX_MIXTURE_CHUNK = 64, 512, 1024


def default_chunk(
    bytes_per_weight: float, int8_macs_per_second: float, bandwidth_bytes_per_second: float, rows_per_expert: float = 1.0
) -> int:
    """Rows per chunk, a multiple of 64 in 64..512 (mixtures: ..1024), from the machine's ceilings and the model's packed bytes per weight.

    Streaming a weight takes b / B seconds and using it for C rows C / M, equal at C = b * M / B. 128 times that row count leaves the
    stream 1 % of the arithmetic and the unpacking of panels no more; more rows only grow scratch.
    Where only the share `rows_per_expert` of a chunk's rows meets an expert's weights, so many times more rows are needed.
    """
    ridge_rows = bytes_per_weight * int8_macs_per_second / bandwidth_bytes_per_second
    most = MAX_CHUNK if rows_per_expert == 1.0 else MAX_MIXTURE_CHUNK
    return min(most, max(MIN_CHUNK, -(-int(128 * ridge_rows / rows_per_expert) // 64) * 64))
