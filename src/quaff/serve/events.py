"""What an answer is made of, in the order in which it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """More of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool: its `index`-th call, whose arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the arguments of a call: pieces that add up to one JSON object."""

    index: int
    arguments: str


Event = Text | Thinking | CallStart | CallDelta


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


Part = Text | Thinking | Call


def joined(events: Iterable[Event]) -> list[Part]:
    """The whole parts of an answer, in order."""
    parts: list[Part] = []
    for event in events:
        last = parts[-1] if parts else None
        match event:
            case CallStart():
                parts.append(Call(event.id, event.name, ""))
            case CallDelta():
                assert isinstance(last, Call)
                parts[-1] = Call(last.id, last.name, last.arguments + event.arguments)
            case Text() if isinstance(last, Text):
                parts[-1] = Text(last.text + event.text)
            case Thinking() if isinstance(last, Thinking):
                parts[-1] = Thinking(last.text + event.text)
            case _:
                parts.append(event)
    return parts
