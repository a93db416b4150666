"""Reports of a bench as JSON values and as a markdown table."""

from __future__ import annotations

from typing import Any

from quaff.measure import counted
from quaff.measure.bench import BenchReport


def bench_json(report: BenchReport) -> dict[str, Any]:
    """One object; `threads` is the highest count measured, and every result says its own."""
    return {
        "isa": report.model["isa"],
        "threads": report.threads,
        "model": report.model["path"],
        "results": [
            {
                "test": r.test,
                "threads": r.threads,
                "schedule": r.schedule,
                "chunk": r.chunk,
                "tokens_per_second": r.mean,
                "stddev": r.stddev,
                "samples": list(r.samples),
                "counters": r.counters.as_dict(),
            }
            for r in report.results
        ],
        "phase_ratio": report.phase_ratio,
        "ceilings": [{"threads": c.threads, **c.as_dict()} for c in report.ceilings],
    }


def bench_markdown(report: BenchReport) -> str:
    """Table of all results, then sentences: ceilings, control, phase ratio."""
    types = ", ".join(f"{count} {kind}" for kind, count in report.model["tensor_types"].items())
    lines = [
        f"{report.model['name'] or report.model['path']} ({types}), {report.model['isa']}",
        "",
        "| test | threads | schedule | tokens/s | weight bytes touched | launches |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for r in report.results:
        schedule = r.schedule if r.schedule == "token" else f"{r.schedule}({r.chunk})"
        speed = f"{r.mean:,.1f} ± {r.stddev:,.1f}"
        lines.append(f"| {r.test} | {r.threads} | {schedule} | {speed} | {r.counters.weight_bytes_touched:,} | {r.counters.launches:,} |")
    lines.append("")
    lines += [c.sentence() for c in report.ceilings]
    lines += _control(report)
    if report.headline and report.phase_ratio:
        prompt, generated = report.headline
        meaning = "the prompt is batched" if report.phase_ratio >= 2 else "the prompt is not batched"
        lines.append(
            f"phase ratio {report.phase_ratio:.1f}: {prompt.test} over {generated.test}; a prompt token costs "
            f"{100 / report.phase_ratio:.0f} % of a generated one, so {meaning}"
        )
    return "\n".join(lines)


def _control(report: BenchReport) -> list[str]:
    """Each batched prompt beside the token-major control of the same run."""
    out = []
    for r in report.results:
        control = report.find(r.test, r.threads, "token")
        if not r.test.startswith("pp") or control is None or control is r:
            continue
        bytes_ratio = control.counters.weight_bytes_touched / max(1, r.counters.weight_bytes_touched)
        out.append(
            f"{r.test} on {counted(r.threads, 'thread')}: {r.schedule}-major is {r.mean / control.mean:.1f}x the token-major control "
            f"and touches 1/{bytes_ratio:.4g} of its weight bytes"
        )
    return out
