"""Explained before, true afterwards: memory, the choice, the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import CASES

from quaff import load
from quaff.checkpoint import open_checkpoint
from quaff.errors import PromptError
from quaff.measure.explain import Explanation, explain, explain_json, explain_markdown, run
from quaff.measure.roofline import DRAM, EFFICIENCY, FMA, INT8, Ceilings, Level
from quaff.schedule import Order

FAST_MEMORY = Ceilings("any", 1, 1e11, 1e10, (Level(DRAM, None, 1e12),))
SLOW_MEMORY = Ceilings("any", 1, 1e11, 1e10, (Level(DRAM, None, 1e9),))


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
    assert slow.control.limit.ceiling == DRAM and slow.costs[1].limit.ceiling in (INT8, FMA)
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
