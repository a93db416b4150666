"""Did this change cost speed? Two builds run the same bench by turns, and the noise between equal runs says what a loss is.

A round is four fresh processes: base, ours, ours, base. Its neighbours give two paired ratios, ours over base; the median of all pairs is
the change of a phase. The same round gives two ratios of equal code (base over base, ours over ours), in which no change can show. Medians
of as many of these, drawn again and again with either sign, are what the median would be if nothing had changed: the noise floor is the
loss that one such median in 500 goes beyond. Rounds are added until the floor is at most 1 %, or the most rounds are done.

    python -m quaff.measure.guard smollm2 --base "OLD/bin/python -m quaff" --ours "NEW/bin/python -m quaff"

The last line of output is one JSON object. Exit status 1: prefill or decode lost more than max(1 %, noise).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quaff.errors import QuaffError
from quaff.measure.ledger import Entry, cpu_model, model_file, read

LEAST_LOSS = 0.01
"""Losses up to this are never reported: the bar that the project sets itself."""
DRAWS = 2000
ONE_IN = 500


class GuardError(QuaffError):
    """A build that cannot be measured."""


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of one test in four processes, in the order they ran."""

    base_first: float
    ours_first: float
    ours_last: float
    base_last: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio` is ours over base, the median of paired ratios; `noise` the loss that equal builds may show, as a share of one."""

    test: str
    base: float
    ours: float
    ratio: float
    noise: float
    pairs: int

    @property
    def phase(self) -> str:
        return "prefill" if self.test.startswith("pp") else "decode"

    @property
    def allowed(self) -> float:
        return max(LEAST_LOSS, self.noise)

    @property
    def lost(self) -> bool:
        return 1 - self.ratio > self.allowed

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"phase": self.phase, "lost": self.lost}

    def sentence(self) -> str:
        what = f"LOST {100 * (1 - self.ratio):.1f} %" if self.lost else "no loss"
        blind = "; smaller losses cannot be seen in this run" if self.noise > LEAST_LOSS and not self.lost else ""
        return (
            f"{self.phase} {self.test}: {self.ours:,.1f} tokens/s, base {self.base:,.1f}; {what}: "
            f"median of {self.pairs} paired ratios {self.ratio:.3f}, "
            f"noise {100 * self.noise:.1f} %, allowed {100 * self.allowed:.1f} %{blind}"
        )


def judge(test: str, rounds: Sequence[Round]) -> Verdict:
    """The verdict on one test; needs a round at least. The same rounds give the same verdict."""
    pairs = [math.log(ours / base) for r in rounds for base, ours in ((r.base_first, r.ours_first), (r.base_last, r.ours_last))]
    equal = [math.log(last / first) for r in rounds for first, last in ((r.base_first, r.base_last), (r.ours_first, r.ours_last))]
    base = statistics.median(rate for r in rounds for rate in (r.base_first, r.base_last))
    ours = statistics.median(rate for r in rounds for rate in (r.ours_first, r.ours_last))
    return Verdict(test, base, ours, math.exp(statistics.median(pairs)), noise_floor(equal), len(pairs))


def noise_floor(equal: Sequence[float]) -> float:
    """Loss, as a share of one, that the median of as many log ratios between equal builds goes beyond once in `ONE_IN` draws."""
    numbers = random.Random(0)
    either = [*equal, *(-ratio for ratio in equal)]
    medians = sorted(statistics.median(numbers.choices(either, k=len(equal))) for _ in range(DRAWS))
    return max(0.0, 1 - math.exp(medians[DRAWS // ONE_IN]))


Run = Callable[[str], dict[str, float]]
"""Runs one side, `base` or `ours`, in a fresh process: tokens per second by test."""


def compare(run: Run, fewest: int, most: int) -> list[Verdict]:
    """Rounds until the noise is small in every test or the most are done; then one verdict per test."""
    rounds: dict[str, list[Round]] = {}
    done = 0
    while True:
        four = [run(side) for side in ("base", "ours", "ours", "base")]
        if any(rates.keys() != four[0].keys() for rates in four):
            raise GuardError("the two builds did not run the same tests")
        for test in four[0]:
            rounds.setdefault(test, []).append(Round(*(rates[test] for rates in four)))
        done += 1
        verdicts = [judge(test, of_test) for test, of_test in rounds.items()]
        if done >= most or (done >= fewest and all(v.noise <= LEAST_LOSS for v in verdicts)):
            return verdicts


def bench(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON report of `COMMAND bench ARGUMENTS` in a process of its own."""
    whole = [*shlex.split(command), "bench", *arguments, "--json"]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, check=True)
        report: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise GuardError(f"{shlex.join(whole)}: {said[-1] if said else 'failed'}") from None
    return report


def rates(report: dict[str, Any], schedule: str = "chunk") -> dict[str, float]:
    """Median tokens per second by test; generation has one order only and keeps the name of the first."""
    return {r["test"]: statistics.median(r["samples"]) for r in report["results"] if r["schedule"] == schedule}


def against_ledger(verdict: Verdict, line: Entry | None, here: dict[str, Any]) -> str:
    """The ratio to the last ledger line, or why there is none: another machine or another file would be another denominator."""
    if line is None:
        return "last ledger line: none (no ledger, or nothing in it)"
    which = f"last ledger line, {line['utc']}, commit {(line['commit'] or 'unknown')[:12]}{' and changes' if line['dirty'] else ''}"
    there = {"cpu": line["machine"]["cpu"], "isa": line["machine"]["isa"], "sha256": line["model"]["sha256"]}
    if other := [name for name in there if there[name] != here[name]]:
        return f"{which}: not comparable ({', '.join(other)} differ{'s' if len(other) == 1 else ''})"
    for r in line["results"]:
        if (r["test"], r["threads"], r["schedule"]) == (verdict.test, here["threads"], "chunk"):
            was = r["median_tokens_per_second"]
            return f"{which}: {verdict.ours / was:.3f}x of {was:,.1f} tokens/s (another hour, not paired)"
    return f"{which}: has no such test"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias or GGUF file")
    parser.add_argument("--base", required=True, help="command that runs the quaff to compare with")
    parser.add_argument("--ours", required=True, help="command that runs the quaff to judge")
    parser.add_argument("--base-name", default="base", help="what to call the base in the report")
    parser.add_argument("-p", "--n-prompt", default="512", help="prompt tokens (default 512)")
    parser.add_argument("-n", "--n-gen", default="64", help="generated tokens (default 64)")
    parser.add_argument("-t", "--threads", help="worker threads (default: what quaff takes)")
    parser.add_argument("-r", "--repetitions", default="3", help="runs of a test within a process, of which the median counts (default 3)")
    parser.add_argument("--rounds", type=int, default=4, help="fewest rounds (default 4)")
    parser.add_argument("--most", type=int, default=10, help="most rounds (default 10)")
    parser.add_argument("--ledger", type=Path, help="published lines to compare with")
    args = parser.parse_args(arguments)
    if not 1 <= args.rounds <= args.most:
        parser.error("expected 1 <= --rounds <= --most")

    published = read(args.ledger) if args.ledger else []
    same = [args.model, "-p", args.n_prompt, "-r", args.repetitions, *(("-t", args.threads) if args.threads else ())]
    commands = {"base": args.base, "ours": args.ours}
    control = bench(args.ours, [*same, "-n", "0", "--schedule", "chunk,token"])
    verdicts = compare(lambda side: rates(bench(commands[side], [*same, "-n", args.n_gen])), args.rounds, args.most)

    here = {"cpu": cpu_model(), "isa": control["isa"], "threads": control["threads"]} | model_file(Path(control["model"]))
    token, chunk = rates(control, "token"), rates(control)
    print(f"{here['file']}, {here['cpu']}, {here['isa']}, {here['threads']} threads")
    for v in verdicts:
        print(v.sentence())
        if v.test in token:
            print(f"  to our own token-major control, same process: {chunk[v.test] / token[v.test]:.2f}x of {token[v.test]:,.1f} tokens/s")
        print(f"  to {args.base_name}, paired: {v.ratio:.3f}x of {v.base:,.1f} tokens/s")
        print(f"  to the {against_ledger(v, published[-1] if published else None, here)}")
    lost = [v.phase for v in verdicts if v.lost]
    print(f"lost speed: {', '.join(lost)}" if lost else "no phase lost speed")
    print(json.dumps({"guard": here, "base": args.base_name, "verdicts": [v.as_dict() for v in verdicts], "lost": lost}))
    return 1 if lost else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuaffError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
