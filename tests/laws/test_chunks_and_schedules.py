"""Law: chunk size and order of cells never show, for any thread count and instruction set."""

import itertools

import pytest
from tests.laws.paths import ISAS, WHOLE, Tinyrun, Trace, prompt

import quaff.engine.runner as runner_module
from quaff.schedule import Cell, CompiledSchedule, Grid, Order, chunk_major, compile_cells, layer_major

LENGTH = 530
CHUNKS = (1, 2, 7, 16, 31, 32, 33, 64, 511, 512, 513, LENGTH)
ORDERS = [Order("token"), *(Order(name, chunk) for name in ("chunk", "layer") for chunk in CHUNKS)]  # type: ignore[arg-type]
THREADS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def wholes() -> dict[int, Trace]:
    """The baseline of each model: the whole prompt in one chunk, scalar, one thread."""
    return {}


def whole(model: Tinyrun, wholes: dict[int, Trace]) -> Trace:
    if id(model) not in wholes:
        model.use("scalar", 1)
        wholes[id(model)] = model.read(prompt(model.vocab, LENGTH))
    return wholes[id(model)]


@pytest.mark.parametrize(("isa", "threads"), list(itertools.product(ISAS, THREADS)))
def test_every_chunk_size_and_schedule_gives_the_same_bits(model: Tinyrun, wholes: dict[int, Trace], isa: str, threads: int) -> None:
    """Chunk size shows (mlx-lm 619, llama.cpp 4479): every row's logits and all KV bytes are equal."""
    expected = whole(model, wholes)
    model.use(isa, threads)
    runtime = model.runner._runtime
    owned, joined, shared = runtime.owned_launches, runtime.joined_launches, runtime.shared_launches
    for order in ORDERS:
        difference = model.read(prompt(model.vocab, LENGTH), order).difference(expected)
        assert not difference, f"{order} on {isa} with {threads} threads: {difference}"
    # Long cells give each worker rows of his own, with which he goes from op to op; single rows share out their pages, of which windows may
    # leave too few.
    assert (runtime.owned_launches > owned) == (runtime.joined_launches > joined) == (threads > 1)
    assert (runtime.shared_launches > shared) == (threads > 1) or all(kind.window for kind in model.graph.kv_kinds)


def mixers_backwards(grid: Grid) -> list[Cell]:
    """A mixer attends to rows that are not written yet."""
    cells = list(layer_major(grid, 100))
    mixers = [i for i, c in enumerate(cells) if grid.stages[c.stage] == "mixer" and c.stage == 1]
    for i, j in zip(mixers, reversed(mixers), strict=True):
        if i < j:
            cells[i], cells[j] = cells[j], cells[i]
    return cells


def ffn_forgotten(grid: Grid) -> list[Cell]:
    """One chunk skips one ffn."""
    cells = list(chunk_major(grid, 100))
    return [c for c in cells if not (c.stage == 2 and c.ranges[0][0] == 100)]


def row_twice(grid: Grid) -> list[Cell]:
    """A residual is added twice to one row."""
    cells = list(chunk_major(grid, 100))
    at = next(i for i, c in enumerate(cells) if c.stage == 2)
    return [*cells[: at + 1], Cell(2, ((50, 51),)), *cells[at + 1 :]]


@pytest.mark.parametrize("wrong", [mixers_backwards, ffn_forgotten, row_twice])
def test_a_wrong_order_fails_the_comparison(
    model: Tinyrun, wholes: dict[int, Trace], wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the checker out of the way, an illegal order runs and its bits differ."""
    expected = whole(model, wholes)
    tokens = prompt(model.vocab, LENGTH)
    grid = Grid(tuple(s.kind for s in model.graph.stages), ((0, LENGTH),), tuple(range(LENGTH)))
    cells = wrong(grid)  # type: ignore[operator]

    def unchecked(grid: Grid, cells: list[Cell]) -> CompiledSchedule:
        with monkeypatch.context() as patch:
            patch.setattr("quaff.schedule.check_schedule", lambda grid, cells: None)
            return compile_cells(grid, cells)

    monkeypatch.setattr(runner_module, "compile_cells", unchecked)
    model.use(threads=2)
    assert model.read(tokens, cells).difference(expected)


def test_two_then_three_is_two_and_three(model: Tinyrun) -> None:
    """Chunk size shows (llama.cpp 4479): evaluating [2] and then [3] must be evaluating [2, 3]."""
    assert not model.read([2, 3], cuts=[1]).difference(model.read([2, 3]))


def test_whole_prompt_runs_in_one_chunk(model: Tinyrun) -> None:
    """The baseline is what it says: each stage once."""
    before = model.counters
    model.read(prompt(model.vocab, 100), WHOLE)
    spent = model.counters - before
    assert spent.launches == sum(stage.launches for stage in model.graph.stages)
    layers = model.graph.stages[1 : max(i for i, s in enumerate(model.graph.stages) if s.kind == "mixer") + 1]
    assert spent.weight_bytes_touched == sum(model.weights[n].nbytes for s in layers for n in s.linear_weights)
