"""How long a step may take that others wait for, and how much work that is on this machine now: measured, never assumed. How long one may
be for nobody to notice that its tokens come together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quaff.errors import ConfigError

SLOWER, FASTER = 0.5, 1.25
"""One step's measurement changes the work of the next by at most these factors: a hiccup of the machine is forgotten in a few steps."""


BURST_MS = 16.0
"""Nobody sees a text grow in steps so short, and several tokens then share what Python does between two native calls."""
BURST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """How an engine treats the requests that share it. No bit of an answer depends on any of it.

    `max_stall_ms`: what a running stream may wait between two tokens because of someone's prompt; steps of prompts alone then end after
    one chunk, so that newcomers and cancels need not wait longer. None: steps are as long as is fastest. `draft_tokens`: the longest
    guess that is checked in one step, 0 for none. `max_running`: requests that take part in steps; the others wait. `burst_ms`:
    while nobody's prompt is read those that decode get the tokens of so long a time together, at most BURST_TOKENS, 0: each as it comes.
    """

    max_stall_ms: float | None = None
    draft_tokens: int = 0
    max_running: int = 1 << 20
    burst_ms: float = BURST_MS

    def __post_init__(self) -> None:
        stall = self.max_stall_ms
        if stall is not None and not (isinstance(stall, int | float) and math.isfinite(stall) and stall > 0):
            raise ConfigError(f"max_stall_ms is {stall!r}; expected a number of milliseconds above 0")
        burst = self.burst_ms
        if not (isinstance(burst, int | float) and not isinstance(burst, bool) and 0 <= burst <= 1000):
            raise ConfigError(f"burst_ms is {burst!r}; expected a number of milliseconds in 0..1000")
        for name, value, least, most in (("draft_tokens", self.draft_tokens, 0, 64), ("max_running", self.max_running, 1, 1 << 20)):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; expected an integer in {least}..{most}")


class Pace:
    """Work of prompts that fits into a step beside decoding requests, so that the step takes `target_seconds`.

    A step takes a fixed part (weights are read, rows decode) and one that grows with the work. Scaling the work by target / measured
    settles at the target without knowing either, whatever the model, the machine, its neighbours and the length of the contexts.
    """

    def __init__(self, target_seconds: float) -> None:
        self.target_seconds = target_seconds
        self.work = 0
        """Multiply-accumulates; 0 before anything was measured."""

    def measured(self, prompt_work: int, seconds: float, mixed: bool) -> None:
        """A finished step: work of its prompts, wall-clock seconds, and whether someone decoded in it."""
        if not prompt_work or seconds <= 0:
            return
        if not mixed:
            # Long steps use the machine best: a first guess, too large for short ones, which correct it.
            if not self.work:
                self.work = max(1, int(prompt_work * self.target_seconds / seconds))
            return
        if 2 * prompt_work >= self.work or seconds > self.target_seconds:
            # A step with little to do says only that it was not too long.
            scale = min(FASTER, max(SLOWER, self.target_seconds / seconds))
            self.work = max(1, int(max(self.work, prompt_work) * scale))
