"""Prompt speed of batched orders against the token-major control: one model, one process, taken in turns, new prompts every round.

Speed is prompt tokens / seconds from token ids handed over to logits of the last row. A ratio is taken within a round; the median counts.
Bytes are counted, not timed: with no logits wanted, weight bytes touched must fall by exactly ceil(N/C)/N, where C is the rows of a
chunk. With the last row's logits the last ffn and the head run for one row in either order, so that ratio is given apart.

    python benchmarks/prefill.py smollm2 -p 512 -t 2 --schedule chunk,layer

The last line of output is one JSON object. Exit status 1: the counted ratio is not the predicted one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from fractions import Fraction
from typing import Any

import numpy as np

import quaff
from quaff import _native
from quaff.llm import LLM

CONTROL = "token"
Rates = dict[str, list[float]]


def passes(schedule: str, tokens: int, chunk: int) -> int | None:
    """How often a prompt of `tokens` reads every layer's weights; None where mixers and ffns are read a different number of times."""
    if schedule == CONTROL:
        return tokens
    chunks = -(-tokens // chunk)
    return chunks if schedule == "chunk" or chunks == 1 else None


def touched(llm: LLM, schedule: Any, ids: list[int]) -> int:
    """Weight bytes of layers that kernels read for a prompt without logits."""
    llm.configure(schedule=schedule)
    result = llm.prefill(ids, logits="none")
    with result.state:
        return result.counters.weight_bytes_touched


def measure(llm: LLM, schedules: list[Any], tokens: int, rounds: int, seed: int) -> tuple[Rates, dict[str, dict[str, int]]]:
    """Tokens per second per schedule, one value a round after one of warm-up, and the counters of the last run."""
    rng = np.random.default_rng(seed)
    rates: Rates = {s: [] for s in schedules}
    counters: dict[str, dict[str, int]] = {}
    for number in range(-1, rounds):
        ids = rng.integers(0, llm.config.vocab, tokens).tolist()
        turn = number % len(schedules)
        for schedule in schedules[turn:] + schedules[:turn]:
            llm.configure(schedule=schedule)
            begin = time.perf_counter()
            result = llm.prefill(ids)
            seconds = time.perf_counter() - begin
            result.state.close()
            counters[schedule] = result.counters.as_dict()
            if number >= 0:
                rates[schedule].append(tokens / seconds)
    return rates, counters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="alias or GGUF file (default smollm2)")
    parser.add_argument("-p", "--tokens", type=int, default=512, help="prompt tokens (default 512)")
    parser.add_argument("-t", "--threads", type=int, help="worker threads (default: physical cores it may use)")
    parser.add_argument("--chunk", type=int, help="rows of a cell (default: the engine's choice)")
    parser.add_argument("--schedule", default="chunk", help="orders to compare with the control: chunk, layer, or both with a comma")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts (default: the clock)")
    args = parser.parse_args()
    batched = args.schedule.split(",")
    if not set(batched) <= {"chunk", "layer"}:
        parser.error(f"--schedule {args.schedule}: expected chunk, layer or both")

    with quaff.load(args.model, threads=args.threads, chunk=args.chunk, context=args.tokens + 1) as llm:
        llm.configure(schedule=batched[0])
        if llm.order.name == CONTROL:
            raise SystemExit("error: QUAFF_BATCHED_PREFILL=0 leaves only the control; unset it")
        ids = np.random.default_rng(args.seed).integers(0, llm.config.vocab, args.tokens).tolist()
        control_bytes = touched(llm, CONTROL, ids)
        counted = {s: Fraction(touched(llm, s, ids), control_bytes) for s in batched}
        rates, counters = measure(llm, [*batched, CONTROL], args.tokens, args.rounds, args.seed)
        about = {"model": llm.path.name, "isa": _native.isa(), "threads": llm.threads, "chunk": llm.chunk}

    exact = True
    rows: dict[str, Any] = {}
    print(f"pp{args.tokens} of {about['model']}, {about['isa']}, {about['threads']} threads, chunk {about['chunk']}, {args.rounds} rounds")
    for s in [*batched, CONTROL]:
        count = counters[s]
        rows[s] = {"tokens_per_second": statistics.median(rates[s]), "samples": rates[s], "counters": count}
        speed, megabytes = rows[s]["tokens_per_second"], count["weight_bytes_touched"] / 1e6
        line = f"  {s:6s} {speed:9.1f} tokens/s {megabytes:10.1f} MB {count['launches']:8d} launches"
        if s != CONTROL:
            times = passes(s, args.tokens, about["chunk"])
            predicted = None if times is None else Fraction(times, args.tokens)
            exact = exact and predicted in (None, counted[s])
            control = counters[CONTROL]
            rows[s] |= {
                "ratio": statistics.median(a / b for a, b in zip(rates[s], rates[CONTROL], strict=True)),
                "weight_bytes_ratio": str(counted[s]),
                "weight_bytes_ratio_predicted": None if predicted is None else str(predicted),
                "weight_bytes_ratio_with_last_row": str(Fraction(count["weight_bytes_touched"], control["weight_bytes_touched"])),
                "launches_ratio": str(Fraction(count["launches"], control["launches"])),
            }
            line += f"   {rows[s]['ratio']:.2f}x the control, bytes x {counted[s]}"
            line += "" if predicted is None else f" (predicted {predicted})"
        print(line)
    result = {"benchmark": "prefill", "test": f"pp{args.tokens}", **about, "rounds": args.rounds, "schedules": rows}
    print(json.dumps(result | {"ratio": rows[batched[0]]["ratio"], "weight_bytes_exact": exact}))
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
