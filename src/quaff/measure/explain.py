"""What reading a prompt will cost in every schedule, before it is read, and which one the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quaff import _native
from quaff.batch import Counters
from quaff.cache.pages import PageCache
from quaff.checkpoint import Checkpoint
from quaff.config import Memory, Workload, rows_per_expert
from quaff.engine.engine import make_scheduler
from quaff.errors import PromptError
from quaff.graph.builder import build_graph
from quaff.graph.program import Graph
from quaff.measure import counted
from quaff.measure.bench import Plan, Progress, Result, Stand
from quaff.measure.forecast import Trial, forecast, total
from quaff.measure.memory import bytes_per_weight
from quaff.measure.roofline import EFFICIENCY, Bound, Ceilings, bound
from quaff.measure.streaming import plan_markdown
from quaff.measure.table import Column, markdown
from quaff.models import ReadModel, read_model
from quaff.schedule import Order, choose_order, default_chunk, expected_experts, stage_costs
from quaff.tokenizer import Tokenizer
from quaff.weights.budget import Accountant, human_bytes
from quaff.weights.plan import Plan as MemoryPlan
from quaff.weights.planner import make_ask, make_plan
from quaff.weights.sizes import packed_sizes

if TYPE_CHECKING:
    from quaff.llm import LLM


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer's mixture and of them those that one row uses."""

    experts: int
    used: int

    def touched(self, rows: int) -> float:
        """Distinct experts that a cell of `rows` rows reads, to be expected when rows choose independently."""
        return expected_experts(self.experts, self.used, rows)


@dataclass(frozen=True, slots=True)
class Cost:
    """One schedule: its counters, bytes of memory, the least seconds under the ceilings and the seconds to expect.

    `cell_rows`: rows of its largest cell of a feed-forward network. `disk_bytes` of packed weights are read, if any are streamed."""

    order: Order
    counters: Counters
    cell_rows: int
    scratch_bytes: int
    kv_bytes: int
    limit: Bound
    expected: Bound
    measured: Result | None = None
    disk_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """Weight bytes that kernels read: layers, experts, embedding rows and head."""
        return self.counters.weight_bytes_read

    @property
    def shared_weight_share(self) -> float:
        """Of the weight bytes read, those that all rows of a cell use; an expert serves the rows that chose it."""
        return 1.0 - self.counters.expert_bytes_touched / self.read_bytes

    @property
    def intensity(self) -> float:
        """Multiply-accumulates per weight byte read."""
        return self.counters.work / self.read_bytes


@dataclass(frozen=True, slots=True)
class Explanation:
    """Costs of reading `trial.prompt` tokens in each schedule; `chosen` is the one that the engine takes by itself. `plan`: that of its
    memory, where it has a budget."""

    path: str
    trial: Trial
    ceilings: Ceilings
    weight_bytes: int
    chosen: Order
    why: str
    costs: tuple[Cost, ...]
    mixture: Mixture | None = None
    plan: MemoryPlan | None = None

    @property
    def control(self) -> Cost:
        return next(c for c in self.costs if c.order.name == "token")


