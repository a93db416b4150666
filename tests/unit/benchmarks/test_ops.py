"""The benchmark of linear layers: every form runs, its results are compared while they are timed, and a wrong bit fails it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks import ops

SMALL = ["--shapes", "80x256,48x512", "-b", "1,7,13", "-r", "2", "--memory", "1", "-t", "2"]


def test_every_type_agrees_with_plain_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main([*SMALL, "--types", ",".join(ops.HALVES)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["mismatches"] == 0 and report["threads"] == 2
    assert [(r["type"], r["rows"], r["batch"]) for r in report["rows"]] == [
        (name, rows, batch) for name in ops.HALVES for rows in (80, 48) for batch in (1, 7, 13)
    ]
    assert all(r["gmacs"] > 0 and r["gbps"] > 0 and r["int8_share"] > 0 for r in report["rows"])


def test_a_wrong_bit_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.plain

    def wrong(layer: ops.Layer) -> ops.F32:
        result = right(layer)
        result.view(np.uint32)[0, 5] ^= 1
        return result

    monkeypatch.setattr(ops, "plain", wrong)
    assert ops.main(["--types", "Q8_0", "--shapes", "48x64", "-b", "1,16", "-r", "1", "--memory", "1", "-t", "1"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["mismatches"] == 3  # rows 0 and 8 of 16 are one row of activations
    assert "ELEMENTS DIFFER" in out


@pytest.mark.parametrize("argv", [["--types", "Q9"], ["--shapes", "12"], ["--shapes", "axb"], ["-b", "0"]])
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        ops.main(argv)
    assert stop.value.code == 2
    capsys.readouterr()
