"""Law: what a mixture reads follows its routing, to the byte; how experts are chosen and combined never depends on the rows beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.laws.paths import Tinyrun, prompt
from tests.laws.test_reference import reference_trace, reference_weights
from tests.tiny import CASES

from quaff.batch import Batch
from quaff.graph import reference
from quaff.graph.builder import SCORING
from quaff.graph.program import Graph, OpKind
from quaff.schedule import Cell, Order, expected_experts

MIXTURES = [name for name, tiny in CASES.items() if tiny.experts]
ORDERS = [Order("token"), Order("chunk", 7), Order("chunk", 33), Order("layer", 20)]
Routing = dict[int, NDArray[np.int64]]


def routing_of(name: str, model: Tinyrun, folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Routing:
    """Experts [rows, used] that the reference chooses, by layer."""
    seen: list[NDArray[np.int64]] = []
    choose = reference.route

    def watched(*arguments: Any) -> Any:
        ids, w = choose(*arguments)
        seen.append(ids)
        return ids, w

    with monkeypatch.context() as patch:
        patch.setattr(reference, "route", watched)
        reference_trace(model.graph, reference_weights(name, folder), tokens)
    return dict(zip((i for i, layer in enumerate(model.graph.config.layers) if layer.experts), seen, strict=True))


def touched(model: Tinyrun, routing: Routing, cells: list[Cell]) -> tuple[int, int, int]:
    """(pairs of a row and an expert, distinct experts summed over cells, their bytes), from the routing alone."""
    pairs = distinct = nbytes = 0
    for cell in cells:
        stage = model.graph.stages[cell.stage]
        if not stage.expert_weights:
            continue
        rows = [row for begin, end in cell.ranges for row in range(begin, end)]
        chosen = routing[stage.layer][rows]
        pairs += chosen.size
        distinct += len(np.unique(chosen))
        one = sum(model.weights[n].nbytes for n in stage.expert_weights) // stage.experts[0]
        nbytes += len(np.unique(chosen)) * one
    return pairs, distinct, nbytes


@pytest.mark.parametrize("name", MIXTURES)
def test_expert_bytes_are_those_of_the_routing(
    name: str, models: dict[str, Tinyrun], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, n = models[name], 60
    tokens = prompt(model.vocab, n, seed=3)
    routing = routing_of(name, model, folder, tokens, monkeypatch)
    other = routing_of(name, model, folder, prompt(model.vocab, n, seed=4), monkeypatch)
    for order in ORDERS:
        sequence = model.cache.create()
        model.cache.grow(sequence, n)
        batch = Batch((model.cache.segment(sequence, np.array(tokens, np.int32), (n - 1,)),))
        before = model.runner.counters
        model.runner.run(batch, order)
        spent = model.runner.counters - before
        cells = list(order.cells(model.runner.grid(batch)))
        assert (spent.expert_rows, spent.experts_touched, spent.expert_bytes_touched) == touched(model, routing, cells), f"{order}"
        if order.name == "layer":
            assert all(sum(cell.stage == i for cell in cells) == 1 for i, s in enumerate(model.graph.stages) if s.expert_weights)
            assert spent.experts_touched <= sum(s.experts[0] for s in model.graph.stages)
        if order == Order("chunk", 7):
            assert touched(model, routing, cells) != touched(model, other, cells), "control: another routing reads something else"
        model.cache.commit(sequence, n)
        model.cache.free(sequence)


def rerouted(graph: Graph, scale: float, biased: bool, **changes: int) -> Graph:
    """Every ROUTE with other flags; a bias is the norm of queries, which has a value for each of the 16 experts."""
    names = ("experts", "used", "scoring", "normalise", "groups", "groups_used", "group_top")
    stages = []
    for stage in graph.stages:
        ops, weights = list(stage.program.ops), stage.weights
        for i, op in enumerate(ops):
            if op.kind == OpKind.ROUTE:
                ints = tuple((dict(zip(names, op.ints, strict=True)) | changes).values())
                slot = len(weights) if biased else -1
                ops[i] = replace(op, ints=ints, floats=(scale,), weights=(slot,))
                weights = (*weights, f"blk.{stage.layer}.attn_q_norm.weight") if biased else weights
        stages.append(replace(stage, program=replace(stage.program, ops=tuple(ops)), weights=weights))
    return replace(graph, stages=tuple(stages))


ROUTERS: dict[str, tuple[float, bool, dict[str, int]]] = {
    "softmax, as it is": (1.0, False, {"normalise": 0}),
    "softmax, biased": (1.5, True, {}),
    "sigmoid": (1.0, False, {"scoring": SCORING["sigmoid"]}),
    "sigmoid in groups": (2.5, True, {"scoring": SCORING["sigmoid"], "groups": 4, "groups_used": 2, "group_top": 2}),
    "softmax in groups": (16.0, False, {"normalise": 0, "groups": 8, "groups_used": 3, "group_top": 1}),
    "softmax of the chosen": (1.0, False, {"scoring": SCORING["softmax_of_chosen"]}),
    "softmax of the chosen, biased": (1.0, True, {"scoring": SCORING["softmax_of_chosen"], "groups": 2, "groups_used": 1}),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_is_that_of_the_reference(router: str, models: dict[str, Tinyrun], folder: Path) -> None:
    plain = models["qwen3moe"]
    scale, biased, changes = ROUTERS[router]
    graph = rerouted(plain.graph, scale, biased, **changes)
    model = Tinyrun(None, folder / "qwen3moe.gguf", graph=graph)
    tokens = prompt(model.vocab, 40, seed=8)
    expected = reference_trace(graph, reference_weights("qwen3moe", folder), tokens)
    for isa in ("scalar", None):
        model.use(isa, 2)
        for order in (Order("chunk", 40), Order("token"), Order("layer", 16)):
            assert not model.read(tokens, order).difference(expected), f"{order}"
    assert plain.read(tokens).difference(expected), "control: the model's own router gives something else"


def test_the_expectation_is_that_of_random_choices() -> None:
    rng = np.random.default_rng(0)
    for experts, used, rows in ((64, 8, 1), (64, 8, 7), (64, 8, 30), (8, 2, 3), (128, 8, 512)):
        draws = [len({int(e) for _ in range(rows) for e in rng.permutation(experts)[:used]}) for _ in range(40)]
        assert abs(np.mean(draws) / expected_experts(experts, used, rows) - 1) < 0.03
        assert expected_experts(experts, used, rows) <= min(used * rows, experts)
