"""Speed of quaff beside llama.cpp and OpenVINO GenAI: the same files, threads and prompts, taken in turns in one run.

Every engine lives in a process of its own and waits while another works. In each round all engines get the same new prompt of random
token ids (so no prefix cache can help any of them), in an order that rotates; a ratio is taken within a round, and the median of the
rounds' ratios counts. Tests are named as llama-bench names them: pp512 reads a prompt of 512 tokens, tg64 decodes 64 tokens one by one.

llama.cpp comes as `xllamacpp` (a portable wheel) and as `llama-cpp-python` (built for this machine, each test with the parameters that
suit it best). The faster of the two counts. A peer that is not installed, or that cannot read a file, is null; stderr says why. Decode is
bound by memory, whose speed changes on shared machines: every round of it reads a large buffer just before and just after quaff's turn.

    python -m benchmarks.peers
    python -m benchmarks.peers --models smollm2-q8_0,qwen2-1.5b-q8_0 --tests pp512,tg64 --rounds 3 --threads 2

The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from benchmarks.files import FILES, Content, content, model_file

from quaff import _native

LLAMA_CPP = ("xllamacpp", "llama-cpp-python")
ENGINES = ("quaff", *LLAMA_CPP, "openvino")
TESTS = ("pp512", "tg64")
MORE_TESTS = {
    "smollm2-q8_0": ("pp512", "pp2048", "tg64"),
    "smollm2-q4_0": ("pp512", "pp2048", "pp8192", "tg64"),
    "smollm2-q4_k_m": ("pp512", "pp2048", "tg64"),
}
DECODE_PROMPT_TOKENS = 16
PAUSE_SECONDS = 0.05  # lets the last engine's threads stop spinning
PROBE_MEGABYTES = 1024  # beyond any cache
HERE = Path(__file__).parent
PEERS_PYTHON = Path("build/peers/bin/python")  # made by `make bench-peers`


@dataclass(frozen=True)
class Workload:
    """`prompt` tokens are read; `new` tokens follow (0: reading is what counts)."""

    name: str
    prompt: int
    new: int

    @classmethod
    def parse(cls, name: str) -> Workload:
        """ValueError unless `name` is pp or tg and a positive number."""
        match = re.fullmatch(r"(pp|tg)([1-9]\d*)", name)
        if not match:
            raise ValueError(f"{name!r} is not a test; expected pp512, tg64 and the like")
        count = int(match[2])
        return cls(name, count, 0) if match[1] == "pp" else cls(name, DECODE_PROMPT_TOKENS, count)

    @property
    def tokens(self) -> int:
        """What a speed counts."""
        return self.new or self.prompt

    def rounds(self, wanted: int) -> int:
        """Long prompts vary less and take long: fewer rounds, but three where so many are wanted."""
        return min(wanted, max(3, 16384 // self.prompt))


class EngineError(Exception):
    """An engine could not start or answer; the message says why."""


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[str]
    errors: IO[bytes]
    about: str = ""

    @classmethod
    def start(cls, name: str, python: str, model: Path, threads: int, context: int) -> Worker:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the engine fails)
        command = [python, str(HERE / "engines.py"), name, str(model), "--threads", str(threads), "--context", str(context)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        worker = cls(name, process, errors)
        try:
            worker.about = worker._answer()["about"]
        except EngineError:
            worker.stop()
            raise
        return worker

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace").strip().splitlines()
            raise EngineError(said[-1] if said else f"stopped with status {self.process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def seconds(self, ids: list[int], new: int) -> float:
        assert self.process.stdin is not None
        time.sleep(PAUSE_SECONDS)
        try:
            self.process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says why
        return float(self._answer()["seconds"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


@dataclass
class Samples:
    """Tokens per second of every engine that got through, one value a round, and the bandwidth around quaff's turns of decoding."""

    rates: dict[str, list[float]]
    bandwidth: list[float] = field(default_factory=list)


