"""Ops, programs and stages: the values that the reference and the native executor both read.

Buffers of a program are numbered: 0 the residual (f32, model width), 1 the logits (f32, vocabulary), 2.. scratch of the cell;
-1 is none. Op fields, by kind (`->` separates inputs from outputs):

| kind | inputs -> outputs | weights | ints | floats |
|---|---|---|---|---|
| EMBED | -> 0 or buf | table | | scale |
| RMS_NORM | src -> f32 or -1, int8 or -1 | w | heads: vectors of len(w) per row | eps |
| QUANTIZE | src -> int8 | | parts: of a row, quantised one by one | |
| LINEAR | int8 or -1, f32 or -1 -> one per weight | w1..wn, b1..bn (-1 none) | n, accumulate | |
| ROPE | buf -> the same buf | | rope index, heads, head_dim, interleaved | |
| KV_WRITE | k, v -> | | kind, layer in kind, kv_heads, head_dim, value_dim | |
| ATTEND | q -> out | sinks (-1 none) | kind, layer in kind, heads, kv_heads, head_dim, window, value_dim | scale, softcap |
| GLU | gate, up -> f32 or -1, int8 or -1 | | 0 silu, 1 gelu_tanh, 2 sigmoid, 3 clamped silu | of 3: alpha, limit |
| ADD | src -> 0 or buf | | | scale: out + scale*src |
| CONV | src -> f32 or -1, int8 or -1 | w [channels, taps], b (-1 none) | kind, layer in kind, channels, taps, 0 gated or 1 silu | |
| SPLIT | src -> one per part | | heads, width of each part in a head | |
| UNIT_NORM | buf -> the same buf | | heads, head_dim | eps, scale |
| DELTA_GATES | a, b -> the same bufs | rate [heads], dt | | |
| DELTA | q, k, v, decay, beta -> out | | kind, layer in kind, key heads, value heads, key dim, value dim, tiled | |
| SCALE | src -> buf, src itself or another | | | factor, softcap (0 none) |
| CONCAT | a, b -> out | | heads: every head of out is that of a, then that of b | |
| HEAD_LINEAR | int8 or -1, f32 or -1 -> f32 | w, b (-1 none) | 1, 0, heads: every head has a matrix of its own | |
| ROUTE | router logits -> routing | bias or -1 | experts, used, scoring, normalise, groups, groups used, group top | scale |
| GATHER | src, routing -> the same by slots | | | |
| EXPERT_LINEAR | int8 or -1, f32 or -1, routing -> one per weight, all by slots | w1..wn, b1..bn (-1 none) | n, experts | |
| COMBINE | src by slots, routing -> f32 | | accumulate | |
| GATE | x, h -> the same buf as x | w | | |

Integer weights of LINEAR read the int8 input when there is one; float weights, and all weights without it, read the f32 input.
With `accumulate`, LINEAR and COMBINE add to their output; a second output of RMS_NORM, GLU or CONV is the first one quantised.
CONV sums the taps of every channel over its last rows. Gated, src is [B | C | x] and the result C * conv(B*x); else silu(conv(src)).
UNIT_NORM is x * (1/sqrt(sum of squares + eps)) * scale per head. DELTA_GATES makes a the share of a state that is kept,
E(rate * softplus(a + dt)), and b sigmoid(b). Where a is wider than the heads, every row of a head's state decays by itself.
DELTA is the gated delta rule of every value head; value head j has key head j % key heads when tiled, else
j // (value heads / key heads).

Experts: ROUTE gives every row `used` experts. A routing row holds their numbers, ascending, then their weights, all as f32. A (row, expert)
pair is a slot; the slots of a cell are sorted by expert, then by row, so an expert's rows lie side by side. GATHER copies rows to their
slots, EXPERT_LINEAR multiplies each expert's slots with its own matrix, GLU and QUANTIZE work on slots as on rows, COMBINE brings
a row's slots together. GATE multiplies x by the sigmoid of the product of h and w.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

from quaff.config import ModelConfig, RopeConfig

StageKind = Literal["embed", "mixer", "attend", "ffn", "head"]
"""A mixer leaves state behind for later rows; attend is the half of the last one that does not, where it can be halved."""

NONE = -1
RESIDUAL = 0
LOGITS = 1
SCRATCH = 2
F32 = 0
INT8 = 1
SLOT_F32 = 2
SLOT_INT8 = 3


class OpKind(IntEnum):
    """Numbers are shared with native/runtime/program.cpp."""

    EMBED = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    ROPE = 4
    KV_WRITE = 5
    ATTEND = 6
    GLU = 7
    ADD = 8
    CONV = 9
    SPLIT = 10
    UNIT_NORM = 11
    DELTA_GATES = 12
    DELTA = 13
    SCALE = 14
    CONCAT = 15
    HEAD_LINEAR = 16
    ROUTE = 17
    GATHER = 18
    EXPERT_LINEAR = 19
    COMBINE = 20
    GATE = 21


RECURRENT = (OpKind.CONV, OpKind.DELTA)
"""Kinds whose result needs the state that earlier rows left."""
GATED, SILU_OF_SUM = 0, 1
"""Forms of CONV."""
LINEAR_KINDS = (OpKind.LINEAR, OpKind.HEAD_LINEAR)
"""Ops that read the whole of their `ints[0]` weight matrices in every cell."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation over the rows of a cell. Inputs and outputs are buffer ids, weights are slots of the stage."""

    kind: OpKind
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """Ops of a stage and its scratch buffers: `buffers[i]` = (width, F32 or INT8) of buffer i + 2; SLOT_F32 and SLOT_INT8 have
    `slots` such rows for every row of the cell.

    Hashable: equal stages share one program."""

    buffers: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]
    slots: int = 1

    @property
    def scratch_bytes_per_row(self) -> int:
        """Bytes of scratch for one row: f32 values, or int8 codes and a spare line with an f32 scale and three int32 sums per group of 32,
        whose number is rounded up to 16, and 8 bytes for each outlier."""
        outliers = [-(-width // 1024) for width, _ in self.buffers]
        for op in self.ops:
            if op.kind == OpKind.QUANTIZE:
                i, parts = op.outputs[0] - SCRATCH, op.ints[0]
                outliers[i] = max(outliers[i], parts * -(-self.buffers[i][0] // parts // 1024))
        return sum(
            (self.slots if kind in (SLOT_F32, SLOT_INT8) else 1)
            * (width * 4 if kind in (F32, SLOT_F32) else width + 64 + 256 * -(-width // 512) + 8 * outliers[i])
            for i, (width, kind) in enumerate(self.buffers)
        )


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A program with the names of its weights in slot order. `layer` is -1 for embed and head.

    `macs_per_row`: multiply-accumulates of the linear ops for one row, of as many experts as a row goes through.
    """

    kind: StageKind
    layer: int
    program: ProgramSpec
    weights: tuple[str, ...]
    macs_per_row: int

    @property
    def launches(self) -> int:
        """Parallel regions of one cell of this stage: one per op."""
        return len(self.program.ops)

    @property
    def linear_weights(self) -> tuple[str, ...]:
        """Names of the weights that a linear op reads whole in every cell, in slot order, biases left out."""
        slots = {s for op in self.program.ops if op.kind in LINEAR_KINDS for s in op.weights[: op.ints[0]]}
        return tuple(self.weights[s] for s in sorted(slots))

    @property
    def expert_weights(self) -> tuple[str, ...]:
        """Names of the stacks of matrices of which a cell reads those that its rows chose, in slot order."""
        names = {name for stacks in self.expert_stacks for name in stacks}
        return tuple(name for name in self.weights if name in names)

    @property
    def expert_stacks(self) -> tuple[tuple[str, ...], ...]:
        """The same by op, in the order in which they run: an op reads one expert's matrices of all its stacks together."""
        ops = (op for op in self.program.ops if op.kind == OpKind.EXPERT_LINEAR)
        return tuple(tuple(self.weights[s] for s in op.weights[: op.ints[0]]) for op in ops)

    @property
    def experts(self) -> tuple[int, int]:
        """(experts, experts that a row uses); (0, 0) for a dense stage."""
        return next(((op.ints[0], op.ints[1]) for op in self.program.ops if op.kind == OpKind.ROUTE), (0, 0))

    @property
    def small_weights(self) -> tuple[str, ...]:
        """Names of norm vectors and biases, in slot order; an embedding table is in neither list, cells read single rows of it."""
        large = {*self.linear_weights, *self.expert_weights, *self.tables}
        return tuple(name for name in self.weights if name not in large)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables of which a row reads its token's row, one for each time it does."""
        return tuple(self.weights[op.weights[0]] for op in self.program.ops if op.kind == OpKind.EMBED)

    def attention_macs(self, start: int, rows: int) -> int:
        """Multiply-accumulates of scores and values over the visible positions of rows start .. start + rows - 1."""
        total = 0
        for op in self.program.ops:
            if op.kind == OpKind.ATTEND:
                _, _, heads, _, dim, window, value_dim = op.ints
                total += heads * (dim + value_dim) * visible_positions(start, rows, window)
        return total

    @property
    def state_macs_per_row(self) -> int:
        """Multiply-accumulates of convolutions and recurrences for one row."""
        return sum(state_macs(op) for op in self.program.ops)

    def kv_bytes_per_row(self, value_bytes: int) -> int:
        """Bytes of keys and values that one row writes."""
        writes = (op.ints for op in self.program.ops if op.kind == OpKind.KV_WRITE)
        return sum(heads * bytes_of_position(dim, value_dim, value_bytes) for _, _, heads, dim, value_dim in writes)


def bytes_of_position(dim: int, value_dim: int, value_bytes: int) -> int:
    """Bytes of one head's key and value of a position: two bf16 scales belong to codes."""
    return (dim + value_dim) * value_bytes + (4 if value_bytes == 2 else 0)


def state_macs(op: Op) -> int:
    """Multiply-accumulates of a recurrent op for one row; 0 of any other."""
    if op.kind == OpKind.CONV:
        return op.ints[2] * op.ints[3]
    return 3 * op.ints[3] * op.ints[4] * op.ints[5] if op.kind == OpKind.DELTA else 0


def visible_positions(start: int, rows: int, window: int) -> int:
    """Sum over i in start .. start + rows - 1 of the positions j <= i (and j > i - window when there is one)."""

    def below(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return below(start + rows) - below(start)


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers that share one page table per sequence: equal KV shape and window. `layers` are model layers, ascending; a head's keys are
    `dim` values wide, its values `value_dim`.

    `value_bytes`: 2, codes of 13 bits with a scale for each key and value, or 4, f32 for checking.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    dim: int
    value_dim: int
    window: int
    value_bytes: int = 2

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all layers and heads."""
        return len(self.layers) * self.kv_heads * bytes_of_position(self.dim, self.value_dim, self.value_bytes)


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layers whose state is `size` f32 values, whatever the number of positions. `layers` are model layers, ascending."""

    name: str
    layers: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Graph:
    """A model as stages in grid order: embed, (mixer, ffn) per layer, head. A last mixer of attention is followed by its attend stage.

    `hidden`: the head leaves the residual after its norm in the place of logits.
    """

    config: ModelConfig
    stages: tuple[StageSpec, ...]
    ropes: tuple[RopeConfig, ...]
    kv_kinds: tuple[KVKind, ...]
    state_kinds: tuple[StateKind, ...] = ()
    hidden: bool = False

    @property
    def outputs(self) -> int:
        """Values that the head makes for a row."""
        return self.config.dim if self.hidden else self.config.vocab

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of a value in KV pages, the same in all kinds."""
        return max((kind.value_bytes for kind in self.kv_kinds), default=2)

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        """Every tensor the graph reads, once, in order of first use."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.weights))

    @cached_property
    def scratch_bytes_per_row(self) -> int:
        """Of the stage that needs most."""
        return max((stage.program.scratch_bytes_per_row for stage in self.stages), default=0)

    def scratch_bytes(self, rows: int, cell_rows: int) -> int:
        """Scratch of a step: the residual of all its rows, and the buffers of its largest cell."""
        return rows * self.config.dim * 4 + cell_rows * self.scratch_bytes_per_row
