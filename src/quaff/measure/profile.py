"""Where the time of a test goes, op by op, in names that a reader of the model knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quaff.graph.program import LINEAR_KINDS, NONE, RECURRENT, SCRATCH, SLOT_F32, Graph, Op, OpKind, StageSpec, state_macs
from quaff.measure.forecast import LINEAR, StageForecast, attention_work, linear_macs
from quaff.measure.roofline import NOTHING, Ceilings, Work, bound

BETWEEN = "between ops"
"""Wall clock outside of ops: scheduling, sampling and Python, and what two clocks an op cost."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """All ops of one name in one test. `share` of the test's wall clock; `work` is empty where an op does none that we count.

    `ceiling_share`: the least seconds that the binding ceiling allows over those it took.
    """

    name: str
    seconds: float
    share: float
    work: Work
    ceiling: str | None
    ceiling_share: float | None

    @property
    def macs(self) -> int:
        return self.work.int8_macs + self.work.int16_macs + self.work.fma_macs

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.name,
            "seconds": self.seconds,
            "share": self.share,
            "macs": self.macs,
            "bytes_read": self.work.stream_bytes,
            "ceiling": self.ceiling,
            "ceiling_share": self.ceiling_share,
        }


def profile(
    graph: Graph,
    weight_bytes: Mapping[str, int],
    stages: Sequence[StageForecast],
    times: Sequence[tuple[StageSpec, Op, float]],
    wall_seconds: float,
    ceilings: Ceilings,
) -> tuple[OpTime, ...]:
    """Ops of equal names together, the slowest first, and what is left of `wall_seconds`.

    `weight_bytes` by tensor name, `times` as `Runner.stop_profile` gives them.
    """
    seconds: dict[str, float] = {}
    done: dict[str, Work] = {}
    index = iter(times)
    for stage, forecast in zip(graph.stages, stages, strict=True):
        for _ in stage.program.ops:
            spec, op, spent = next(index)
            name = op_name(spec, op)
            seconds[name] = seconds.get(name, 0.0) + spent
            done[name] = done.get(name, NOTHING) + _op_work(graph, stage, op, forecast, weight_bytes)
    seconds[BETWEEN] = max(0.0, wall_seconds - sum(seconds.values()))
    whole = sum(seconds.values()) or 1.0
    out = []
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        work = done.get(name, NOTHING)
        limit = bound([work], ceilings, sum(weight_bytes.values()))
        counted = work != NOTHING and spent > 0
        out.append(OpTime(name, spent, spent / whole, work, limit.ceiling if counted else None, limit.seconds / spent if counted else None))
    return tuple(out)


def _op_work(graph: Graph, stage: StageSpec, op: Op, forecast: StageForecast, weight_bytes: Mapping[str, int]) -> Work:
    """An op's part of what its stage does: products and panels of linear ops, attention and the keys and values it reads."""
    spent = forecast.counters
    if op.kind == OpKind.ATTEND:
        return attention_work(graph, spent.attention_macs, forecast.kv_bytes)
    if op.kind in RECURRENT:
        return Work(fma_macs=spent.state_macs * state_macs(op) // stage.state_macs_per_row)
    if op.kind not in LINEAR:
        return NOTHING
    macs = (spent.macs + spent.head_macs) * linear_macs(graph, stage, op) // max(1, stage.macs_per_row)
    mine = sum(weight_bytes[stage.weights[slot]] for slot in op.weights[: op.ints[0]])
    of_experts = op.kind == OpKind.EXPERT_LINEAR
    whole = sum(weight_bytes[name] for name in (stage.expert_weights if of_experts else stage.linear_weights))
    bytes_read = spent.expert_bytes_touched if of_experts else spent.weight_bytes_touched + spent.head_bytes_touched
    read = bytes_read * mine // max(1, whole)
    return Work(fma_macs=macs, stream_bytes=read) if op.inputs[0] == NONE else Work(int8_macs=macs, stream_bytes=read)


def op_name(stage: StageSpec, op: Op) -> str:
    """What an op does, in the checkpoint's own words: "ffn gate+up", "attn q+k+v", "attention", "head"."""
    if op.kind == OpKind.ATTEND:
        return f"attention, window {op.ints[5]}" if op.ints[5] else "attention"
    if op.kind == OpKind.LINEAR and stage.kind == "head":
        return "head"
    if op.kind == OpKind.GLU and _by_slots(stage, op.inputs[0]):
        return "experts activation"
    if op.kind == OpKind.EXPERT_LINEAR:
        roles = [_short(stage.weights[slot]).removeprefix("ffn ").removesuffix(" exps") for slot in op.weights[: op.ints[0]]]
        return "experts " + "+".join(roles)
    if op.kind in LINEAR_KINDS:
        first, *others = [_short(stage.weights[slot]) for slot in op.weights[: op.ints[0]]]
        if first == "ffn gate inp" and not others:
            return "router"
        group = first.partition(" ")[0] + " "
        return "+".join([first, *(name.removeprefix(group) for name in others)])
    if op.kind == OpKind.RMS_NORM:
        return _short(stage.weights[op.weights[0]])
    return {
        OpKind.EMBED: "embedding",
        OpKind.QUANTIZE: "quantize",
        OpKind.ROPE: "rope",
        OpKind.KV_WRITE: "KV write",
        OpKind.GLU: "ffn activation",
        OpKind.ADD: "residual add",
        OpKind.CONV: "convolution",
        OpKind.SPLIT: "split",
        OpKind.UNIT_NORM: "unit norm",
        OpKind.DELTA_GATES: "delta gates",
        OpKind.DELTA: "delta rule",
        OpKind.SCALE: "copy" if op.inputs != op.outputs else "logit scale" if stage.kind == "head" else "scale",
        OpKind.CONCAT: "concat",
        OpKind.ROUTE: "choice of experts",
        OpKind.GATHER: "rows to experts",
        OpKind.COMBINE: "experts together",
        OpKind.GATE: "gate of the shared expert",
    }[op.kind]


def _by_slots(stage: StageSpec, buffer: int) -> bool:
    return buffer >= SCRATCH and stage.program.buffers[buffer - SCRATCH][1] == SLOT_F32


def _short(tensor: str) -> str:
    """blk.3.ffn_gate.weight -> ffn gate."""
    parts = tensor.removesuffix(".weight").split(".")
    return parts[-1].replace("_", " ")
