"""Drafts are what followed the latest tokens before; their length follows how often they are right."""

from quaff.engine.speculate import FIRST_DRAFT, LONGEST_REST, Lookup


def test_what_followed_before_is_drafted() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert Lookup(8).draft(tokens, 8) == [4, 5, 6, 7]
    assert Lookup(8).draft(tokens, 2) == [4, 5]
    assert Lookup(8).draft(tokens[:-1], 8) == []
    assert Lookup(8).draft([1, 2], 8) == []
    assert Lookup(8).draft([1, 2, 3], 8) == []


def test_the_latest_occurrence_counts() -> None:
    assert Lookup(8).draft([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 0, 1, 2, 3], 1) == [5]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert Lookup(8).draft([7, 8, 9, 7, 8, 9], 8) == [7, 8, 9, 7]
    assert Lookup(8).draft([5, 5, 5, 5], 8) == [5, 5, 5, 5]


def test_tokens_may_come_in_any_portions() -> None:
    tokens = [i * i % 7 for i in range(60)]
    step_by_step, at_once = Lookup(4), Lookup(4)
    for n in range(1, 60):
        step_by_step.draft(tokens[:n], 4)
    assert step_by_step.draft(tokens, 4) == at_once.draft(tokens, 4) != []


def test_right_drafts_grow_and_wrong_ones_shrink() -> None:
    tokens = [*range(100), 0, 1, 2]
    lookup = Lookup(16)
    assert len(lookup.draft(tokens, 99)) == FIRST_DRAFT
    lookup.judge(4, 4, len(tokens))
    assert len(lookup.draft(tokens, 99)) == 8
    lookup.judge(8, 8, len(tokens))
    lookup.judge(16, 16, len(tokens))
    assert len(lookup.draft(tokens, 99)) == 16
    lookup.judge(16, 2, len(tokens))
    assert len(lookup.draft(tokens, 99)) == 3


def test_after_misses_it_rests() -> None:
    tokens = [*range(20)] * 20
    lookup = Lookup(8)
    rests = []
    known = 100
    for _ in range(8):
        lookup.judge(1, 0, known)
        rest = next(i for i in range(1, 200) if lookup.draft(tokens[: known + i], 8))
        rests.append(rest)
        known += rest
    assert rests == [2, 4, 8, 16, 32, 64, 64, 64] and max(rests) == LONGEST_REST
    lookup.judge(1, 1, known)
    assert lookup.draft(tokens[:known], 8)
    lookup.stop()
    assert not lookup.draft(tokens, 8)
