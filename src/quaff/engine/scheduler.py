"""Which rows run next. Integers in, integers out: every request has computed tokens that catch up with known tokens.

A prompt is a request with many tokens to catch up, a decoding request has one; a step takes one row of every decoding request first
and fills the rest of its rows with prompts in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_LOGITS = 1 << 62
"""`logits_from` of a request that wants none."""


@dataclass(frozen=True, slots=True)
class Work:
    """Rows start .. start + rows - 1 of a request; logits are wanted for the rows from `logits` on (counted from the first row)."""

    request: int
    start: int
    rows: int
    logits: int


@dataclass(slots=True)
class _Entry:
    known: int
    computed: int
    logits_from: int

    @property
    def pending(self) -> int:
        return self.known - self.computed


class Scheduler:
    """`prompt_rows` bounds a step of prompts only, `mixed_rows` one that someone decodes in, `logits_rows` a step's rows of logits."""

    def __init__(self, prompt_rows: int, mixed_rows: int, logits_rows: int) -> None:
        if min(prompt_rows, mixed_rows, logits_rows) < 1:
            raise ValueError("a step needs at least one row")
        self.prompt_rows = prompt_rows
        self.mixed_rows = mixed_rows
        self.logits_rows = logits_rows
        self._entries: dict[int, _Entry] = {}
        self._turn = 0

    def add(self, request: int, known: int, computed: int = 0, logits_from: int = NO_LOGITS) -> None:
        """A request with `known` tokens, `computed` of them done. Logits are wanted for positions from `logits_from` on."""
        if request in self._entries:
            raise ValueError(f"request {request} is already scheduled")
        if not 0 <= computed <= known:
            raise ValueError(f"{computed} computed of {known} known tokens")
        self._entries[request] = _Entry(known, computed, logits_from)

    def extend(self, request: int, tokens: int = 1) -> None:
        self._entries[request].known += tokens

    def finish(self, request: int, rows: int) -> None:
        """`rows` more tokens of the request are computed."""
        entry = self._entries[request]
        if not 0 <= rows <= entry.pending:
            raise ValueError(f"{rows} rows finished, {entry.pending} were pending")
        entry.computed += rows

    def remove(self, request: int) -> None:
        del self._entries[request]

    def computed(self, request: int) -> int:
        return self._entries[request].computed

    @property
    def idle(self) -> bool:
        return not any(e.pending for e in self._entries.values())

    def plan(self) -> tuple[Work, ...]:
        """Segments of the next step, at most one per request; empty when nothing is pending."""
        decoding = [r for r, e in self._entries.items() if e.pending == 1 and e.computed]
        waiting = [r for r, e in self._entries.items() if e.pending and not (e.pending == 1 and e.computed)]
        rows_left = self.mixed_rows if decoding else self.prompt_rows
        logits_left = self.logits_rows
        if len(decoding) > min(rows_left, logits_left):
            # More decoding requests than rows: take turns, so that none starves.
            self._turn %= len(decoding)
            decoding = decoding[self._turn :] + decoding[: self._turn]
            self._turn += min(rows_left, logits_left)
        out = []
        for request in decoding + waiting:
            entry = self._entries[request]
            plain = max(0, min(entry.logits_from, entry.known) - entry.computed)
            rows = min(entry.pending, rows_left, plain + logits_left)
            if rows <= 0:
                continue
            out.append(Work(request, entry.computed, rows, min(plain, rows)))
            rows_left -= rows
            logits_left -= rows - min(plain, rows)
        return tuple(out)