def explain(checkpoint: Checkpoint, tokens: int, ceilings: Ceilings, chunk: int | None = None, memory: Memory | None = None) -> Explanation:
    """Explain reading `tokens` tokens with `ceilings.threads` threads, from the file's tensor table alone.

    `chunk` None: the engine's rule, from these ceilings. `memory`: a budget for a process like this one. PromptError when the prompt does
    not fit the context, MemoryBudgetError when the budget does not hold the model.
    """
    model = read_model(checkpoint)
    tensors = model.tensors
    graph = build_graph(model.config, model.family, tensors)
    if tokens > graph.config.context_length:
        raise PromptError(f"the prompt has {tokens} tokens, the model's context is {graph.config.context_length} tokens")
    packed = packed_sizes(tensors)
    stages = stage_costs(graph, packed, graph.config.vocab)
    weight_bytes = sum(packed.values())
    trial = Trial(prompt=tokens)
    rows = chunk or default_chunk(
        bytes_per_weight(tensors), ceilings.int8_macs_per_second, ceilings.bytes_per_second, rows_per_expert(graph.config)
    )
    plan = _plan(checkpoint, model, graph, packed, tokens, chunk, ceilings.threads, memory) if memory is not None else None
    rows = plan.chunk if plan is not None else rows
    streamed = plan is not None and not plan.resident
    experts, used = max(stage.experts for stage in graph.stages)
    tail = 1 + max(i for i, stage in enumerate(graph.stages) if stage.kind == "mixer")
    costs = []
    for order in (Order("token"), Order("chunk", rows), Order("layer", rows, cut=streamed and not experts)):
        parts = forecast(graph, stages, order, trial, plan)
        work = [part.work for part in parts]
        step_rows = make_scheduler(order, graph, plan=plan).prompt_rows
        costs.append(
            Cost(
                order,
                total(parts),
                order.cell_rows(min(tokens, step_rows)),
                *_memory(graph, order, tokens, step_rows),
                bound(work, ceilings, weight_bytes),
                bound(work, ceilings.at(EFFICIENCY), weight_bytes),
                disk_bytes=plan.disk_bytes(-(-tokens // (step_rows if order.name == "layer" else order.chunk)), tail) if plan else 0,
            )
        )
    chosen = choose_order("layer" if streamed else "chunk", rows, cut=not experts)
    why = _why_streamed(chosen, tuple(costs)) if streamed else _why(chosen, tuple(costs), tokens, chunk is not None)
    mixture = Mixture(experts, used) if experts else None
    return Explanation(str(checkpoint.path), trial, ceilings, weight_bytes, chosen, why, tuple(costs), mixture, plan)


def _plan(
    checkpoint: Checkpoint,
    model: ReadModel,
    graph: Graph,
    packed: Mapping[str, int],
    tokens: int,
    chunk: int | None,
    threads: int,
    memory: Memory,
) -> MemoryPlan:
    """The plan that a process with this budget would make for such a prompt."""
    # Part of every process that runs a model, and so of its memory.
    tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    context = graph.config.context_length
    reading = max(view.scratch_bytes for view in model.views.values())
    workload = Workload(tokens, logits_rows=1)
    ask = make_ask(memory, workload, tokenizer, context, graph.config.vocab, chunk, threads, reading)
    return make_plan(graph, packed, _cache(graph).peak_bytes, ask)


def run(llm: LLM, explanation: Explanation, repetitions: int, progress: Progress | None = None) -> Explanation:
    """The same with every schedule measured beside its prediction: `repetitions` after a warm-up."""
    chunk = max(cost.order.chunk for cost in explanation.costs)
    plan = Plan((explanation.trial,), (explanation.ceilings.threads,), ("token", "chunk", "layer"), chunk, repetitions)
    with Stand(llm, plan, progress) as stand:
        results = {result.schedule: result for result in stand.run(explanation.ceilings)}
    return replace(explanation, costs=tuple(replace(cost, measured=results.get(cost.order.name)) for cost in explanation.costs))


def _memory(graph: Graph, order: Order, tokens: int, step_rows: int) -> tuple[int, int]:
    """Bytes of scratch and one row of logits, and of KV state, at their peak."""
    step = min(tokens, step_rows)
    return graph.scratch_bytes(step, order.cell_rows(step)) + 4 * graph.config.vocab, _cache(graph).peak_bytes(tokens, step)


def _cache(graph: Graph) -> PageCache:
    """An empty one, for its formulas."""
    pools = [_native.PagePool(len(kind.layers), kind.kv_heads, kind.dim, kind.value_dim) for kind in graph.kv_kinds]
    states = [_native.StatePool(len(kind.layers), kind.size) for kind in graph.state_kinds]
    return PageCache(graph.kv_kinds, pools, Accountant(), graph.state_kinds, states)


def _why(chosen: Order, costs: tuple[Cost, ...], tokens: int, asked: bool) -> str:
    """One plain sentence."""
    token, chunk, layer = costs
    if chosen.name == "token":
        return "token-major is taken because QUAFF_BATCHED_PREFILL=0 asks for the control"
    rows = f"the {counted(chosen.chunk, 'row')} that were asked for" if asked else f"{counted(chosen.chunk, 'row')}, the machine's choice,"
    now, before = chunk.limit.ceiling, token.limit.ceiling
    binds = f"{now} binds instead of {before}" if now != before else f"{now} binds as before"
    gain = token.expected.seconds / chunk.expected.seconds
    more = layer.scratch_bytes - chunk.scratch_bytes
    faster = chunk.expected.seconds / layer.expected.seconds
    other = f"be {faster:.2f}x as fast for {human_bytes(more)} more scratch" if faster >= 1.01 else "gain nothing here"
    return (
        f"chunk-major with {rows} is taken: it reads the weights {_times(-(-tokens // chosen.chunk))} where token-major reads them "
        f"{_times(tokens)}, so that {binds} and {gain:.1f}x its speed is expected; "
        f"layer-major would {other}"
    )


def _why_streamed(chosen: Order, costs: tuple[Cost, ...]) -> str:
    """One plain sentence."""
    if chosen.name == "token":
        return "token-major is taken because QUAFF_BATCHED_PREFILL=0 asks for the control"
    token, chunk, layer = (human_bytes(cost.disk_bytes) for cost in costs)
    return (
        f"layer-major is taken, since the budget does not hold the weights: it reads {layer} of them from the file where chunk-major reads "
        f"{chunk} and token-major {token}; the seconds are those of computing alone"
    )


def _experts(e: Explanation) -> list[str]:
    """What cells of each schedule read of a mixture: the reason why many rows pay for it."""
    if e.mixture is None:
        return []
    m = e.mixture
    parts = [
        f"{cost.order.name} in cells of {counted(cost.cell_rows, 'row')} reads {m.touched(cost.cell_rows):.1f} of them, "
        f"{human_bytes(cost.counters.expert_bytes_touched // e.trial.tokens)} a token"
        for cost in e.costs
    ]
    return [
        f"a row goes through {m.used} of {m.experts} experts; when rows choose independently, " + "; ".join(parts),
        f"C rows read {m.experts}*(1-(1-{m.used}/{m.experts})^C) experts, at most min({m.used}*C, {m.experts}): an expert's bytes "
        "serve the rows that chose it, so a mixture gains from more rows in a cell than a dense model does",
    ]


def _times(n: int) -> str:
    return "once" if n == 1 else counted(n, "time")


def explain_json(e: Explanation) -> dict[str, Any]:
    """One object; bytes are bytes, seconds seconds, shares of one."""
    return {
        "model": e.path,
        "isa": e.ceilings.isa,
        "threads": e.ceilings.threads,
        "prompt_tokens": e.trial.prompt,
        "weight_bytes": e.weight_bytes,
        "ceilings": e.ceilings.as_dict(),
        "efficiency": {"int8": EFFICIENCY.int8, "int16": EFFICIENCY.int16, "fma": EFFICIENCY.fma, "stream": EFFICIENCY.stream},
        "chosen": {"schedule": e.chosen.name, "chunk": e.chosen.chunk, "why": e.why},
        "schedules": [_cost(e, cost) for cost in e.costs],
        "plan": e.plan and e.plan.as_dict(),
    }


def _cost(e: Explanation, cost: Cost) -> dict[str, Any]:
    measured = cost.measured
    return {
        "schedule": cost.order.name,
        "chunk": cost.order.chunk,
        "chosen": cost.order == e.chosen,
        "weight_bytes_read": cost.read_bytes,
        "disk_bytes": cost.disk_bytes,
        "shared_weight_share": cost.shared_weight_share,
        "experts_per_cell": e.mixture and e.mixture.touched(cost.cell_rows),
        "arithmetic_intensity": cost.intensity,
        "memory": {"weight_bytes": e.weight_bytes, "kv_bytes": cost.kv_bytes, "scratch_bytes": cost.scratch_bytes},
        "ceiling": cost.limit.ceiling,
        "least_seconds": cost.limit.seconds,
        "predicted_seconds": cost.expected.seconds,
        "predicted_over_token": e.control.expected.seconds / cost.expected.seconds,
        "counters": cost.counters.as_dict(),
        "measured": measured
        and {
            "seconds": measured.seconds,
            "samples": list(measured.samples),
            "over_token": e.control.measured and e.control.measured.seconds / measured.seconds,
            "counters": measured.counters.as_dict(),
            "counters_as_predicted": measured.counters.fixed == cost.counters.fixed,
        },
    }


def explain_markdown(e: Explanation) -> str:
    """A line per schedule, then what is taken and what the seconds rest on; predicted beside measured if it was run."""
    columns: list[Column[Cost]] = [
        Column("schedule", lambda c: c.order.name if c.order.name == "token" else f"{c.order.name}({c.order.chunk})", right=False),
        Column("weight bytes", lambda c: human_bytes(c.read_bytes)),
        *([Column("from disk", lambda c: human_bytes(c.disk_bytes))] if e.plan else []),
        Column("shared", lambda c: f"{100 * c.shared_weight_share:.0f} %"),
        Column("launches", lambda c: f"{c.counters.launches:,}"),
        Column("GMAC", lambda c: f"{c.counters.work / 1e9:,.1f}"),
        Column("MAC/byte", lambda c: f"{c.intensity:,.1f}"),
        Column("scratch", lambda c: human_bytes(c.scratch_bytes)),
        Column("KV", lambda c: human_bytes(c.kv_bytes)),
        Column("ceiling", lambda c: c.limit.ceiling, right=False),
        Column("least s", lambda c: f"{c.limit.seconds:.3f}"),
        Column("predicted s", lambda c: f"{c.expected.seconds:.3f}"),
        Column("x token", lambda c: f"{e.control.expected.seconds / c.expected.seconds:.1f}"),
    ]
    lines = [f"{e.path}: {e.trial.name}, weights {human_bytes(e.weight_bytes)}, {counted(e.ceilings.threads, 'thread')}", ""]
    lines += [*markdown(columns, e.costs), "", e.why, *_experts(e)]
    lines += ["", *plan_markdown(e.plan), ""] if e.plan else []
    lines += [
        f"predicted seconds assume {100 * EFFICIENCY.int8:.0f} % of int8 dot, {100 * EFFICIENCY.int16:.0f} % of int16 dot, "
        f"{100 * EFFICIENCY.fma:.0f} % of f32 fma and "
        f"{100 * EFFICIENCY.stream:.0f} % of reading; least seconds assume all of it",
        e.ceilings.sentence(),
    ]
    if e.control.measured:
        lines += ["", *_measured(e)]
    return "\n".join(lines)


def _measured(e: Explanation) -> list[str]:
    """Predicted beside measured: seconds, then every counter."""
    ran = [(cost, cost.measured) for cost in e.costs if cost.measured is not None]
    control = e.control.measured
    seconds: list[Column[tuple[Cost, Result]]] = [
        Column("schedule", lambda r: r[0].order.name, right=False),
        Column("predicted s", lambda r: f"{r[0].expected.seconds:.3f}"),
        Column("measured s", lambda r: f"{r[1].seconds:.3f}"),
        Column("x token predicted", lambda r: f"{e.control.expected.seconds / r[0].expected.seconds:.1f}"),
        Column("x token measured", lambda r: f"{control.seconds / r[1].seconds:.1f}" if control else ""),
        Column("of the least time", lambda r: f"{100 * r[0].limit.seconds / r[1].seconds:.0f} %"),
    ]
    counters: list[Column[str]] = [Column("counter: predicted and measured", str, right=False)]
    counters += [Column(cost.order.name, lambda name, p=cost.counters, m=r.counters: _beside(name, p, m)) for cost, r in ran]  # type: ignore[misc]
    return [*markdown(seconds, ran), "", *markdown(counters, Counters().as_dict())]


def _beside(name: str, predicted: Counters, measured: Counters) -> str:
    p, m = getattr(predicted, name), getattr(measured, name)
    exact = getattr(measured.fixed, name) == m
    return f"{p:,} {'=' if p == m else '≠' if exact else '≈'} {m:,}"
