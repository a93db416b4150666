"""Law: a recurrent state belongs to one position. Kept there, shared or gone back to, it continues with the bits of a fresh run."""

import itertools

import numpy as np
import pytest
from tests.laws.paths import ISAS, Tinyrun, Trace, prompt, state_hash
from tests.tiny import CASES, TinyKimi, TinyLfm2, TinyQwen35

import quaff.engine.runner as runner_module
from quaff.batch import Batch
from quaff.schedule import Cell, Order, compile_cells

RECURRENT = [name for name, tiny in CASES.items() if isinstance(tiny, TinyLfm2 | TinyQwen35 | TinyKimi)]
BLOCK_COLUMNS = 64  # kDeltaColumns
PLACES = (1, 2, 3, 63, 64, 65, 100, 149)
ORDERS = [Order("token"), Order("chunk", 1), Order("chunk", 7), Order("chunk", 64), Order("layer", 33)]


@pytest.fixture(params=RECURRENT)
def model(request: pytest.FixtureRequest, models: dict[str, Tinyrun]) -> Tinyrun:
    return models[request.param]


@pytest.mark.parametrize(("isa", "threads", "order"), list(itertools.product(ISAS, (1, 3), ORDERS)), ids=str)
def test_snapshots_on_the_way_are_the_states_of_shorter_prompts(model: Tinyrun, isa: str, threads: int, order: Order) -> None:
    """Steps that end elsewhere leave them, whatever the cells; forks from there, and the sequence cut back to them, go on as if cold."""
    tokens = prompt(model.vocab, 150, seed=1)
    model.use(isa, threads)
    cold = model.read(tokens)
    base = model.cache.create()
    for place in PLACES:
        model.cache.snapshot(base, place)
    for begin, end in ((0, 40), (40, 41), (41, 150)):
        model.step([(base, tokens[begin:end])], order, [Trace()])
    for place in PLACES:
        twin = model.cache.fork(base, place)
        assert model.cache.kv_sha256(twin) == state_hash(model, tokens[:place])
        trace = Trace()
        model.step([(twin, tokens[place:])], Order("chunk", 50), [trace])
        assert not trace.difference(cold.after(place)), f"continued at {place}"
        model.cache.free(twin)
    for place in reversed(PLACES):
        model.cache.truncate(base, place)
    trace = Trace()
    model.step([(base, tokens[1:])], order, [trace])
    assert not trace.difference(cold.after(1))
    model.cache.free(base)
    assert model.cache.states.slots_in_use == (0,) * len(model.graph.state_kinds)


def test_states_of_both_kinds_of_decay_are_split_among_workers(models: dict[str, Tinyrun]) -> None:
    """The models above must have states of several blocks of columns: narrower ones are one worker's."""
    rules = [layer.delta for name in RECURRENT for layer in models[name].graph.config.layers if layer.delta is not None]
    assert {rule.decay_each for rule in rules if rule.value_dim > BLOCK_COLUMNS} == {False, True}


def test_lengths_without_a_state_are_refused(model: Tinyrun) -> None:
    tokens = prompt(model.vocab, 90, seed=2)
    sequence = model.cache.create()
    model.cache.snapshot(sequence, 50)
    model.step([(sequence, tokens)], Order("chunk", 64), [Trace()])
    assert [model.cache.longest(sequence, n) for n in (90, 89, 51, 50, 49, 0)] == [90, 50, 50, 50, 0, 0]
    for length in (89, 51, 49):
        assert not model.cache.can_shorten(sequence, length)
        for refused in (model.cache.truncate, model.cache.fork):
            with pytest.raises(ValueError, match=r"left behind; there are some at \(50, 90\)"):
                refused(sequence, length)
    model.cache.truncate(sequence, 0)
    trace = Trace()
    model.step([(sequence, tokens)], Order("chunk", 64), [trace])
    assert not trace.difference(model.read(tokens))
    model.cache.free(sequence)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("order", ORDERS[2:], ids=str)
def test_a_step_that_ended_early_leaves_the_state_where_it_began(
    model: Tinyrun, order: Order, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have gone further than others: all of it is dropped, and the step is run again."""
    tokens = prompt(model.vocab, 150, seed=3)
    cold = model.read(tokens)
    sequence = model.cache.create()
    model.step([(sequence, tokens[:30])], Order("chunk", 30), [Trace()])
    before = model.cache.kv_sha256(sequence)
    batch = Batch((model.cache.segment(sequence, np.array(tokens[30:], dtype=np.int32)),))
    cells = list(order.cells(model.runner.grid(batch)))
    with monkeypatch.context() as patch:
        patch.setattr("quaff.schedule.check_schedule", lambda grid, cells: None)
        model.runner.run(batch, cells[: int(len(cells) * share)])
    model.cache.commit(sequence, 30)
    assert model.cache.kv_sha256(sequence) == before
    trace = Trace()
    model.step([(sequence, tokens[30:])], order, [trace])
    assert not trace.difference(cold.after(30))
    model.cache.free(sequence)


def test_a_snapshot_taken_one_row_off_fails_the_comparison(model: Tinyrun) -> None:
    """Negative control: a fork at 64 that begins with the state of 63."""
    tokens = prompt(model.vocab, 100, seed=4)
    cold = model.read(tokens)
    base = model.cache.create()
    for place in (63, 64):
        model.cache.snapshot(base, place)
    model.step([(base, tokens)], Order("chunk", 50), [Trace()])
    kept = model.cache.states._sequences[base].kept
    kept[63], kept[64] = kept[64], kept[63]
    assert model.cache.kv_sha256(model.cache.fork(base, 64)) != state_hash(model, tokens[:64])
    twin, trace = model.cache.fork(base, 64), Trace()
    model.step([(twin, tokens[64:])], Order("chunk", 50), [trace])
    assert (trace.logits[0][0] != cold.logits[0][64]).any()
    assert trace.difference(cold.after(64))


def test_rows_out_of_order_fail_the_comparison(model: Tinyrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the second half of the first mixer runs before the first half."""
    tokens = prompt(model.vocab, 100, seed=5)
    cold = model.read(tokens)

    def unchecked(grid: object, cells: list[Cell]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr("quaff.schedule.check_schedule", lambda grid, cells: None)
            return compile_cells(grid, cells)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "compile_cells", unchecked)
    stages = len(model.graph.stages)
    mixer = next(i for i, s in enumerate(model.graph.stages) if s.state_macs_per_row)
    cells = [Cell(0, ((0, 100),))]
    for stage in range(1, stages):
        halves = [Cell(stage, ((0, 50),)), Cell(stage, ((50, 100),))]
        cells += reversed(halves) if stage == mixer else halves
    assert model.read(tokens, cells, checked=False).difference(cold)
