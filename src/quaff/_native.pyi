"""Types of the native module. Arrays are C-contiguous NumPy arrays; a wrong shape or dtype raises TypeError or ValueError."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
OpTuple = tuple[int, Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[float]]

NUMERICS_VERSION: int
PAGE: int  # 64
PANEL_VERSION: int  # of the layout that pack_panels writes

def isa() -> str: ...  # the set in use: scalar, avx2, avxvnni, avx512, neon
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...  # ValueError: unknown or not supported by this processor (lists what is)
def default_threads() -> int: ...  # min(affinity, cgroup quota, physical cores)
def measure_int8(threads: int, seconds: float) -> float: ...  # multiply-accumulates per second, register only
def measure_int16(threads: int, seconds: float) -> float: ...
def measure_fma(threads: int, seconds: float) -> float: ...
def measure_bandwidth(threads: int, megabytes: int) -> float: ...  # bytes per second read from one buffer
def measure_cache(threads: int, kilobytes: int, seconds: float) -> float: ...  # the same, a buffer for every thread, over and over
def packed_bytes(ggml_type: int, rows: int, cols: int) -> int: ...  # nbytes of such a Weight, before there is one
def pack_panels(ggml_type: int, data: U8, rows: int, cols: int, threads: int = 1) -> U8: ...  # [packed_bytes]; what is unused is zero

class MappedFile:
    """The first `nbytes` bytes of an open file, mapped; a thread moves them into huge pages meanwhile. RuntimeError when they cannot be."""

    def __init__(self, fd: int, nbytes: int) -> None: ...
    def array(self) -> U8: ...  # [nbytes], read-only, at a multiple of 2 MiB
    @property
    def moved_bytes(self) -> int: ...
    def wait(self) -> None: ...  # until all of it has moved, or cannot

class Weight:
    """A packed 2-D weight, or a float vector (rows == 1, kept as f32)."""

    def __init__(self, ggml_type: int, data: U8, rows: int, cols: int, threads: int = 1) -> None: ...
    @staticmethod
    def vector(values: F32) -> Weight: ...
    @staticmethod
    def stack(ggml_type: int, data: U8, experts: int, rows: int, cols: int, threads: int = 1) -> Weight: ...  # each packed by itself
    @staticmethod
    def read(  # rows of blocks in an open file, `stride` bytes apart; RuntimeError when they cannot be read. experts 0: one matrix
        ggml_type: int, fd: int, offset: int, stride: int, experts: int, rows: int, cols: int, threads: int = 1
    ) -> Weight: ...
    @staticmethod
    def view(  # panels where they lie, kept alive: matrix e of a stack begins at e * stride. experts 0: a matrix
        ggml_type: int, panels: U8, stride: int, experts: int, rows: int, cols: int
    ) -> Weight: ...
    @property
    def experts(self) -> int: ...  # matrices of rows x cols: 1 but for a stack
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...  # bytes one pass over the weight reads; of a stack, over all its matrices
    @property
    def is_integer(self) -> bool: ...
    @property
    def group(self) -> int: ...
    def dequantize(self, row0: int = 0, count: int = -1) -> F32: ...  # [count, cols]

class RopeTable:
    """cos and sin by position, grown on demand: inv_freq_i = theta^(-2i/rotary_dim) / factors[i] (empty: 1), in float64, both times
    scale * (1 + temperature * ln(1 + position // temperature_length)), rounded once."""

    def __init__(
        self,
        theta: float,
        rotary_dim: int,
        factors: Sequence[float] = (),
        scale: float = 1.0,
        temperature: float = 0.0,
        temperature_length: int = 0,
    ) -> None: ...
    def rows(self, positions: I32) -> F32: ...  # [n, rotary_dim]: cos half, then sin half

class PagePool:
    """Memory of KV pages of one kind, zeroed when taken. Layout of a page: docs/formats.md.

    With `value_bytes` 4, f32 for checking: `array` gives two words of 16 bits a value."""

    def __init__(self, layers: int, kv_heads: int, dim: int, value_dim: int, value_bytes: int = 2) -> None: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def pages_in_use(self) -> int: ...
    @property
    def spare_pages(self) -> int: ...  # given back, their memory kept for the next ones
    @property
    def bytes_in_use(self) -> int: ...
    def take(self, zeroed: bool = True) -> int: ...  # MemoryError when the system refuses; not zeroed, it holds what an earlier page did
    def give(self, page: int) -> None: ...
    def copy(self, page: int) -> int: ...  # a new page with the same bytes
    def array(self, page: int) -> U16: ...  # a copy, [layers, kv_heads, 64*(dim + value_dim)]
    def view(self, page: int) -> U16: ...  # the page itself, to be read and written while it is held; of the same shape

class StatePool:
    """Memory of recurrent state of one kind: slots of `layers` x `size` f32 values, those of an earlier use until a step fills them."""

    def __init__(self, layers: int, size: int) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots_in_use(self) -> int: ...
    @property
    def spare_slots(self) -> int: ...  # given back, their memory kept for the next ones
    def take(self) -> int: ...  # MemoryError when the system refuses
    def give(self, slot: int) -> None: ...
    def array(self, slot: int) -> F32: ...  # a copy, [layers, size]
    def view(self, slot: int) -> F32: ...  # the slot itself, to be read and written while it is held

class Program:
    """Ops of one stage kind, checked when built. Buffer 0 is the residual; see graph/program.py for kinds and fields."""

    def __init__(self, buffers: Sequence[tuple[int, int]], ops: Sequence[OpTuple], slots: int = 1) -> None: ...
    # buffers: (width, kind 0 = f32 | 1 = int8 rows | 2 = f32 | 3 = int8 with `slots` rows a row of the cell);
    # ops: (kind, inputs, outputs, weight slots, ints, floats); slot -1 = none

class Model:
    """Stages (program + bound weights) in grid order."""

    def __init__(self, dim: int, vocab: int, outputs: int) -> None: ...  # outputs: width of a row of logits
    def add_rope(self, table: RopeTable) -> int: ...
    def add_stage(self, program: Program, weights: Sequence[Weight]) -> int: ...
    @property
    def stages(self) -> int: ...

class SourceError(OSError):
    """Weights cannot be read: the message says which, where and why."""

class WeightSource:
    """Weights that stay in their files: `readers` threads, each with a buffer of `buffer_bytes`, a multiple of 4096, bring them.

    files: (path, bytes, time of modification in ns), as they were when their headers were read. SourceError when one is not.
    """

    def __init__(self, files: Sequence[tuple[str, int, int]], readers: int, buffer_bytes: int) -> None: ...
    def add(
        self,
        name: str,
        ggml_type: int,
        matrices: int,  # of a stack, else 0
        rows: int,
        cols: int,
        file: int,
        offset: int,
        matrix_stride: int,
        row_stride: int,  # of rows of ggml blocks
        packed: bool,  # panels as Weight has them
    ) -> Weight: ...  # without panels
    def bind(self, model: Model, slots: int, pinned: Sequence[int], pin_tables: bool, head_rows: int, expert_bytes: int) -> None: ...
    # once, when the model has its stages. `pinned`: stages that are read once and kept; token tables with pin_tables, else by rows.
    # A head of more than head_rows rows (a multiple of 16) is cut. expert_bytes: of chosen experts that are in memory at once
    def stop(self) -> None: ...  # steps that need it fail from then on
    @property
    def memory_bytes(self) -> int: ...  # slots, buffers, and what is kept once it has been read
    @property
    def counters(self) -> dict[str, Any]: ...  # sums; see weights.plan.StreamCounters

class Control:
    """Shared with a running step from any thread: cancel word and progress."""

    def __init__(self) -> None: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...
    def reset(self) -> None: ...
    @property
    def cells_done(self) -> int: ...
    @property
    def work_done(self) -> int: ...  # multiply-accumulates finished in this step

class Counters:
    """Sums of what steps did: see batch.Counters."""

    def __init__(self) -> None: ...
    def as_dict(self) -> dict[str, int]: ...

class Runtime:
    """Worker threads and scratch memory. One step at a time."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def pulse(self) -> int: ...  # another value whenever a unit of work has ended; any thread may ask
    @property
    def owned_launches(self) -> int: ...  # linear launches so far in which every worker owned a block of rows
    @property
    def joined_launches(self) -> int: ...  # launches so far that every worker came to with his own rows, without a barrier
    @property
    def shared_launches(self) -> int: ...  # attention launches so far in which workers shared the pages of a tile
    @property
    def expected_launches(self) -> int: ...  # linear launches so far whose weights workers were told beforehand
    def step(
        self,
        model: Model,
        pools: Sequence[PagePool],
        state_pools: Sequence[StatePool],
        segments: Sequence[tuple[I32, int, Sequence[I32], Sequence[I32]]],  # tokens, start, tables and states: see batch.Segment
        cell_stage: I32,  # [cells]
        cell_ranges: I32,  # [cells + 1], CSR into ranges
        ranges: I32,  # [n, 2] row begin, end
        logits_rows: I32,  # rows whose logits are written, ascending
        logits: F32,  # [len(logits_rows), outputs]; with draw [segments, outputs], those of the last rows that were computed
        control: Control,
        counters: Counters,  # what the step did is added to them
        op_seconds: NDArray[np.float64] | None = None,  # so are its seconds to these: one per op of every stage, stages in order
        draw: Sequence[tuple[float, int, float, float, int, int, I32]] = (),
    ) -> tuple[int, tuple[bool, ...], tuple[list[int], ...]]: ...
    # Cells done, fewer than there are when it was cancelled or drawing ended; segments of which a row became non-finite; tokens drawn.
    # `draw`: of every segment temperature, top_k, top_p, min_p, seed and choice of `sample`, and tokens after which nothing follows for
    # any. Of a segment the first token is read, every other one drawn from the logits of the row before it. Segments have as many rows
    # each, and the first ones of all go through all stages before the second ones.

def sample(
    logits: F32,  # [vocab]
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    history: I32,  # ids the penalty applies to
    seed: int,
    position: int,
    choice: int,
) -> int: ...
def logprobs(logits: F32, ids: I32) -> NDArray[np.float64]: ...  # log P(id) of one row, NUMERICS 20
def exp_row(x: F32) -> F32: ...  # E, sigmoid, tanh: for tests
def sigmoid_row(x: F32) -> F32: ...
def tanh_row(x: F32) -> F32: ...
