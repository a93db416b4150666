"""What is foretold is what is counted: every kind of test, every schedule, every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiny import CASES

from quaff import LLM, load
from quaff.graph.program import OpKind
from quaff.measure.bench import Plan, Stand, check_trials
from quaff.measure.forecast import LINEAR, Trial, forecast, linear_macs, total
from quaff.measure.profile import BETWEEN, op_name, profile
from quaff.measure.roofline import DRAM, NOTHING, Ceilings, Level
from quaff.schedule import Order

CEILINGS = Ceilings("any", 1, 1e11, 5e10, 1e10, (Level(DRAM, None, 1e10),))
TRIALS = (
    Trial(prompt=150),
    Trial(prompt=1),
    Trial(generate=5),
    Trial(generate=1),
    Trial(prompt=40, depth=100),
    Trial(generate=4, depth=70),
    Trial(prompt=50, sequences=3),
    Trial(generate=4, sequences=5),
    Trial(prompt=33, depth=65, sequences=2),
    Trial(generate=3, depth=65, sequences=2),
)


@pytest.fixture(scope="module", params=["llama-gqa", "gemma3"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = CASES[request.param].write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with load(path, threads=1, chunk=32) as llm:
        yield llm


def test_names_are_llama_benchs() -> None:
    assert [t.name for t in (Trial(prompt=512), Trial(generate=64), Trial(prompt=512, depth=1024))] == ["pp512", "tg64", "pp512 @ d1024"]
    assert Trial(generate=64, depth=128, sequences=4).name == "tg64 np4 @ d128"
    assert Trial(generate=64, sequences=4).tokens == 256 and Trial(prompt=512, depth=1024).positions == 1536


@pytest.mark.parametrize("schedule", ["token", "chunk", "layer"])
def test_forecast_is_what_the_native_module_counts(llm: LLM, schedule) -> None:  # noqa: ANN001
    plan = Plan(TRIALS, (1,), (schedule,), 32, 1)
    check_trials(TRIALS, llm.context)
    with Stand(llm, plan) as stand:
        results = {result.trial: result for result in stand.run(CEILINGS)}
    assert set(results) == set(TRIALS)
    for trial, result in results.items():
        stages = forecast(llm.graph, llm.engine.runner.costs, llm.order, trial)
        assert total(stages) == result.counters, trial.name
        assert tuple(stage.work for stage in stages) == result.work
        assert sum(w.int8_macs + w.int16_macs + w.fma_macs for w in result.work) == result.counters.work


def test_long_prompts_are_foretold_block_by_block(llm: LLM) -> None:
    """The engine cuts prompts into blocks of native calls; layer-major then reads the weights once a block."""
    one = total(forecast(llm.graph, llm.engine.runner.costs, Order("layer", 64), Trial(prompt=4096)))
    two = total(forecast(llm.graph, llm.engine.runner.costs, Order("layer", 64), Trial(prompt=4160)))
    ffn = sum(c.weight_bytes for c in llm.engine.runner.costs if c.spec.kind == "ffn" and c.spec.layer < len(llm.config.layers) - 1)
    mixers = sum(c.weight_bytes for c in llm.engine.runner.costs if c.spec.kind == "mixer")
    assert two.weight_bytes_touched - one.weight_bytes_touched == ffn + mixers


def test_depth_and_chunks_change_only_what_they_should(llm: LLM) -> None:
    costs = llm.engine.runner.costs
    flat = forecast(llm.graph, costs, Order("chunk", 32), Trial(generate=3))
    deep = forecast(llm.graph, costs, Order("chunk", 32), Trial(generate=3, depth=200))
    assert total(deep).macs == total(flat).macs and total(deep).attention_macs > total(flat).attention_macs
    # A row alone reads keys and values of every position it sees: two bytes for each value, and two scales.
    index, attend = next((i, op) for i, s in enumerate(llm.graph.stages) for op in s.program.ops if op.kind == OpKind.ATTEND)
    _, _, _, kv_heads, dim, window, value_dim = attend.ints
    assert deep[index].kv_bytes == kv_heads * (2 * (dim + value_dim) + 4) * sum(min(n, window or n) for n in (201, 202, 203))
    token = forecast(llm.graph, costs, Order("token"), Trial(prompt=64))
    chunk = forecast(llm.graph, costs, Order("chunk", 32), Trial(prompt=64))
    assert chunk[index].kv_bytes == token[index].kv_bytes // 32  # whole bytes


def test_work_of_float_weights_is_f32(tmp_path: Path) -> None:
    from dataclasses import replace

    path = replace(CASES["llama-gqa"], types={"": "F16"}, embedding="Q8_0").write(tmp_path / "f16.gguf")
    with load(path, threads=1, chunk=32) as llm:
        stages = forecast(llm.graph, llm.engine.runner.costs, llm.order, Trial(prompt=10))
    spent = total(stages)
    head = stages[-1].counters.head_macs
    assert sum(s.work.int8_macs for s in stages) == head  # the tied table is integers
    assert sum(s.work.int16_macs for s in stages) == spent.attention_macs > 0
    assert sum(s.work.fma_macs for s in stages) == spent.work - head - spent.attention_macs


def test_ops_have_names_that_a_reader_knows(llm: LLM) -> None:
    names = {op_name(stage, op) for stage in llm.graph.stages for op in stage.program.ops}
    assert {"embedding", "attn q+k+v", "attn output", "ffn gate+up", "ffn down", "ffn activation", "head", "KV write", "rope"} <= names
    assert {"attn norm", "ffn norm", "output norm"} <= names
    if llm.config.architecture == "gemma3":
        assert {"attn q norm", "attn k norm", "post ffw norm"} <= names
        assert len({name for name in names if name.startswith("attention")}) == 2  # full, and with a window
    else:
        assert "attention" in names


def test_linear_ops_share_out_the_products_of_their_stage(llm: LLM) -> None:
    for stage in llm.graph.stages:
        assert sum(linear_macs(llm.graph, stage, op) for op in stage.program.ops if op.kind == OpKind.LINEAR) == stage.macs_per_row


def test_a_profile_divides_wall_clock_and_work(llm: LLM) -> None:
    trial, runner = Trial(prompt=70), llm.engine.runner
    stages = forecast(llm.graph, runner.costs, llm.order, trial)
    times = [(stage, op, 0.001) for stage in llm.graph.stages for op in stage.program.ops]
    wall = 0.001 * len(times) + 0.5
    ops = profile(llm.graph, runner.weight_bytes, stages, times, wall, CEILINGS)
    assert [op.name for op in ops][0] == BETWEEN and ops[0].seconds == pytest.approx(0.5)
    assert sum(op.seconds for op in ops) == pytest.approx(wall) and sum(op.share for op in ops) == pytest.approx(1)
    assert sum(op.macs for op in ops) == total(stages).work
    spent = total(stages)
    read = sum(op.work.stream_bytes for op in ops if not op.name.startswith("attention"))
    assert read == spent.weight_bytes_touched + spent.head_bytes_touched
    for op in ops:
        assert (op.ceiling is None) == (op.work == NOTHING)
        assert op.ceiling_share is None or op.ceiling_share > 0


def test_profile_is_not_left_running(llm: LLM) -> None:
    plan = Plan((Trial(prompt=20),), (1,), ("chunk",), 32, 1, profile=True)
    with Stand(llm, plan) as stand:
        (result,) = stand.run(CEILINGS)
    assert len(result.ops) > 10 and llm.engine.runner.stop_profile() == []


def test_states_and_sequences_are_given_back(llm: LLM) -> None:
    before = llm.engine.cache.sequences
    with Stand(llm, Plan(TRIALS, (1,), ("chunk",), 32, 1)) as stand:
        list(stand.run(CEILINGS))
        assert llm.engine.cache.sequences > before
    assert llm.engine.cache.sequences == before


def test_ops_of_a_mixture_have_names_and_share_out_its_products(tmp_path: Path) -> None:
    with load(CASES["qwen2moe"].write(tmp_path / "mixture.gguf"), threads=1) as mixture:
        names = {op_name(stage, op) for stage in mixture.graph.stages for op in stage.program.ops}
        assert {"router", "choice of experts", "rows to experts", "experts gate+up", "experts activation", "experts down"} <= names
        assert {"experts together", "ffn gate shexp+up shexp", "ffn down shexp", "gate of the shared expert"} <= names
        for stage in mixture.graph.stages:
            assert sum(linear_macs(mixture.graph, stage, op) for op in stage.program.ops if op.kind in LINEAR) == stage.macs_per_row
