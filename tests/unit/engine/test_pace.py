"""The pace settles at the target whatever a step's fixed part, and forgets hiccups."""

import pytest

from quaff.engine.pace import Pace, Policy
from quaff.errors import ConfigError


def settle(pace: Pace, fixed: float, speed: float, steps: int, least: int = 1) -> float:
    """Seconds of the last of some full steps on a machine that takes `fixed` seconds and one more for every `speed` of work."""
    seconds = 0.0
    for _ in range(steps):
        work = max(pace.work, least)
        seconds = fixed + work / speed
        pace.measured(work, seconds, mixed=True)
    return seconds


@pytest.mark.parametrize("fixed, speed", [(0.0, 1e6), (0.05, 1e9), (0.19, 1e10), (0.1, 3e4)])
def test_steps_settle_at_the_target(fixed: float, speed: float) -> None:
    pace = Pace(0.2)
    pace.measured(100_000, 100_000 / (2 * speed), mixed=False)
    assert settle(pace, fixed, speed, 200) == pytest.approx(0.2, rel=0.05)
    # The machine becomes three times slower, and fast again.
    assert settle(pace, fixed, speed / 3, 60) == pytest.approx(0.2, rel=0.05)
    assert settle(pace, fixed, speed, 60) == pytest.approx(0.2, rel=0.05)


def test_a_long_step_of_prompts_is_the_first_guess() -> None:
    pace = Pace(0.2)
    pace.measured(1000, 2.0, mixed=False)
    assert pace.work == 100
    pace.measured(5000, 2.0, mixed=False)
    assert pace.work == 100


def test_small_steps_say_only_that_they_were_not_too_long() -> None:
    pace = Pace(0.2)
    pace.measured(1000, 0.2, mixed=False)
    pace.measured(10, 0.05, mixed=True)
    assert pace.work == 1000
    pace.measured(10, 0.3, mixed=True)
    assert pace.work < 1000
    pace.measured(0, 9.0, mixed=True)  # no prompt in it
    assert pace.work > 500


def test_one_hiccup_halves_the_work_at_most() -> None:
    pace = Pace(0.2)
    pace.measured(1000, 0.2, mixed=False)
    pace.measured(1000, 60.0, mixed=True)
    assert pace.work == 500


def test_a_machine_too_slow_for_the_target_keeps_its_least_rows() -> None:
    pace = Pace(0.2)
    settle(pace, 0.5, 1e6, 50, least=16)
    assert pace.work <= 16
    # It recovers from there as soon as there is time.
    assert settle(pace, 0.01, 1e6, 60, least=16) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_stall_ms": 0},
        {"max_stall_ms": float("nan")},
        {"draft_tokens": -1},
        {"draft_tokens": 65},
        {"max_running": 0},
        *({"burst_ms": value} for value in (-1, 1001, float("nan"), True, "12")),
    ],
)
def test_policies_out_of_range_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Policy(**bad)  # type: ignore[arg-type]
