"""An answer's text becomes events as it comes: reasoning, text, tool calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from quaff.serve.calls import NotACall, Schemas, Section, ignore
from quaff.serve.dialects import Dialect
from quaff.serve.events import CallDelta, CallStart, Event, Text, Thinking
from quaff.serve.reading import Reading, Source

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class AnswerReader:
    """Reads one answer. `push` its text as it arrives, then `finish`; both return what is certain by then.

    Texts of `Text` events add up to the answer without reasoning and calls; white space around those is dropped. What looks like a call
    and is none stays text. `calls` counts the calls so far.
    """

    def __init__(
        self, dialect: Dialect, schemas: Schemas | None, thinking: bool = False, call_prefix: str = "call_", several: bool = True
    ) -> None:
        """`schemas`: of the tools that the model was shown; None when there are none, and calls are not looked for.

        `thinking`: the prompt ended inside a reasoning, whose mark the answer does not repeat. Without `several` calls after the first are
        left out.
        """
        self.calls = 0
        self._most_calls = float("inf") if several else 1
        self._dialect = dialect
        self._schemas = schemas
        self._thinking = thinking
        self._call_prefix = call_prefix
        self._source = Source()
        self._events: list[Event] = []
        self._blank = ""
        self._trim = False
        self._reading = self._read_channels() if dialect.channels else self._read()
        self._done = False

    def push(self, text: str) -> list[Event]:
        self._source.text += text
        self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        self._source.ended = True
        self._advance()
        if self._blank and not self.calls:
            self._events.append(Text(self._blank))
            self._blank = ""
        return self._taken()

    def _advance(self) -> None:
        if not self._done:
            try:
                next(self._reading)
            except StopIteration:
                self._done = True

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Where things go

    def start(self, name: str, id: str | None = None) -> None:
        if self._dialect.bare and self._schemas is not None and name not in self._schemas:
            raise NotACall
        if self.calls == self._most_calls:
            raise NotACall
        self._blank = ""
        self._events.append(CallStart(self.calls, id or self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallDelta(self.calls - 1, text))

    def _new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self._dialect.short_ids else self._call_prefix + secrets.token_hex(12)

    def _text(self, text: str) -> None:
        """White space at the end is held: before a call it is layout. After a reasoning or a call, so is white space at the start."""
        text = self._blank + text
        if self._trim:
            text = text.lstrip()
        kept = text.rstrip() if self._schemas is not None else text
        self._blank = text[len(kept) :]
        if kept:
            self._trim = False
            self._events.append(Text(kept))

    # The forms of answers

    def _read(self) -> Reading:
        source, (opening, closing) = self._source, self._dialect.thinking
        if self._thinking:
            yield from self._think(closing)
        # Reasoning comes before the answer; later on its mark is text that the model writes about.
        while (yield from source.begins(opening)):
            yield from source.until((opening,), ignore)
            yield from self._think(closing)
        if self._schemas is None or self._dialect.section is None:
            yield from source.until((), self._text)
            return
        if self._dialect.bare and (yield from source.begins("{")):
            yield from self._call(self._dialect.section, "")
        while (mark := (yield from source.until((self._dialect.begin,), self._text))) is not None:
            if self.calls == self._most_calls:
                yield from source.until((), ignore)
                return
            yield from self._call(self._dialect.section, mark)

    def _think(self, closing: str) -> Reading:
        held, begun = "", False

        def use(text: str) -> None:
            nonlocal held, begun
            text = held + text if begun else (held + text).lstrip()
            kept = text.rstrip()
            held = text[len(kept) :]
            if kept:
                begun = True
                self._events.append(Thinking(kept))

        yield from self._source.until((closing,), use)
        self._blank, self._trim = "", True

    def _call(self, section: Section, mark: str) -> Reading:
        before = self.calls
        self._source.record()
        try:
            yield from section(self._source, self, self._schemas or {})
            if self.calls == before:
                raise NotACall
            self._source.recorded()
            self._trim = True
        except NotACall:
            read = self._source.recorded()
            if self.calls == before:
                self._text(mark + read)
            elif self.calls == self._most_calls:
                yield from self._source.until((), ignore)

    def _read_channels(self) -> Reading:
        """gpt-oss: messages, each with a header that names its channel and, for a call, its recipient."""
        while True:
            header, mark = yield from self._source.upto(("<|message|>",))
            if mark is None:
                if "<|channel|>" not in header and header.strip():
                    self._text(header)
                return
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            use: Callable[[str], object]
            if recipient is not None and self._schemas is not None and self.calls == self._most_calls:
                use = ignore
            elif recipient is not None and self._schemas is not None:
                self.start(recipient[1])
                use = self.arguments
            elif channel is not None and channel[1] == "analysis":
                use = self._analysis
            else:
                use = self._text
            if (yield from self._source.until(_MESSAGE_ENDS, use)) is None:
                return

    def _analysis(self, text: str) -> None:
        self._events.append(Thinking(text))
