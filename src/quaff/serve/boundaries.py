"""Where later prompts are likely to part from a prompt: places at which it pays to keep a state that cannot be gone back to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TRIES = 64
"""Places where the words of a message are looked for: a boundary that is not found costs time in a later turn, nothing else."""


def boundaries(text: str, messages: Sequence[Mapping[str, Any]], edges: Sequence[tuple[int, int]], count: int) -> tuple[int, ...]:
    """Numbers of tokens: after what all conversations share, after the last thing the user said (reasoning that follows may be dropped),
    and after the last message.

    `text` is the rendered prompt of `messages`, `edges` its special tokens as (character, number of ids before it), on both sides of each;
    `count` its number of ids.
    """
    ids_before = dict(edges)
    characters = sorted(ids_before)
    found: set[int] = set()
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
    start = 0
    for content in (_content(m) for m in messages[: first + 1]):
        start = text.find(content, start)
    before = bisect_right(characters, start) - 1
    # The mark that opens the message, and the one before its content where there are two.
    if first and start >= 0 and before >= 1:
        found.add(ids_before[characters[before - 1]])
    user = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
    for content in {_content(user), _content(messages[-1])}:
        start = len(text)
        for _ in range(MAX_TRIES if content else 0):
            start = text.rfind(content, 0, start + len(content) - 1)
            if start < 0:
                break
            after = bisect_left(characters, start + len(content))
            if after == len(characters):
                continue
            # The end of a message is a mark; what merely holds the same words goes on with others.
            if not text[start + len(content) : characters[after]].strip():
                found.add(ids_before[characters[min(after + 1, len(characters) - 1)]])
                break
    return tuple(sorted(n for n in found if 0 < n < count))


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()
