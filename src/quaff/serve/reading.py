"""Text that arrives in pieces, read by code that looks as if it were all there: readers are generators that pause when they need more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from quaff.engine.sampler import overlap

Reading = Generator[None, None, None]
"""A reader at work. It pauses with `yield` when the text so far does not decide what comes next."""


class Source:
    """What has arrived and was not read. `ended`: nothing more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._record: list[str] | None = None

    def record(self) -> None:
        """From here on, keep what is read: `recorded` gives it back when it was not what it looked like."""
        self._record = []

    def recorded(self) -> str:
        text, self._record = "".join(self._record or ()), None
        return text

    def read(self, n: int) -> str:
        """The next `n` characters, which must have arrived."""
        taken, self.text = self.text[:n], self.text[n:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def blanks(self) -> Generator[None, None, str]:
        """Read white space; the character after it, not read, or "" at the end."""
        while True:
            self.read(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return self.text[:1]
            yield

    def begins(self, mark: str) -> Generator[None, None, bool]:
        """Whether the text begins with `mark`, white space aside. Nothing is read."""
        while True:
            text = self.text.lstrip()
            if text.startswith(mark):
                return True
            if self.ended or not mark.startswith(text):
                return False
            yield

    def until(self, marks: Sequence[str], use: Callable[[str], object]) -> Generator[None, None, str | None]:
        """Read past the first of `marks`: that mark, or None at the end. `use` gets the text before it as soon as that is sure."""
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, _, mark = min(found)
                # A longer mark may still be arriving where a shorter one was found.
                if self.ended or not any(m != mark and m.startswith(self.text[at:]) for m in marks):
                    if at:
                        use(self.read(at))
                    self.read(len(mark))
                    return mark
                safe = at
            elif self.ended:
                if self.text:
                    use(self.read(len(self.text)))
                return None
            else:
                safe = len(self.text) - overlap(self.text, marks)
            if safe:
                use(self.read(safe))
            yield

    def upto(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str | None]]:
        """`until`, with the text before the mark in one piece."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append)
        return "".join(parts), mark
