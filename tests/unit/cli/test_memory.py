"""--memory on every verb that takes it: the plan, the report, the refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny import Tiny
from tests.unit.cli.conftest import Cli, Result

from quaff import SamplingParams, load

LARGE = Tiny(dim=1024, ffn_dim=4096, layers=6, heads=8, kv_heads=2, head_dim=64, vocab=4096, tied=False)


@pytest.fixture
def cli() -> Cli:
    """In a process of its own: a budget is for all of a process, and this one holds what other tests left."""

    def call(*arguments: object, stdin: bytes = b"") -> Result:
        done = subprocess.run([sys.executable, "-m", "quaff", *map(str, arguments)], input=stdin, capture_output=True, check=False)
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return call


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LARGE.write(tmp_path_factory.mktemp("memory") / "large.gguf")


def smallest(cli: Cli, *command: object) -> int:
    """MiB, from the refusal."""
    result = cli(*command, "--memory", "1MiB")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for item in ("the process itself", "slots of", "read buffers", "KV state of"):
        assert item in result.err
    found = re.search(r"smallest budget that will do is (\d+)MiB", result.err)
    assert found is not None
    return int(found[1])


def test_run_reports_what_it_streamed(cli: Cli, large: Path) -> None:
    command = ("run", large, "--raw", "a few words", "--max-tokens", 4, "--json")
    budget = f"{smallest(cli, *command) + 12}MiB"
    result = cli(*command, "--memory", budget)
    report = json.loads(result.out)
    with load(large) as llm:
        assert report["text"] == llm.generate("a few words", SamplingParams(max_tokens=4)).text
    memory, streaming = report["memory"], report["streaming"]
    assert memory["resident"] is False and memory["planned_bytes"] <= memory["memory_bytes"]
    assert sum(item["bytes"] for item in memory["items"]) == memory["planned_bytes"]
    assert streaming["prefill_passes"] == 1
    assert 1 <= streaming["decode_passes"] <= report["completion_tokens"] - 1
    assert streaming["prefill_bytes"] > streaming["decode_bytes"] / streaming["decode_passes"] > 0
    assert streaming["peak_bytes"] <= memory["memory_bytes"]
    for name in ("pass_bytes", "kernel_peak_bytes", "compute_seconds", "read_seconds", "read_mb_per_second"):
        assert streaming[name] > 0
    assert {"wait_seconds", "prefetch_hits", "prefetch_misses"} <= streaming.keys()
    assert streaming["bound"] in ("disk", "compute")


def test_score_takes_one_pass(cli: Cli, large: Path, tmp_path: Path) -> None:
    """Logits of every row are made in it: there is room for them."""
    text = tmp_path / "text.txt"
    text.write_text("a few words, and some more of them " * 3)
    command = ("score", large, text, "--json")
    budget = f"{smallest(cli, *command) + 6}MiB"
    report, whole = (json.loads(cli(*command, *more).out) for more in (("--memory", budget), ()))
    assert report["memory"]["resident"] is False and report["streaming"]["prefill_passes"] == 1
    assert (report["perplexity"], report["logprobs"]) == (whole["perplexity"], whole["logprobs"])
    assert whole["memory"] is None and whole["streaming"] is None
    assert "streamed " in cli("score", large, text, "--memory", budget).err


def test_run_says_it_to_people_too(cli: Cli, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = smallest(cli, "run", large, "--raw", "words", "--max-tokens", 2) + 12
    monkeypatch.setenv("QUAFF_MEMORY", f"{budget}MiB")
    result = cli("run", large, "--raw", "words", "--max-tokens", 2)
    assert result.code == 0
    assert re.search(r"streamed \S+ MiB in 1 pass for the prompt and \S+ MiB in 1 pass for the answer", result.err)


def test_without_a_budget_nothing_is_said(cli: Cli, model: Path) -> None:
    report = json.loads(cli("run", model, "words", "--max-tokens", 2, "--json").out)
    assert report["memory"] is None and report["streaming"] is None


def test_explain_shows_the_plan(cli: Cli, large: Path) -> None:
    command = ("explain", large, "-p", 300)
    budget = smallest(cli, *command) + 20
    report = json.loads(cli(*command, "--memory", f"{budget}MiB", "--json").out)
    plan = report["plan"]
    assert (plan["positions"], plan["resident"]) == (300, False)
    assert (report["chosen"]["schedule"], report["chosen"]["chunk"]) == ("layer", plan["chunk"])
    disk = {s["schedule"]: s["disk_bytes"] for s in report["schedules"]}
    pins = plan["pinned_bytes"] + plan["embedding_bytes"]
    assert plan["pass_rows"] >= 300 and disk["layer"] == pins + plan["pass_bytes"]
    # The last layer's rest and the head are read for one row.
    assert 0.7 * 300 * plan["pass_bytes"] < disk["token"] - pins < 300 * plan["pass_bytes"]
    text = cli(*command, "--memory", f"{budget}MiB").out
    assert "| from disk |" in text and "KV state of 300 tokens" in text and "layer-major is taken" in text


def test_bench_measures_streaming(cli: Cli, large: Path) -> None:
    command = ("bench", large, "-p", 16, "-n", 2, "-r", 1, "-t", 1)
    budget = smallest(cli, *command) + 12
    report = json.loads(cli(*command, "--memory", f"{budget}MiB", "--json").out)
    assert {r["schedule"] for r in report["results"]} == {"layer"}
    prompt, generated = (r["stream"] for r in report["results"])
    assert (prompt["passes"], generated["passes"]) == (1, 2)
    assert prompt["disk_bytes"] > 0 and generated["disk_bytes"] > 0
    assert report["streaming"]["prefill_passes"] == 4  # two of each test, a prompt of one token before generation
    assert "| from disk |" in cli(*command, "--memory", f"{budget}MiB").out


def test_verify_compares_a_streamed_path(cli: Cli, model: Path) -> None:
    verdict = json.loads(cli("verify", model, "--tokens", 140, "--memory", "2GiB", "--json").out)
    assert verdict["equal"] is True
    assert verdict["paths"][-1]["name"] == "resident in 2.0 GiB"


def test_a_size_that_is_none_is_refused(cli: Cli, model: Path) -> None:
    result = cli("run", model, "words", "--memory", "much")
    assert result.code == 1
    assert "memory is 'much'; expected a size such as 2GiB" in result.err
