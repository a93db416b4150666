"""The memory planner: what it spends a budget on, in which order things shrink, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import CASES, Tiny

from quaff import _native
from quaff.cache.pages import PageCache
from quaff.checkpoint import open_checkpoint
from quaff.config import Workload
from quaff.errors import MemoryBudgetError
from quaff.graph.builder import build_graph
from quaff.graph.program import Graph
from quaff.models import read_model
from quaff.weights.budget import Accountant, process_memory_bytes
from quaff.weights.plan import Plan
from quaff.weights.planner import MARGIN_BYTES, Ask, make_ask, make_plan
from quaff.weights.sizes import packed_sizes

BASE = 50 << 20


class Model:
    """A model as far as a plan needs it."""

    def __init__(self, tiny: Tiny, path: Path) -> None:
        tiny.write(path)
        with open_checkpoint(path) as checkpoint:
            model = read_model(checkpoint)
            self.graph: Graph = build_graph(model.config, model.family, model.tensors)
            self.sizes: Mapping[str, int] = packed_sizes(model.tensors)
        pools = [_native.PagePool(len(k.layers), k.kv_heads, k.dim, k.value_dim) for k in self.graph.kv_kinds]
        states = [_native.StatePool(len(k.layers), k.size) for k in self.graph.state_kinds]
        self.kv_bytes = PageCache(self.graph.kv_kinds, pools, Accountant(), self.graph.state_kinds, states).peak_bytes

    def plan(self, memory_bytes: int, positions: int = 300, **more: int) -> Plan:
        return make_plan(self.graph, self.sizes, self.kv_bytes, Ask(memory_bytes, BASE, positions, **more))

    def least(self, positions: int = 300, **more: int) -> int:
        """The smallest budget, in bytes, as the refusal names it."""
        with pytest.raises(MemoryBudgetError) as refused:
            self.plan(1, positions, **more)
        return int(str(refused.value).split("smallest budget that will do is ")[1].split("MiB")[0]) << 20


# Units that are large beside buffers, roundings and cells.
LARGE = Tiny(dim=1024, ffn_dim=4096, layers=6, heads=8, kv_heads=2, head_dim=64, vocab=4096, tied=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(LARGE, tmp_path_factory.mktemp("plan") / "large.gguf")


def enough(model: Model) -> int:
    return sum(model.sizes.values()) + model.least() + (256 << 20)


def test_a_model_that_fits_stays_in_memory(large: Model) -> None:
    plan = large.plan(enough(large))
    assert plan.resident
    assert plan.pass_bytes == 0
    assert (plan.chunk, plan.pass_rows) == (320, 320)  # of 300 positions, whole pages
    assert {item.what for item in plan.items} >= {"weights", "KV state of 300 tokens"}


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), positions=st.integers(1, 4000), sequences=st.integers(1, 3))
def test_no_plan_exceeds_its_budget(large: Model, share: float, positions: int, sequences: int) -> None:
    least = large.least(positions, sequences=sequences)
    budget = least + int(share * (sum(large.sizes.values()) + (64 << 20)))
    plan = large.plan(budget, positions, sequences=sequences)
    assert plan.planned_bytes <= budget == plan.memory_bytes
    assert plan.kv_bytes == sequences * large.kv_bytes(positions, plan.pass_rows)
    assert plan.scratch_bytes >= large.graph.scratch_bytes(plan.pass_rows, min(plan.chunk, plan.pass_rows))
    if not plan.resident:
        left = [u.nbytes for u in plan.units[:-1] if u.stage not in plan.pinned]
        assert plan.slot_bytes >= max(left, default=0)
        assert plan.pinned_bytes == sum(u.all_bytes for u in plan.units if u.stage in plan.pinned)
        assert plan.head_block_rows % 16 == 0


def test_the_smallest_budget_does_and_less_does_not(large: Model) -> None:
    least = large.least()
    plan = large.plan(least)
    assert (plan.chunk, plan.embedding, plan.slots) == (64, "rows", 2)
    assert plan.memory_bytes - plan.planned_bytes < 1 << 20
    with pytest.raises(MemoryBudgetError) as refused:
        large.plan(least - (1 << 20))
    text = str(refused.value)
    for word in ("the process itself", "2 slots of", "read buffers", "KV state of 300 tokens", "logits", f"{least >> 20}MiB"):
        assert word in text
    assert "\n" not in text


def test_more_memory_never_reads_more(large: Model) -> None:
    """Among budgets that allow the same cells, the next one pins no less, to within the smallest unit; passes never become more."""
    plans = [large.plan(large.least() + (n << 20)) for n in range(0, 60, 2)]
    smallest = min(unit.all_bytes for unit in plans[0].units if unit.all_bytes)
    for plan, more in zip(plans, plans[1:], strict=False):
        assert more.pass_rows >= plan.pass_rows
        if (plan.chunk, plan.embedding, plan.resident) == (more.chunk, more.embedding, more.resident):
            assert more.pass_bytes < plan.pass_bytes + smallest
    assert plans[-1].resident
    assert {len(plan.pinned) for plan in plans} >= {1, 5, 10}


def test_things_shrink_in_the_stated_order(large: Model) -> None:
    """From the least budget up: rows of a pass come back first, then the chunk, then the embedding and pins, and the prefix cache last."""
    positions, wish = 4000, 8 << 20
    whole = -(-positions // 64) * 64
    plans = [large.plan(large.least(positions) + (n << 20), positions, prefix_cache_bytes=wish) for n in range(80)]
    unit = max(unit.all_bytes for unit in plans[0].units)
    assert plans[0].pass_rows < whole
    for plan in plans:
        free = plan.memory_bytes - plan.planned_bytes + plan.prefix_cache_bytes
        later = free + plan.pinned_bytes + plan.embedding_bytes
        if plan.resident:
            continue
        assert plan.prefix_cache_bytes < unit  # less than another pin
        if plan.pinned_bytes > unit and plan.embedding == "rows":
            assert later < large.sizes["token_embd.weight"] + unit
        if plan.pass_rows < whole:
            cells = (plan.chunk - 64) * large.graph.scratch_bytes_per_row
            assert later + cells < (whole - plan.pass_rows) * large.graph.config.dim * 4
    assert plans[-1].prefix_cache_bytes == wish


def test_passes_are_even(large: Model) -> None:
    """A prompt that takes two passes is cut in halves, not into as much as fits and a rest."""
    rows = {large.plan(large.least(4000) + (n << 20), 4000).pass_rows for n in range(20)}
    assert rows <= {64 * math.ceil(63 / n) for n in range(1, 64)}
    assert len(rows) > 3


def test_a_tied_head_is_pinned_with_its_table(tmp_path: Path) -> None:
    model = Model(replace(LARGE, tied=True), tmp_path / "tied.gguf")
    head = len(model.graph.stages) - 1
    least = model.plan(model.least())
    assert least.units[head].names == ("token_embd.weight",) and head not in least.pinned
    more = model.plan(model.least() + (30 << 20))
    assert more.embedding == "pinned" and head in more.pinned
    assert more.pinned_bytes == sum(u.all_bytes for u in more.units if u.stage in more.pinned - {head})


def test_a_large_head_is_cut_into_blocks(tmp_path: Path) -> None:
    """A vocabulary far wider than the model: a slot holds some rows of the head, not all."""
    model = Model(replace(LARGE, ffn_dim=64, vocab=32768), tmp_path / "wide.gguf")
    plan = model.plan(model.least())
    others = max(unit.nbytes for unit in plan.units[:-1])
    assert plan.head_block_rows < 32768
    assert plan.slot_bytes == max(others, plan.units[-1].nbytes * plan.head_block_rows // 32768)


def test_experts_have_memory_of_their_own(tmp_path: Path) -> None:
    tiny = replace(CASES["qwen3moe"], dim=256, expert_dim=256, experts=16, used=2, layers=4)
    model = Model(tiny, tmp_path / "moe.gguf")
    plan = model.plan(model.least())
    mixtures = [unit for unit in plan.units if unit.experts]
    assert len(mixtures) == 4
    assert all(len(unit.experts) == 3 and unit.experts_bytes == 16 * unit.expert_bytes for unit in mixtures)
    assert plan.expert_slot_bytes >= 2 * mixtures[0].expert_bytes
    assert plan.slot_bytes < mixtures[0].experts_bytes
    # Their cells span a pass, and so does the scratch that is priced.
    assert plan.scratch_bytes >= model.graph.scratch_bytes(plan.pass_rows, plan.pass_rows)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_kind_of_model_can_be_planned(name: str, tmp_path: Path) -> None:
    model = Model(CASES[name], tmp_path / "tiny.gguf")
    plan = model.plan(model.least())
    streamed = {n for unit in plan.units for n in (*unit.names, *unit.experts)}
    kept = {n for stage in model.graph.stages for n in (*stage.small_weights, *stage.tables)}
    assert streamed | kept == set(model.graph.weight_names)
    assert plan.small_bytes + plan.pass_bytes <= plan.weight_bytes + model.sizes["token_embd.weight"]
    assert not plan.resident or plan.weight_bytes < 2 * plan.slot_bytes + plan.read_buffer_bytes + (8 << 20)
    assert model.plan(enough(model)).resident


def test_an_ask_is_of_this_process_and_within_the_context() -> None:
    ask = make_ask(1 << 30, Workload(lambda tokenizer: len(str(tokenizer)), sequences=2, spare_bytes=5), "four", 4096, vocab=1 << 20)
    assert (ask.memory_bytes, ask.positions, ask.sequences, ask.logits_rows) == (1 << 30, 4, 2, 4)
    assert abs(ask.base_bytes - MARGIN_BYTES - 5 - process_memory_bytes()[0]) < 8 << 20
    assert make_ask(1 << 30, Workload(9000), None, 512, vocab=100).positions == 512
    assert make_ask(1 << 30, Workload(), None, 1 << 20, vocab=1 << 20).logits_rows == 4
    assert make_ask("auto", Workload(), None, 512, vocab=100).memory_bytes > process_memory_bytes()[0]
