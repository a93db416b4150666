"""Orders of the grid are legal, mutations of them are not, and costs follow the formulas."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaff.errors import ConfigError, ScheduleError
from quaff.schedule import (
    Cell,
    Grid,
    Order,
    check_schedule,
    choose_order,
    chunk_major,
    compile_cells,
    compile_order,
    default_chunk,
    layer_major,
    token_major,
)


def stage_kinds(layers: int) -> tuple[str, ...]:
    return ("embed", *(("mixer", "ffn") * layers), "head")


def make_grid(lengths: list[int], logits: set[int], layers: int = 2) -> Grid:
    spans, row = [], 0
    for n in lengths:
        spans.append((row, row + n))
        row += n
    return Grid(stage_kinds(layers), tuple(spans), tuple(sorted(r for r in logits if r < row)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    logits = draw(st.sets(st.integers(0, sum(lengths) - 1)))
    return make_grid(lengths, logits, draw(st.integers(1, 3)))


ORDERS = st.one_of(
    st.just(Order("token")),
    st.integers(1, 20).map(lambda c: Order("chunk", c)),
    st.integers(1, 20).map(lambda c: Order("layer", c)),
    st.integers(1, 20).map(lambda c: Order("layer", c, cut=True)),
)


def work(cells: list[Cell]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for stage, ranges in cells:
        out.setdefault(stage, []).extend(r for b, e in ranges for r in range(b, e))
    return out


@settings(deadline=None)
@given(grids(), ORDERS)
def test_every_order_is_legal_and_does_exactly_the_needed_work(grid: Grid, order: Order) -> None:
    cells = list(order.cells(grid))
    check_schedule(grid, cells)
    done = work(cells)
    for stage, kind in enumerate(grid.stages):
        past_last_mixer = stage > grid.last_mixer
        expected = list(grid.logits_rows) if past_last_mixer else list(range(grid.rows))
        assert sorted(done.get(stage, [])) == expected, (stage, kind)


@settings(deadline=None)
@given(grids(), ORDERS)
def test_no_cell_has_more_rows_than_the_order_says(grid: Grid, order: Order) -> None:
    most = max(sum(e - b for b, e in cell.ranges) for cell in order.cells(grid))
    assert most == order.cell_rows(grid.rows)


@settings(deadline=None)
@given(grids(), st.integers(1, 20))
def test_layer_major_cells_of_a_stage_follow_each_other(grid: Grid, chunk: int) -> None:
    """One walk over the stages, cut or not: what a stage needs is loaded once."""
    for cut in (False, True):
        stages = [cell.stage for cell in Order("layer", chunk, cut).cells(grid)]
        assert stages == sorted(stages)


@settings(deadline=None)
@given(grids(), ORDERS, st.data())
def test_random_legal_interleavings_pass(grid: Grid, order: Order, data: st.DataObject) -> None:
    """Any topological order of single-row cells is legal, not only the named ones."""
    needed = [[r for b, e in ranges for r in range(b, e)] for ranges in grid.needed()]
    level = dict.fromkeys(range(grid.rows), 0)
    cells = []
    first = {b for b, _ in grid.spans}

    def ready() -> Iterator[int]:
        for row, stage in level.items():
            if stage == len(grid.stages) or row not in needed[stage]:
                continue
            if grid.stages[stage] != "mixer" or row in first or level[row - 1] > stage:
                yield row

    while rows := list(ready()):
        row = data.draw(st.sampled_from(rows))
        cells.append(Cell(level[row], ((row, row + 1),)))
        level[row] += 1
    check_schedule(grid, cells)


@settings(max_examples=300, deadline=None)
@given(grids(), ORDERS, st.data())
def test_mutated_orders_are_rejected(grid: Grid, order: Order, data: st.DataObject) -> None:
    cells = list(order.cells(grid))
    i = data.draw(st.integers(0, len(cells) - 1))
    kind = data.draw(st.sampled_from(["drop", "repeat", "move to the front", "shrink", "other stage"]))
    if kind == "drop":
        bad = cells[:i] + cells[i + 1 :]
    elif kind == "repeat":
        bad = [*cells[: i + 1], *cells[i:]]
    elif kind == "move to the front":
        rows = {r for b, e in cells[i].ranges for r in range(b, e)}
        if cells[i].stage == 0 or not rows:
            return
        bad = [cells[i], *cells[:i], *cells[i + 1 :]]
    elif kind == "shrink":
        b, e = cells[i].ranges[0]
        shorter = ((b + 1, e), *cells[i].ranges[1:]) if e - b > 1 else cells[i].ranges[1:]
        bad = [*cells[:i], Cell(cells[i].stage, shorter), *cells[i + 1 :]]
    else:
        stage = data.draw(st.integers(-1, len(grid.stages)).filter(lambda s: s != cells[i].stage))
        bad = [*cells[:i], Cell(stage, cells[i].ranges), *cells[i + 1 :]]
    with pytest.raises(ScheduleError):
        compile_cells(grid, bad)


GRID = make_grid([4, 3], {3, 6}, layers=1)
LEGAL = [Cell(0, ((0, 7),)), Cell(1, ((0, 7),)), Cell(2, ((3, 4), (6, 7))), Cell(3, ((3, 4), (6, 7)))]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([LEGAL[1], LEGAL[0], *LEGAL[2:]], "not done"),
        ([LEGAL[0], Cell(1, ((1, 7),)), Cell(1, ((0, 1),)), *LEGAL[2:]], "computes row 1 before row 0 of the same sequence"),
        ([LEGAL[0], Cell(1, ((0, 4),)), Cell(1, ((5, 7),)), Cell(1, ((4, 5),)), *LEGAL[2:]], "computes row 5 before row 4"),
        ([*LEGAL, LEGAL[3]], "twice"),
        (LEGAL[:3], "row 3 of stage 3 is never computed"),
        ([LEGAL[0], LEGAL[1], Cell(2, ((2, 4), (6, 7))), LEGAL[3]], "logits are not wanted"),
        ([LEGAL[0], Cell(1, ((0, 4), (3, 7))), *LEGAL[2:]], "out of order"),
        ([Cell(0, ((0, 8),)), *LEGAL[1:]], "outside the batch"),
        ([Cell(0, ()), *LEGAL[1:]], "no rows"),
        ([Cell(4, ((0, 7),)), *LEGAL], "names stage 4"),
    ],
)
def test_each_illegality_is_named(cells: list[Cell], says: str) -> None:
    check_schedule(GRID, LEGAL)
    with pytest.raises(ScheduleError, match=says):
        check_schedule(GRID, cells)


def test_segments_are_independent() -> None:
    """The second sequence may run first, and a mixer cell may mix segments."""
    check_schedule(GRID, [LEGAL[0], Cell(1, ((4, 6),)), Cell(1, ((0, 2), (6, 7))), Cell(1, ((2, 4),)), *LEGAL[2:]])


def test_cell_counts_are_those_of_the_design() -> None:
    grid = make_grid([100], {99}, layers=3)
    stages = len(grid.stages)
    assert len(list(token_major(grid))) == 100 * (stages - 2) + 2
    assert len(list(chunk_major(grid, 32))) == 4 * (stages - 2) + 2
    assert len(list(layer_major(grid, 32))) == 3 * 4 + 3 + 2
    assert [c.ranges for c in layer_major(grid, 32) if grid.stages[c.stage] == "ffn"] == [((0, 100),), ((0, 100),), ((99, 100),)]


def test_no_logits_means_no_head_and_no_last_ffn() -> None:
    grid = make_grid([5], set(), layers=2)
    assert {c.stage for c in chunk_major(grid, 2)} == {0, 1, 2, 3}


def test_control_is_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_order("chunk", 64) == Order("chunk", 64)
    assert choose_order("token", 64) == Order("token")
    monkeypatch.setenv("QUAFF_BATCHED_PREFILL", "0")
    assert choose_order("layer", 64) == Order("token")


def test_bad_orders_are_refused() -> None:
    with pytest.raises(ConfigError):
        Order("chunk", 0)
    with pytest.raises(ConfigError):
        Order("diagonal", 1)  # type: ignore[arg-type]


def test_compiled_arrays_describe_the_cells() -> None:
    shape = tuple((end - begin, tuple(row - begin for row in GRID.logits_rows if begin <= row < end)) for begin, end in GRID.spans)
    compiled = compile_order(GRID.stages, shape, Order("layer", 3))
    assert compiled.grid == GRID and compiled.logits_rows.tolist() == list(GRID.logits_rows)
    cells = list(layer_major(GRID, 3))
    assert compiled.cells == len(cells)
    for i, cell in enumerate(cells):
        assert compiled.stage[i] == cell.stage
        assert [tuple(r) for r in compiled.cell_ranges(i).tolist()] == list(cell.ranges)


def test_checker_is_linear() -> None:
    """200,000 cells of one row in well under the time that anything quadratic needs."""
    grid = make_grid([20_000], {19_999}, layers=5)
    check_schedule(grid, token_major(grid))


def test_default_chunk_follows_the_ceilings() -> None:
    assert default_chunk(0.625, 50e9, 25e9) == 192  # ridge 1.25 rows, 128 times that is 160
    assert default_chunk(0.625, 1e9, 25e9) == 64
    assert default_chunk(0.625, 50e9, 25e9, 0.25) == 640, "a quarter of the rows meets an expert"
    assert default_chunk(4.0, 4e12, 10e9, 0.125) == 1024
    assert default_chunk(4.0, 4e12, 10e9) == 512
    assert all(default_chunk(0.6, m * 1e9, 20e9) % 64 == 0 for m in range(1, 2000, 37))
