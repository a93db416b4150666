"""How the next token is chosen: frozen parameters, a native draw that depends on (seed, position, choice) only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.errors import ConfigError, NonFiniteError

_NO_HISTORY: NDArray[np.int32] = np.empty(0, dtype=np.int32)


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ConfigError(what)


def _integer(name: str, value: object, least: int, most: int) -> None:
    _check(
        isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        f"{name} is {value!r}; expected an integer in {least}..{most}",
    )


def _number(name: str, value: object, least: float, most: float, above: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and least <= value <= most
    _check(ok and not (above and value == least), f"{name} is {value!r}; expected a number in {'(' if above else '['}{least:g}, {most:g}]")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to generate and how to choose; ConfigError names a value out of range.

    `max_tokens`: at most so many new tokens. `temperature` 0 takes the most likely token (the lower id among equals). `top_k` 0, `top_p` 1
    and `min_p` 0 are off. `repetition_penalty` divides positive and multiplies negative logits of tokens seen before. `seed` and `choice`
    (which of several completions of one prompt) start the random numbers. `stop`: texts (one, several, or None) that end the completion
    and are not part of it. `ignore_eos` goes on after an end-of-text token.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, 1 << 30)
        _number("temperature", self.temperature, 0, 100)
        _integer("top_k", self.top_k, 0, 1 << 30)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _integer("seed", self.seed, 0, (1 << 64) - 1)
        _integer("choice", self.choice, 0, (1 << 31) - 1)
        given: object = self.stop
        _check(given is None or isinstance(given, str | list | tuple), f"stop is {given!r}; expected a text, or a list of texts")
        stop = (given,) if isinstance(given, str) else tuple(self.stop or ())
        _check(all(isinstance(s, str) and s for s in stop), "stop strings must be texts that are not empty")
        object.__setattr__(self, "stop", stop)
        _check(isinstance(self.ignore_eos, bool), f"ignore_eos is {self.ignore_eos!r}; expected true or false")


def sample(params: SamplingParams, logits: NDArray[np.float32], tokens: list[int]) -> int:
    """The token after `tokens`, from its f32 logits [vocab] (NUMERICS 20). The penalty covers all of `tokens`.

    Raises NonFiniteError when a logit is infinite or NaN.
    """
    history = np.array(tokens, dtype=np.int32) if params.repetition_penalty != 1.0 else _NO_HISTORY
    try:
        return _native.sample(
            logits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            history,
            params.seed,
            len(tokens),
            params.choice,
        )
    except ValueError as error:
        raise refused(error, len(tokens) - 1) from None


def refused(error: ValueError, position: int) -> ValueError | NonFiniteError:
    """A native refusal of logits: NonFiniteError when that is what is wrong with them, else as it is."""
    if "not finite" in str(error):
        return NonFiniteError(f"the logits at position {position} became infinite or NaN; the request was dropped")
    return error


class StopMatcher:
    """Cuts streamed text at the first stop string, and holds back what may still become one: no part of a stop string ever leaks.

    `met` is the stop string that was found, of several at one place the one that sorts first.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.met: str | None = None

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def push(self, text: str) -> str:
        """Text that is safe to show now; nothing more comes once `stopped`."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.met = min(found)
            safe, self._held = self._held[:at], ""
            return safe
        keep = max(self._overlap(s) for s in self._stop)
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        safe, self._held = self._held, ""
        return safe

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
