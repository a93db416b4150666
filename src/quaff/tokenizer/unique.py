"""Finds control and user-defined tokens in a text before anything is split or merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

_PREFIX = 3


class UniqueTokens:
    """Cuts texts at the tokens of a fixed set. The longest token (in UTF-8 bytes) is taken everywhere first, then the next, as in
    llama.cpp (`tokenizer_st_partition`): not the same as the leftmost match where two tokens overlap.
    """

    def __init__(self, entries: Iterable[tuple[str, int]]) -> None:
        self._entries = sorted(entries, key=lambda entry: -len(entry[0].encode("utf-8", "surrogatepass")))
        # Vocabularies hold thousands of "<unused...>": one search for a common prefix rules them all out.
        self._by_prefix: dict[str, list[int]] = defaultdict(list)
        for order, (text, _) in enumerate(self._entries):
            self._by_prefix[text[:_PREFIX]].append(order)

    def split(self, text: str) -> list[str | int]:
        """`text` as plain pieces (never empty) and token ids, in order."""
        present = sorted(
            order for prefix, orders in self._by_prefix.items() if prefix in text for order in orders if self._entries[order][0] in text
        )
        pieces: list[str | int] = [text] if text else []
        for order in present:
            token_text, token = self._entries[order]
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int) or token_text not in piece:
                    cut.append(piece)
                    continue
                for index, part in enumerate(piece.split(token_text)):
                    if index:
                        cut.append(token)
                    if part:
                        cut.append(part)
            pieces = cut
        return pieces
