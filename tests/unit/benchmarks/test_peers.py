"""The arithmetic of the comparison: rotation, warm-up, paired ratios, which peer counts, what a failure leaves; and one real worker."""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import (
    HEADER,
    EngineError,
    Samples,
    Worker,
    Workload,
    bandwidth_share,
    compare,
    fastest,
    line,
    median_ratio,
    phase_ratios,
    row,
    started,
)
from tests.tiny import CASES

Log = list[tuple[str, tuple[int, ...]]]


class FakeWorker:
    """Takes the given seconds in turn; the round of warm-up takes ten times as long. None: the engine fails."""

    def __init__(self, name: str, seconds: list[float | None], log: Log) -> None:
        self.name, self.log = name, log
        self.values = iter([10 * (seconds[0] or 0.0), *seconds])

    def seconds(self, ids: list[int], new: int) -> float:
        self.log.append((self.name, tuple(ids)))
        value = next(self.values)
        if value is None:
            raise EngineError("out of memory")
        return value


def run(test: str, rounds: int, log: Log, **seconds: list[float | None]) -> Samples:
    workers: Any = [FakeWorker(name, values, log) for name, values in seconds.items()]
    probes = count(1)
    return compare(workers, Workload.parse(test), 1000, rounds, np.random.default_rng(1), lambda: float(next(probes)))


def test_rounds_share_a_new_prompt_and_rotate() -> None:
    log: Log = []
    samples = run("pp8", 3, log, quaff=[1.0, 1.0, 1.0], b=[2.0, 2.0, 4.0])
    assert samples.rates == {"quaff": [8.0, 8.0, 8.0], "b": [4.0, 4.0, 2.0]}
    assert samples.bandwidth == []
    prompts = [ids for _, ids in log]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 4
    assert [name for name, _ in log] == ["b", "quaff", "quaff", "b", "b", "quaff", "quaff", "b"]


def test_decode_is_bracketed_by_probes_and_counts_new_tokens() -> None:
    log: Log = []
    samples = run("tg64", 2, log, b=[2.0, 2.0], quaff=[0.5, 0.25])
    assert samples.rates == {"b": [32.0, 32.0], "quaff": [128.0, 256.0]}
    assert samples.bandwidth == [1.5, 3.5]
    assert {len(ids) for _, ids in log} == {16}
    assert bandwidth_share(samples, token_bytes=3) == np.median([128.0 * 3 / 1.5, 256.0 * 3 / 3.5])


def test_an_engine_that_fails_is_left_out_and_the_reason_told(capsys: pytest.CaptureFixture[str]) -> None:
    samples = run("pp8", 3, [], quaff=[1.0, 1.0, 1.0], openvino=[1.0, None], xllamacpp=[2.0, 2.0, 2.0])
    assert samples.rates == {"quaff": [8.0] * 3, "xllamacpp": [4.0] * 3}
    assert "pp8: openvino is left out: out of memory" in capsys.readouterr().err
    found = row("m", Workload.parse("pp8"), 2, samples)
    assert (found["openvino"], found["ratio_openvino"], found["ratio"]) == (None, None, 2.0)


def test_ratio_is_the_median_of_paired_ratios_against_the_faster_llama_cpp() -> None:
    rates = {"quaff": [100.0, 50.0, 90.0], "xllamacpp": [50.0, 10.0, 30.0], "llama-cpp-python": [20.0, 25.0, 60.0], "openvino": [25.0] * 3}
    assert fastest(rates, ("xllamacpp", "llama-cpp-python")) == "xllamacpp"
    assert median_ratio(rates, "llama-cpp-python") == 2.0
    assert row("m", Workload.parse("tg64"), 2, Samples(rates, [4e10, 8e10, 6e10])) == {
        "model": "m",
        "test": "tg64",
        "threads": 2,
        "quaff": 90.0,
        "llama_cpp": 30.0,
        "openvino": 25.0,
        "ratio": 3.0,
        "ratio_openvino": 3.6,
        "bandwidth_gbps": 60.0,
    }