def compare(
    workers: list[Worker], test: Workload, vocab: int, rounds: int, rng: np.random.Generator, probe: Callable[[], float]
) -> Samples:
    """Run a test; a first round of warm-up is thrown away, and an engine that fails is left out with its reason on stderr."""
    samples = Samples({w.name: [] for w in workers})
    for number in range(-1, rounds):
        ids = rng.integers(0, vocab, test.prompt).tolist()
        present = [w for w in workers if w.name in samples.rates]
        turn = number % max(1, len(present))
        for worker in present[turn:] + present[:turn]:
            probed = worker.name == "quaff" and test.new > 0 and number >= 0
            before = probe() if probed else 0.0
            try:
                seconds = worker.seconds(ids, test.new)
            except EngineError as error:
                print(f"{test.name}: {worker.name} is left out: {error}", file=sys.stderr)
                del samples.rates[worker.name]
                continue
            if number >= 0:
                samples.rates[worker.name].append(test.tokens / seconds)
            if probed:
                samples.bandwidth.append((before + probe()) / 2)
        if number >= 0:
            print(f"{test.name} {number + 1}/{rounds}: " + ", ".join(f"{n} {r[-1]:.0f}" for n, r in samples.rates.items()), file=sys.stderr)
    return samples


def fastest(rates: dict[str, list[float]], names: tuple[str, ...]) -> str | None:
    """The engine among `names` with the highest median; None where none ran."""
    present = [name for name in names if rates.get(name)]
    return max(present, key=lambda name: statistics.median(rates[name]), default=None)


def median_ratio(rates: dict[str, list[float]], name: str | None) -> float | None:
    """Median over rounds of quaff's speed / that engine's in the same round."""
    if name is None or not rates.get("quaff"):
        return None
    return statistics.median(q / r for q, r in zip(rates["quaff"], rates[name], strict=True))


def row(model: str, test: Workload, threads: int, samples: Samples) -> dict[str, Any]:
    """One line of the result: medians in tokens per second, ratios, the probe's median in GB/s; null where an engine did not run."""
    rates = samples.rates
    peer, openvino = fastest(rates, LLAMA_CPP), fastest(rates, ("openvino",))

    def median(name: str | None) -> float | None:
        return statistics.median(rates[name]) if name is not None and rates.get(name) else None

    return {
        "model": model,
        "test": test.name,
        "threads": threads,
        "quaff": median("quaff"),
        "llama_cpp": median(peer),
        "openvino": median(openvino),
        "ratio": median_ratio(rates, peer),
        "ratio_openvino": median_ratio(rates, openvino),
        "bandwidth_gbps": statistics.median(samples.bandwidth) / 1e9 if samples.bandwidth else None,
    }


def bandwidth_share(samples: Samples, token_bytes: int) -> float | None:
    """Median over rounds of bytes per second that quaff's decode needs / bytes per second that the probe read in the same round."""
    rates = samples.rates.get("quaff")
    if not rates or not samples.bandwidth:
        return None
    return statistics.median(r * token_bytes / b for r, b in zip(rates, samples.bandwidth, strict=True))


