"""Text to token ids and back, from a checkpoint's metadata alone."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from quaff.errors import CheckpointError, PromptError, UnsupportedError, quote
from quaff.tokenizer.byte_level import ByteLevelEncoder, byte_characters
from quaff.tokenizer.chat_template import ChatTemplate
from quaff.tokenizer.huggingface import JSON_KEY, JsonEncoder
from quaff.tokenizer.pretokenizers import pre_tokenizer
from quaff.tokenizer.sentencepiece import SPACE, ScoreEncoder
from quaff.tokenizer.unique import UniqueTokens
from quaff.tokenizer.vocabulary import TokenKind, Vocabulary, read_flag, read_merges, read_scores, read_vocabulary


class _Encoder(Protocol):
    def encode(self, text: str, after_special: bool) -> list[int]: ...


class Tokenizer:
    """Token ids equal to those of llama.cpp (`llama_tokenize`) for the same file, text and flags.

    Byte-level BPE (`tokenizer.ggml.model` = gpt2) and SentencePiece (= llama) vocabularies. Make one with `from_metadata`. Where the
    metadata hold a tokenizer.json instead of the rules for cutting and merging, ids are those of the `tokenizers` library.
    """

    def __init__(
        self, vocabulary: Vocabulary, encoder: _Encoder | JsonEncoder, byte_level: bool, space_prefix: bool, template: str | None
    ) -> None:
        self.vocabulary = vocabulary
        self.chat_template: ChatTemplate | None = None if template is None else ChatTemplate(template, self._special_texts())
        self._encoder = encoder
        self._byte_level = byte_level
        self._space_prefix = space_prefix
        unique = [token for token in range(len(vocabulary)) if vocabulary.is_unique_text(token)]
        visible = [token for token in unique if not vocabulary.is_special(token)]
        self._all_unique = UniqueTokens((vocabulary.tokens[token], token) for token in unique)
        self._user_defined = UniqueTokens((vocabulary.tokens[token], token) for token in visible)
        self._byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file's `tokenizer.*` keys: strings, lists of strings, numbers, and lists or NumPy arrays of numbers.

        Raises CheckpointError for broken metadata and UnsupportedError for a kind of vocabulary or pre-tokenizer that is not known.
        """
        model = metadata.get("tokenizer.ggml.model")
        if model is None:
            raise CheckpointError("tokenizer.ggml.model is missing: the file holds no tokenizer")
        encoder: _Encoder | JsonEncoder
        json_text = _read_text(metadata, JSON_KEY)
        if model not in ("gpt2", "llama"):
            raise UnsupportedError(f"tokenizer.ggml.model is {quote(str(model))}; supported: gpt2 (byte-level BPE), llama (SentencePiece)")
        if json_text is not None and "tokenizer.ggml.pre" not in metadata and "tokenizer.ggml.scores" not in metadata:
            vocabulary = read_vocabulary(metadata, defaults={}, add_bos=False)
            encoder = JsonEncoder(json_text)
            space_prefix = read_flag(metadata, "tokenizer.ggml.add_space_prefix", False)
        elif model == "gpt2":
            rule = pre_tokenizer(_read_text(metadata, "tokenizer.ggml.pre") or "default")
            vocabulary = read_vocabulary(metadata, defaults={}, add_bos=rule.add_bos)
            encoder = ByteLevelEncoder(vocabulary, read_merges(metadata, vocabulary.ids), rule)
            space_prefix = False
        else:
            vocabulary = read_vocabulary(metadata, defaults={"unknown": 0, "bos": 1, "eos": 2}, add_bos=True)
            for token, kind in enumerate(vocabulary.kinds):
                if kind == TokenKind.BYTE:
                    _byte_value(vocabulary.tokens[token], token)
            space_prefix = read_flag(metadata, "tokenizer.ggml.add_space_prefix", True)
            encoder = ScoreEncoder(vocabulary, read_scores(metadata, len(vocabulary)), space_prefix)
        return cls(vocabulary, encoder, model == "gpt2", space_prefix, _read_text(metadata, "tokenizer.chat_template"))

    def _special_texts(self) -> dict[str, str]:
        vocabulary = self.vocabulary
        ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unknown_id, "pad": vocabulary.pad_id}
        return {f"{name}_token": "" if token is None else vocabulary.tokens[token] for name, token in ids.items()}

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids run from 0 to one less."""
        return len(self.vocabulary)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, or None."""
        return self.vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token the file names as the end of a text, or None; a generation stops at any of `end_ids`."""
        return self.vocabulary.eos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a generation: those the file names and llama.cpp's well-known ones."""
        return self.vocabulary.end_ids

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special`: BOS before and EOS after, where the file asks for them. `parse_special`: control tokens written in the text become
        those tokens; user-defined ones always do. Raises PromptError if `text` holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
        vocabulary = self.vocabulary
        ids: list[int] = [vocabulary.bos_id] if add_special and vocabulary.add_bos and vocabulary.bos_id is not None else []
        if isinstance(self._encoder, JsonEncoder):
            ids += self._encoder.encode(text, parse_special)
        else:
            after_special = True
            for piece in (self._all_unique if parse_special else self._user_defined).split(text):
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    ids += self._encoder.encode(piece, after_special)
                after_special = isinstance(piece, int)
        if add_special and vocabulary.add_eos and vocabulary.eos_id is not None:
            ids.append(vocabulary.eos_id)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a conversation through the chat template, with exactly one BOS where the model wants one and never an EOS.

        Raises PromptError without a chat template, and as `ChatTemplate.render` does.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template: it continues plain text")
        text = self.chat_template.render(messages, add_generation_prompt, **variables)
        ids = self.encode(text, add_special=False, parse_special=True)
        bos = self.vocabulary.bos_id
        # Most templates write BOS themselves; the file's add_bos_token holds for the others.
        if self.vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    @property
    def runs_json(self) -> bool:
        """Whether a tokenizer.json cuts texts, by rules of its own around special tokens."""
        return isinstance(self._encoder, JsonEncoder)

    def pieces(self, text: str) -> list[str | int]:
        """`text` cut at special and user-defined tokens: plain texts (never empty) and token ids, in order."""
        return self._all_unique.split(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True, start_of_text: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special`: control tokens have no text.

        `start_of_text`: the ids begin a text rather than continue one, so the space that `encode` put before it is taken off.
        Raises PromptError for an id outside the vocabulary.
        """
        decoder = self.decoder(skip_special, start_of_text)
        return "".join([decoder.push(token) for token in ids]) + decoder.finish()

    def decoder(self, skip_special: bool = True, start_of_text: bool = False, shown: Collection[int] = frozenset()) -> IncrementalDecoder:
        """A decoder that takes one token at a time; its parts add up to `decode` of all of them. `shown`: special tokens not to skip."""
        return IncrementalDecoder(self, skip_special, start_of_text and self._space_prefix, shown)

    def token_text(self, token: int) -> str:
        """What a token stands for, control tokens by name; bytes that are not UTF-8 by themselves become U+FFFD."""
        return self.token_bytes(token, skip_special=False).decode(errors="replace")

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes a token adds to a text. Raises PromptError for an id outside the vocabulary."""
        if not 0 <= token < len(self.vocabulary):
            raise PromptError(f"token id {token} is outside the vocabulary of {len(self.vocabulary)} tokens")
        if skip_special and self.vocabulary.is_special(token):
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> bytes:
        text, kind = self.vocabulary.tokens[token], self.vocabulary.kinds[token]
        if kind == TokenKind.NORMAL:
            if not self._byte_level:
                return text.replace(SPACE, " ").encode()
            return b"".join(bytes([self._byte_of[c]]) if c in self._byte_of else c.encode() for c in text)
        if kind == TokenKind.BYTE:
            return bytes([_byte_value(text, token)])
        if kind in (TokenKind.UNUSED, TokenKind.UNDEFINED):
            return b""
        return text.encode()


class IncrementalDecoder:
    """Turns tokens into text as they come. A character whose bytes are spread over tokens appears when its last byte does."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_space: bool, shown: Collection[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        piece = self._tokenizer.token_bytes(token, self._skip_special and token not in self._shown)
        if self._strip_space and piece:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


def _read_text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{key} is not a string")
    return value


def _byte_value(text: str, token: int) -> int:
    """The byte of a "<0x0A>" token."""
    try:
        if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
            raise ValueError
        return int(text[3:5], 16)
    except ValueError:
        raise CheckpointError(f"token {token} is marked as a byte, but its text is {quote(text)} instead of '<0x00>' to '<0xFF>'") from None
