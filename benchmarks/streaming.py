"""Models larger than memory: one pass over the file per prompt, at the speed of the disk or of the arithmetic, whichever is slower.

    once      a cold prompt inside a budget beside reading the file alone and beside the same prompt with all weights in memory
    limited   a cold prompt under a limit of the kernel (control group), beside llama.cpp, which maps the file, under the same limit
    control   token-major reads the layers once for every token, and the counters say so
    budgets   from the least memory to all weights: equal bits, faster and faster generation, less than the least refused with a list
    peak      the peak of a longer prompt is that of a shorter one, its residual rows and its KV state

    python -m benchmarks.streaming once llama2-7b-q4_0 --tokens 512 --memory 1GiB

Every run is a process of its own; before it the file's pages are dropped from the page cache, and that is checked. The last line of output
is one JSON object. Exit status 1: bits, bytes or memory are not what they must be; times are only reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coldread import drop, seconds_to_read
from benchmarks.files import model_file

from quaff import _native
from quaff.checkpoint import open_checkpoint
from quaff.config import parse_memory
from quaff.weights.budget import human_bytes

HERE = Path(__file__).parent
GROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
PEERS_PYTHON = Path("build/peers/bin/python")  # made by `make bench-peers`


class RunError(Exception):
    """A run ended without a result; the message says why."""


def cold(engine: str, model: Path, args: argparse.Namespace, group: Path | None = None, **options: object) -> dict[str, Any]:
    """One run of coldstart.py, with nothing of the file in the page cache, in a control group if there is one."""
    drop(model)
    options = {"tokens": args.tokens, "threads": args.threads, **options}
    flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    python = sys.executable if engine == "quaff" else args.peers
    command = [python, str(HERE / "coldstart.py"), engine, str(model), *flags]

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=join)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"{engine} could not be started: {error}") from None
    if done.returncode == -signal.SIGKILL:
        raise RunError("ended by the kernel, for want of memory")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RunError(said[-1] if said else f"{engine} ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path | None]:
    """A control group with a limit of resident memory and page cache; None where this process may not make one."""
    name = f"quaff-streaming-{os.getpid()}"
    for base, limit in GROUPS:
        group = base / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if _written(group / limit, limit_bytes):
                yield group
                return
        finally:
            group.rmdir()
    yield None


def _written(path: Path, number: int) -> bool:
    """False where the system has no such file, or does not let us."""
    try:
        path.write_text(str(number))
    except OSError:
        return False
    return True


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def once(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    reads, residents, streams = [], [], []
    for _ in range(args.rounds):
        drop(model)
        reads.append(seconds_to_read(model))
        residents.append(cold("quaff", model, args))
        streams.append(cold("quaff", model, args, memory=args.memory))
        say(
            f"reading the file {reads[-1]:.1f} s, resident prefill {residents[-1]['prefill_seconds']:.1f} s, "
            f"streamed {streams[-1]['prefill_seconds']:.1f} s"
        )
    streamed, resident, budget = streams[-1], residents[-1], int(parse_memory(args.memory))
    counters, weights = streamed["streaming"], sum(tensor_bytes(model).values())
    floor = [max(read, run["prefill_seconds"]) for read, run in zip(reads, residents, strict=True)]
    ratio = median(run["prefill_seconds"] / least for run, least in zip(streams, floor, strict=True))
    checks = {
        "one_pass": counters["prefill_passes"] == 1,
        "bytes_once": abs(counters["prefill_bytes"] / weights - 1) <= 0.01,
        "within_budget": streamed["peak_rss_bytes"] <= 1.05 * budget,
        "same_bits": all(streamed[key] == resident[key] for key in ("logits_sha256", "kv_sha256")),
    }
    say(
        f"streamed {ratio:.2f}x the longer of reading and computing; {counters['prefill_bytes']:,} of {weights:,} bytes "
        f"in {counters['prefill_passes']} pass; peak {human_bytes(streamed['peak_rss_bytes'])} of {human_bytes(budget)}"
    )
    return {
        "tokens": args.tokens,
        "memory_bytes": budget,
        "weight_bytes": weights,
        "disk_bytes_per_second": model.stat().st_size / median(reads),
        "read_seconds": reads,
        "resident_prefill_seconds": [run["prefill_seconds"] for run in residents],
        "streamed_prefill_seconds": [run["prefill_seconds"] for run in streams],
        "over_longer_of_both": ratio,
        "streamed": streamed,
        "resident": resident,
        "checks": checks,
    }


def limited(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    limit = int(parse_memory(args.limit))
    with limited_memory(limit) as group:
        if group is None:
            say("not run: this process may not make a control group with a limit")
            return {"run": False, "checks": {}}
        drop(model)
        read_seconds = seconds_to_read(model)
        runs: dict[str, dict[str, Any]] = {}
        for engine, options in (("quaff", {"memory": args.memory}), ("llama.cpp", {})):
            try:
                runs[engine] = cold(engine, model, args, group, **options)
            except RunError as error:
                runs[engine] = {"error": str(error)}
                say(f"{engine}: no result: {error}")
                continue
            run = runs[engine]
            run["compute_share"] = run["user_seconds"] / (args.threads * run["first_token_seconds"])
            say(
                f"{engine}: first token after {run['first_token_seconds']:.1f} s (loading {run['load_seconds']:.1f} s), "
                f"{human_bytes(run['read_bytes'])} from disk, {100 * run['compute_share']:.0f} % of the processors' time computing"
            )
    ours, theirs = (runs[name].get("first_token_seconds") for name in ("quaff", "llama.cpp"))
    ratio = theirs / ours if ours and theirs else None
    say(f"disk {model.stat().st_size / read_seconds / 1e6:,.0f} MB/s; first token {f'{ratio:.2f}x sooner' if ratio else 'not compared'}")
    return {
        "run": True,
        "tokens": args.tokens,
        "limit_bytes": limit,
        "disk_bytes_per_second": model.stat().st_size / read_seconds,
        "first_token_ratio": ratio,
        "runs": runs,
        "checks": {"quaff_ran": "error" not in runs["quaff"]},
    }


def control(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """With the least memory, so that next to nothing is pinned."""
    memory = least(args, model)
    runs = [cold("quaff", model, args, memory=memory, schedule=order) for order in ("layer", "token")]
    layer, token = (run["streaming"] for run in runs)
    ratio = token["prefill_bytes"] / layer["prefill_bytes"]
    say(f"{args.tokens} tokens: layer-major {layer['prefill_bytes']:,} bytes, token-major {token['prefill_bytes']:,}: {ratio:.2f}x")
    # The last row alone needs what follows the last layer's keys and values: in either order that is read once, as pins are.
    once = tail_share(model) + runs[1]["plan"]["pinned_bytes"] / layer["prefill_bytes"]
    checks = {
        "passes": (layer["prefill_passes"], token["prefill_passes"]) == (1, args.tokens),
        "bytes": 0.99 * (args.tokens * (1 - once) + once) <= ratio <= args.tokens,
        "decode_apart": layer["decode_bytes"] == token["decode_bytes"] == 0,
    }
    return {"tokens": args.tokens, "layer": layer, "token": token, "ratio": ratio, "checks": checks}


def tensor_bytes(model: Path) -> dict[str, int]:
    """As they lie in the file, which is what the disk is asked for."""
    with open_checkpoint(model) as checkpoint:
        return {name: view.nbytes for name, view in checkpoint.tensors.items()}


def tail_share(model: Path) -> float:
    """Share of a model's bytes that its last layer and its head have, token tables left out."""
    sizes = {name: size for name, size in tensor_bytes(model).items() if not name.startswith("token_embd")}
    last = max(int(name.split(".")[1]) for name in sizes if name.startswith("blk."))
    return sum(n for name, n in sizes.items() if name.startswith((f"blk.{last}.", "output"))) / sum(sizes.values())


