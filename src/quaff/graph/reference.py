"""A NumPy interpreter of a Graph in the contract's order: slow, readable, and the specification of every bit of the native executor.

Rows are computed together only where the contract makes them independent; loops run along reductions, in the order that counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.batch import PAGE
from quaff.errors import PromptError
from quaff.graph.arithmetic import (
    F32,
    LOG2E,
    ONE,
    OUTLIER_BLOCK,
    P_CODE,
    ZERO,
    Coded,
    Quantised,
    clamp_f16,
    dot16,
    encode,
    exp,
    fma,
    gelu_tanh,
    max16,
    maximum,
    minimum,
    power,
    quantise,
    rms_norm,
    rope,
    route,
    sigmoid,
    silu,
    softplus,
    sum16,
    tanh,
    unit_norm,
)
from quaff.graph.lowering import ReferenceWeight, lower
from quaff.graph.program import GATED, LOGITS, NONE, SCRATCH, SLOT_INT8, Graph, KVKind, Op, OpKind, StageSpec
from quaff.graph.rope_table import rope_rows

FLOAT_BLOCK = 128
DOT_DIMS = 128

__all__ = ["Reference", "ReferenceState", "ReferenceWeight", "attend", "linear_float", "linear_int", "lower"]


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """Keys and values of `length` positions: per KV kind and layer in kind, [length, kv_heads, dim] and [..., value_dim], codes or f32.
    `states`: recurrent state per kind and layer in kind, f32 [size]."""

    length: int
    keys: tuple[tuple[Coded, ...], ...]
    values: tuple[tuple[Coded, ...], ...]
    states: tuple[tuple[F32, ...], ...] = ()

    def pages(self, kind: int) -> NDArray[np.uint16]:
        """All pages of one kind, [pages, layers, kv_heads, words] bits as in the native PagePool: keys [dim/2][64][2], values
        [32][value_dim][2], bf16 scales of keys [64] and of values [64]; or f32 keys [dim][64], values [64][value_dim]. Positions not
        written yet are zero."""

        def pages(x: NDArray[Any]) -> NDArray[Any]:  # [layers, length, heads, ...] -> [count, layers, heads, 64, ...]
            pad = [(0, 0), (0, -x.shape[1] % PAGE), *[(0, 0)] * (x.ndim - 2)]
            x = np.pad(x, pad)
            x = x.reshape(x.shape[0], -1, PAGE, *x.shape[2:])
            return np.moveaxis(x, (0, 1, 2, 3), (1, 0, 3, 2))

        keys, values = (pages(np.stack([layer.values for layer in kinds[kind]])) for kinds in (self.keys, self.values))
        lead, scales = keys.shape[:3], [layer.scale for kinds in (self.keys, self.values) for layer in kinds[kind]]
        if scales[0] is None:
            parts = [np.moveaxis(keys, 3, 4), values]
        else:
            k = np.moveaxis(keys.reshape(*lead, PAGE, -1, 2), 3, 4)
            v = np.moveaxis(values.reshape(*lead, PAGE // 2, 2, -1), 4, 5)
            half = len(scales) // 2
            parts = [
                k,
                v,
                *(
                    pages(np.stack([(s.view(np.uint32) >> 16).astype(np.uint16) for s in part if s is not None]))
                    for part in (scales[:half], scales[half:])
                ),
            ]
        return np.concatenate([np.ascontiguousarray(x).reshape(*lead, -1).view(np.uint16) for x in parts], axis=3)


def linear_int(x: Quantised, w: ReferenceWeight) -> F32:
    """Rule 13 without bias: rows [n, k] times weight [m, k], as f32 [n, m]."""
    assert w.codes is not None and w.scale is not None
    q, groups = x.codes, w.scale.shape[1]
    group = w.codes.shape[1] // groups
    acc = np.zeros((q.shape[0], w.codes.shape[0]), dtype=np.float32)
    for g in range(groups):
        span = slice(g * group, (g + 1) * group)
        # Integers below 2^53: exact in any order of summation.
        dot = (q[:, span].astype(np.float64) @ w.codes[:, span].T.astype(np.float64)).astype(np.float32)
        a = x.scale[:, g * group // 32, None]
        half, exponent = np.frexp(a)
        scaled, mantissa = np.ldexp(dot, exponent - 1).astype(np.float32), (half * 2).astype(np.float32)
        acc = fma(scaled, w.scale[None, :, g] * mantissa, acc)
        if w.min is not None:
            total = q[:, span].sum(axis=1, dtype=np.int64).astype(np.float32)[:, None]
            acc = fma(w.min[None, :, g], a * total, acc)
        end = (g + 1) * group
        if end % OUTLIER_BLOCK == 0 or g == groups - 1:
            block = (end - 1) // OUTLIER_BLOCK
            column, value = x.column[:, block], x.outlier[:, block, None]
            code, scale = w.codes.T[column].astype(np.float32), w.scale.T[column // group]
            dequantised = scale * code if w.min is None else fma(scale, code, w.min.T[column // group])
            acc = fma(dequantised, value, acc)
    return acc


def linear_float(x: F32, w: F32) -> F32:
    """Rule 14 without bias: x [n, k] times w [m, k], as f32 [n, m]."""
    total = np.zeros((x.shape[0], w.shape[0]), dtype=np.float32)
    for begin in range(0, x.shape[1], FLOAT_BLOCK):
        acc = np.zeros_like(total)
        for k in range(begin, min(begin + FLOAT_BLOCK, x.shape[1])):
            acc = fma(w[None, :, k], x[:, k, None], acc)
        total = total + acc
    return total


def attend(
    q: F32, positions: NDArray[np.int64], keys: Coded, values: Coded, window: int, scale: float, softcap: float, sinks: F32 | None = None
) -> F32:
    """Rule 16: q [n, heads, dim] at absolute positions over keys [length, kv_heads, dim] and values [length, kv_heads, value_dim], as f32
    [n, heads, value_dim]. `sinks`: a score for each head."""
    n, heads, _ = q.shape
    length, kv_heads, value_dim = values.values.shape
    share = np.arange(heads) // (heads // kv_heads)
    q = q * (np.float32(scale) if softcap > 0 else np.float32(scale) * LOG2E)
    rows = Coded(q) if keys.scale is None else encode(q)
    m = np.zeros((n, heads), dtype=np.float32)
    l, o = np.zeros_like(m), np.zeros((n, heads, value_dim), dtype=np.float32)  # noqa: E741  the contract's names
    started = np.zeros(n, dtype=bool)
    for begin in range(0, length, PAGE):
        k, v = (_page_of(x, begin, share) for x in (keys, values))
        j = begin + np.arange(PAGE)
        visible = j[None, :] <= positions[:, None]
        if window:
            visible &= j[None, :] > positions[:, None] - window
        seeing = np.flatnonzero(visible.any(axis=1))
        if not len(seeing):
            continue
        mine = Coded(rows.values[seeing], None if rows.scale is None else rows.scale[seeing])
        m_p, l_p, o_p, worth = _page(mine, k, v, visible[seeing, None, :], np.float32(softcap))
        first, later = ~started[seeing], started[seeing]
        new = seeing[first]
        m[new], l[new], o[new] = m_p[first], l_p[first], o_p[first] * worth[first][..., None]
        old = seeing[later]
        m_p, l_p, o_p = m_p[later], l_p[later], o_p[later]
        top = maximum(m[old], m_p)
        a, b = power(m[old] - top), power(m_p - top)
        l[old] = fma(l[old], a, l_p * b)
        o[old] = fma(o[old], a[..., None], o_p * (b * worth[later])[..., None])
        m[old] = top
        started[seeing] = True
    if sinks is not None:
        sinks = sinks * LOG2E
        top = maximum(m, sinks[None])
        a = power(m - top)
        l = fma(l, a, power(sinks[None] - top))  # noqa: E741
        o = o * a[..., None]
    return o * (ONE / l)[..., None]


def _page_of(x: Coded, begin: int, share: NDArray[np.int64]) -> Coded:
    """64 positions of the KV head of every query head; those not written yet are zero."""
    pad = PAGE - min(PAGE, len(x.values) - begin)
    values, scale = (None if a is None else a[begin : begin + PAGE, share] for a in (x.values, x.scale))
    assert values is not None
    return Coded(np.pad(values, ((0, pad), (0, 0), (0, 0))), None if scale is None else np.pad(scale, ((0, pad), (0, 0))))


def _page(q: Coded, k: Coded, v: Coded, visible: NDArray[np.bool_], cap: np.float32) -> tuple[F32, F32, F32, F32]:
    """One page alone: (m, l, o) of q [n, heads, dim] over k [64, heads, dim] and v [64, heads, value_dim], and what o is in units of;
    visible [n, 1, 64]."""
    heads = q.values.shape[:2]
    s = np.zeros((*heads, PAGE), dtype=np.float32)
    if q.scale is not None and k.scale is not None:
        for begin in range(0, q.values.shape[2], DOT_DIMS):
            part = slice(begin, begin + DOT_DIMS)
            s = s + _dots("nhd,jhd->nhj", q.values[..., part], k.values[..., part])
        s = s * k.scale.T[None] * q.scale[..., None]
    else:
        for d in range(q.values.shape[2]):
            s = fma(q.values[:, :, d, None], k.values[:, :, d].T[None], s)
    if cap > 0:
        s = (cap * LOG2E) * tanh(s * (ONE / cap))
    m = max16(np.where(visible, s, np.float32(-np.inf)))
    p = np.where(visible, power(s - m[..., None]), ZERO)
    l, worth = sum16(p), np.ones(heads, dtype=np.float32)  # noqa: E741  the contract's name
    if v.scale is not None:
        p = p * v.scale.T[None]
        largest = p.max(axis=-1)
        tiny = largest < np.float32(2.0**-64)
        safe = np.where(tiny, ONE, largest)
        codes = np.rint(p * np.where(tiny, ZERO, P_CODE / safe)[..., None])
        return m, l, _dots("nhj,jhd->nhd", codes, v.values), np.where(tiny, ZERO, safe / P_CODE)
    o = np.zeros((*heads, v.values.shape[2]), dtype=np.float32)
    for j in range(PAGE):
        o = fma(p[:, :, j, None], v.values[None, j], o)
    # A chain may end in -0 or +0 depending on whether hidden positions took part; adding +0 makes both +0.
    return m, l, o + ZERO, worth


def _dots(what: str, a: NDArray[Any], b: NDArray[Any]) -> F32:
    """Sums of products of codes: integers below 2^31, exact in f64 in any order, rounded once."""
    sums: F32 = np.einsum(what, a.astype(np.float64), b.astype(np.float64), optimize=True).astype(np.float32)
    return sums


def convolve(x: F32, w: F32, bias: F32 | None) -> F32:
    """Rule 17: rows x [taps - 1 + n, channels], the first taps - 1 from before, times w [channels, taps] as f32 [n, channels]."""
    n = len(x) - w.shape[1] + 1
    acc = np.zeros((n, w.shape[0]), dtype=np.float32)
    for t in range(w.shape[1]):
        acc = fma(x[t : t + n], w[None, :, t], acc)
    return acc if bias is None else acc + bias


def delta_rule(q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> tuple[F32, F32]:
    """Rule 17, row by row: q, k [n, heads, dk], v [n, heads, dv], decay [n, heads, dk or 1], beta [n, heads], state
    [heads, dk, dv].

    Results [n, heads, dv] and the state after them.
    """
    out = np.zeros_like(v)
    for row in range(len(v)):
        state = state * decay[row, :, :, None]
        u, o = np.zeros_like(v[row]), np.zeros_like(v[row])
        for i in range(k.shape[2]):
            u = fma(state[:, i], k[row, :, i, None], u)
        step = beta[row, :, None] * (v[row] - u)
        state = fma(k[row, :, :, None], step[:, None, :], state)
        for i in range(k.shape[2]):
            o = fma(state[:, i], q[row, :, i, None], o)
        out[row] = o
    return out, state


class Reference:
    """Runs a Graph on weights given by tensor name; see ReferenceWeight and `lower`.

    >>> import quaff.graph.reference as reference
    >>> reference.linear_float(np.ones((1, 3), np.float32), np.ones((2, 3), np.float32)).tolist()
    [[3.0, 3.0]]
    """

    def __init__(self, graph: Graph, weights: Mapping[str, ReferenceWeight]) -> None:
        self.graph = graph
        self._weights = {name: weights[name] for name in graph.weight_names}

    def run(self, tokens: Sequence[int], state: ReferenceState | None = None) -> tuple[F32, ReferenceState]:
        """Logits [n, vocab] of every token and the KV state after them. `state` continues an earlier run."""
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self.graph.config.vocab:
            raise PromptError(f"token ids must lie in 0..{self.graph.config.vocab - 1} and there must be at least one")
        run = _Run(self.graph, self._weights, ids, state)
        for stage in self.graph.stages:
            run.stage(stage)
        return run.logits, run.state()


class _Run:
    """The buffers and KV arrays of one call."""

    def __init__(self, graph: Graph, weights: Mapping[str, ReferenceWeight], ids: NDArray[np.int64], state: ReferenceState | None) -> None:
        self._graph, self._weights, self._ids = graph, weights, ids
        self._program = graph.stages[0].program
        start = state.length if state else 0
        self._positions = start + np.arange(len(ids))
        self._f32: dict[int, F32] = {}
        self._codes: dict[int, Quantised] = {}
        self._keys = _grown([(k, k.dim) for k in graph.kv_kinds], state.keys if state else None, len(ids))
        self._values = _grown([(k, k.value_dim) for k in graph.kv_kinds], state.values if state else None, len(ids))
        kinds = graph.state_kinds
        self._states = [list(s) for s in state.states] if state else [[np.zeros(k.size, np.float32)] * len(k.layers) for k in kinds]
        self._ropes = [rope_rows(r, self._positions) for r in graph.ropes]

    @property
    def logits(self) -> F32:
        return self._f32[LOGITS]

    def state(self) -> ReferenceState:
        keys, values = (tuple(tuple(kind) for kind in arrays) for arrays in (self._keys, self._values))
        return ReferenceState(int(self._positions[-1]) + 1, keys, values, tuple(tuple(kind) for kind in self._states))

    def stage(self, stage: StageSpec) -> None:
        steps = {
            OpKind.EMBED: self._embed,
            OpKind.RMS_NORM: self._rms_norm,
            OpKind.QUANTIZE: self._quantise,
            OpKind.LINEAR: self._linear,
            OpKind.ROPE: self._rope,
            OpKind.KV_WRITE: self._kv_write,
            OpKind.ATTEND: self._attend,
            OpKind.GLU: self._glu,
            OpKind.ADD: self._add,
            OpKind.CONV: self._conv,
            OpKind.SPLIT: self._split,
            OpKind.UNIT_NORM: self._unit_norm,
            OpKind.DELTA_GATES: self._delta_gates,
            OpKind.DELTA: self._delta,
            OpKind.SCALE: self._scale,
            OpKind.CONCAT: self._concat,
            OpKind.HEAD_LINEAR: self._head_linear,
            OpKind.ROUTE: self._route,
            OpKind.GATHER: self._gather,
            OpKind.EXPERT_LINEAR: self._expert_linear,
            OpKind.COMBINE: self._combine,
            OpKind.GATE: self._gate,
        }
        self._program = stage.program
        for op in stage.program.ops:
            steps[op.kind](op, [None if s == NONE else self._weights[stage.weights[s]] for s in op.weights])

    def _embed(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (table,) = weights
        assert table is not None
        self._f32[op.outputs[0]] = table.dequantised()[self._ids] * np.float32(op.floats[0])

    def _rms_norm(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (w,) = weights
        assert w is not None and w.values is not None
        x = self._f32[op.inputs[0]]
        y = rms_norm(x.reshape(len(x), op.ints[0], -1), w.values, op.floats[0]).reshape(x.shape)
        self._store_both(op, y)

    def _quantise(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        # Parts are rows of their own here: part j of row i is row i * parts + j.
        x = self._f32[op.inputs[0]]
        self._codes[op.outputs[0]] = quantise(x.reshape(len(x) * op.ints[0], -1))

    def _linear(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (codes, values), (n, accumulate) = op.inputs, op.ints
        results = []
        for w, bias in zip(weights[:n], weights[n:], strict=True):
            assert w is not None
            y = linear_int(self._codes[codes], w) if w.is_integer and codes != NONE else linear_float(self._f32[values], w.dequantised())
            if bias is not None:
                assert bias.values is not None
                y = y + bias.values
            results.append(y)
        for out, y in zip(op.outputs, results, strict=True):
            self._f32[out] = self._f32[out] + y if accumulate else y

    def _head_linear(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (codes, values), (w, bias), heads = op.inputs, weights, op.ints[2]
        assert w is not None
        rows, parts = w.rows // heads, []
        for h in range(heads):
            matrix = w.part(h * rows, rows)
            if w.is_integer and codes != NONE:
                parts.append(linear_int(self._codes[codes].rows(slice(h, None, heads)), matrix))
            else:
                parts.append(linear_float(np.split(self._f32[values], heads, axis=1)[h], matrix.dequantised()))
        y = np.concatenate(parts, axis=1)
        if bias is not None:
            assert bias.values is not None
            y = y + bias.values
        self._f32[op.outputs[0]] = y

    def _concat(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        parts = [self._f32[b].reshape(len(self._ids), op.ints[0], -1) for b in op.inputs]
        self._f32[op.outputs[0]] = np.concatenate(parts, axis=2).reshape(len(self._ids), -1)

    def _rope(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        index, heads, dim, interleaved = op.ints
        cos, sin = np.split(self._ropes[index], 2, axis=1)
        x = self._f32[op.inputs[0]]
        self._f32[op.outputs[0]] = rope(x.reshape(len(x), heads, dim), cos, sin, bool(interleaved)).reshape(x.shape)

    def _kv_write(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        kind, layer, heads, *dims = op.ints
        for arrays, buffer, dim in zip((self._keys, self._values), op.inputs, dims, strict=True):
            values, room = clamp_f16(self._f32[buffer].reshape(-1, heads, dim)), arrays[kind][layer]
            new = Coded(values) if room.scale is None else encode(values)
            room.values[self._positions] = new.values
            if room.scale is not None:
                room.scale[self._positions] = new.scale

    def _attend(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        kind, layer, heads, _, dim, window, _ = op.ints
        q = self._f32[op.inputs[0]]
        keys, values = self._keys[kind][layer], self._values[kind][layer]
        sinks, (scale, softcap) = None if weights[0] is None else weights[0].values, op.floats
        y = attend(q.reshape(-1, heads, dim), self._positions, keys, values, window, scale, softcap, sinks)
        self._f32[op.outputs[0]] = y.reshape(len(q), -1)

    def _glu(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        gate, up = (self._f32[b] for b in op.inputs)
        if op.ints[0] == 3:
            alpha, limit = np.float32(op.floats[0]), np.float32(op.floats[1])
            gate, up = minimum(gate, limit), minimum(maximum(up, -limit), limit)
            y = (gate / (ONE + exp(-(alpha * gate)))) * (up + ONE)
        else:
            y = (silu, gelu_tanh, sigmoid)[op.ints[0]](gate) * up
        self._store_both(op, y)

    def _add(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        self._f32[op.outputs[0]] = fma(self._f32[op.inputs[0]], np.float32(op.floats[0]), self._f32[op.outputs[0]])

    def _scale(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        factor, cap = np.float32(op.floats[0]), np.float32(op.floats[1])
        y = self._f32[op.inputs[0]] * factor
        self._f32[op.outputs[0]] = cap * tanh(y * (ONE / cap)) if cap > 0 else y

    def _conv(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        kind, layer, channels, taps, form = op.ints
        w, bias = weights
        assert w is not None
        x = self._f32[op.inputs[0]]
        if form == GATED:
            b, gate, x = np.split(x, 3, axis=1)
            x = b * x
        x = np.concatenate([self._states[kind][layer].reshape(taps - 1, channels), x])
        y = convolve(x, w.dequantised(), None if bias is None else bias.values)
        self._states[kind][layer] = x[len(x) - taps + 1 :].reshape(-1)
        self._store_both(op, gate * y if form == GATED else silu(y))

    def _split(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        heads, *widths = op.ints
        x = self._f32[op.inputs[0]]
        parts = np.split(x.reshape(len(x), heads, -1), np.cumsum(widths)[:-1], axis=2)
        for out, part in zip(op.outputs, parts, strict=True):
            self._f32[out] = np.ascontiguousarray(part).reshape(len(x), -1)

    def _unit_norm(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        x = self._f32[op.inputs[0]]
        self._f32[op.outputs[0]] = unit_norm(x.reshape(len(x), *op.ints), *op.floats).reshape(x.shape)

    def _delta_gates(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        rate, dt = weights
        assert rate is not None and rate.values is not None and dt is not None and dt.values is not None
        a, b = op.inputs
        rates = np.repeat(rate.values, len(dt.values) // len(rate.values))
        self._f32[a] = exp(rates * softplus(self._f32[a] + dt.values))
        self._f32[b] = sigmoid(self._f32[b])

    def _delta(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        kind, layer, key_heads, heads, dk, dv, tiled = op.ints
        of_value = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
        q, k, v, decay, beta = (self._f32[b] for b in op.inputs)
        q, k = (x.reshape(-1, key_heads, dk)[:, of_value] for x in (q, k))
        state = self._states[kind][layer].reshape(heads, dk, dv)
        y, state = delta_rule(q, k, v.reshape(-1, heads, dv), decay.reshape(len(decay), heads, -1), beta, state)
        self._states[kind][layer] = state.reshape(-1)
        self._f32[op.outputs[0]] = y.reshape(v.shape)

    def _route(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (bias,) = weights
        ids, w = route(self._f32[op.inputs[0]], None if bias is None else bias.values, op.ints, op.floats[0])
        self._f32[op.outputs[0]] = np.concatenate([ids.astype(np.float32), w], axis=1)

    def _slots(self, routing: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of every slot its expert, its row, and which of the row's experts it is."""
        table = self._f32[routing]
        ids = table[:, : table.shape[1] // 2].astype(np.int64)
        # Rows lie in order and experts of a row ascend: a stable sort by expert is the order by (expert, row).
        order = np.argsort(ids.reshape(-1), kind="stable")
        row, which = np.divmod(order, ids.shape[1])
        return ids.reshape(-1)[order], row, which

    def _gather(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        source, routing = op.inputs
        _, row, _ = self._slots(routing)
        if self._program.buffers[op.outputs[0] - SCRATCH][1] == SLOT_INT8:
            self._codes[op.outputs[0]] = self._codes[source].rows(row)
        else:
            self._f32[op.outputs[0]] = self._f32[source][row]

    def _expert_linear(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        codes, values, routing = op.inputs
        n, experts = op.ints
        of_slot, _, _ = self._slots(routing)
        for out, w, bias in zip(op.outputs, weights[:n], weights[n:], strict=True):
            assert w is not None
            rows = w.rows // experts
            y = np.zeros((len(of_slot), rows), dtype=np.float32)
            for e in np.unique(of_slot):
                mine, part = of_slot == e, w.part(int(e) * rows, rows)
                if part.is_integer and codes != NONE:
                    y[mine] = linear_int(self._codes[codes].rows(mine), part)
                else:
                    y[mine] = linear_float(self._f32[values][mine], part.dequantised())
            if bias is not None:
                assert bias.values is not None
                y = y + bias.values.reshape(experts, rows)[of_slot]
            self._f32[out] = y

    def _combine(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        source, routing = op.inputs
        table, x = self._f32[routing], self._f32[source]
        _, row, which = self._slots(routing)
        used = table.shape[1] // 2
        slot = np.empty((len(table), used), dtype=np.int64)
        slot[row, which] = np.arange(len(row))
        y = np.zeros((len(table), x.shape[1]), dtype=np.float32)
        for j in range(used):
            y = fma(table[:, used + j, None], x[slot[:, j]], y)
        out = op.outputs[0]
        self._f32[out] = self._f32[out] + y if op.ints[0] else y

    def _gate(self, op: Op, weights: list[ReferenceWeight | None]) -> None:
        (w,) = weights
        assert w is not None and w.values is not None
        x, h = (self._f32[b] for b in op.inputs)
        self._f32[op.outputs[0]] = x * sigmoid(dot16(h, w.values))[:, None]

    def _store_both(self, op: Op, y: F32) -> None:
        values, codes = op.outputs
        if values != NONE:
            self._f32[values] = y
        if codes != NONE:
            self._codes[codes] = quantise(y)


def _grown(kinds: list[tuple[KVKind, int]], old: tuple[tuple[Coded, ...], ...] | None, rows: int) -> list[list[Coded]]:
    """Keys or values, `kinds` with their width, with room for `rows` more positions; the old ones are copied."""

    def grow(kind: int, layer: int, k: KVKind, dim: int) -> Coded:
        codes = k.value_bytes == 2
        room = np.zeros((rows, k.kv_heads, dim), dtype=np.int16 if codes else np.float32)
        scale = np.zeros((rows, k.kv_heads), dtype=np.float32) if codes else None
        if old is None:
            return Coded(room, scale)
        before = old[kind][layer]
        return Coded(np.concatenate([before.values, room]), None if before.scale is None else np.concatenate([before.scale, scale]))

    return [[grow(i, layer, k, dim) for layer in range(len(k.layers))] for i, (k, dim) in enumerate(kinds)]
