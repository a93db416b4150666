"""Law: what a run costs is known before it runs, to the byte."""

import numpy as np
import pytest
from tests.laws.paths import Tinyrun, prompt

from quaff.batch import Batch, Counters
from quaff.config import LayerConfig
from quaff.graph.program import LINEAR_KINDS, StageSpec
from quaff.schedule import Order, predict


def run(model: Tinyrun, n: int, order: Order, logits: tuple[int, ...]) -> Counters:
    sequence = model.cache.create()
    batch = Batch((model.cache.segment(sequence, np.array(prompt(model.vocab, n), np.int32), logits),))
    before = model.runner.counters
    result = model.runner.run(batch, order)
    spent = model.runner.counters - before
    grid = model.runner.grid(batch)
    assert spent.fixed == predict(model.runner.costs, grid.spans, (0,), order.cells(grid)).fixed
    assert result.values.shape == (len(logits), model.vocab)
    model.cache.commit(sequence, n)
    model.cache.free(sequence)
    return spent


def last_mixer(model: Tinyrun) -> int:
    return max(i for i, stage in enumerate(model.graph.stages) if stage.kind == "mixer")


def matrices(spec: StageSpec) -> list[str]:
    return [spec.weights[s] for op in spec.program.ops if op.kind in LINEAR_KINDS for s in op.weights[: op.ints[0]]]


def sizes(model: Tinyrun) -> tuple[int, int, int]:
    """(weight bytes of the layers up to the last state, of what follows in the last layer, of the head), summed here."""

    def nbytes(stage: int) -> int:
        spec = model.graph.stages[stage]
        return sum(model.weights[name].nbytes for name in matrices(spec))

    tail, head = last_mixer(model) + 1, len(model.graph.stages) - 1
    return sum(nbytes(i) for i in range(1, tail)), sum(nbytes(i) for i in range(tail, head)), nbytes(head)


@pytest.mark.parametrize("chunk", [1, 16, 33, 100, 512])
def test_weight_bytes_fall_by_exactly_the_number_of_chunks(model: Tinyrun, chunk: int) -> None:
    n = 100
    layers, rest, head = sizes(model)
    chunks = -(-n // chunk)
    for logits in ((), (n - 1,), (0, 40, 41, n - 1), tuple(range(n))):
        control = run(model, n, Order("token"), logits)
        batched = run(model, n, Order("chunk", chunk), logits)
        by_layer = run(model, n, Order("layer", chunk), logits)
        assert control.weight_bytes_touched == n * layers
        assert batched.weight_bytes_touched * n == control.weight_bytes_touched * chunks
        assert by_layer.weight_bytes_touched <= batched.weight_bytes_touched
        cells = len({row // chunk for row in logits})
        assert control.head_bytes_touched == len(logits) * (rest + head)
        assert batched.head_bytes_touched == cells * (rest + head)
        assert by_layer.head_bytes_touched == min(1, cells) * (rest + head)
        assert batched.macs == control.macs == by_layer.macs
        assert batched.attention_macs == control.attention_macs == by_layer.attention_macs
        assert batched.state_macs == control.state_macs == by_layer.state_macs


@pytest.mark.parametrize("order", [Order("token"), Order("chunk", 7), Order("layer", 20)])
def test_rest_of_the_last_layer_and_head_run_only_for_rows_that_are_asked_for(model: Tinyrun, order: Order) -> None:
    """Logits for every row (mlx-vlm 2119): the head's cost follows the rows asked for, not the prompt."""
    n, (layers, rest, head) = 50, sizes(model)
    spent = run(model, n, order, (n - 1,))
    passes = {"token": n, "chunk": -(-n // 7), "layer": 1}[order.name]
    mixers = -(-n // 20) if order.name == "layer" else passes
    mixer_bytes = sum(model.runner.costs[i].weight_bytes for i, s in enumerate(model.graph.stages) if s.kind == "mixer")
    assert spent.weight_bytes_touched == mixers * mixer_bytes + passes * (layers - mixer_bytes)
    assert (spent.head_rows, spent.head_bytes_touched) == (1, rest + head)
    read = [model.weights[name] for stage in model.graph.stages[last_mixer(model) + 1 :] for name in matrices(stage)]
    chosen = [
        (stage.experts[1], model.weights[name]) for stage in model.graph.stages[last_mixer(model) + 1 :] for name in stage.expert_weights
    ]
    assert spent.head_macs == sum(w.experts * w.rows * w.cols for w in read) + sum(used * w.rows * w.cols for used, w in chosen)
    assert spent.weight_bytes_loaded == 0


def last_own(model: Tinyrun) -> int:
    """The last layer that leaves state; those after it read the keys and values of others."""
    return max(i for i, layer in enumerate(model.graph.config.layers) if layer.kv_layer is None)


def attends(layer: LayerConfig) -> bool:
    return layer.kind in ("full", "sliding")


def state_macs(layer: LayerConfig, dim: int) -> int:
    """Taps of every channel, and three products with every element of a delta rule's state."""
    if (d := layer.delta) is None:
        return layer.conv_taps * dim
    channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim
    return layer.conv_taps * channels + 3 * d.value_heads * d.key_dim * d.value_dim


def test_the_rest_of_the_formulas(model: Tinyrun) -> None:
    n, c = 90, model.graph.config
    spent = run(model, n, Order("chunk", 32), (n - 1,))
    attending = [(i, layer.attention) for i, layer in enumerate(c.layers) if attends(layer)]
    kv = sum(a.kv_heads * ((a.head_dim + a.v_dim) * 2 + 4) for i, a in attending if c.layers[i].kv_layer is None)
    assert spent.state_macs == n * sum(state_macs(layer, c.dim) for layer in c.layers)
    assert spent.kv_bytes_written == n * kv
    attention = 0
    for index, a in attending:
        rows = range(n) if index < last_own(model) else (n - 1,)
        visible = sum(min(i + 1, a.window) if a.window else i + 1 for i in rows)
        attention += visible * (a.head_dim + a.v_dim) * a.heads
    assert spent.attention_macs == attention
    table = model.weights["token_embd.weight"]
    tables = [(table, (32, 32, 26))]
    for i in range(len(c.layers) if c.per_layer_dim else 0):
        cells = (32, 32, 26) if i < last_own(model) else (1,)
        tables += [(table, cells), (model.weights[f"blk.{i}.per_layer_token_embd.weight"], cells)]
    assert spent.embedding_bytes_touched == sum(rows * t.nbytes // t.rows for t, cells in tables for rows in cells)
    tail = last_mixer(model) + 1
    assert spent.macs == n * sum(s.macs_per_row for s in model.graph.stages[:tail])
    launches = [s.launches for s in model.graph.stages]
    assert spent.launches == 3 * sum(launches[:tail]) + sum(launches[tail:])


def test_a_wrong_prediction_is_noticed(model: Tinyrun) -> None:
    """Negative control: counters of another order, of one more row, or of one more logit are not equal."""
    n = 40
    counted = run(model, n, Order("chunk", 8), (n - 1,))
    assert counted != run(model, n, Order("chunk", 7), (n - 1,))
    assert counted != run(model, n + 1, Order("chunk", 8), (n,))
    assert counted != run(model, n, Order("chunk", 8), (n - 2, n - 1))
    assert counted != run(model, n, Order("layer", 8), (n - 1,))
