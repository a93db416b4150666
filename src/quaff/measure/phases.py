"""The phase table: where the time of one request went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """`tokens` finished in `seconds`; load has no tokens."""

    name: str
    seconds: float
    tokens: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


def phase_table(phases: Sequence[Phase]) -> str:
    """Plain lines: phase, tokens, seconds, tokens/s."""
    lines = [f"{'phase':<10}{'tokens':>8}{'seconds':>10}{'tokens/s':>11}"]
    for p in phases:
        tokens = "" if p.tokens is None else f"{p.tokens:,}"
        speed = "" if p.tokens_per_second is None else f"{p.tokens_per_second:,.1f}"
        lines.append(f"{p.name:<10}{tokens:>8}{p.seconds:>10.3f}{speed:>11}".rstrip())
    return "\n".join(lines)
