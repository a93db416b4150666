"""Events of an answer, joined so that they can be compared: ("text", ...), ("thinking", ...), ("call", name, arguments)."""

from __future__ import annotations

from collections.abc import Iterable

from quaff.serve.answer import AnswerReader
from quaff.serve.calls import Schemas
from quaff.serve.dialects import Dialect
from quaff.serve.events import Call, CallStart, Text, Thinking, joined

SCHEMAS: Schemas = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a"]},
    "g": {},
}


def read(
    dialect: Dialect, parts: Iterable[str], schemas: Schemas | None = SCHEMAS, thinking: bool = False, several: bool = True
) -> list[tuple[str, ...]]:
    reader = AnswerReader(dialect, schemas, thinking, several=several)
    events = [event for part in parts for event in reader.push(part)] + reader.finish()
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(reader.calls))
    names = {Text: "text", Thinking: "thinking"}
    return [("call", p.name, p.arguments) if isinstance(p, Call) else (names[type(p)], p.text) for p in joined(events)]
