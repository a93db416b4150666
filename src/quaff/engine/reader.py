"""Tokens of one completion to text: whole characters only, cut at stop strings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

from quaff.engine.engine import FinishReason
from quaff.engine.sampler import SamplingParams, StopMatcher
from quaff.tokenizer import Tokenizer


class Reader:
    """Give `accept` to `Engine.submit`. `shown`: special tokens that are part of the text.

    `deltas` are pieces that nobody took yet, `parts` all of them; `first_at` is when the first token came (perf_counter seconds).
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, shown: Collection[int] = frozenset()) -> None:
        self._silent = frozenset() if params.ignore_eos else tokenizer.end_ids
        self._decoder = tokenizer.decoder(shown=shown)
        self._stop = StopMatcher(params.stop)
        self.deltas: deque[str] = deque()
        self.parts: list[str] = []
        self.first_at = 0.0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.met

    def accept(self, token: int) -> FinishReason | None:
        if not self.first_at:
            self.first_at = time.perf_counter()
        if token not in self._silent:
            self._add(self._stop.push(self._decoder.push(token)))
        return "stop" if self._stop.stopped else None

    def finish(self) -> None:
        """Once, after the last token: what was held back and turned out to be text."""
        self._add(self._stop.push(self._decoder.finish()) + self._stop.finish())

    def take(self) -> str:
        """The text that came since the last call."""
        text = "".join(self.deltas)
        self.deltas.clear()
        return text

    def _add(self, text: str) -> None:
        if text:
            self.deltas.append(text)
            self.parts.append(text)
