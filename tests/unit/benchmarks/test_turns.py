"""Turns of conversations: lengths of turns, which are checked, shares and ratios; and one played through, with a control that must fail."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.turns import Session, Stage, Turn, line, play, summary, tiny_models
from tests.tiny import CASES

import quaff.engine.disk as disk

TURN = Turn(0, 1, 500, 400, 399, 396, 1.0, 2.0, 0.5, True)


def test_prompts_grow_evenly_and_the_checked_turns_are_spread() -> None:
    session = Session(12, 2000, 7500, 32, 2, 3)
    assert [session.length(t) for t in (0, 1, 11)] == [2000, 2500, 7500]
    assert [t for t in range(12) if session.checked(t)] == [3, 7, 11]
    assert [t for t in range(12) if replace(session, check=12).checked(t)] == list(range(12))
    assert not any(replace(session, check=0).checked(t) for t in range(12))


def test_a_summary_takes_the_worse_way_and_leaves_first_turns_out() -> None:
    first = replace(TURN, turn=0, sent=0, memory_cached=0, disk_cached=0, memory_seconds=99.0, equal=None)
    values = summary([first, TURN, replace(TURN, disk_cached=400, memory_seconds=0.25)])
    assert values == {
        "cached_share": 0.99,
        "equal": True,
        "checked": 2,
        "memory_ratio": 1.25,
        "memory_ratio_worst": 2.0,
        "disk_ratio": 4.0,
        "disk_ratio_worst": 4.0,
    }
    assert summary([TURN, replace(TURN, equal=False)])["equal"] is False
    assert "99.00 %" in line(TURN) and "equal" in line(TURN)
    assert "DIFFERENT" in line(replace(TURN, equal=False))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_a_session_is_cached_in_memory_and_on_disk(name: str, tmp_path: Path) -> None:
    session = Session(3, 200, 500, 4, 2, 3)
    stage = Stage(CASES[name].write(tmp_path / "m.gguf"), session, tmp_path / "d", 1 << 28, 1, 64)
    turns = list(play(stage, seed=1))
    stage.close()
    assert [(t.turn, t.branch, t.tokens) for t in turns] == [(t, b, n) for t, n in enumerate((200, 350, 500)) for b in (0, 1)]
    assert summary(turns)["equal"] is True
    for t in turns[2:]:
        assert t.memory_cached == t.disk_cached == t.sent - 1


def test_a_tier_that_finds_nothing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(disk.DiskTier, "restore", lambda self, tokens, salt="": 0)
    session = Session(2, 200, 300, 4, 1, 0)
    stage = Stage(CASES["llama-gqa"].write(tmp_path / "m.gguf"), session, tmp_path / "d", 1 << 28, 1, 64)
    turns = list(play(stage, seed=1))
    stage.close()
    assert (turns[1].memory_cached, turns[1].disk_cached) == (203, 0)
    assert summary(turns)["cached_share"] == 0.0


def test_tiny_models_have_room_for_a_session(tmp_path: Path) -> None:
    import quaff

    for _, path in tiny_models(tmp_path, 50_000):
        with quaff.load(path, threads=1, chunk=64) as llm:
            assert llm.context == 50_000
