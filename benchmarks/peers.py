"""Prompt speed of quaff beside llama.cpp: the same file, threads and prompts, taken in turns in one run.

Every engine lives in a process of its own and waits while another works. In each round all engines read the same new prompt of random
token ids (so no prefix cache can help any of them), in an order that rotates; a ratio is taken within a round, and the median of the
rounds' ratios counts. Speed is prompt tokens / seconds from token ids handed over to logits of the last row: no tokenising, no sampling,
no loading.

llama.cpp comes as `xllamacpp` (a portable wheel; its server's own `prompt_ms` is used, which leaves HTTP out) and as `llama-cpp-python`
(built from source for this machine). The faster of the two is the peer that `ratio` refers to.

    python benchmarks/peers.py smollm2 -p 512 -t 2
    python benchmarks/peers.py model.gguf --python llama-cpp-python=other-venv/bin/python

The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PEERS = ("xllamacpp", "llama-cpp-python")
ENGINES = ("quaff", *PEERS)
PAUSE_SECONDS = 0.05  # lets the last engine's threads stop spinning

Measure = Callable[[list[int]], float]
"""Token ids -> seconds."""


def start_quaff(model: str, threads: int, tokens: int, chunk: int | None) -> tuple[str, Measure]:
    import quaff
    from quaff import _native

    llm = quaff.load(model, threads=threads, chunk=chunk, context=tokens + 64)

    def measure(ids: list[int]) -> float:
        begin = time.perf_counter()
        llm.prefill(ids)
        return time.perf_counter() - begin

    return f"isa {_native.isa()}", measure


def start_xllamacpp(model: str, threads: int, tokens: int, chunk: int | None) -> tuple[str, Measure]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = tokens + 64
    params.n_parallel = 1
    params.n_batch = max(tokens, 512)
    params.n_ctx_checkpoints = 0
    params.cache_ram_mib = 0
    params.verbosity = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def measure(ids: list[int]) -> float:
        body = json.dumps({"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            timings = json.load(reply)["timings"]
        if timings["prompt_n"] != len(ids):
            raise RuntimeError(f"evaluated {timings['prompt_n']} of {len(ids)} tokens")
        return float(timings["prompt_ms"]) / 1000

    return " ".join(xllamacpp.get_system_info().split()), measure


def start_llama_cpp_python(model: str, threads: int, tokens: int, chunk: int | None) -> tuple[str, Measure]:
    import llama_cpp

    llm = llama_cpp.Llama(
        model,
        n_ctx=tokens + 64,
        n_batch=max(tokens, 512),
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def measure(ids: list[int]) -> float:
        llm.reset()
        begin = time.perf_counter()
        llm.eval(ids)
        return time.perf_counter() - begin

    return f"{llama_cpp.__version__}: " + " ".join(llama_cpp.llama_print_system_info().decode().split()), measure


STARTERS = {"quaff": start_quaff, "xllamacpp": start_xllamacpp, "llama-cpp-python": start_llama_cpp_python}


def serve(engine: str, model: str, threads: int, tokens: int, chunk: int | None) -> None:
    """Worker: one line of JSON in, one line out, until the input ends. Whatever the engine prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    about, measure = STARTERS[engine](model, threads, tokens, chunk)
    print(json.dumps({"about": about}), file=out)
    for line in sys.stdin:
        print(json.dumps({"seconds": measure(json.loads(line))}), file=out)


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[str]
    about: str

    @classmethod
    def start(cls, name: str, python: str, args: argparse.Namespace, model: str) -> Worker | None:
        command = [python, __file__, model, "--worker", name, "-p", str(args.tokens), "-t", str(args.threads)]
        if args.chunk is not None:
            command += ["--chunk", str(args.chunk)]
        errors = None if args.verbose else subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            return cls(name, process, json.loads(line)["about"])
        process.wait()
        return None

    def seconds(self, ids: list[int]) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        time.sleep(PAUSE_SECONDS)
        self.process.stdin.write(json.dumps(ids) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.name} stopped; run again with --verbose to see why")
        return float(json.loads(line)["seconds"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(workers: list[Worker], vocab: int, tokens: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Tokens per second of every engine, one value per round; a first round of warm-up is thrown away."""
    rng = np.random.default_rng(seed)
    rates: dict[str, list[float]] = {w.name: [] for w in workers}
    for number in range(-1, rounds):
        ids = rng.integers(0, vocab, tokens).tolist()
        turn = number % len(workers)
        for worker in workers[turn:] + workers[:turn]:
            seconds = worker.seconds(ids)
            if number >= 0:
                rates[worker.name].append(tokens / seconds)
        if number >= 0:
            print(f"round {number + 1}/{rounds}: " + ", ".join(f"{n} {r[-1]:.0f}" for n, r in rates.items()), file=sys.stderr)
    return rates


def report(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians per engine, median paired ratio quaff / peer, and the fastest peer's ratio as `ratio` (absent without quaff)."""
    engines = {
        name: {"tokens_per_second": statistics.median(values), "best": max(values), "samples": values} for name, values in rates.items()
    }
    out: dict[str, Any] = {"engines": engines}
    peers = [name for name in rates if name != "quaff"]
    if peers:
        out["fastest_peer"] = max(peers, key=lambda name: statistics.median(rates[name]))
    if peers and "quaff" in rates:
        out["ratios"] = {p: statistics.median(q / r for q, r in zip(rates["quaff"], rates[p], strict=True)) for p in peers}
        out["ratio"] = out["ratios"][out["fastest_peer"]]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="alias or GGUF file (default smollm2)")
    parser.add_argument("-p", "--tokens", type=int, default=512, help="prompt tokens (default 512)")
    parser.add_argument("-t", "--threads", type=int, help="threads of every engine (default: quaff's)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--chunk", type=int, help="quaff's chunk (default: its own choice)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated, default all: " + ", ".join(ENGINES))
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter that has this engine")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts (default: the clock)")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.model, args.threads, args.tokens, args.chunk)
        return

    from quaff.checkpoint import open_checkpoint
    from quaff.hub import resolve

    if args.threads is None:
        from quaff import _native

        args.threads = _native.default_threads()
    path = Path(resolve(args.model))
    with open_checkpoint(path) as checkpoint:
        vocab = len(checkpoint.metadata["tokenizer.ggml.tokens"])
    pythons = dict(item.split("=", 1) for item in args.python)
    workers = []
    for name in args.engines.split(","):
        if name not in ENGINES:
            parser.error(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
        worker = Worker.start(name, pythons.get(name, sys.executable), args, str(path))
        if worker is None:
            print(f"{name}: could not be started, left out (--verbose shows why)", file=sys.stderr)
        else:
            workers.append(worker)
    if not workers:
        raise SystemExit("error: no engine could be started")
    try:
        rates = compare(workers, vocab, args.tokens, args.rounds, args.seed)
    finally:
        for worker in workers:
            worker.stop()

    result = {
        "benchmark": "peers",
        "test": f"pp{args.tokens}",
        "model": path.name,
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": platform.machine(),
        "about": {w.name: w.about for w in workers},
        **report(rates),
    }
    print(f"pp{args.tokens} of {path.name}, {args.threads} threads, median of {args.rounds} rounds (prompt tokens per second)")
    for name, engine in result["engines"].items():
        ratio = f"   quaff is {result['ratios'][name]:.2f}x" if name in result.get("ratios", {}) else ""
        print(f"  {name:18s} {engine['tokens_per_second']:9.1f}{ratio}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