def test_nulls_where_nothing_ran() -> None:
    found = row("m", Workload.parse("pp8"), 2, Samples({"xllamacpp": [1.0]}))
    assert [found[k] for k in ("quaff", "llama_cpp", "openvino", "ratio", "ratio_openvino", "bandwidth_gbps")] == [None, 1.0] + [None] * 4
    assert fastest({"openvino": []}, ("openvino",)) is None
    assert bandwidth_share(Samples({"quaff": [1.0]}), 1) is None


def test_phase_ratio_uses_the_first_test_of_each_kind() -> None:
    rows = [
        {"model": "a", "test": "pp512", "quaff": 100.0, "llama_cpp": 30.0, "openvino": None},
        {"model": "a", "test": "pp2048", "quaff": 1.0, "llama_cpp": 1.0, "openvino": None},
        {"model": "a", "test": "tg64", "quaff": 10.0, "llama_cpp": 15.0, "openvino": 1.0},
        {"model": "b", "test": "pp512", "quaff": 100.0, "llama_cpp": 30.0, "openvino": None},
    ]
    assert phase_ratios(rows) == {"a": {"quaff": 10.0, "llama_cpp": 2.0}}


@pytest.mark.parametrize(
    ("name", "prompt", "new", "tokens", "rounds"),
    [("pp512", 512, 0, 512, 7), ("pp2048", 2048, 0, 2048, 7), ("pp8192", 8192, 0, 8192, 3), ("tg64", 16, 64, 64, 7)],
)
def test_names_of_tests(name: str, prompt: int, new: int, tokens: int, rounds: int) -> None:
    test = Workload.parse(name)
    assert (test.prompt, test.new, test.tokens, test.rounds(7)) == (prompt, new, tokens, rounds)
    assert test.rounds(1) == 1


@pytest.mark.parametrize("name", ["pp", "pp0", "tg-1", "512", "xpp512", "pp512 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a test"):
        Workload.parse(name)


def test_columns_stand_under_their_names() -> None:
    full = row("m", Workload.parse("tg64"), 2, Samples({"quaff": [90.0], "xllamacpp": [30.0], "openvino": [25.0]}, [6e10]))
    empty = row("m", Workload.parse("pp512"), 2, Samples({}))
    lines = line(full, "xllamacpp", 0.5), line(empty, None, None)
    for text in lines:
        ends = [HEADER.index(name) + len(name) for name in ("quaff", "llama.cpp", "ratio", "GB/s", "of it")]
        assert all(text[end - 1] != " " and (end == len(text) or text[end] == " ") for end in ends), text
    assert lines[0].endswith("50 %   xllamacpp")


def test_a_real_worker_answers_and_reports_bad_requests(tmp_path: Path) -> None:
    worker = Worker.start("quaff", sys.executable, CASES["qwen2"].write(tmp_path / "m.gguf"), threads=1, context=64)
    try:
        assert worker.about.startswith("isa ")
        assert worker.seconds([1, 2, 3], 0) > 0
        assert worker.seconds([1, 2, 3], 4) > 0
        with pytest.raises(EngineError, match="999999"):
            worker.seconds([999999], 0)
        assert worker.seconds([3, 2, 1], 0) > 0
    finally:
        worker.stop()
    assert worker.process.returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is not None, reason="OpenVINO is installed here")
def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    with started(["quaff", "openvino"], dict.fromkeys(("quaff", "openvino"), sys.executable), path, 1, 64) as workers:
        assert [w.name for w in workers] == ["quaff"]
    assert "openvino is left out: ModuleNotFoundError" in capsys.readouterr().err


def test_quaff_must_run(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model")
    with (
        pytest.raises(SystemExit, match="quaff cannot load .*m.gguf"),
        started(["quaff"], {"quaff": sys.executable}, tmp_path / "m.gguf", 1, 64),
    ):
        pass
