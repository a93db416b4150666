"""SentencePiece vocabularies (`tokenizer.ggml.model` = llama): characters merged by token score, unknown ones spelled in bytes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from quaff.tokenizer.vocabulary import Vocabulary

SPACE = "\u2581"
"""What a space is written as inside such a vocabulary."""

_CACHED_SEGMENT = 64
_CACHE_ENTRIES = 65536


class ScoreEncoder:
    """Text without unique tokens -> ids: of all neighbours that together are a token, the best score merges first, the leftmost of
    equal ones (llama.cpp's `llm_tokenizer_spm`). Ranked merges cannot say that: many tokens share one score.
    """

    def __init__(self, vocabulary: Vocabulary, scores: list[float], add_space_prefix: bool) -> None:
        self._ids = vocabulary.ids
        self._cost = dict(zip(vocabulary.tokens, (-score for score in scores), strict=True))
        self._prefix = SPACE if add_space_prefix else ""
        unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._bytes = [self._byte_ids(byte, unknown) for byte in range(256)]
        # No merge can reach over two neighbours that stand side by side in no token: the text falls apart there.
        self._pairs = {pair for token in vocabulary.tokens for pair in zip(token, token[1:], strict=False)}
        self._cache: dict[str, list[int]] = {}

    def _byte_ids(self, byte: int, unknown: list[int]) -> list[int]:
        found = self._ids.get(f"<0x{byte:02X}>")
        if found is None and byte < 0x80:
            found = self._ids.get(chr(byte))
        return unknown if found is None else [found]

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of `text`. `after_special`: it starts the prompt or follows a unique token, where the space prefix goes."""
        text = text.replace(" ", SPACE)
        if after_special:
            text = self._prefix + text
        pairs, ids, cache = self._pairs, [], self._cache
        cuts = [index for index, pair in enumerate(zip(text, text[1:], strict=False), 1) if pair not in pairs]
        start = 0
        for end in (*cuts, len(text)):
            segment = text[start:end]
            start = end
            found = cache.get(segment)
            if found is None:
                found = self._merge(segment)
                if len(segment) <= _CACHED_SEGMENT:
                    if len(cache) >= _CACHE_ENTRIES:
                        cache.clear()
                    cache[segment] = found
            ids += found
        return ids

    def _merge(self, text: str) -> list[int]:
        """One segment, in O(n log n): a heap of candidates and a linked list of symbols."""
        count, cost = len(text), self._cost
        size = [1] * count
        before = list(range(-1, count - 1))
        after = list(range(1, count + 1))
        heap: list[tuple[float, int, int, int]] = []
        for left in range(count - 1):
            found = cost.get(text[left : left + 2])
            if found is not None:
                heap.append((found, left, left + 1, 2))
        heapify(heap)
        while heap:
            _, left, right, total = heappop(heap)
            if not size[left] or not size[right] or size[left] + size[right] != total:
                continue  # one of the two has merged since
            size[left], size[right] = total, 0
            following = after[left] = after[right]
            if following < count:
                before[following] = left
                joined = total + size[following]
                found = cost.get(text[left : left + joined])
                if found is not None:
                    heappush(heap, (found, left, following, joined))
            preceding = before[left]
            if preceding >= 0:
                joined = size[preceding] + total
                found = cost.get(text[preceding : preceding + joined])
                if found is not None:
                    heappush(heap, (found, preceding, left, joined))
        ids: list[int] = []
        index = 0
        while index < count:
            symbol = text[index : index + size[index]]
            token = self._ids.get(symbol)
            if token is not None:
                ids.append(token)
            else:
                for byte in symbol.encode():
                    ids += self._bytes[byte]
            index = after[index]
        return ids
