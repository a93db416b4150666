"""One step: Batch + order + weights + pages -> Logits, by a single native call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.batch import Batch, Counters, Logits
from quaff.errors import CheckpointError, ConfigError, MemoryBudgetError
from quaff.graph.program import Graph, Op, StageSpec
from quaff.schedule import Cell, CompiledSchedule, Grid, Order, StageCost, compile_burst, compile_cells, compile_order, predict, stage_costs
from quaff.weights.budget import Accountant
from quaff.weights.plan import StreamCounters
from quaff.weights.resident import ResidentWeights
from quaff.weights.streamed import StreamedWeights

T = TypeVar("T")

# About 50 ms of one core: longer steps, and those that wait for a disk, run beside a thread that reports progress and answers Ctrl-C.
LONG_STEP_MACS = 4_000_000_000
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Draw:
    """How a step draws the tokens of a segment's rows after the first: `SamplingParams.draw`, and tokens after which it ends (int32)."""

    options: tuple[float, int, float, float, int, int]
    ends: NDArray[np.int32]


def bind_model(graph: Graph, weights: ResidentWeights | StreamedWeights) -> _native.Model:
    """Native programs of a graph with weights bound; stages with equal programs share one."""
    model = _native.Model(graph.config.dim, graph.config.vocab, graph.outputs)
    for rope in graph.ropes:
        table = _native.RopeTable(rope.theta, rope.rotary_dim, rope.factors, rope.scale, rope.temperature, rope.temperature_length)
        model.add_rope(table)
    programs: dict[object, _native.Program] = {}
    for stage in graph.stages:
        spec = stage.program
        if spec not in programs:
            ops = [(int(op.kind), op.inputs, op.outputs, op.weights, op.ints, op.floats) for op in spec.ops]
            programs[spec] = _native.Program(spec.buffers, ops, spec.slots)
        model.add_stage(programs[spec], [weights[name] for name in stage.weights])
    if isinstance(weights, StreamedWeights):
        weights.bind(model)
    return model


