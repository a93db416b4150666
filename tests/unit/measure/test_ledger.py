"""Ledger lines: whole or not at all, read back exactly, and refused when anything about them is off."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from quaff.measure.ledger import LedgerError, append, checkout, read

RESULT = {
    "test": "pp512",
    "threads": 2,
    "schedule": "chunk",
    "chunk": 64,
    "median_tokens_per_second": 4.5,
    "spread": 0.1,
    "samples": [4.4, 4.5, 5],
}


def line(**changes: Any) -> dict[str, Any]:
    machine = {"cpu": "a processor", "isa": "scalar", "load_average_before": 0.5, "load_average_after": 1}
    model = {"file": "m.gguf", "bytes": 3, "sha256": "00"}
    rest = {"utc": "2026-01-01T00:00:00+00:00", "commit": None, "dirty": None, "quaff": "0.1.0", "numerics": 1}
    return rest | {"machine": machine, "model": model, "results": [RESULT]} | changes


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert read(path) == []
    lines = [line(), line(commit="abc", dirty=True), line(quaff="wörter")]
    for one in lines:
        append(path, one)
    assert read(path) == lines
    assert path.read_bytes().count(b"\n") == 3


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    writers = [threading.Thread(target=append, args=(path, line(numerics=i, quaff="x" * 20000))) for i in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(one["numerics"] for one in read(path)) == list(range(16))


def test_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError):
        append(path, line(results=[RESULT | {"spread": float("nan")}]))
    assert read(path) == []


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("{", "Expecting"),
        ("[]", "line must be an object"),
        ("", "Expecting"),
        ("\x80", "line 2"),
        ("[" * 100_000, "line 2"),
        (json.dumps(line(extra=1)), "line must be an object with the keys utc"),
        (json.dumps({k: v for k, v in line().items() if k != "model"}), "model"),
        (json.dumps(line(results=[])), "results must be a list with something in it"),
        (json.dumps(line(results=[RESULT | {"threads": True}])), "threads has the wrong type"),
        (json.dumps(line(results=[RESULT | {"samples": ["fast"]}])), "samples has the wrong type"),
        (json.dumps(line(machine=None)), "machine must be an object"),
        (json.dumps(line(results=[RESULT | {"spread": float("nan")}])), "NaN is not a figure"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str, words: str) -> None:
    path = tmp_path / "ledger.jsonl"
    append(path, line())
    with path.open("ab") as file:
        file.write(damaged.encode("latin-1") + b"\n")
    append(path, line())
    with pytest.raises(LedgerError, match="line 2") as caught:
        read(path)
    assert words in str(caught.value)


def test_a_cut_line_is_refused_by_reader_and_writer_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(path, line())
    path.write_bytes(path.read_bytes()[:-1])
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="line 1: cut off"):
        read(path)
    with pytest.raises(LedgerError, match="cut off"):
        append(path, line())
    assert path.read_bytes() == before


def test_commit_and_changes_of_sources_alone(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "src/module.py"
    source.parent.mkdir()
    source.write_text("1")
    git("init", "--quiet")
    assert checkout(source) == (None, None)
    git("add", "src")
    git("commit", "--quiet", "--message", "first")
    head = git("rev-parse", "HEAD")
    assert checkout(source) == (head, False)
    (tmp_path / "ledger.jsonl").write_text("\n")
    assert checkout(source) == (head, False)
    source.write_text("2")
    assert checkout(source) == (head, True)
