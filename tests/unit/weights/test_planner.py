"""The memory planner: what it spends a budget on, in which order things shrink, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from quaff.models import FAMILIES, read_model
from quaff.models.family import Tensors
from quaff.weights.budget import Accountant, process_memory_bytes
from quaff.weights.plan import Plan
from quaff.weights.planner import MARGIN_BYTES, Ask, make_ask, make_plan
from quaff.weights.sizes import packed_sizes

BASE = 50 << 20
F32, Q4_0 = 0, 2


class Model:
    """A model as far as a plan needs it."""

    def __init__(self, graph: Graph, tensors: Tensors) -> None:
        self.graph = graph
        self.sizes: Mapping[str, int] = packed_sizes(tensors)
        pools = [_native.PagePool(len(k.layers), k.kv_heads, k.dim, k.value_dim) for k in self.graph.kv_kinds]
        states = [_native.StatePool(len(k.layers), k.size) for k in self.graph.state_kinds]
        self.kv_bytes = PageCache(self.graph.kv_kinds, pools, Accountant(), self.graph.state_kinds, states).peak_bytes

    @classmethod
    def written(cls, tiny: Tiny, path: Path) -> Model:
        with open_checkpoint(tiny.write(path)) as checkpoint:
            model = read_model(checkpoint)
            return cls(build_graph(model.config, model.family, model.tensors), model.tensors)

    def plan(self, memory_bytes: int, positions: int = 300, **more: int) -> Plan:
        return make_plan(self.graph, self.sizes, self.kv_bytes, Ask(memory_bytes, BASE, positions, **more))

    def least(self, positions: int = 300, **more: int) -> int:
        """The smallest budget, in bytes, as the refusal names it."""
        with pytest.raises(MemoryBudgetError) as refused:
            self.plan(1, positions, **more)
        return int(str(refused.value).split("smallest budget that will do is ")[1].split("MiB")[0]) << 20


# Units that are large beside buffers, roundings and cells.
LARGE = Tiny(dim=1024, ffn_dim=4096, layers=6, heads=8, kv_heads=2, head_dim=64, vocab=4096, tied=False)


def layout(architecture: str, layers: int, dim: int, ffn_dim: int, heads: int, vocab: int, tied: bool = False, **more: object) -> Model:
    """Of a model in Q4_0 that has no file: larger ones than a test would write."""
    family = FAMILIES[architecture]
    sizes = {"embedding_length": dim, "block_count": layers, "attention.head_count": heads, "feed_forward_length": ffn_dim, **more}
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    metadata |= {f"{architecture}.context_length": 8192, f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5}
    config = family.config(metadata, {"token_embd.weight": ((vocab, dim), Q4_0)})
    wanted = [s for s in family.table(config) if not s.optional or s.name == "output.weight" and not tied]
    tensors: Tensors = {s.name: (s.shape, F32 if len(s.shape) == 1 or s.float32 or "ffn_gate_inp" in s.name else Q4_0) for s in wanted}
    return Model(build_graph(config, family, tensors), tensors)


LAYOUTS: dict[str, Callable[[], Model]] = {
    "seven billion": lambda: layout("llama", 32, 4096, 11008, 32, 32000),
    "large vocabulary": lambda: layout("llama", 32, 4096, 14336, 32, 128256, **{"attention.head_count_kv": 8}),
    "tied": lambda: layout("llama", 24, 2048, 8192, 32, 49152, tied=True),
    "experts": lambda: layout(
        "qwen3moe",
        48,
        2048,
        6144,
        32,
        151936,
        expert_count=128,
        expert_used_count=8,
        expert_feed_forward_length=768,
        **{"attention.head_count_kv": 4, "attention.key_length": 128},
    ),
}


@pytest.fixture(scope="module")
def layouts() -> dict[str, Model]:
    return {name: make() for name, make in LAYOUTS.items()}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.written(LARGE, tmp_path_factory.mktemp("plan") / "large.gguf")


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
        assert plan.pinned_bytes == sum(u.kept_bytes for u in plan.units if u.stage in plan.pinned)
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


@pytest.mark.parametrize("positions", [300, 4000])
@pytest.mark.parametrize("name", ["large", *LAYOUTS])
def test_a_larger_budget_never_reads_more(large: Model, layouts: dict[str, Model], name: str, positions: int) -> None:
    """Passes of a prompt and bytes from disk for a token after it, over hundreds of budgets: up to all weights, and close to the least."""
    model = {"large": large, **layouts}[name]
    least, weights = model.least(positions), sum(model.sizes.values())
    steps = 400 if name == "large" else 40  # of its 4,000 positions, few budgets hold some weights and not all
    budgets = [*(least + i * weights // steps for i in range(steps * 5 // 4)), *(least + i * weights // 1000 for i in range(50))]
    plans = [model.plan(budget, positions) for budget in sorted(budgets)]
    passes = [-(-positions // plan.pass_rows) for plan in plans if not plan.resident]
    assert passes == sorted(passes, reverse=True)
    assert plans[0].token_bytes > 0 == plans[-1].token_bytes
    for plan, more in zip(plans, plans[1:], strict=False):
        assert more.token_bytes <= plan.token_bytes, f"{plan.memory_bytes >> 20} MiB: {plan.items}, {more.memory_bytes >> 20}: {more.items}"
    assert len({plan.token_bytes for plan in plans}) > (2 if name == "large" else 20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quarter_of_a_model_saves_a_quarter_of_a_token(layouts: dict[str, Model], name: str) -> None:
    """Of mixtures it saves twice as much, for what every row reads stays first."""
    model = layouts[name]
    least, more = model.plan(model.least()), model.plan(model.least() + sum(model.sizes.values()) // 4)
    saved = 1 - more.token_bytes / least.token_bytes
    assert 0.2 < saved < 0.3 or name == "experts" and saved > 0.5


@pytest.mark.parametrize("name", LAYOUTS)
def test_things_shrink_in_the_stated_order(layouts: dict[str, Model], name: str) -> None:
    """From the least budget up: rows of a pass come back first, then the chunk, ... and pins only when all of that is whole."""
    model, positions = layouts[name], 4000
    more = {"logits_rows": 16, "prefix_cache_bytes": 8 << 20}
    step = sum(model.sizes.values()) // 250
    plans = [model.plan(model.least(positions) + n * step, positions, **more) for n in range(270)]
    assert plans[-1].resident and plans[-1].prefix_cache_bytes == 8 << 20
    streamed = [plan for plan in plans if not plan.resident]
    sizes = [(p.pass_rows, p.chunk, p.head_block_rows, p.logits_rows, p.expert_slot_bytes) for p in streamed]
    assert sizes == sorted(sizes) and len(set(sizes)) > 5
    assert sizes[-1][:4] == (4032, 512, streamed[-1].head_block_rows, 16)
    pinned = [size for size, plan in zip(sizes, streamed, strict=True) if plan.pinned]
    assert len(pinned) > 150 and set(pinned) == {sizes[-1]}


def test_what_every_row_reads_stays_before_experts(layouts: dict[str, Model]) -> None:
    """A token reads all of an attention's weights, but eight of a hundred and twenty-eight experts."""
    model = layouts["experts"]
    plans = [model.plan(model.least() + (n << 28)) for n in range(60)]
    mixtures = {unit.stage for unit in plans[0].units if unit.experts}
    dense = {unit.stage for unit in plans[0].units if unit.names} - mixtures
    assert all(not plan.pinned & mixtures or plan.pinned >= dense for plan in plans)
    assert any(plan.pinned & mixtures for plan in plans) and any(plan.pinned and not plan.pinned & mixtures for plan in plans)


