"""Which rows run next. Integers in, integers out: every request has computed tokens that catch up with known tokens.

A prompt is a request with many tokens to catch up, a decoding request has one; a step takes one row of every decoding request first
and fills the rest of its rows with prompts. Prompts take turns of equal work, so that none waits for another's whole prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

NO_LOGITS = 1 << 62
"""`logits_from` of a request that wants none."""
TURN_ROWS = 64
"""A turn is the work of so many rows at position 0. Cells are cut from all rows of a step, so that short turns add none."""
LEAST_ROWS = 16
"""Prompts get so many rows of a step however little work it may do: they cost a step that reads all weights next to nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Rows start .. start + rows - 1 of a request; logits are wanted for the rows from `logits` on (counted from the first row)."""

    request: int
    start: int
    rows: int
    logits: int


@dataclass(slots=True)
class _Entry:
    """`drafted` rows beyond the known ones are guesses that a decoding request may check, or drawn in the step; `spent` is the work of its
    turn so far."""

    known: int
    computed: int
    logits_from: int
    drafted: int = 0
    spent: int = 0

    @property
    def pending(self) -> int:
        return self.known - self.computed


def _one(position: int) -> int:
    return 1


class Scheduler:
    """`prompt_rows` bounds a step of prompts only, `mixed_rows` one that someone decodes in, `logits_rows` a step's rows of logits.

    `row_work` is the work of a prompt's row by its position, in any unit (multiply-accumulates), never less at a later position.
    """

    def __init__(self, prompt_rows: int, mixed_rows: int, logits_rows: int, row_work: Callable[[int], int] = _one) -> None:
        if min(prompt_rows, mixed_rows, logits_rows) < 1:
            raise ValueError("a step needs at least one row")
        self.prompt_rows = prompt_rows
        self.mixed_rows = mixed_rows
        self.logits_rows = logits_rows
        self._row_work = row_work
        self._turn_work = TURN_ROWS * row_work(0)
        self._entries: dict[int, _Entry] = {}
        self._prompts: deque[int] = deque()
        self._turn = 0
        self.prompt_work = 0
        """Work of the prompts' rows in the last plan."""
        self.mixed = False
        """Whether someone waits for the step of the last plan."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: int, known: int, computed: int = 0, logits_from: int = NO_LOGITS) -> None:
        """A request with `known` tokens, `computed` of them done. Logits are wanted for positions from `logits_from` on."""
        if request in self._entries:
            raise ValueError(f"request {request} is already scheduled")
        if not 0 <= computed <= known:
            raise ValueError(f"{computed} computed of {known} known tokens")
        self._entries[request] = _Entry(known, computed, logits_from)
        self._prompts.append(request)

    def extend(self, request: int, tokens: int = 1) -> None:
        self._entries[request].known += tokens

    def draft(self, request: int, tokens: int) -> None:
        """So many tokens, guessed or drawn in the step, may be computed after the known one of a decoding request, with logits, where there
        is room."""
        self._entries[request].drafted = tokens

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

    def decoding(self) -> list[int]:
        """Requests with one token to compute after others, in order of arrival."""
        return [r for r, e in self._entries.items() if e.known - e.computed == 1 and e.computed]

    @property
    def idle(self) -> bool:
        return not any(e.pending for e in self._entries.values())

    def plan(self, prompt_work: int | None = None, awaited: bool = False) -> tuple[Work, ...]:
        """Segments of the next step, at most one per request; empty when nothing is pending.

        `prompt_work` bounds the work of prompts in a step that someone decodes in (None: only `mixed_rows` does), or that is `awaited`.
        """
        decoding = self.decoding()
        self.mixed, self.prompt_work = awaited or bool(decoding), 0
        rows = self.mixed_rows if self.mixed else self.prompt_rows
        out = self._decodes(decoding, min(rows, self.logits_rows))
        while self._prompts and not self._is_prompt(self._prompts[0]):
            self._prompts.popleft()
        if self._prompts:
            room = _Room(rows - sum(w.rows for w in out), self.logits_rows - sum(w.rows - w.logits for w in out))
            out += self._turns(room, prompt_work if self.mixed else None)
        return tuple(out)

    def _decodes(self, decoding: list[int], most: int) -> list[Work]:
        """At most so many rows: one of each, and then guesses."""
        if len(decoding) > most:
            # More decoding requests than rows: take turns, so that none starves.
            self._turn %= len(decoding)
            decoding = (decoding[self._turn :] + decoding[: self._turn])[:most]
            self._turn += most
        spare = most - len(decoding)
        out = []
        for request in decoding:
            entry = self._entries[request]
            drafted = min(entry.drafted, spare)
            spare -= drafted
            plain = 1 if entry.logits_from > entry.computed else 0
            out.append(Work(request, entry.computed, 1 + drafted, plain))
        return out

    def _turns(self, room: _Room, work_left: int | None) -> list[Work]:
        """Rows of prompts, turn by turn, until the step is full."""
        if work_left is not None:
            work_left = max(work_left, LEAST_ROWS * self._row_work(self._entries[self._prompts[0]].computed))
        granted: dict[int, Work] = {}
        refused = 0
        while self._prompts and room.rows and refused < len(self._prompts):
            request = self._prompts[0]
            if not self._is_prompt(request):
                self._prompts.popleft()
                continue
            entry, had = self._entries[request], granted.get(request)
            start = had.start + had.rows if had else entry.computed
            plain = max(0, min(entry.logits_from, entry.known) - start)
            rows = min(entry.known - start, room.rows, plain + room.logits)
            alone = len(self._prompts) == 1
            if rows > 0 and not alone:
                rows = min(rows, max(1, (self._turn_work - entry.spent) // self._row_work(start + min(rows, TURN_ROWS) - 1)))
            if rows > 0 and work_left is not None:
                rows = min(rows, work_left // self._row_work(start + rows - 1))
            if rows <= 0:
                refused += 1
                self._prompts.rotate(-1)
                continue
            refused = 0
            granted[request] = Work(request, entry.computed, start + rows - entry.computed, (had.logits if had else 0) + min(plain, rows))
            room.rows -= rows
            room.logits -= rows - min(plain, rows)
            spent = rows * self._row_work(start + rows - 1)
            self.prompt_work += spent
            if work_left is not None:
                work_left -= spent
            entry.spent = 0 if alone else entry.spent + spent
            if self._turn_work - entry.spent < self._row_work(start + rows):
                entry.spent = 0
                self._prompts.rotate(-1)
        return list(granted.values())

    def _is_prompt(self, request: int) -> bool:
        entry = self._entries.get(request)
        return entry is not None and entry.pending > (1 if entry.computed else 0)


@dataclass(slots=True)
class _Room:
    """What is left of a step."""

    rows: int
    logits: int