def phase_ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Prefill / decode speed per model and engine, from the first test of each kind. Near one: prompts are not read in batches."""
    out: dict[str, dict[str, float]] = {}
    for model in dict.fromkeys(r["model"] for r in rows):
        prefill, decode = (next((r for r in rows if r["model"] == model and r["test"].startswith(kind)), None) for kind in ("pp", "tg"))
        if prefill and decode:
            names = [n for n in ("quaff", "llama_cpp", "openvino") if prefill[n] and decode[n]]
            out[model] = {name: prefill[name] / decode[name] for name in names}
    return out


def line(r: dict[str, Any], peer: str | None, share: float | None) -> str:
    """A row of the table for people."""

    def cell(value: float | None, form: str = "9.1f", unit: str = "") -> str:
        width = int(form.split(".")[0]) + len(unit)
        return f"{value:{form}}{unit}" if value is not None else f"{'-':>{width}}"

    text = f"  {r['test']:7s}{cell(r['quaff'])}{cell(r['llama_cpp'], '11.1f')}{cell(r['openvino'], '10.1f')}"
    text += f"{cell(r['ratio'], '8.2f', 'x')}{cell(r['ratio_openvino'], '10.2f', 'x')}{cell(r['bandwidth_gbps'], '8.1f')}"
    return text + cell(None if share is None else 100 * share, "7.0f", " %") + (f"   {peer}" if peer else "")


HEADER = (
    f"  {'':7s}{'quaff':>9s}{'llama.cpp':>11s}{'openvino':>10s}{'ratio':>9s}{'openvino':>11s}{'GB/s':>8s}{'of it':>9s}   which llama.cpp"
)


@contextmanager
def started(names: list[str], pythons: dict[str, str], path: Path, threads: int, context: int) -> Iterator[list[Worker]]:
    """Workers of the engines that can load the file; the others' reasons go to stderr. quaff must be able to."""
    workers: list[Worker] = []
    try:
        for name in names:
            try:
                workers.append(Worker.start(name, pythons[name], path, threads, context))
            except EngineError as error:
                if name == "quaff":
                    raise SystemExit(f"error: quaff cannot load {path}: {error}") from None
                print(f"{name} is left out: {error}", file=sys.stderr)
            else:
                print(f"{name}: {workers[-1].about}", file=sys.stderr)
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def describe(name: str, threads: int, path: Path, about: Content) -> str:
    return f"\n{name}, {threads} threads: {about} ({path.stat().st_size / 1e6:.0f} MB)\n{HEADER}"


def main() -> None:
    python = str(PEERS_PYTHON if PEERS_PYTHON.exists() else sys.executable)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(FILES)
    parser.add_argument("--models", default=",".join(FILES), help=f"aliases, files or names, with commas between (default: {names})")
    parser.add_argument("--tests", help="tests of every model, such as pp512,tg64 (default: pp512 and tg64, long prompts on SmolLM2 only)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, at most three for very long prompts (default 7)")
    parser.add_argument("--threads", type=int, default=_native.default_threads(), help="threads of every engine (default: physical cores)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas between; all: " + ", ".join(ENGINES))
    parser.add_argument("--peers", default=python, help="interpreter that has the peers")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts (default: the clock)")
    args = parser.parse_args()
    engines = args.engines.split(",")
    try:
        tests = [Workload.parse(t) for t in args.tests.split(",")] if args.tests else None
    except ValueError as error:
        parser.error(str(error))
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"unknown engine {unknown[0]!r}; known: {', '.join(ENGINES)}")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")

    pythons = {name: sys.executable if name == "quaff" else args.peers for name in ENGINES}
    rng = np.random.default_rng(args.seed)
    probe = partial(_native.measure_bandwidth, args.threads, PROBE_MEGABYTES)
    rows: list[dict[str, Any]] = []
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"load average {load:.1f}: other programs are at work, and the speeds will suffer", file=sys.stderr)
    for name in args.models.split(","):
        path = model_file(name, args.peers)
        about = content(path)
        plan = tests or [Workload.parse(t) for t in MORE_TESTS.get(name, TESTS)]
        print(describe(name, args.threads, path, about), flush=True)
        with started(engines, pythons, path, args.threads, max(t.prompt + t.new for t in plan) + 64) as workers:
            for test in plan:
                samples = compare(workers, test, about.vocab, test.rounds(args.rounds), rng, probe)
                rows.append(row(name, test, args.threads, samples))
                print(line(rows[-1], fastest(samples.rates, LLAMA_CPP), bandwidth_share(samples, about.token_bytes)), flush=True)
    ratios = phase_ratios(rows)
    print("\nprefill / decode: " + "; ".join(f"{m} " + ", ".join(f"{e} {v:.1f}" for e, v in r.items()) for m, r in ratios.items()))
    print(json.dumps({"rows": rows, "phase_ratio": ratios}))


if __name__ == "__main__":
    main()
