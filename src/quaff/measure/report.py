"""Reports of a bench: JSON values, and a table with sentences that say what the figures mean."""

from __future__ import annotations

from typing import Any

from quaff.measure import counted
from quaff.measure.bench import BenchReport, Result
from quaff.measure.profile import OpTime
from quaff.measure.roofline import FMA, INT8, INT16
from quaff.measure.streaming import bound_of, megabytes_per_second
from quaff.measure.table import Column, markdown
from quaff.weights.budget import human_bytes

BATCHED_FROM = 2.0
"""A phase ratio below this means that a prompt token costs about what a generated one does: nothing is shared between rows."""


def bench_json(report: BenchReport) -> dict[str, Any]:
    """One object; `threads` is the highest count measured, and every result says its own. Units are in the names, shares are of one."""
    return {
        "isa": report.model["isa"],
        "threads": report.threads,
        "model": report.model["path"],
        "load_average_before": report.load_average[0],
        "load_average_after": report.load_average[1],
        "results": [_result(report, r) for r in report.results],
        "phase_ratio": report.phase_ratio,
        "ceilings": [c.as_dict() for c in report.ceilings],
        "streaming": report.streaming and report.streaming.as_dict(),
        "sentences": sentences(report),
    }


def _result(report: BenchReport, r: Result) -> dict[str, Any]:
    limit = report.bound(r)
    out: dict[str, Any] = {
        "test": r.test,
        "n_prompt": r.trial.prompt,
        "n_gen": r.trial.generate,
        "n_depth": r.trial.depth,
        "n_parallel": r.trial.sequences,
        "threads": r.threads,
        "schedule": r.schedule,
        "chunk": r.chunk,
        "tokens_per_second": r.mean,
        "stddev": r.stddev,
        "median_tokens_per_second": r.median,
        "spread": r.spread,
        "samples": list(r.samples),
        "ceiling": limit.ceiling,
        "ceiling_share": limit.seconds / r.seconds,
        "bound_seconds": dict(limit.parts),
        "counters": r.counters.as_dict(),
    }
    if r.stream is not None:
        out["stream"] = {**r.stream.as_dict(), "bound": bound_of(r.stream)}
    if r.ops:
        out["profile"] = {"scope": scope(report), "ops": [op.as_dict() for op in r.ops]}
    return out


def scope(report: BenchReport) -> str:
    """What a profile is of. All stages of the loaded model run in every test; a slice would have to say so."""
    return f"full model, {counted(report.model['layers'], 'layer')}"


def bench_markdown(report: BenchReport, roofline: bool = False) -> str:
    """Table of all results (with `roofline`, of their shares of the ceilings too), profiles, then sentences."""
    types = ", ".join(f"{count} {kind}" for kind, count in report.model["tensor_types"].items())
    columns: list[Column[Result]] = [
        Column("test", lambda r: r.test, right=False),
        Column("threads", lambda r: str(r.threads)),
        Column("schedule", lambda r: r.schedule if r.schedule == "token" else f"{r.schedule}({r.chunk})", right=False),
        Column("tokens/s", lambda r: f"{r.mean:,.1f} ± {r.stddev:,.1f}"),
        Column("median", lambda r: f"{r.median:,.1f}"),
        Column("spread", lambda r: f"{100 * r.spread:.0f} %"),
    ]
    if roofline:
        columns += [
            Column("ceiling", lambda r: report.bound(r).ceiling, right=False),
            Column("share of it", lambda r: f"{100 * report.bound(r).seconds / r.seconds:.0f} %"),
        ]
    if report.streaming is not None:
        columns += [
            Column("passes", lambda r: str(r.stream.passes if r.stream else 0)),
            Column("from disk", lambda r: human_bytes(r.stream.disk_bytes if r.stream else 0)),
            Column("MB/s", lambda r: f"{megabytes_per_second(r.stream):,.0f}" if r.stream else ""),
            Column("bound by", lambda r: bound_of(r.stream) if r.stream else "", right=False),
        ]
    columns += [
        Column("weight bytes touched", lambda r: f"{r.counters.weight_bytes_touched:,}"),
        Column("launches", lambda r: f"{r.counters.launches:,}"),
    ]
    load = " and ".join(f"{value:.1f}" for value in report.load_average)
    lines = [
        f"{report.model['name'] or report.model['path']} ({types}), {report.model['isa']}, load average {load} before and after",
        "",
        *markdown(columns, report.results),
        "",
    ]
    for r in report.results:
        if r.ops:
            lines += [f"{r.test} on {counted(r.threads, 'thread')}, {r.schedule}: time by op, {scope(report)}", ""]
            lines += [*markdown(_PROFILE, r.ops), ""]
    return "\n".join(lines + sentences(report))


