"""Parameters are checked when made, draws repeat, and no part of a stop string ever leaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaff import SamplingParams
from quaff.engine.sampler import StopMatcher, sample
from quaff.errors import ConfigError, NonFiniteError


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-30},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"stop": ("",)},
        {"stop": (1,)},
        {"stop": 5},
        {"stop": b"ab"},
        {"ignore_eos": 1},
    ],
)
def test_values_out_of_range_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="stop" if "stop" in bad else next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_params_are_frozen_and_take_one_stop_string_or_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # type: ignore[misc]


LOGITS = np.random.default_rng(0).normal(size=500).astype(np.float32)


def test_greedy_takes_the_lower_id_among_equals() -> None:
    logits = LOGITS.copy()
    logits[[77, 300]] = 9.0
    assert sample(SamplingParams(), logits, [1, 2]) == 77
    assert sample(SamplingParams(temperature=1.0, top_k=1), logits, [1, 2]) == 77


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_named(value: float) -> None:
    logits = LOGITS.copy()
    logits[3] = value
    with pytest.raises(NonFiniteError, match="logits at position 1 became infinite or NaN"):
        sample(SamplingParams(temperature=1.0), logits, [1, 2])


def test_draws_depend_on_seed_position_and_choice_only() -> None:
    def draws(seed: int, choice: int = 0) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, choice=choice)
        return [sample(params, LOGITS, [0] * n) for n in range(1, 60)]

    assert draws(1) == draws(1)
    assert len({tuple(draws(s, c)) for s in range(3) for c in range(3)}) == 9
    assert len(set(draws(1))) > 20


def test_repetition_penalty_covers_the_known_tokens() -> None:
    logits = np.zeros(10, np.float32)
    logits[3], logits[4] = 2.0, 1.5
    assert sample(SamplingParams(repetition_penalty=2.0), logits, [7]) == 3
    assert sample(SamplingParams(repetition_penalty=2.0), logits, [3]) == 4


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=20), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_stream_is_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    given_text = ""
    cut: int | None = None
    for piece in pieces:
        given_text += piece
        shown += matcher.push(piece)
        found = [at for s in stops if (at := given_text.find(s)) >= 0]
        if found and cut is None:
            # Stops are looked for as text comes: the earliest one in the text so far.
            cut = min(found)
        assert not any(s in shown for s in stops)
        assert matcher.stopped == (cut is not None)
        if cut is not None:
            assert shown == given_text[:cut]
            break
        assert given_text.startswith(shown)
        held = given_text[len(shown) :]
        assert not held or any(s.startswith(held) for s in stops)
    if cut is None:
        assert shown + matcher.finish() == given_text


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("one E") == "one "
    assert matcher.push("N") == ""
    assert matcher.push("Done") == ""
    assert matcher.stopped
    assert matcher.push("more") == ""
    assert matcher.finish() == ""
