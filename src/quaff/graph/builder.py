"""From a family and a checkpoint's tensors to a Graph: records the ops that a family emits and checks every width."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, overload

from quaff.config import Activations, AttentionConfig, DeltaConfig, ExpertsConfig, KVDtype, LayerConfig, ModelConfig, RopeConfig
from quaff.errors import ConfigError, UnsupportedError
from quaff.graph.fuse import fuse as fuse_program
from quaff.graph.fuse import share_buffers, split_at_state
from quaff.graph.program import (
    F32,
    GATED,
    INT8,
    LINEAR_KINDS,
    LOGITS,
    NONE,
    RECURRENT,
    RESIDUAL,
    SCRATCH,
    SILU_OF_SUM,
    SLOT_F32,
    SLOT_INT8,
    Graph,
    KVKind,
    Op,
    OpKind,
    ProgramSpec,
    StageKind,
    StageSpec,
    StateKind,
)
from quaff.models.family import Family, Tensors, Value, WeightRef, Weights

SILU, GELU_TANH, SIGMOID, CLAMPED_SILU = 0, 1, 2, 3
SCORING = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
MAX_TAPS = 16
"""As native/runtime/program.h says."""


@dataclass
class Shared:
    """Tables that all stages index: rotary embeddings, KV kinds and kinds of recurrent state with the layers seen so far."""

    ropes: list[RopeConfig]
    kinds: list[KVKind]
    value_bytes: int = 2
    states: list[StateKind] = field(default_factory=list)

    def rope(self, rope: RopeConfig) -> int:
        # Tables depend on frequencies and size, not on how pairs lie.
        key = replace(rope, interleaved=False)
        if key not in self.ropes:
            self.ropes.append(key)
        return self.ropes.index(key)

    def kv(self, layer: int, kind: str, attention: AttentionConfig) -> tuple[int, int]:
        """(KV kind, layer in kind) of a model layer."""
        wanted = KVKind(kind, (layer,), attention.kv_heads, attention.head_dim, attention.v_dim, attention.window, self.value_bytes)
        for i, k in enumerate(self.kinds):
            if replace(k, layers=wanted.layers) == wanted:
                self.kinds[i] = replace(k, layers=(*k.layers, layer))
                return i, len(k.layers)
        self.kinds.append(wanted)
        return len(self.kinds) - 1, 0

    def kv_of(self, layer: int) -> tuple[int, int]:
        """(KV kind, layer in kind) of keys and values that were written by an earlier layer."""
        for i, k in enumerate(self.kinds):
            if layer in k.layers:
                return i, k.layers.index(layer)
        raise ConfigError(f"layer {layer} has no keys and values that another could read")

    def state(self, layer: int, name: str, size: int) -> tuple[int, int]:
        """(kind of recurrent state, layer in kind) of a model layer."""
        for i, k in enumerate(self.states):
            if (k.name, k.size) == (name, size):
                self.states[i] = replace(k, layers=(*k.layers, layer))
                return i, len(k.layers)
        self.states.append(StateKind(name, (layer,), size))
        return len(self.states) - 1, 0


class StageBuilder:
    """Records one stage, one plain op per step (fusions come after). Implements quaff.models.family.Builder."""

    def __init__(self, config: ModelConfig, shared: Shared, layer: int, activations: Activations) -> None:
        self.config = config
        self.layer = layer
        self._shared = shared
        self._activations = activations
        self._residual = Value(self, RESIDUAL, config.dim)
        self._buffers: list[tuple[int, int]] = []
        self._slots = 1
        self._ops: list[Op] = []
        self._weights: list[WeightRef] = []

    @property
    def residual(self) -> Value:
        return self._residual

    @residual.setter
    def residual(self, value: Value) -> None:
        if value is not self._residual:
            raise ConfigError("the residual can only be added to")

    def embed(self, table: WeightRef, scale: float) -> None:
        self._matrix(table, self.config.dim)
        self._emit(OpKind.EMBED, (), (RESIDUAL,), (self._slot(table),), floats=(scale,))

    def copy(self, x: Value) -> Value:
        """The same values in a buffer of their own: what a linear layer that reads the residual needs."""
        out = self._f32(x.width)
        self._emit(OpKind.SCALE, (x.buffer,), (out.buffer,), floats=(1.0, 0.0))
        return out

    def token(self, table: WeightRef, scale: float) -> Value:
        """The row of a table that belongs to the row's token, times `scale`."""
        if len(table.shape) != 2 or table.shape[0] != self.config.vocab:
            raise ConfigError(f"table {table.name} of shape {table.shape} has no row for each of {self.config.vocab} tokens")
        self._matrix(table, table.shape[1])
        out = self._f32(table.shape[1])
        self._emit(OpKind.EMBED, (), (out.buffer,), (self._slot(table),), floats=(scale,))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """In place: the value given and the value returned are the same buffer."""
        if factor != 1.0:
            self._emit(OpKind.SCALE, (x.buffer,), (x.buffer,), floats=(factor, 0.0))
        return x

    def rms_norm(self, x: Value, w: WeightRef, eps: float) -> Value:
        if len(w.shape) != 1 or x.width % w.shape[0]:
            raise ConfigError(f"norm weight {w.name} of shape {w.shape} does not divide an input of width {x.width}")
        out = self._f32(x.width)
        self._emit(OpKind.RMS_NORM, (x.buffer,), (out.buffer, NONE), (self._slot(w),), (x.width // w.shape[0],), (eps,))
        return out

    @overload
    def linear(self, x: Value, w: WeightRef, /) -> Value: ...
    @overload
    def linear(self, x: Value, w1: WeightRef, w2: WeightRef, /) -> tuple[Value, Value]: ...
    @overload
    def linear(self, x: Value, w1: WeightRef, w2: WeightRef, w3: WeightRef, /) -> tuple[Value, Value, Value]: ...
    def linear(self, x: Value, /, *weights: WeightRef) -> Any:
        outputs = tuple(self._linear(x, w, self._f32(w.shape[0])) for w in weights)
        return outputs if len(outputs) > 1 else outputs[0]

    def logits(self, x: Value, w: WeightRef) -> None:
        if w.shape[0] != self.config.vocab:
            raise ConfigError(f"head {w.name} has {w.shape[0]} rows; the vocabulary has {self.config.vocab}")
        self._linear(x, w, Value(self, LOGITS, self.config.vocab))
        if self.config.logit_scale != 1.0 or self.config.logit_softcap:
            self._emit(OpKind.SCALE, (LOGITS,), (LOGITS,), floats=(self.config.logit_scale, self.config.logit_softcap))

    def head_linear(self, x: Value, w: WeightRef) -> Value:
        heads, rows, cols = w.shape if len(w.shape) == 3 else (0, 0, 0)
        if not heads or x.width != heads * cols:
            raise ConfigError(f"weight {w.name} of shape {w.shape} cannot take an input of width {x.width} head by head")
        self._groups(w, cols)
        out = self._f32(heads * rows)
        self._product(OpKind.HEAD_LINEAR, x, w, out, (heads,))
        return out

    def concat(self, a: Value, b: Value, heads: int) -> Value:
        out = self._f32(a.width + b.width)
        self._emit(OpKind.CONCAT, (a.buffer, b.buffer), (out.buffer,), ints=(heads,))
        return out

    def rope(self, x: Value, rope: RopeConfig | None, head_dim: int = 0) -> Value:
        """In place: the value given and the value returned are the same buffer. Without a rope nothing is done."""
        if rope is None:
            return x
        dim = head_dim or self._layer_config.attention.head_dim
        self._divides(x, dim, "rope")
        ints = (self._shared.rope(rope), x.width // dim, dim, int(rope.interleaved))
        self._emit(OpKind.ROPE, (x.buffer,), (x.buffer,), ints=ints)
        return x

    def attention(self, q: Value, k: Value | None, v: Value | None, attention: AttentionConfig, sinks: WeightRef | None = None) -> Value:
        """Over the layer's own keys and values, or without any over those of the layer that `kv_layer` names.

        `sinks`: a score for each head that takes part in the softmax and has no value.
        """
        a = attention
        if sinks is not None and sinks.shape != (a.heads,):
            raise ConfigError(f"sinks {sinks.name} have shape {sinks.shape}; layer {self.layer} has {a.heads} heads")
        parts = ((q, a.heads, a.head_dim, "queries"), (k, a.kv_heads, a.head_dim, "keys"), (v, a.kv_heads, a.v_dim, "values"))
        for value, heads, dim, name in parts:
            if value is not None and value.width != heads * dim:
                raise ConfigError(f"{name} of layer {self.layer} are {value.width} wide; {heads} heads of {dim} need {heads * dim}")
        source = self._layer_config.kv_layer
        if k is not None and v is not None and source is None:
            kind, index = self._shared.kv(self.layer, self._layer_config.kind, a)
            self._emit(OpKind.KV_WRITE, (k.buffer, v.buffer), (), ints=(kind, index, a.kv_heads, a.head_dim, a.v_dim))
        elif k is None and v is None and source is not None:
            kind, index = self._shared.kv_of(source)
        else:
            raise ConfigError(f"layer {self.layer} has keys and values of its own, or reads those of another layer, not both")
        out = self._f32(a.heads * a.v_dim)
        ints = (kind, index, a.heads, a.kv_heads, a.head_dim, a.window, a.v_dim)
        weights = (NONE if sinks is None else self._slot(sinks),)
        self._emit(OpKind.ATTEND, (q.buffer,), (out.buffer,), weights, ints, (a.scale, a.softcap))
        return out

    def gated_conv(self, x: Value, w: WeightRef) -> Value:
        if x.width != 3 * w.shape[0]:
            raise ConfigError(f"convolution {w.name} of {w.shape[0]} channels takes three values of each, not a width of {x.width}")
        return self._conv(x, w, GATED)

    def conv(self, x: Value, w: WeightRef) -> Value:
        if x.width != w.shape[0]:
            raise ConfigError(f"convolution {w.name} of {w.shape[0]} channels cannot take an input of width {x.width}")
        return self._conv(x, w, SILU_OF_SUM)

    def split(self, x: Value, heads: int, *widths: int) -> tuple[Value, ...]:
        self._divides(x, sum(widths), "a split")
        parts = tuple(self._f32(heads * width) for width in widths)
        self._emit(OpKind.SPLIT, (x.buffer,), tuple(part.buffer for part in parts), ints=(heads, *widths))
        return parts

    def unit_norm(self, x: Value, dim: int, eps: float, scale: float = 1.0) -> Value:
        """In place: the value given and the value returned are the same buffer."""
        self._divides(x, dim, "unit norm")
        self._emit(OpKind.UNIT_NORM, (x.buffer,), (x.buffer,), ints=(x.width // dim, dim), floats=(eps, scale))
        return x

    def delta_gates(self, a: Value, b: Value, rate: WeightRef, dt: WeightRef) -> tuple[Value, Value]:
        """In place: (share of the state that is kept, step towards the value) per head, or shares per head and key dimension."""
        for w, width in ((rate, b.width), (dt, a.width)):
            if w.shape != (width,) or a.width % b.width:
                raise ConfigError(f"weight {w.name} of shape {w.shape} does not fit gates of widths {a.width} and {b.width}")
        self._emit(OpKind.DELTA_GATES, (a.buffer, b.buffer), (a.buffer, b.buffer), (self._slot(rate), self._slot(dt)))
        return a, b

    def delta_rule(self, q: Value, k: Value, v: Value, decay: Value, beta: Value, delta: DeltaConfig) -> Value:
        d = delta
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        for x, width in ((q, keys), (k, keys), (v, values), (decay, d.decays), (beta, d.value_heads)):
            if x.width != width:
                raise ConfigError(f"an input of the delta rule of layer {self.layer} is {x.width} wide; expected {width}")
        kind, index = self._shared.state(self.layer, "delta", d.value_heads * d.key_dim * d.value_dim)
        out = self._f32(values)
        ints = (kind, index, d.key_heads, d.value_heads, d.key_dim, d.value_dim, int(d.tiled))
        self._emit(OpKind.DELTA, (q.buffer, k.buffer, v.buffer, decay.buffer, beta.buffer), (out.buffer,), ints=ints)
        return out

    def swiglu(self, gate: Value, up: Value) -> Value:
        return self._glu(gate, up, SILU)

    def geglu(self, gate: Value, up: Value) -> Value:
        return self._glu(gate, up, GELU_TANH)

    def sigmoid_gate(self, gate: Value, x: Value) -> Value:
        return self._glu(gate, x, SIGMOID)

    def clamped_swiglu(self, gate: Value, up: Value, alpha: float, limit: float) -> Value:
        return self._glu(gate, up, CLAMPED_SILU, (alpha, limit))

    def route(self, x: Value, router: WeightRef, experts: ExpertsConfig, bias: WeightRef | None = None) -> Value:
        """Chosen experts and their weights. The router's input stays f32 (NUMERICS 18), so its weight must be float too."""
        self._matrix(router, x.width)
        if router.integer:
            raise UnsupportedError(f"router {router.name} is quantised; routers need F32, F16 or BF16")
        if router.shape[0] != experts.count:
            raise ConfigError(f"router {router.name} has {router.shape[0]} rows; the model has {experts.count} experts")
        if bias is not None and bias.shape != (experts.count,):
            raise ConfigError(f"{bias.name} has shape {bias.shape}; the model has {experts.count} experts")
        self._slots = experts.used
        logits, routing = self._f32(experts.count), self._f32(2 * experts.used)
        self._emit(OpKind.LINEAR, (NONE, x.buffer), (logits.buffer,), (self._slot(router), self._bias(router)), (1, 0))
        e = experts
        ints = (e.count, e.used, SCORING[e.scoring], int(e.normalise), e.groups, e.groups_used, e.group_top)
        weights = (NONE if bias is None else self._slot(bias),)
        self._emit(OpKind.ROUTE, (logits.buffer,), (routing.buffer,), weights, ints, (e.scale,))
        return routing

    @overload
    def expert_linear(self, x: Value, routing: Value, w: WeightRef, /) -> Value: ...
    @overload
    def expert_linear(self, x: Value, routing: Value, w1: WeightRef, w2: WeightRef, /) -> tuple[Value, Value]: ...
    def expert_linear(self, x: Value, routing: Value, /, *weights: WeightRef) -> Any:
        """Each slot times its expert's matrix; `x` by rows is brought to the slots first."""
        for w in weights:
            self._matrix(w, x.width, dimensions=3)
        inputs = [NONE, NONE]
        if self._activations == "int8" and any(w.integer for w in weights):
            inputs[0] = self._by_slots(self._quantised(x), routing)
        if self._activations == "float32" or not all(w.integer for w in weights):
            inputs[1] = self._by_slots(x.buffer, routing)
        outputs = tuple(Value(self, self._new(w.shape[1], SLOT_F32), w.shape[1]) for w in weights)
        slots = (*(self._slot(w) for w in weights), *(self._bias(w) for w in weights))
        ints = (len(weights), weights[0].shape[0])
        self._emit(OpKind.EXPERT_LINEAR, (*inputs, routing.buffer), tuple(v.buffer for v in outputs), slots, ints)
        return outputs if len(outputs) > 1 else outputs[0]

    def combine(self, x: Value, routing: Value) -> Value:
        """Per row, its experts' results times their weights."""
        out = self._f32(x.width)
        self._emit(OpKind.COMBINE, (x.buffer, routing.buffer), (out.buffer,), ints=(0,))
        return out

    def gate(self, x: Value, h: Value, w: WeightRef) -> Value:
        """x times sigmoid(h . w), in place."""
        if w.shape != (h.width,):
            raise ConfigError(f"gate {w.name} of shape {w.shape} cannot take an input of width {h.width}")
        self._emit(OpKind.GATE, (x.buffer, h.buffer), (x.buffer,), (self._slot(w),))
        return x

    def add(self, target: Value, x: Value) -> None:
        """In place: the target and the value that `target += x` leaves are the same buffer."""
        if x.width != target.width:
            what = "the residual" if target.buffer == RESIDUAL else "a value"
            raise ConfigError(f"a value of width {x.width} cannot be added to {what} of width {target.width}")
        scale = self.config.residual_scale if target.buffer == RESIDUAL else 1.0
        self._emit(OpKind.ADD, (x.buffer,), (target.buffer,), floats=(scale,))

    def finish(self, kind: StageKind, fuse: bool) -> StageSpec:
        return self._stage(kind, self._ops, fuse)

    def finish_last_mixer(self, fuse: bool) -> tuple[StageSpec, ...]:
        """The mixer of the last layer in two stages: what leaves state behind, for every row, and the rest, for rows with logits only.

        What both need (the norm before q, k and v) is computed in both. A recurrent mixer stays whole: its result needs the rows before.
        """
        if any(op.kind in RECURRENT for op in self._ops):
            return (self._stage("mixer", self._ops, fuse),)
        state, rest = split_at_state(self._ops)
        return self._stage("mixer", state, fuse), self._stage("attend", rest, fuse)

    def _stage(self, kind: StageKind, ops: list[Op], fuse: bool) -> StageSpec:
        used = sorted({s for op in ops for s in op.weights if s != NONE})
        slot = {NONE: NONE} | {s: i for i, s in enumerate(used)}
        mapped = tuple(replace(op, weights=tuple(slot[s] for s in op.weights)) for op in ops)
        program = ProgramSpec(tuple(self._buffers), mapped, self._slots)
        program = share_buffers(fuse_program(program) if fuse else program)
        linear = [self._weights[s] for op in ops if op.kind in LINEAR_KINDS for s in op.weights[: op.ints[0]]]
        experts = [self._weights[s] for op in ops if op.kind == OpKind.EXPERT_LINEAR for s in op.weights[: op.ints[0]]]
        macs = sum(prod(w.shape) for w in linear) + self._slots * sum(prod(w.shape[1:]) for w in experts)
        return StageSpec(kind, self.layer, program, tuple(self._weights[s].name for s in used), macs)

    @property
    def _layer_config(self) -> LayerConfig:
        return self.config.layers[self.layer]

    def _linear(self, x: Value, w: WeightRef, out: Value) -> Value:
        self._matrix(w, x.width)
        self._product(OpKind.LINEAR, x, w, out)
        return out

    def _product(self, kind: OpKind, x: Value, w: WeightRef, out: Value, ints: tuple[int, ...] = ()) -> None:
        parts = ints[0] if kind == OpKind.HEAD_LINEAR else 1
        inputs = (self._quantised(x, parts), NONE) if w.integer and self._activations == "int8" else (NONE, x.buffer)
        self._emit(kind, inputs, (out.buffer,), (self._slot(w), self._bias(w)), (1, 0, *ints))

    def _conv(self, x: Value, w: WeightRef, form: int) -> Value:
        channels, taps = w.shape
        if not 2 <= taps <= MAX_TAPS:
            raise UnsupportedError(f"convolution {w.name} has {taps} taps; 2 to {MAX_TAPS} are supported")
        kind, index = self._shared.state(self.layer, "conv", channels * (taps - 1))
        out = self._f32(channels)
        bias = NONE if w.bias is None else self._slot(w.bias)
        self._emit(OpKind.CONV, (x.buffer,), (out.buffer, NONE), (self._slot(w), bias), (kind, index, channels, taps, form))
        return out

    def _glu(self, gate: Value, up: Value, activation: int, floats: tuple[float, ...] = ()) -> Value:
        if gate.width != up.width:
            raise ConfigError(f"gate of width {gate.width} and up of width {up.width} differ in layer {self.layer}")
        out = Value(self, self._new(gate.width, self._kind(gate.buffer)), gate.width)
        self._emit(OpKind.GLU, (gate.buffer, up.buffer), (out.buffer, NONE), ints=(activation,), floats=floats)
        return out

    def _quantised(self, x: Value, parts: int = 1) -> int:
        source = self._new(x.width, SLOT_INT8 if self._kind(x.buffer) == SLOT_F32 else INT8)
        self._emit(OpKind.QUANTIZE, (x.buffer,), (source,), ints=(parts,))
        return source

    def _by_slots(self, buffer: int, routing: Value) -> int:
        """The buffer itself, or a copy by slots of one by rows."""
        kind = self._kind(buffer)
        if kind in (SLOT_F32, SLOT_INT8):
            return buffer
        out = self._new(self._buffers[buffer - SCRATCH][0], SLOT_F32 if kind == F32 else SLOT_INT8)
        self._emit(OpKind.GATHER, (buffer, routing.buffer), (out,))
        return out

    def _kind(self, buffer: int) -> int:
        return self._buffers[buffer - SCRATCH][1] if buffer >= SCRATCH else F32

    def _bias(self, w: WeightRef) -> int:
        return NONE if w.bias is None else self._slot(w.bias)

    def _matrix(self, w: WeightRef, width: int, dimensions: int = 2) -> None:
        if len(w.shape) != dimensions or w.shape[-1] != width:
            raise ConfigError(f"weight {w.name} of shape {w.shape} cannot take an input of width {width}")
        self._groups(w, width)

    def _groups(self, w: WeightRef, width: int) -> None:
        if w.integer and width % 32:
            raise UnsupportedError(
                f"weight {w.name} is quantised and {width} wide; widths that are no multiple of 32 need F32, F16 or BF16"
            )

    def _divides(self, x: Value, dim: int, what: str) -> None:
        if x.width % dim:
            raise ConfigError(f"{what} of layer {self.layer}: a value of width {x.width} is not made of heads of {dim}")

    def _slot(self, w: WeightRef) -> int:
        if w not in self._weights:
            self._weights.append(w)
        return self._weights.index(w)

    def _new(self, width: int, kind: int) -> int:
        self._buffers.append((width, kind))
        return SCRATCH + len(self._buffers) - 1

    def _f32(self, width: int) -> Value:
        return Value(self, self._new(width, F32), width)

    def _emit(
        self,
        kind: OpKind,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        weights: tuple[int, ...] = (),
        ints: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
    ) -> None:
        self._ops.append(Op(kind, inputs, outputs, weights, ints, floats))


class HiddenBuilder(StageBuilder):
    """Of a head that gives what its matrix would get."""

    def logits(self, x: Value, w: WeightRef) -> None:
        if x.width != self.config.dim:
            raise ConfigError(f"the head of this model takes {x.width} values, not the {self.config.dim} of its residual")
        self._emit(OpKind.SCALE, (x.buffer,), (LOGITS,), floats=(1.0, 0.0))


def build_graph(
    config: ModelConfig,
    family: Family,
    tensors: Tensors,
    activations: Activations = "int8",
    fuse: bool = True,
    kv_dtype: KVDtype = "int16",
    hidden: bool = False,
) -> Graph:
    """Stages of a model in grid order: embed, (mixer, ffn) per layer, head. A last mixer of attention is followed by its attend stage.

    `tensors`: name -> (shape, ggml type). `hidden`: the head ends with its norm, and gives that instead of logits.

    Raises ConfigError for a missing, unexpected or misshapen tensor, UnsupportedError for a feature we lack; both name it.
    `fuse=False` keeps one op per step; values are the same either way.
    """
    family.check(config, tensors)
    shared = Shared([], [], 4 if kv_dtype == "float32" else 2)
    top = Weights(tensors)
    stages: list[StageSpec] = []

    g = StageBuilder(config, shared, NONE, activations)
    family.embed(g, config, top)
    stages.append(g.finish("embed", fuse))
    # Layers that only read the state of others are needed for rows with logits alone, and so is what follows in the last other one.
    last = max((i for i, layer in enumerate(config.layers) if layer.kv_layer is None), default=0)
    for i, layer in enumerate(config.layers):
        w = Weights(tensors, f"blk.{i}.")
        g = StageBuilder(config, shared, i, activations)
        family.mixer(g, config, layer, w)
        if i == last:
            stages.extend(g.finish_last_mixer(fuse))
        else:
            stages.append(g.finish("mixer" if i < last else "attend", fuse))
        g = StageBuilder(config, shared, i, activations)
        family.ffn(g, config, layer, w)
        stages.append(g.finish("ffn", fuse))
    g = HiddenBuilder(config, shared, NONE, activations) if hidden else StageBuilder(config, shared, NONE, activations)
    family.head(g, config, top)
    stages.append(g.finish("head", fuse))
    return Graph(config, tuple(stages), tuple(shared.ropes), tuple(shared.kinds), tuple(shared.states), hidden)
