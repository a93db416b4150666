"""Parameters are checked when made, draws repeat, and no part of a stop string ever leaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaff import SamplingParams
from quaff.engine.sampler import StopMatcher, TokenLogprobs, describe, sample
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
        {"presence_penalty": "much"},
        {"frequency_penalty": float("inf")},
        {"logit_bias": 3},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: 1000}},
        {"logit_bias": ((3, 1.0, 2.0),)},
        {"logit_bias": dict.fromkeys(range(2000), 1.0)},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": 1 << 20},
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


@pytest.mark.parametrize("places", [(2047, 2048), (2048, 4095, 4999), (4096, 4097), (0, 4999), (4999,)])
def test_greedy_looks_at_every_block_of_a_long_row(places: tuple[int, ...]) -> None:
    logits = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    logits[list(places)] = logits.max() + 1
    assert sample(SamplingParams(), logits, [1, 2]) == places[0]
    for bad in (1, 2047, 2048, 4999):
        wrong = logits.copy()
        wrong[bad] = np.nan
        with pytest.raises(NonFiniteError):
            sample(SamplingParams(), wrong, [1, 2])
    with pytest.raises(NonFiniteError):
        sample(SamplingParams(), np.full(5000, -np.inf, dtype=np.float32), [1, 2])


def test_sampling_leaves_the_logits_as_they_are() -> None:
    logits = LOGITS.copy()
    for params in (SamplingParams(), SamplingParams(temperature=0.8, repetition_penalty=1.5)):
        sample(params, logits, list(range(100)))
        assert (logits == LOGITS).all()


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


def test_biases_are_added_and_kept_as_pairs() -> None:
    params = SamplingParams(logit_bias={9: -100, 4: 3.0})
    assert params.biases == ((4, 3.0), (9, -100.0))
    assert SamplingParams(logit_bias=params.biases) == params and hash(params)
    logits = np.zeros(10, np.float32)
    logits[9], logits[2] = 5.0, 2.5
    before = logits.tobytes()
    assert sample(params, logits, [1]) == 4
    assert logits.tobytes() == before
    with pytest.raises(ConfigError, match="token 9, which is outside the vocabulary of 9"):
        params.check_vocab(9)
    params.check_vocab(10)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = np.zeros(10, np.float32)
    logits[3], logits[4] = 2.0, 1.5
    presence, frequency = SamplingParams(presence_penalty=1.0), SamplingParams(frequency_penalty=0.25)
    assert sample(presence, logits, [3, 3, 3], prompt_tokens=3) == 3
    assert sample(presence, logits, [1, 3], prompt_tokens=1) == 4
    assert sample(presence, logits, [1, 3, 3, 4], prompt_tokens=1) == 3  # once each, however often
    assert sample(frequency, logits, [1, 3], prompt_tokens=1) == 3
    assert sample(frequency, logits, [1, 3, 3, 3], prompt_tokens=1) == 4
    assert sample(frequency, logits, [1, 3, 3, 3, 4, 4], prompt_tokens=1) == 3
    encouraged = SamplingParams(presence_penalty=-2.0)
    assert sample(encouraged, logits, [1, 7], prompt_tokens=1) == 3
    assert sample(encouraged, logits, [1, 4], prompt_tokens=1) == 4


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = np.zeros(500, bool)
    allowed[[17, 40, 300]] = True
    draws = {sample(SamplingParams(temperature=5.0, seed=s), LOGITS, [1], allowed=allowed) for s in range(60)}
    assert draws == {17, 40, 300}
    best = max((17, 40, 300), key=lambda i: LOGITS[i])
    assert sample(SamplingParams(), LOGITS, [1], allowed=allowed) == best
    with pytest.raises(ConfigError, match="no token"):
        sample(SamplingParams(), LOGITS, [1], allowed=np.zeros(500, bool))
    poisoned = LOGITS.copy()
    poisoned[0] = np.nan  # wrong where it is forbidden is wrong all the same
    with pytest.raises(NonFiniteError):
        sample(SamplingParams(), poisoned, [1], allowed=allowed)


def test_all_tokens_allowed_changes_no_draw() -> None:
    everything = np.ones(500, bool)
    for s in range(20):
        params = SamplingParams(temperature=1.3, top_p=0.9, seed=s)
        assert sample(params, LOGITS, [1]) == sample(params, LOGITS, [1], allowed=everything)


def test_log_probabilities_name_the_likeliest_in_order() -> None:
    logits = LOGITS.copy()
    logits[[100, 50, 200]] = 9.0
    logits[7] = -0.0
    logits[8] = 0.0
    told = describe(logits, 5, 4, 0)
    assert [i for i, _ in told.top][:3] == [50, 100, 200]
    assert told.top[0][1] == told.top[2][1] > told.top[3][1] >= told.logprob
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert told.logprob == pytest.approx(exact[5], abs=1e-6)
    assert dict(told.top) == pytest.approx({i: exact[i] for i, _ in told.top}, abs=1e-6)
    every = [i for i, _ in describe(logits, 5, 1000, 0).top]
    assert every == sorted(range(500), key=lambda i: (-logits[i], i))
    assert describe(logits, 5, 0, 0) == TokenLogprobs(5, told.logprob, ())
    logits[3] = np.nan
    with pytest.raises(NonFiniteError, match="position 11"):
        describe(logits, 5, 3, 11)


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