class Runner:
    """Runs batches of one model. Not for two threads at once; `control.cancel()` may come from any thread."""

    def __init__(
        self,
        graph: Graph,
        weights: ResidentWeights | StreamedWeights,
        pools: Sequence[_native.PagePool],
        threads: int,
        accountant: Accountant,
        state_pools: Sequence[_native.StatePool] = (),
    ) -> None:
        self.graph = graph
        self.pools = list(pools)
        self.state_pools = list(state_pools)
        self.control = _native.Control()
        self.weight_bytes = weights.nbytes
        self.costs: tuple[StageCost, ...] = stage_costs(graph, self.weight_bytes, graph.config.vocab)
        self._loaded_bytes = weights.loaded_bytes
        self._accountant = accountant
        self._weights = weights
        self._model = bind_model(graph, weights)
        self._kinds = tuple(stage.kind for stage in graph.stages)
        self._macs_per_row = sum(stage.macs_per_row for stage in graph.stages)
        self._scratch_rows_bytes = self._most_rows = self._most_cell_rows = 0
        self._values = self._logits_memory(0)
        self._op_seconds: NDArray[np.float64] | None = None
        self._spent = _native.Counters()
        self._row_bytes = 4 * graph.outputs
        self._scratch_for: CompiledSchedule | None = None
        self.streamed = isinstance(weights, StreamedWeights)
        self.set_threads(threads)

    def set_threads(self, threads: int) -> None:
        try:
            self._runtime = _native.Runtime(threads)
        except RuntimeError as error:
            raise ConfigError(str(error)) from None
        self.threads = threads

    @property
    def counters(self) -> Counters:
        """Everything counted since the weights were loaded."""
        return Counters(weight_bytes_loaded=self._loaded_bytes) + Counters(**self._spent.as_dict())

    @property
    def pulse(self) -> tuple[int, ...]:
        """Another value whenever a step got on: a unit of work has ended, or something was read from a file. Any thread may ask."""
        streamed = self.stream_counters()
        return self.control.work_done, self._runtime.pulse, streamed.read_bytes if streamed is not None else 0

    def stream_counters(self) -> StreamCounters | None:
        """What streaming cost since the model was loaded, also while a step runs; None where all weights are in memory."""
        return self._weights.stream_counters()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the native side holds."""
        return self._runtime.scratch_bytes

    def start_profile(self) -> None:
        """Time every op of the steps that follow, from zero."""
        self._op_seconds = np.zeros(sum(len(stage.program.ops) for stage in self.graph.stages))

    def stop_profile(self) -> list[tuple[StageSpec, Op, float]]:
        """Wall-clock seconds of every op since `start_profile`, stages in grid order."""
        seconds, self._op_seconds = self._op_seconds, None
        ops = [(stage, op) for stage in self.graph.stages for op in stage.program.ops]
        return [(stage, op, float(s)) for (stage, op), s in zip(ops, seconds if seconds is not None else [], strict=False)]

    def close(self) -> None:
        """Let go of the weights; nothing can be run afterwards."""
        self._model = _native.Model(self.graph.config.dim, self.graph.config.vocab, self.graph.outputs)

    def grid(self, batch: Batch) -> Grid:
        return Grid.of(self._kinds, batch.shape)

    def work(self, start: int, rows: int, logits: int) -> int:
        """Multiply-accumulates of `rows` new rows from position `start`, with logits for the last `logits` of them, in any order."""
        grid = Grid(self._kinds, ((0, rows),), tuple(range(rows - logits, rows)))
        return predict(self.costs, grid.spans, (start,), Order("chunk", rows).cells(grid)).work

    def rows_with_scratch(self, cell_rows: int) -> int:
        """The most rows that a step with such cells may have for which no scratch memory was counted that others have not needed."""
        return self._most_rows if cell_rows <= self._most_cell_rows else 0

    def run(
        self,
        batch: Batch,
        order: Order | Iterable[Cell],
        on_work: Callable[[int], None] | None = None,
        draw: Sequence[Draw] = (),
    ) -> Logits:
        """Run a batch in an order, checked first (ScheduleError).

        With `draw`, one for each segment, only their first tokens are read, the others are drawn, and the order is that of `compile_burst`.
        Segments have as many rows each, all with logits, and memory for one row of logits a segment is enough.

        `on_work` gets the multiply-accumulates done in this step, several times a second while it runs. A cancelled step returns the
        rows that are finished. Raises MemoryBudgetError before scratch memory is taken, CheckpointError when weights cannot be read.
        """
        if draw:
            schedule = compile_burst(self._kinds, batch.shape)
        else:
            schedule = (
                compile_order(self._kinds, batch.shape, order) if isinstance(order, Order) else compile_cells(self.grid(batch), order)
            )
        if schedule is not self._scratch_for:
            self._take_scratch(schedule.rows, schedule.largest)
            self._scratch_for = schedule
        rows = len(draw) or len(schedule.logits_rows)
        more = rows * self._row_bytes if rows > len(self._values) else 0
        if more:
            self._accountant.take(more, f"logits of {rows} rows")
        try:
            values = self._logits_memory(rows) if more else self._values[:rows]
            done, poisoned, drawn = self._step(batch, schedule, values, on_work, draw)
        except MemoryError:
            raise MemoryBudgetError("the system has no memory left for this step; use a smaller chunk or a shorter prompt") from None
        except _native.SourceError as error:
            raise CheckpointError(str(error)) from None
        finally:
            if more:
                self._accountant.give(more)
        self._count_scratch()
        if done == len(schedule.stage):
            return Logits(schedule.logits_rows, values, schedule.lengths, poisoned, drawn)
        keep, finished = self._finished(schedule, done)
        return Logits(schedule.logits_rows[keep], values if draw else values[keep], finished, poisoned, drawn)

    def reserve(self, rows: int, order: Order, logits_rows: int) -> None:
        """Count what steps of at most `rows` rows, `logits_rows` of them with logits, need; MemoryBudgetError leaves the count as it was.

        Scratch stays counted; memory of logits is kept from step to step until the next call, which may ask for less.
        """
        more = (logits_rows - len(self._values)) * self._row_bytes
        if more > 0:
            self._accountant.take(more, f"logits of {logits_rows} rows")
        try:
            self._take_scratch(rows, order.cell_rows(rows))
            if more:
                self._values = self._logits_memory(logits_rows)
        except MemoryBudgetError:
            if more > 0:
                self._accountant.give(more)
            raise
        if more < 0:
            self._accountant.give(-more)

    def _logits_memory(self, rows: int) -> NDArray[np.float32]:
        try:
            return np.empty((rows, self.graph.outputs), dtype=np.float32)
        except MemoryError:
            raise MemoryBudgetError(f"the system has no memory left for logits of {rows} rows; shorten the prompt") from None

    def _take_scratch(self, rows: int, cell_rows: int) -> None:
        # The native arena keeps its high-water mark, and so does the account.
        need = self.graph.scratch_bytes(rows, cell_rows)
        if need > self._scratch_rows_bytes:
            self._accountant.take(need - self._scratch_rows_bytes, f"scratch for {rows} rows")
            self._scratch_rows_bytes = need
        self._most_rows, self._most_cell_rows = max(self._most_rows, rows), max(self._most_cell_rows, cell_rows)

    def _count_scratch(self) -> None:
        # The threads' own scratch is known only after a step: it depends on the kernels and on how attention was cut.
        more = self._runtime.scratch_bytes - self._scratch_rows_bytes - self._accountant.found_bytes
        if more > 0:
            self._accountant.find(more)

    def _step(
        self,
        batch: Batch,
        schedule: CompiledSchedule,
        values: NDArray[np.float32],
        on_work: Callable[[int], None] | None,
        draw: Sequence[Draw],
    ) -> tuple[int, tuple[bool, ...], tuple[list[int], ...]]:
        arguments = (
            self._model,
            self.pools,
            self.state_pools,
            [(s.tokens, s.start, s.tables, s.states) for s in batch.segments],
            schedule.stage,
            schedule.offsets,
            schedule.ranges,
            schedule.logits_rows,
            values,
            self.control,
            self._spent,
            self._op_seconds,
            [(*d.options, d.ends) for d in draw],
        )
        if schedule.rows * self._macs_per_row < LONG_STEP_MACS and not self.streamed:
            return self._runtime.step(*arguments)
        return self._watched(lambda: self._runtime.step(*arguments), on_work)

    def _watched(self, step: Callable[[], T], on_work: Callable[[int], None] | None) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(step())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="quaff-step")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                if on_work is not None:
                    on_work(self.control.work_done)
        except BaseException:
            # The caller's progress function failed or was interrupted: the step must not outlive the call that owns its memory.
            self.control.cancel()
            thread.join()
            raise
        if errors:
            raise errors[0]
        return results[0]

    def _finished(self, schedule: CompiledSchedule, done: int) -> tuple[NDArray[np.bool_], tuple[int, ...]]:
        """What the first `done` cells have left: which of the rows that want logits have them, and finished rows by segment."""
        grid = schedule.grid
        finished = [0] * len(grid.spans)
        with_logits: set[int] = set()
        for cell in range(done):
            stage = int(schedule.stage[cell])
            if stage == grid.last_mixer:
                # Rows of a sequence pass a mixer in order, so the rows that have passed the last one are a prefix.
                for i, (begin, end) in enumerate(grid.spans):
                    finished[i] += sum(max(0, min(hi, end) - max(lo, begin)) for lo, hi in schedule.cell_ranges(cell).tolist())
            elif stage == len(grid.stages) - 1:
                with_logits.update(row for lo, hi in schedule.cell_ranges(cell).tolist() for row in range(lo, hi))
        if self.graph.state_kinds:
            # A recurrent layer has gone past the rows that are finished: only a whole segment has a state to go on from.
            finished = [rows if rows == end - begin else 0 for rows, (begin, end) in zip(finished, grid.spans, strict=True)]
        return np.array([row in with_logits for row in schedule.logits_rows.tolist()], dtype=bool), tuple(finished)
