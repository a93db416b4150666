"""The vocabulary of a checkpoint, checked: token texts, their kinds, and the ids that mean something special."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quaff.errors import CheckpointError, quote


class TokenKind(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The well-known texts are llama.cpp's (src/llama-vocab.cpp): files often name only one of several end tokens, or none.
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    )
)
# Fill-in-the-middle marks: one text of each kind becomes a control token; the last three kinds also end a generation.
_FIM_TEXTS = (
    ("fim_pre", "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>"),
    ("fim_suf", "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>"),
    ("fim_mid", "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> <|middle|>"),
    ("fim_pad", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    ("fim_rep", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    ("fim_sep", "<|file_sep|>"),
)
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[id]` is a token's text as stored (distinct, not empty), `kinds[id]` its kind, `ids` the inverse of `tokens`."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    pad_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def is_special(self, token: int) -> bool:
        """Control and unknown tokens: not part of the text, matched in a prompt only when special tokens are parsed."""
        return self.kinds[token] in (TokenKind.CONTROL, TokenKind.UNKNOWN)

    def is_unique_text(self, token: int) -> bool:
        """Tokens that are found in a text as they are, before anything is split or merged."""
        return self.kinds[token] in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)


def read_vocabulary(metadata: Mapping[str, Any], *, defaults: Mapping[str, int], add_bos: bool) -> Vocabulary:
    """The checked vocabulary. `defaults`: special ids by role ("bos", "eos", "unknown") where the file names none.

    `add_bos`: whether BOS starts a text where the file does not say. Raises CheckpointError.
    """
    tokens = read_tokens(metadata)
    count = len(tokens)
    ids = dict(zip(tokens, range(count), strict=True))
    if len(ids) != count:
        last = {text: index for index, text in enumerate(tokens)}
        first = next(index for index, text in enumerate(tokens) if last[text] != index)
        raise CheckpointError(f"tokenizer.ggml.tokens holds {quote(tokens[first])} twice, at {first} and {last[tokens[first]]}")
    kinds = _read_kinds(metadata, count)

    def special(role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = metadata.get(key)
        if value is None:
            fallback = defaults.get(role)
            return fallback if fallback is not None and fallback < count else None
        if not _is_integer(value):
            raise CheckpointError(f"{key} is {quote(str(value))}, not a token id")
        # -1 in 32 bits is how some converters write "none".
        if int(value) in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= int(value) < count:
            raise CheckpointError(f"{key} is {value}, outside the vocabulary of {count} tokens")
        return int(value)

    end_ids = {ids[text] for text in END_TEXTS if text in ids}
    end_ids |= {found for role in ("eos", "eot", "eom") if (found := special(role)) is not None}
    control = {ids[text] for text in END_TEXTS if text in ids}
    for role, texts in _FIM_TEXTS:
        found = special(role)
        if found is None:
            found = next((ids[text] for text in texts.split() if text in ids), None)
            control |= {found} if found is not None else set()
        if found is not None and role in ("fim_pad", "fim_rep", "fim_sep"):
            end_ids.add(found)
    for token in control:
        kinds[token] = TokenKind.CONTROL
    for text in _ALWAYS_SHOWN:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    _drop_false_ends(ids, kinds, end_ids)

    bos_id, eos_id = special("bos"), special("eos")
    adds_bos = read_flag(metadata, "tokenizer.ggml.add_bos_token", add_bos)
    adds_eos = read_flag(metadata, "tokenizer.ggml.add_eos_token", False)
    for adds, found, role in ((adds_bos, bos_id, "bos"), (adds_eos, eos_id, "eos")):
        if adds and found is None:
            raise CheckpointError(f"texts are to get a {role.upper()} token, but tokenizer.ggml.{role}_token_id is missing")
    return Vocabulary(tokens, kinds, ids, bos_id, eos_id, special("unknown"), special("padding"), frozenset(end_ids), adds_bos, adds_eos)


def _drop_false_ends(ids: Mapping[str, int], kinds: list[int], end_ids: set[int]) -> None:
    """`<|end|>` closes a message, not a turn, in vocabularies with call tokens; Gemma 4's `</s>` is markup."""

    def ends(text: str) -> bool:
        return ids.get(text) in end_ids

    calls = ends("<|call|>") or ends("<|calls|>")
    if ends("<|end|>") and calls and (ends("<|return|>") or ends("<|flush|>")):
        end_ids.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    if ends("<|tool_response>") and ends("</s>"):
        end_ids.discard(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.NORMAL


def read_tokens(metadata: Mapping[str, Any]) -> list[str]:
    """`tokenizer.ggml.tokens`; an empty text gets a name of its own, as in llama.cpp, so that it can never match."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise CheckpointError("tokenizer.ggml.tokens is missing: the file holds no vocabulary")
    if not isinstance(tokens, (list, tuple)) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("tokenizer.ggml.tokens is not a list of strings, or is empty")
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _read_kinds(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    values = metadata.get(key)
    if values is None:
        return [int(TokenKind.NORMAL)] * count
    kinds = _as_list(values, key, count)
    if not all(_is_integer(kind) for kind in kinds):
        raise CheckpointError(f"{key} holds something that is not an integer")
    return [kind if 0 <= kind <= 6 else int(TokenKind.UNDEFINED) for kind in kinds]


def read_scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    """`tokenizer.ggml.scores`, one finite number per token."""
    key = "tokenizer.ggml.scores"
    values = metadata.get(key)
    if values is None:
        raise CheckpointError(f"{key} is missing: a SentencePiece vocabulary merges by score")
    scores = _as_list(values, key, count)
    for index, score in enumerate(scores):
        if not isinstance(score, (int, float)) or not math.isfinite(score):
            raise CheckpointError(f"{key} is {score} for token {index}: not a finite number")
    return scores


def read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """`tokenizer.ggml.merges` in order of rank, the first of equal ones kept; each joins two tokens into a third."""
    key = "tokenizer.ggml.merges"
    lines = metadata.get(key)
    if lines is None:
        raise CheckpointError(f"{key} is missing: a byte-level vocabulary needs its merges")
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise CheckpointError(f"{key} is not a list of strings")
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not right:
            raise CheckpointError(f"{key}[{rank}] is {quote(line)}, not two tokens separated by a space")
        for piece in (left, right, left + right):
            if piece not in ids:
                raise CheckpointError(f"{key}[{rank}] is {quote(line)}, but {quote(piece)} is not in the vocabulary")
        merges.setdefault((left, right))
    return list(merges)


def read_flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean of the file, or `default` where it has none."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool) and value not in (0, 1):
        raise CheckpointError(f"{key} is {quote(str(value))}, neither true nor false")
    return bool(value)


def _as_list(values: Any, key: str, count: int) -> list[Any]:
    """A plain list of `count` Python numbers, from a list or a NumPy array."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(items, (list, tuple)):
        raise CheckpointError(f"{key} is not a list")
    if len(items) != count:
        raise CheckpointError(f"{key} has {len(items)} entries for {count} tokens")
    return list(items)


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