_PROFILE: tuple[Column[OpTime], ...] = (
    Column("op", lambda op: op.name, right=False),
    Column("ms", lambda op: f"{1e3 * op.seconds:,.2f}"),
    Column("share", lambda op: f"{100 * op.share:.1f} %"),
    Column("GB/s", lambda op: f"{op.work.stream_bytes / op.seconds / 1e9:,.1f}" if op.work.stream_bytes and op.seconds else ""),
    Column("GMAC/s", lambda op: f"{op.macs / op.seconds / 1e9:,.0f}" if op.macs and op.seconds else ""),
    Column("of ceiling", lambda op: "" if op.ceiling_share is None else f"{100 * op.ceiling_share:.0f} % of {op.ceiling}"),
)


ARITHMETIC = {INT8: "integer arithmetic", INT16: "integer arithmetic of attention", FMA: "f32 arithmetic"}


def sentences(report: BenchReport) -> list[str]:
    """Ceilings, which of them binds each test, the control, and what the phase ratio implies."""
    return [*(c.sentence() for c in report.ceilings), *_binding(report), *_control(report), *_phase_ratio(report)]


def _binding(report: BenchReport) -> list[str]:
    out = []
    for r in report.results:
        limit = report.bound(r)
        what = ARITHMETIC.get(limit.ceiling, f"reading weights and KV state from {limit.ceiling}")
        others = ", ".join(
            f"{name} {100 * seconds / limit.seconds:.0f} %" for name, seconds in limit.parts if seconds and name != limit.ceiling
        )
        out.append(
            f"{r.test} on {counted(r.threads, 'thread')}, {r.schedule}: {what} binds; the least time that the ceilings allow is "
            f"{100 * limit.seconds / r.seconds:.0f} % of the time taken" + (f" (of that least time {others})" if others else "")
        )
    return out


def _control(report: BenchReport) -> list[str]:
    """Each batched prompt beside the token-major control of the same run, by medians."""
    out = []
    for r in report.results:
        control = report.find(r.test, r.threads, "token")
        if not r.trial.prompt or control is None or control is r:
            continue
        bytes_ratio = control.counters.weight_bytes_touched / max(1, r.counters.weight_bytes_touched)
        out.append(
            f"{r.test} on {counted(r.threads, 'thread')}: {r.schedule}-major is {r.median / control.median:.1f}x the token-major control "
            f"(predicted from the ceilings {report.bound(control).seconds / report.bound(r).seconds:.1f}x) "
            f"and touches 1/{bytes_ratio:.4g} of its weight bytes"
        )
    return out


def _phase_ratio(report: BenchReport) -> list[str]:
    if not report.headline or not report.phase_ratio:
        return []
    prompt, generated = report.headline
    if report.phase_ratio >= BATCHED_FROM:
        meaning = "the prompt is batched: rows share the weights that are read for them"
    else:
        meaning = "a ratio near 1, so the prompt is not batched: every prompt token reads the weights anew, as a generated one does"
    return [
        f"phase ratio {report.phase_ratio:.1f}: {prompt.test} over {generated.test}; a prompt token costs "
        f"{100 / report.phase_ratio:.0f} % of a generated one, {meaning}"
    ]
