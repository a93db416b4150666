"""The scheduler counts: no tokens lost, no step over its budget, nobody starves."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaff.engine.scheduler import LEAST_ROWS, NO_LOGITS, TURN_ROWS, Scheduler, Work


def test_a_prompt_is_cut_at_the_row_budget_and_logits_are_asked_for_last() -> None:
    s = Scheduler(prompt_rows=100, mixed_rows=10, logits_rows=5)
    s.add(1, known=250, logits_from=249)
    seen = []
    while not s.idle:
        (work,) = s.plan()
        seen.append(work)
        s.finish(1, work.rows)
    assert seen == [Work(1, 0, 100, 100), Work(1, 100, 100, 100), Work(1, 200, 50, 49)]
    assert s.plan() == ()


def test_decodes_come_first_and_prompts_fill_the_rest() -> None:
    s = Scheduler(prompt_rows=100, mixed_rows=10, logits_rows=50)
    s.add(1, known=40, logits_from=39)
    s.add(2, known=8, computed=7, logits_from=7)
    s.add(3, known=5, logits_from=4)
    assert s.plan() == (Work(2, 7, 1, 0), Work(1, 0, 9, 9))
    s.remove(2)
    assert s.plan() == (Work(1, 0, 40, 39), Work(3, 0, 5, 4))


def test_rows_of_logits_are_bounded() -> None:
    s = Scheduler(prompt_rows=100, mixed_rows=100, logits_rows=7)
    s.add(1, known=30, logits_from=10)
    s.add(2, known=30, logits_from=NO_LOGITS)
    assert s.plan() == (Work(1, 0, 17, 10), Work(2, 0, 30, 30))
    s.finish(1, 17)
    assert Work(1, 17, 7, 0) in s.plan()


def test_more_decodes_than_rows_take_turns() -> None:
    s = Scheduler(prompt_rows=4, mixed_rows=4, logits_rows=4)
    for r in range(10):
        s.add(r, known=5, computed=4, logits_from=4)
    served = [0] * 10
    for _ in range(10):
        for work in s.plan():
            served[work.request] += 1
            s.finish(work.request, work.rows)
            s.extend(work.request)
    assert sum(served) == 40
    assert min(served) >= 3


def drive(s: Scheduler, prompt_work: int | None = None) -> dict[int, int]:
    """Run until nothing is pending; the step in which each request's last token was computed."""
    ended: dict[int, int] = {}
    step = 0
    while plan := s.plan(prompt_work):
        step += 1
        for work in plan:
            s.finish(work.request, work.rows)
            ended[work.request] = step
    return ended


def test_no_prompt_waits_for_anothers_whole_prefill() -> None:
    s = Scheduler(prompt_rows=512, mixed_rows=512, logits_rows=50)
    s.add(1, known=50_000)
    for _ in range(3):
        (work,) = s.plan()
        assert work.rows == 512  # alone, it has whole steps
        s.finish(1, work.rows)
    for r in range(2, 6):
        s.add(r, known=50 * r)
    plan = {w.request: w.rows for w in s.plan()}
    assert sum(plan.values()) == 512
    assert plan[2] == 100 and min(plan.values()) >= TURN_ROWS
    for request, rows in plan.items():
        s.finish(request, rows)
    ended = drive(s)
    assert max(ended[r] for r in range(3, 6)) <= 3 and ended[1] > 80


def test_turns_are_of_equal_work_not_of_equal_rows() -> None:
    s = Scheduler(prompt_rows=10 * TURN_ROWS, mixed_rows=8, logits_rows=50, row_work=lambda position: 100 + position)
    s.add(1, known=10_000, computed=900)
    s.add(2, known=10_000)
    done = {1: 0, 2: 0}
    for _ in range(3):
        for work in s.plan():
            s.finish(work.request, work.rows)
            done[work.request] += sum(100 + work.start + i for i in range(work.rows))
    assert 0.8 < done[1] / done[2] < 1.25


