"""How the next token is chosen: frozen parameters, a native draw that depends on (seed, position, choice) only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.errors import ConfigError, NonFiniteError

MAX_ALTERNATIVES = 1024
"""Log-probabilities are reported for at most so many alternatives of a token."""
MAX_BIASED = 1024

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
    and `min_p` 0 are off. `logit_bias` is added to the logits of token ids; a generated token that occurred n times loses
    `presence_penalty` + n * `frequency_penalty`; `repetition_penalty` divides positive and multiplies negative logits of tokens seen
    before, the prompt's too; in this order. `seed` and `choice` (which of several completions of one prompt) start the random numbers.
    `stop`: texts (one, several, or None) that end the completion and are not part of it. `ignore_eos` goes on after an end-of-text token.
    `logprobs`: report every generated token's log-probability and so many likely alternatives (0: none; None: nothing);
    `prompt_logprobs`: the same for the prompt's tokens after the first.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

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
        _number("presence_penalty", self.presence_penalty, -100, 100)
        _number("frequency_penalty", self.frequency_penalty, -100, 100)
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_ALTERNATIVES)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_ALTERNATIVES)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, what is added to its logit), ids ascending."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def draw(self) -> tuple[float, int, float, float, int, int] | None:
        """What a step needs to draw tokens itself; None where a token's logits are changed by others, or looked at."""
        if self.biases or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logprobs is not None:
            return None
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.choice

    def check_vocab(self, vocab: int) -> None:
        """ConfigError when a biased id is not one of `vocab` tokens."""
        if self.biases and self.biases[-1][0] >= vocab:
            raise ConfigError(f"logit_bias names token {self.biases[-1][0]}, which is outside the vocabulary of {vocab} tokens")


def _pairs(given: object) -> tuple[tuple[int, float], ...]:
    """Checked (token id, bias) pairs, ids ascending; the last one counts of an id that is given twice."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    _check(
        isinstance(pairs, list | tuple) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs),
        "logit_bias is not a mapping of token ids to numbers",
    )
    assert isinstance(pairs, list | tuple)
    _check(len(pairs) <= MAX_BIASED, f"logit_bias has {len(pairs)} entries; at most {MAX_BIASED} are taken")
    for token, bias in pairs:
        _integer("a token id of logit_bias", token, 0, 1 << 30)
        _number(f"logit_bias of token {token}", bias, -100, 100)
    return tuple(sorted({int(token): float(bias) for token, bias in pairs}.items()))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`logprob`: natural log-probability of the token `id` under the model's own distribution: no penalty, constraint or temperature in it.

    `top`: the most likely ids with theirs, likeliest first, the lower id first among equals.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """What the next token may be. The engine asks before every draw and reports the token that was drawn, in order."""

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab], true where the next token may be; some are."""

    def accept(self, token: int) -> None:
        """The token that was drawn."""

    @property
    def ended(self) -> bool:
        """True when nothing can follow but the end."""


def sample(
    params: SamplingParams,
    logits: NDArray[np.float32],
    tokens: Sequence[int],
    prompt_tokens: int = 0,
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token after `tokens`, `prompt_tokens` of which were given, from its f32 logits [vocab] (NUMERICS 20).

    `allowed` [vocab]: ids that may be drawn, None for all. Raises NonFiniteError when a logit is infinite or NaN.
    """
    if params.logit_bias or params.presence_penalty or params.frequency_penalty:
        logits = _shifted(params, logits, tokens[prompt_tokens:])
    if allowed is not None:
        logits = _masked(logits, allowed, len(tokens) - 1)
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


def _shifted(params: SamplingParams, logits: NDArray[np.float32], generated: Sequence[int]) -> NDArray[np.float32]:
    """Logits with biases added and penalties taken off: f64 sums of two terms, rounded once; the same on every machine."""
    out = logits.copy()
    for token, bias in params.biases:
        out[token] = np.float32(float(out[token]) + bias)
    if generated and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        penalties = counts * np.float64(params.frequency_penalty) + params.presence_penalty
        out[ids] = (out[ids].astype(np.float64) - penalties).astype(np.float32)
    return out


def _masked(logits: NDArray[np.float32], allowed: NDArray[np.bool_], position: int) -> NDArray[np.float32]:
    if not np.isfinite(logits).all():
        # A row that is wrong where it is forbidden is wrong all the same.
        raise refused(ValueError("not finite"), position)
    if not allowed.any():
        raise ConfigError("the constraint allows no token at all")
    return np.where(allowed, logits, np.float32(-np.inf))


def describe(logits: NDArray[np.float32], token: int, alternatives: int, position: int) -> TokenLogprobs:
    """The log-probability of `token` and of the likeliest `alternatives`, from the f32 logits [vocab] of the row at `position`."""
    n = min(alternatives, len(logits))
    likely: list[int] = []
    if n:
        least = np.partition(logits, len(logits) - n)[len(logits) - n]
        among = np.flatnonzero(logits >= least)
        likely = among[np.argsort(-logits[among], kind="stable")][:n].tolist()
    try:
        values = _native.logprobs(logits, np.array([token, *likely], dtype=np.int32)).tolist()
    except ValueError as error:
        raise refused(error, position) from None
    return TokenLogprobs(token, values[0], tuple(zip(likely, values[1:], strict=True)))


def refused(error: ValueError, position: int) -> ValueError | NonFiniteError:
    """A native refusal of logits: NonFiniteError when that is what is wrong with them, else as it is."""
    if "not finite" in str(error):
        return NonFiniteError(f"the logits at position {position} became infinite or NaN; the request was dropped")
    return error


def overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks` but is not all of it."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(len(mark) > n and mark.startswith(text[-n:]) for mark in marks)), 0)


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
        keep = overlap(self._held, self._stop)
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        safe, self._held = self._held, ""
        return safe