def least(args: argparse.Namespace, model: Path, **options: object) -> str:
    """The smallest budget, from the refusal that names it. That of this moment: the process is never exactly as large."""
    try:
        cold("quaff", model, args, memory="1MiB", **options)
    except RunError as error:
        say(str(error))
        match = re.search(r"smallest budget that will do is (\d+)MiB", str(error))
        if match is None:
            raise
        return f"{int(match[1]) + 1}MiB"
    raise RunError("a budget of 1 MiB was not refused")


def budgets(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    smallest = int(parse_memory(least(args, model, decode=args.decode)))
    resident = cold("quaff", model, args, decode=args.decode)
    bits = ("logits_sha256", "kv_sha256", "answer")
    rows = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        # All weights and what the least budget holds for state: enough for a resident run.
        memory = smallest + int(share * resident["weight_bytes"])
        run = cold("quaff", model, args, memory=memory, decode=args.decode)
        rows.append(
            {
                "share": share,
                "memory_bytes": memory,
                "peak_rss_bytes": run["peak_rss_bytes"],
                "resident": run["plan"]["resident"],
                "prefill_seconds": run["prefill_seconds"],
                "decode_tokens_per_second": run["decode_tokens_per_second"],
                "decode_bytes": run["streaming"]["decode_bytes"] if run["streaming"] else 0,
                "same_bits": all(run[key] == resident[key] for key in bits),
            }
        )
        r = rows[-1]
        say(
            f"{human_bytes(memory)}: {r['decode_tokens_per_second']:.2f} tokens/s, {human_bytes(r['decode_bytes'])} for {args.decode} "
            f"tokens, peak {human_bytes(r['peak_rss_bytes'])}, bits {'equal' if r['same_bits'] else 'DIFFERENT'}"
        )
    decoded = [r["decode_bytes"] for r in rows]
    checks = {
        "same_bits": all(r["same_bits"] for r in rows),
        "bytes_fall": decoded == sorted(decoded, reverse=True) and decoded[-1] == 0,
        "within_budget": all(r["peak_rss_bytes"] <= 1.05 * r["memory_bytes"] for r in rows),
    }
    return {"tokens": args.tokens, "decode": args.decode, "least_bytes": smallest, "rows": rows, "checks": checks}


def peak(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Two prompts in one plan. By our own count the longer one has its residual rows and its KV state more, and nothing else
    (tests/laws/test_budgets.py); the kernel is to agree."""
    short = argparse.Namespace(**{**vars(args), "tokens": args.tokens // 8})
    runs = [cold("quaff", model, a, memory=args.memory, positions=args.tokens) for a in (short, args)]
    counted = runs[1]["streaming"]["peak_bytes"] - runs[0]["streaming"]["peak_bytes"]
    grown = runs[1]["peak_rss_bytes"] - runs[0]["peak_rss_bytes"]
    budget = int(parse_memory(args.memory))
    say(f"{short.tokens} to {args.tokens} tokens: the peak grows by {human_bytes(max(0, grown))}, counted {human_bytes(max(0, counted))}")
    checks = {
        "within_budget": all(run["peak_rss_bytes"] <= 1.05 * budget for run in runs),
        "as_counted": grown <= counted + 0.05 * budget,
    }
    return {"tokens": [short.tokens, args.tokens], "grown_bytes": grown, "counted_bytes": counted, "runs": runs, "checks": checks}


TESTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "once": once,
    "limited": limited,
    "control": control,
    "budgets": budgets,
    "peak": peak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", choices=TESTS)
    parser.add_argument("model", help="a name in files.py, an alias or a file")
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt (default 512)")
    parser.add_argument("--decode", type=int, default=4, help="tokens generated by budgets (default 4)")
    parser.add_argument("--memory", default="1GiB", help="budget of the process (default 1GiB)")
    parser.add_argument("--limit", default="1GiB", help="of the kernel, for limited (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=1, help="of once (default 1)")
    parser.add_argument("--threads", type=int, default=_native.default_threads(), help="threads (default: physical cores)")
    parser.add_argument(
        "--peers", default=str(PEERS_PYTHON if PEERS_PYTHON.exists() else sys.executable), help="interpreter with llama_cpp"
    )
    args = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"load average {load:.1f}: other programs are at work, and the speeds will suffer")
    model = model_file(args.model, args.peers)
    try:
        result = {"test": args.test, "model": str(model), "threads": args.threads, **TESTS[args.test](args, model)}
    except RunError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(result))
    if not all(result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