def test_what_stays_is_spread_over_the_model(layouts: dict[str, Model]) -> None:
    """The disk works while what stays computes: nowhere are many pinned stages next to each other, with streamed ones elsewhere."""
    model = layouts["seven billion"]
    for share in (0.25, 0.5, 0.7):
        plan = model.plan(model.least() + int(share * sum(model.sizes.values())))
        streamed = [unit.stage for unit in plan.units if unit.all_bytes and unit.stage not in plan.pinned]
        gaps = [b - a for a, b in zip(streamed, streamed[1:], strict=False)]
        assert len(plan.pinned) > 10 and max(gaps) <= 2 + len(plan.units) // len(streamed)


def test_slots_shrink_when_all_that_is_large_stays(layouts: dict[str, Model]) -> None:
    """Two slots of a feed-forward network are worth more than the attentions that fit beside them."""
    model = layouts["seven billion"]
    plan = model.plan(model.least() + int(0.75 * sum(model.sizes.values())))
    attention = plan.units[1].nbytes
    assert plan.slot_bytes == attention < plan.units[2].nbytes
    assert plan.pinned >= {unit.stage for unit in plan.units[:-1] if unit.nbytes > attention}


def test_passes_are_even(large: Model) -> None:
    """A prompt that takes two passes is cut in halves, not into as much as fits and a rest."""
    rows = {large.plan(large.least(4000) + (n << 20), 4000).pass_rows for n in range(20)}
    assert rows <= {64 * math.ceil(63 / n) for n in range(1, 64)}
    assert len(rows) > 3


def test_a_tied_head_is_pinned_with_its_table(layouts: dict[str, Model]) -> None:
    model = layouts["tied"]
    head, weights = len(model.graph.stages) - 1, sum(model.sizes.values())
    plans = [model.plan(model.least() + i * weights // 20) for i in range(20)]
    assert plans[0].units[head].names == ("token_embd.weight",)
    for plan in plans:
        assert plan.resident or (plan.embedding == "pinned") == (head in plan.pinned)
        assert plan.resident or plan.pinned_bytes == sum(u.all_bytes for u in plan.units if u.stage in plan.pinned - {head})
    assert {plan.embedding for plan in plans} == {"pinned", "rows"}


def test_a_large_head_is_cut_into_blocks(tmp_path: Path) -> None:
    """A vocabulary far wider than the model: a slot holds some rows of the head, not all."""
    model = Model.written(replace(LARGE, ffn_dim=64, vocab=32768), tmp_path / "wide.gguf")
    plan = model.plan(model.least())
    others = max(unit.nbytes for unit in plan.units[:-1])
    assert plan.head_block_rows < 32768
    assert plan.slot_bytes == max(others, plan.units[-1].nbytes * plan.head_block_rows // 32768)


def test_experts_have_memory_of_their_own(tmp_path: Path) -> None:
    tiny = replace(CASES["qwen3moe"], dim=256, expert_dim=256, experts=16, used=2, layers=4)
    model = Model.written(tiny, tmp_path / "moe.gguf")
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
    model = Model.written(CASES[name], tmp_path / "tiny.gguf")
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
