"""Explained before, true afterwards: memory, the choice, the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import CASES

from quaff import load
from quaff.checkpoint import open_checkpoint
from quaff.errors import PromptError
from quaff.measure.explain import Explanation, explain, explain_json, explain_markdown, run
from quaff.measure.roofline import DRAM, EFFICIENCY, INT8, INT16, Ceilings, Level
from quaff.schedule import Order

FAST_MEMORY = Ceilings("any", 1, 1e11, 5e10, 1e10, (Level(DRAM, None, 1e12),))
SLOW_MEMORY = Ceilings("any", 1, 1e11, 5e10, 1e10, (Level(DRAM, None, 1e9),))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def explained(path: Path, tokens: int, ceilings: Ceilings = SLOW_MEMORY, chunk: int | None = None) -> Explanation:
    with open_checkpoint(path) as checkpoint:
        return explain(checkpoint, tokens, ceilings, chunk)


@pytest.mark.parametrize("name", ["token", "chunk", "layer"])
@pytest.mark.parametrize("tokens", [20, 300])
def test_memory_is_what_the_engine_takes(path: Path, name, tokens: int) -> None:  # noqa: ANN001
    cost = next(c for c in explained(path, tokens, chunk=32).costs if c.order.name == name)
    with load(path, threads=1, chunk=32, schedule=name) as llm, llm.prefill([1] * tokens).state:
        logits = 4 * llm.config.vocab  # given back with the step
        assert llm.accountant.used_bytes == llm.weight_bytes + cost.kv_bytes + cost.scratch_bytes - logits


def test_chunk_follows_the_ceilings_and_the_sentence_says_why(path: Path) -> None:
    slow, fast = explained(path, 400), explained(path, 400, FAST_MEMORY)
    assert slow.chosen == Order("chunk", 512) and fast.chosen == Order("chunk", 64)
    assert slow.control.limit.ceiling == DRAM and slow.costs[1].limit.ceiling in (INT8, INT16)
    assert "512 rows, the machine's choice, is taken: it reads the weights once where token-major reads them 400 times" in slow.why
    assert f"so that {slow.costs[1].limit.ceiling} binds instead of DRAM" in slow.why and slow.why.count(".") <= 2
    assert "reads the weights 7 times" in fast.why and f"{fast.costs[1].limit.ceiling} binds as before" in fast.why
    assert slow.costs[1].intensity > 90 * slow.control.intensity  # of 400 rows; embedding and head are read as often by both


def test_predicted_seconds_are_the_least_ones_at_lower_ceilings(path: Path) -> None:
    control = explained(path, 100).control
    assert control.limit.parts[0][1] == control.limit.parts[1][1] == 0  # every stage waits for memory
    assert control.limit.seconds == pytest.approx(control.expected.seconds * EFFICIENCY.stream)
    weights = control.read_bytes / SLOW_MEMORY.bytes_per_second
    assert weights < control.limit.seconds < 1.5 * weights  # the rest is keys and values


def test_environment_keeps_the_control(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAFF_BATCHED_PREFILL", "0")
    told = explained(path, 50, chunk=16)
    assert told.chosen == Order("token") and "QUAFF_BATCHED_PREFILL=0" in told.why
    assert [s["chosen"] for s in explain_json(told)["schedules"]] == [True, False, False]
    with load(path, threads=1, chunk=16) as llm:
        ran = run(llm, told, 1)
    assert [cost.measured is not None for cost in ran.costs] == [True, False, False]
    assert "≠" not in explain_markdown(ran)


def test_a_counter_that_differs_would_be_seen(path: Path) -> None:
    told = explained(path, 50, chunk=16)
    with load(path, threads=1, chunk=16) as llm:
        ran = run(llm, told, 1)
        assert all(s["measured"]["counters_as_predicted"] for s in explain_json(ran)["schedules"])
        wrong = run(llm, explained(path, 51, chunk=16), 1)
    from dataclasses import replace

    mixed = replace(told, costs=tuple(replace(a, measured=b.measured) for a, b in zip(told.costs, wrong.costs, strict=True)))
    assert not any(s["measured"]["counters_as_predicted"] for s in explain_json(mixed)["schedules"])
    assert "≠" in explain_markdown(mixed) and "≠" not in explain_markdown(ran)


def test_a_prompt_longer_than_the_context_is_refused(path: Path) -> None:
    with pytest.raises(PromptError, match="4097 tokens, the model's context is 4096"):
        explained(path, 4097)


def test_a_mixture_gains_from_rows_that_share_experts(tmp_path: Path) -> None:
    """Predicted by the union of what rows choose; measured bytes lie near it, and every other counter is exact."""
    path = CASES["qwen3moe"].write(tmp_path / "mixture.gguf")
    told = explained(path, 300, chunk=20)
    token, chunk, layer = told.costs
    assert told.mixture is not None and (told.mixture.experts, told.mixture.used) == (16, 4)
    assert (token.cell_rows, chunk.cell_rows, layer.cell_rows) == (1, 20, 300)
    assert told.mixture.touched(1) == pytest.approx(4) and 15.9 < told.mixture.touched(20) < 16
    assert token.counters.expert_bytes_touched > 3 * chunk.counters.expert_bytes_touched > 9 * layer.counters.expert_bytes_touched
    assert all(0 < cost.shared_weight_share < 0.5 for cost in told.costs)
    text = explain_markdown(told)
    assert "a row goes through 4 of 16 experts" in text and "chunk in cells of 20 rows reads 15.9 of them" in text
    with load(path, threads=1, chunk=20) as llm:
        ran = run(llm, told, 1)
    for cost in ran.costs:
        assert cost.measured is not None and cost.measured.counters.fixed == cost.counters.fixed
        assert cost.measured.counters.expert_bytes_touched == pytest.approx(cost.counters.expert_bytes_touched, rel=0.1)
    shown = explain_markdown(ran)
    assert "≈" in shown and "≠" not in shown
    assert explain_json(ran)["schedules"][1]["experts_per_cell"] == pytest.approx(15.95, abs=0.05)


def test_a_dense_model_has_no_experts_to_share(path: Path) -> None:
    told = explained(path, 100)
    assert told.mixture is None and all(cost.shared_weight_share == 1 for cost in told.costs) and "experts" not in explain_markdown(told)
