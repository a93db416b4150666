"""The guard fires at a real loss in either phase, stays quiet within noise, and is watched doing both."""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import CASES

from quaff.measure import guard
from quaff.measure.guard import LEAST_LOSS, GuardError, Round, compare, judge
from quaff.measure.ledger import append, model_file

seeds = st.integers(0, 2**32)
speeds = st.floats(1e-2, 1e6)
few = settings(max_examples=30, deadline=None)


def rounds(seed: int, count: int, noise: float, factor: float, speed: float = 100.0) -> list[Round]:
    """Log-normal noise of every process; ours runs at `factor` of the base's speed. Drift moves both alike."""
    numbers = random.Random(seed)

    def rate(of: float) -> float:
        return speed * of * math.exp(numbers.gauss(0, noise))

    return [Round(rate(1), rate(factor), rate(factor), rate(1)) for _ in range(count)]


@few
@given(seeds, st.integers(2, 10), st.floats(0, 0.05), speeds)
def test_a_phase_at_half_speed_is_lost(seed: int, count: int, noise: float, speed: float) -> None:
    verdict = judge("pp8", rounds(seed, count, noise, 0.5, speed))
    assert verdict.lost
    assert "LOST" in verdict.sentence()


@few
@given(seeds, st.integers(1, 10), st.floats(0, 0.05), st.floats(1.5, 4))
def test_a_faster_phase_is_never_lost_when_the_gain_is_beyond_the_noise(seed: int, count: int, noise: float, factor: float) -> None:
    verdict = judge("tg8", rounds(seed, count, noise, factor))
    assert not verdict.lost


@few
@given(st.floats(0, 1), st.integers(1, 6), st.floats(-0.009, 0.009))
def test_without_noise_the_bar_is_one_per_cent(speed: float, count: int, loss: float) -> None:
    assert not judge("pp8", rounds(0, count, 0.0, 1 - loss, 1 + speed)).lost
    assert judge("pp8", rounds(0, count, 0.0, 0.98, 1 + speed)).lost
    assert judge("pp8", rounds(0, count, 0.0, 0.98)).noise == 0


@few
@given(seeds, st.floats(0.2, 5))
def test_the_noise_floor_does_not_see_the_change(seed: int, factor: float) -> None:
    changed, equal = (judge("pp8", rounds(seed, 4, 0.02, f)).noise for f in (factor, 1.0))
    assert changed == pytest.approx(equal, abs=1e-9)


def test_equal_builds_are_rarely_accused_and_a_loss_beyond_the_noise_is_found() -> None:
    trials = 100
    accused = sum(judge("pp8", rounds(seed, 6, 0.03, 1.0)).lost for seed in range(trials))
    found = sum(judge("pp8", rounds(seed, 6, 0.03, 0.85)).lost for seed in range(trials))
    assert accused <= 0.03 * trials
    assert found >= 0.97 * trials


def test_one_disturbed_process_neither_accuses_nor_hides() -> None:
    steady = rounds(1, 5, 0.001, 1.0)
    disturbed = [*steady, Round(100, 10, 100, 100)]
    assert not judge("pp8", disturbed).lost
    slow = [*rounds(1, 5, 0.001, 0.9), Round(100, 9, 90, 100)]
    assert judge("pp8", slow).lost


def test_sides_run_base_ours_ours_base_until_the_noise_is_small() -> None:
    order: list[str] = []

    def run(side: str) -> dict[str, float]:
        order.append(side)
        return {"pp8": 10.0, "tg8": 5.0 if side == "base" else 4.0}

    prefill, decode = compare(run, 2, 9)
    assert order == ["base", "ours", "ours", "base"] * 2
    assert (prefill.phase, prefill.lost, decode.phase, decode.lost) == ("prefill", False, "decode", True)
    assert decode.ratio == pytest.approx(0.8)


def test_noise_is_met_with_more_rounds_up_to_the_most() -> None:
    numbers = random.Random(0)
    verdict = compare(lambda side: {"pp8": math.exp(numbers.gauss(0, 1))}, 2, 5)[0]
    assert verdict.pairs == 10
    assert verdict.allowed > LEAST_LOSS
    assert "smaller losses cannot be seen" in verdict.sentence()


def test_builds_that_run_different_tests_are_not_compared() -> None:
    with pytest.raises(GuardError, match="same tests"):
        compare(lambda side: {"pp8" if side == "base" else "pp9": 1.0}, 1, 1)


# End to end: real processes, one of them slowed.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def command(phase: str) -> str:
    return shlex.join([sys.executable, str(Path(__file__).with_name("guarded_bench.py")), phase])


def guarded(model: Path, ours: str, *more: str) -> subprocess.CompletedProcess[str]:
    short = ["-p", "1024", "-n", "16", "-t", "1", "-r", "3", "--rounds", "2", "--most", "2"]
    whole = [sys.executable, "-m", "quaff.measure.guard", str(model), "--base", command("none"), "--ours", ours, *short, *more]
    return subprocess.run(whole, capture_output=True, text=True)


@pytest.mark.parametrize(("phase", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_slowdown_in_a_phase_fires_the_guard_and_names_it(model: Path, phase: str, other: str) -> None:
    done = guarded(model, command(phase), "--base-name", "commit abc")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert phase in report["lost"]
    ratios = {v["phase"]: v["ratio"] for v in report["verdicts"]}
    assert ratios[phase] < ratios[other]
    assert f"{phase} {'pp1024' if phase == 'prefill' else 'tg16'}: " in done.stdout
    for denominator in ("to our own token-major control", "to commit abc, paired", "to the last ledger line: none"):
        assert denominator in done.stdout


def test_a_build_that_does_not_run_is_an_error_and_no_verdict(model: Path) -> None:
    done = guarded(model, shlex.join([sys.executable, "-c", "raise SystemExit('broken build')"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert "broken build" in done.stderr


def test_the_ledger_is_compared_only_with_the_same_machine_and_file(model: Path, tmp_path: Path) -> None:
    verdict = judge("pp8", rounds(0, 2, 0.0, 1.0))
    here = {"cpu": "x", "isa": "scalar", "threads": 2} | model_file(model)
    result = {
        "test": "pp8",
        "threads": 2,
        "schedule": "chunk",
        "chunk": 8,
        "median_tokens_per_second": 50.0,
        "spread": 0.0,
        "samples": [50.0],
    }
    line = {
        "utc": "2026-01-01T00:00:00+00:00",
        "commit": "c" * 40,
        "dirty": False,
        "quaff": "0.1.0",
        "numerics": 1,
        "machine": {"cpu": "x", "isa": "scalar", "load_average_before": 0.0, "load_average_after": 0.0},
        "model": model_file(model),
        "results": [result],
    }
    append(tmp_path / "ledger.jsonl", line)
    assert "cccccccccccc: 2.000x of 50.0 tokens/s" in guard.against_ledger(verdict, line, here)
    assert "not comparable (cpu differs)" in guard.against_ledger(verdict, line, here | {"cpu": "y"})
    assert "has no such test" in guard.against_ledger(verdict, line, here | {"threads": 1})
