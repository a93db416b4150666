"""Guesses of what comes next, from the text itself: agents and editors repeat long parts of their prompts.

A guess is only computed, never believed: the engine draws every token from the model's own logits and keeps what was guessed right.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3
"""Tokens that must have occurred before: shorter matches are mostly chance, longer ones come too late."""
FIRST_DRAFT = 4
LONGEST_REST = 64


class Lookup:
    """Prompt lookup (Saxena, prompt-lookup-decoding, 2023) for one request: what followed the last time the latest three tokens occurred.

    Drafts grow to `most` tokens while they are right and shrink where they went wrong; after misses in a row it rests for 2, 4 ... 64
    tokens.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._length = min(FIRST_DRAFT, most)
        self._misses = 0
        self._rest_until = 0
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = GRAM

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `tokens`, which begin with those of the call before."""
        n = len(tokens)
        if n < self._rest_until or n < GRAM:
            return []
        # The latest three are looked up before they are entered: they must not find themselves.
        for end in range(self._indexed, n):
            self._after[tuple(tokens[end - GRAM : end])] = end
        self._indexed = max(n, GRAM)
        at = self._after.get(tuple(tokens[n - GRAM :]))
        if at is None:
            return []
        # A text that repeats itself runs into its own end, and goes on from where it was found.
        span = n - at
        return [tokens[at + i % span] for i in range(min(limit, self._length))]

    def judge(self, drafted: int, accepted: int, known: int) -> None:
        """`accepted` of `drafted` tokens were right; `known` tokens there are now."""
        if accepted == drafted:
            self._length = min(self.most, 2 * self._length)
        else:
            self._length = min(self.most, accepted + 1)
        self._misses = 0 if accepted else self._misses + 1
        self._rest_until = known + min(LONGEST_REST, 1 << self._misses) if self._misses else 0

    def stop(self) -> None:
        """No more drafts."""
        self._rest_until = 1 << 62
