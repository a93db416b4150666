"""Token ids of texts between special tokens, kept for the next time: agents send the same messages every turn."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from quaff.tokenizer import Tokenizer

_CACHED_CHARACTERS = 8 << 20
_WORTH_CACHING = 200


def cuts(tokenizer: Tokenizer, template: str) -> bool:
    """Whether a text may be cut at the special tokens of a template without changing its ids.

    A tokenizer.json may let those swallow the white space beside them, or treat the first word of a text alone as the first.
    """
    if not tokenizer.runs_json:
        return True
    vocabulary = tokenizer.vocabulary
    marks = [text for token, text in enumerate(vocabulary.tokens) if vocabulary.is_unique_text(token) and text in template]
    if not marks:
        return False
    text = "".join(f"One {mark} two\n{mark}\n three{mark}" for mark in marks)
    parts = [[p] if isinstance(p, int) else tokenizer.encode(p, add_special=False) for p in tokenizer.pieces(text)]
    return tokenizer.encode(text, add_special=False, parse_special=True) == [token for part in parts for token in part]


class PieceCache:
    """Ids of texts between special tokens: agents send the same messages every turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0

    def encode(self, text: str, at: int, ids: list[int], edges: list[tuple[int, int]]) -> None:
        """Append the ids of `text`, which begins at character `at`, and its edges."""
        for piece in self._tokenizer.pieces(text):
            if isinstance(piece, int):
                edges.append((at, len(ids)))
                ids.append(piece)
                at += len(self._tokenizer.vocabulary.tokens[piece])
                edges.append((at, len(ids)))
            else:
                ids += self._piece(piece)
                at += len(piece)

    def _piece(self, piece: str) -> Sequence[int]:
        if len(piece) < _WORTH_CACHING:
            return self._tokenizer.encode(piece, add_special=False)
        with self._lock:
            if piece in self._ids:
                self._ids.move_to_end(piece)
                return self._ids[piece]
        ids = self._tokenizer.encode(piece, add_special=False)
        with self._lock:
            if piece not in self._ids and len(piece) <= _CACHED_CHARACTERS:
                self._ids[piece] = array("i", ids)
                self._characters += len(piece)
                while self._characters > _CACHED_CHARACTERS:
                    self._characters -= len(self._ids.popitem(last=False)[0])
        return ids
