"""Small vocabularies, as metadata of a checkpoint."""

from __future__ import annotations

from typing import Any

from quaff.tokenizer.byte_level import byte_characters


def byte_level(merges: list[str] | None = None, special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """All 256 bytes, the results of `merges` (pairs written as in a file), then `special` texts with their token types."""
    lines = ["h e", "l l", "he ll", "hell o", "\u0120 w", "1 2"] if merges is None else merges
    tokens = [*byte_characters(), *dict.fromkeys(line.replace(" ", "") for line in lines)]
    kinds = [1] * len(tokens)
    for text, kind in (special or {}).items():
        tokens.append(text)
        kinds.append(kind)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": lines,
    }
    return metadata | {f"tokenizer.{name.replace('__', '.')}": value for name, value in keys.items()}


def sentencepiece(words: dict[str, float], special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """<unk> <s> </s>, the 256 byte tokens, `words` with their scores, then `special` texts with their token types."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *(special or {})]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), *(special or {}).values()]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()) + [0.0] * len(special or {}),
    }
    return metadata | {f"tokenizer.{name.replace('__', '.')}": value for name, value in keys.items()}