def test_a_step_that_someone_decodes_in_is_bounded_by_work() -> None:
    s = Scheduler(prompt_rows=512, mixed_rows=512, logits_rows=50, row_work=lambda position: 10 + position // 100)
    s.add(1, known=9, computed=8, logits_from=8)
    s.add(2, known=10_000)
    rows = []
    while not rows or rows[-1]:
        plan = s.plan(1000)
        rows.append(sum(w.rows for w in plan if w.request == 2))
        assert plan[0] == Work(1, 8, 1, 0) and s.mixed
        assert s.prompt_work <= 1000 or rows[-1] <= LEAST_ROWS
        s.finish(2, rows[-1])
    assert 60 < rows[0] <= 100 and LEAST_ROWS - 1 <= min(rows[:-2]) < 25
    assert sum(rows) == 10_000
    assert len(s.plan(1000)) == 1


def test_however_little_may_be_done_prompts_go_on() -> None:
    s = Scheduler(prompt_rows=512, mixed_rows=512, logits_rows=50, row_work=lambda position: 10)
    s.add(1, known=9, computed=8, logits_from=8)
    s.add(2, known=100)
    assert s.plan(0) == (Work(1, 8, 1, 0), Work(2, 0, LEAST_ROWS, LEAST_ROWS))


def test_guesses_have_the_rows_that_decodes_leave() -> None:
    s = Scheduler(prompt_rows=100, mixed_rows=8, logits_rows=8)
    s.add(1, known=9, computed=8, logits_from=8)
    s.add(2, known=5, computed=4, logits_from=4)
    s.add(3, known=50)
    s.draft(1, 4)
    s.draft(2, 4)
    assert s.plan() == (Work(1, 8, 5, 0), Work(2, 4, 3, 0))
    s.draft(2, 0)
    s.extend(1, 3)
    s.finish(1, 3)
    s.draft(1, 1)
    assert s.plan() == (Work(1, 11, 2, 0), Work(2, 4, 1, 0), Work(3, 0, 5, 5))


@settings(deadline=None)
@given(st.data())
def test_every_token_is_computed_once_in_order(data: st.DataObject) -> None:
    budget = data.draw(st.tuples(*[st.integers(1, 20)] * 3))
    s = Scheduler(*budget)
    known: dict[int, int] = {}
    computed: dict[int, int] = {}
    logits: dict[int, list[int]] = {}
    wants: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()) and len(known) < 6:
            r = len(known)
            known[r] = data.draw(st.integers(1, 40))
            computed[r] = data.draw(st.integers(0, known[r] - 1))
            wants[r] = data.draw(st.sampled_from([NO_LOGITS, 0, known[r] - 1]))
            logits[r] = []
            s.add(r, known[r], computed[r], wants[r])
        plan = s.plan(data.draw(st.none() | st.integers(0, 30)))
        assert bool(plan) == any(known[r] > computed[r] for r in known)
        assert sum(w.rows for w in plan) <= max(budget[0], budget[1])
        assert sum(w.rows - w.logits for w in plan) <= budget[2]
        assert len({w.request for w in plan}) == len(plan)
        for w in plan:
            assert w.start == computed[w.request]
            assert 0 < w.rows <= known[w.request] - computed[w.request]
            # A cancelled step finishes any prefix of its rows.
            done = data.draw(st.integers(0, w.rows))
            logits[w.request] += [w.start + i for i in range(w.logits, done)]
            computed[w.request] += done
            s.finish(w.request, done)
            if computed[w.request] == known[w.request] and data.draw(st.booleans()):
                known[w.request] += 1
                s.extend(w.request)
    for r in known:
        assert s.computed(r) == computed[r]
        first = max(wants[r], min(logits[r], default=0))
        assert logits[r] == list(range(first, computed[r])) or not logits[r]


def test_impossible_counts_are_refused() -> None:
    s = Scheduler(1, 1, 1)
    s.add(1, known=3)
    with pytest.raises(ValueError, match="already"):
        s.add(1, known=3)
    with pytest.raises(ValueError, match="pending"):
        s.finish(1, 4)
    with pytest.raises(ValueError, match="computed"):
        s.add(2, known=1, computed=2)
    with pytest.raises(ValueError, match="at least one row"):
        Scheduler(0, 1, 1)


def test_no_array_library_is_imported() -> None:
    code = "import sys, quaff.engine.scheduler; print(sorted(m for m in sys.modules if m.split('.')[0] in ('numpy', '_native')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
