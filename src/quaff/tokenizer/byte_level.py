"""Byte-level BPE vocabularies (`tokenizer.ggml.model` = gpt2): bytes written as printable characters, merged by rank."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from quaff.errors import PromptError
from quaff.tokenizer.pretokenizers import PreTokenizer, engine_pattern
from quaff.tokenizer.vocabulary import Vocabulary


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


class ByteLevelEncoder:
    """Text without unique tokens -> ids, through the `tokenizers` library."""

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]], rule: PreTokenizer) -> None:
        ids = dict(vocabulary.ids)
        # A byte without a token gets an id past the vocabulary, dropped on the way out, so that its neighbours stay apart.
        self._count = len(ids)
        for character in byte_characters():
            ids.setdefault(character, len(ids))
        self._tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=rule.ignore_merges))
        splits = [Split(Regex(engine_pattern(pattern)), "isolated") for pattern in rule.patterns]
        self._tokenizer.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
        self._has_gaps = len(ids) > self._count

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of `text`; bytes that the vocabulary lacks are left out. `after_special` does not matter to this kind."""
        try:
            # `encode` would let no other thread run, for a second where a text has half a million characters.
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # A panic in the regular expression engine (its retry limit) is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            message = f"the pre-tokenizer's regular expression gave up on a text of {len(text)} characters without a break: shorten it"
            raise PromptError(message) from None
        return [token for token in ids if token < self._count] if self._has_gaps else ids
