"""`quaff bench --ledger`: the figures of the report, and a line for every run."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Cli

from quaff.measure.ledger import model_file, read


def test_bench_appends_a_line_for_every_run(cli: Cli, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        result = cli("bench", model, "-p", 16, "-n", 2, "-t", 1, "-r", 3, "--ledger", path, "--json")
        assert result.code == 0
    report, (_, last) = json.loads(result.out), read(path)
    assert [r["samples"] for r in last["results"]] == [r["samples"] for r in report["results"]]
    assert [r["test"] for r in last["results"]] == ["pp16", "tg2"]
    assert last["machine"]["isa"] == report["isa"]
    assert last["model"] == model_file(model)


def test_bench_reports_a_damaged_ledger_before_it_measures(cli: Cli, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("{}\n")
    result = cli("bench", model, "--ledger", path)
    assert (result.code, result.out) == (1, "")
    assert "line 1" in result.err
    assert path.read_text() == "{}\n"


def test_bench_without_an_installed_version_ends_before_it_measures(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    result = cli("bench", model, "--ledger", tmp_path / "ledger.jsonl")
    assert (result.code, result.out) == (1, "")
    assert "install it first" in result.err
    assert not (tmp_path / "ledger.jsonl").exists()
