"""Fusions of a program. Each merges ops without changing a value: the same arithmetic in the same order, fewer launches and passes.

All take and return a ProgramSpec; weight slots stay as they are. Buffers that no op uses afterwards are dropped by `share_buffers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quaff.graph.program import LOGITS, NONE, RESIDUAL, SCRATCH, Op, OpKind, ProgramSpec

CAN_QUANTISE = (OpKind.RMS_NORM, OpKind.GLU, OpKind.CONV)


def fuse(program: ProgramSpec) -> ProgramSpec:
    """All fusions, in the order in which each makes room for the next."""
    ops = list(program.ops)
    for step in (share_quantize, merge_linear, quantize_in_producer, residual_in_linear):
        ops = step(ops)
    return replace(program, ops=tuple(ops))


def share_quantize(ops: list[Op]) -> list[Op]:
    """Quantise a value once for all its consumers."""
    out: list[Op] = []
    codes: dict[tuple[int, int], int] = {}
    alias: dict[int, int] = {}
    for op in ops:
        if op.kind == OpKind.QUANTIZE and (op.inputs[0], op.ints[0]) in codes:
            alias[op.outputs[0]] = codes[op.inputs[0], op.ints[0]]
            continue
        op = replace(op, inputs=tuple(alias.get(b, b) for b in op.inputs))
        codes = {source: made for source, made in codes.items() if source[0] not in op.outputs}  # rewritten: its codes are stale
        if op.kind == OpKind.QUANTIZE:
            codes[op.inputs[0], op.ints[0]] = op.outputs[0]
        out.append(op)
    return out


def merge_linear(ops: list[Op]) -> list[Op]:
    """One launch over a list of weights for neighbours that read the same rows.

    Mixed files give neighbours different types: an integer weight (int8 input) and a float weight (f32 input) join when the codes were
    made from the same f32 value.
    """
    out: list[Op] = []
    source = {op.outputs[0]: op.inputs[0] for op in ops if op.kind == OpKind.QUANTIZE}
    for op in _quantize_early(ops):
        previous = out[-1] if out else None
        if previous is not None and previous.kind == op.kind == OpKind.LINEAR and _origin(previous, source) == _origin(op, source):
            n, m = previous.ints[0], op.ints[0]
            inputs = tuple(max(a, b) for a, b in zip(previous.inputs, op.inputs, strict=True))
            weights = previous.weights[:n] + op.weights[:m] + previous.weights[n:] + op.weights[m:]
            out[-1] = Op(OpKind.LINEAR, inputs, previous.outputs + op.outputs, weights, (n + m, 0))
        else:
            out.append(op)
    return out


def _quantize_early(ops: list[Op]) -> list[Op]:
    """Move every QUANTIZE up to just after the op that made its input, so that linear ops become neighbours."""
    out: list[Op] = []
    for op in ops:
        at = len(out)
        if op.kind == OpKind.QUANTIZE:
            while at > 0 and op.inputs[0] not in out[at - 1].outputs:
                at -= 1
        out.insert(at, op)
    return out


def _origin(linear: Op, source: dict[int, int]) -> int:
    int8, f32 = linear.inputs
    return f32 if int8 == NONE else source[int8]


def quantize_in_producer(ops: list[Op]) -> list[Op]:
    """RMS_NORM, GLU and CONV write the codes of their result themselves; the f32 result is dropped when nothing else reads it."""
    out: list[Op] = []
    for i, op in enumerate(ops):
        if _is_whole(op) and out and out[-1].kind in CAN_QUANTISE and out[-1].outputs == (op.inputs[0], NONE):
            out[-1] = replace(out[-1], outputs=(NONE if _unread(ops, i, op.inputs[0]) else op.inputs[0], op.outputs[0]))
        else:
            out.append(op)
    return out


def residual_in_linear(ops: list[Op]) -> list[Op]:
    """A linear or combined result whose only use is to be added to the residual is added in the epilogue."""
    out: list[Op] = []
    for i, op in enumerate(ops):
        if (
            op.kind == OpKind.ADD
            and out
            and out[-1].kind in (OpKind.LINEAR, OpKind.COMBINE)
            and out[-1].outputs == op.inputs
            and op.floats == (1.0,)
            and op.outputs == (RESIDUAL,)
            and _unread(ops, i, op.inputs[0])
        ):
            out[-1] = replace(out[-1], outputs=(RESIDUAL,), ints=(*out[-1].ints[:-1], 1))
        else:
            out.append(op)
    return out


def _is_whole(op: Op) -> bool:
    return op.kind == OpKind.QUANTIZE and op.ints == (1,)


def _unread(ops: list[Op], i: int, buffer: int) -> bool:
    return not any(buffer in later.inputs for later in ops[i + 1 :])


def split_at_state(ops: list[Op]) -> tuple[list[Op], list[Op]]:
    """(ops that KV state depends on, ops that the residual depends on), each in order; an op that both need is in both."""
    return _backward(ops, lambda op: op.kind == OpKind.KV_WRITE), _backward(ops, lambda op: RESIDUAL in op.outputs)


def _backward(ops: list[Op], wanted: Callable[[Op], bool]) -> list[Op]:
    out: list[Op] = []
    needed: set[int] = set()
    for op in reversed(ops):
        if wanted(op) or needed.intersection(b for b in op.outputs if b >= SCRATCH):
            out.append(op)
            needed.update(op.inputs)
    return out[::-1]


def share_buffers(program: ProgramSpec) -> ProgramSpec:
    """Give buffers whose lives do not overlap one memory, and drop unused ones. An op's outputs never share memory with its inputs."""
    last = {b: i for i, op in enumerate(program.ops) for b in (*op.inputs, *op.outputs)}
    free: dict[tuple[int, int], list[int]] = {}
    where = {NONE: NONE, RESIDUAL: RESIDUAL, LOGITS: LOGITS}
    buffers: list[tuple[int, int]] = []
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        for b in op.outputs:
            if b not in where:
                shape = program.buffers[b - SCRATCH]
                if free.get(shape):
                    where[b] = free[shape].pop()
                else:
                    buffers.append(shape)
                    where[b] = SCRATCH + len(buffers) - 1
        ops.append(replace(op, inputs=tuple(where[b] for b in op.inputs), outputs=tuple(where[b] for b in op.outputs)))
        for b in dict.fromkeys((*op.inputs, *op.outputs)):
            if b >= SCRATCH and last[b] == i:
                free.setdefault(program.buffers[b - SCRATCH], []).append(where[b])
    return replace(program, buffers=tuple(buffers), ops=tuple(ops))
