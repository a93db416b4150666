"""Tokenizers of Hugging Face folders: `tokenizer.json`, run by the `tokenizers` library as it is, and the vocabulary in GGUF's keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Engine
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PartSequence

from quaff.errors import CheckpointError, PromptError, UnsupportedError, quote
from quaff.tokenizer.pretokenizers import PRE_TOKENIZERS, engine_pattern
from quaff.tokenizer.vocabulary import TokenKind

JSON_KEY = "tokenizer.huggingface.json"
"""GGUF's key for the text of a tokenizer.json; used where no key says how a text is cut into words."""


def make_engine(text: str) -> Engine:
    """The library's tokenizer of a tokenizer.json. CheckpointError when it refuses the file."""
    try:
        engine = Engine.from_str(text)
        engine.no_truncation()
        engine.no_padding()
        return engine
    except BaseException as error:
        # A panic of the library is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from None


class JsonEncoder:
    """Whole texts -> ids, special tokens found by the library itself."""

    def __init__(self, text: str) -> None:
        self._engine = make_engine(text)
        self._lock = Lock()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """The ids of `text`, without the tokens that begin and end one. `parse_special`: control tokens written in the text are tokens."""
        with self._lock:
            self._engine.encode_special_tokens = not parse_special
            try:
                # `encode` would let no other thread run, for a second where a text has half a million characters.
                ids: list[int] = self._engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                raise PromptError(f"the tokenizer gave up on a text of {len(text)} characters: {error}") from None
            return ids


def tokenizer_metadata(
    text: str, settings: Mapping[str, Any], defaults: Sequence[Mapping[str, Any]], template: str | None, count: int
) -> dict[str, Any]:
    """`tokenizer.*` keys of a folder. `text`: its tokenizer.json; `settings`: its tokenizer_config.json.

    `defaults`: where `bos_token_id` and `eos_token_id` are looked up, the first that has them (generation_config.json, config.json).
    `template`: the text of chat_template.jinja. `count`: rows of the embedding; tokens are padded to it.
    Raises CheckpointError, and UnsupportedError for a kind of vocabulary that is not known.
    """
    try:
        values = json.loads(text)
        keys = _vocabulary(values, count)
        keys |= _special(keys["tokenizer.ggml.tokens"], settings, defaults)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"tokenizer.json holds a value of the wrong kind: {type(error).__name__}: {error}") from None
    keys |= _ends(text if values.get("post_processor") else None, keys, settings)
    template = template if template is not None else _template(settings.get("chat_template"))
    if template is not None:
        keys["tokenizer.chat_template"] = template
    keys[JSON_KEY] = text
    return keys


# Words, cases, marks, numbers, scripts, spaces and line breaks, so that every two rules for cutting differ somewhere.
_PROBE = (
    "Hello World, it's we're I'LL they'D don't I've 'tis O'Neil's\n\n\n  indented\ttabs\t\tand    runs of   "
    "spaces     \r\n\r\n x\n y \n1 12 123 1234 12345 1234567890 v2.5 3,14 0x1F A1b2C3 \u0663\u0664\u0665 \u00bd "
    "\u2163 iPhone XMLHttpRequest camelCase snake_case UPPERlower\na/b//c path/to/file.txt /* x */ <tag/> !?... "
    "---!! $5+6=11^2~ `code` |x| (y) [z] {w} @me #tag %d &amp; \\n 'quoted' \"dq\"/\nna\u00efve caf\u00e9 "
    "cafe\u0301 \u00dcber stra\u00dfe \u0441\u043b\u043e\u0432\u043e \u03bb\u03cc\u03b3\u03bf\u03c2 "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f\u30ab\u30ca "
    "\uc548\ub155\ud558\uc138\uc694 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \U0001f600\U0001f44d\U0001f3fd \u2026 "
    "\u201cq\u201d \u2014 \u20ac9 x\u00b2 \u00a0nbsp\u3000wide <sentinel:12> IMGIMGAAZ \n \n\n   "
    "x'tisane y'sauce  12  a   345"
)


# Expressions as models spell them whose reading in llama.cpp differs (case and marks outside ASCII): known by their text instead.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPELLED = {
    (_CASED % (_CONTRACTION, _CONTRACTION, "{1,3}"),): "gpt-4o",
    (_CASED % ("", "", ""),): "tekken",
}


def gguf_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a folder with the rules for cutting and merging in GGUF's own keys, in the place of its tokenizer.json.

    Raises UnsupportedError when its way of cutting words has no name in GGUF.
    """
    keys = dict(metadata)
    text = keys.pop(JSON_KEY)
    model = json.loads(text)["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
    if keys["tokenizer.ggml.model"] == "gpt2":
        del keys["tokenizer.ggml.add_space_prefix"]
        keys["tokenizer.ggml.pre"] = pre_tokenizer_name(text, bool(model.get("ignore_merges", False)))
        keys["tokenizer.ggml.merges"] = merges
        return keys
    # Merges of such a vocabulary were made from its scores: the sooner two pieces join, the better the piece that they become.
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", "", 1), rank)
    tokens = keys["tokenizer.ggml.tokens"]
    keys["tokenizer.ggml.scores"] = [-float(ranks.get(token, len(merges) + len(tokens))) for token in tokens]
    return keys


def pre_tokenizer_name(text: str, ignore_merges: bool) -> str:
    """GGUF's name of the rule that cuts words as this tokenizer.json does: known by its text, or by what both do to one with a bit of
    everything."""
    parts = _parts({"pre_tokenizer": json.loads(text).get("pre_tokenizer")})
    spelled = [part["pattern"].get("Regex") for part in parts if "pattern" in part]
    name = _SPELLED.get(tuple(spelled))
    if name is not None and PRE_TOKENIZERS[name].ignore_merges == ignore_merges:
        return name
    engine = make_engine(text)
    if engine.pre_tokenizer is not None:
        wanted = [piece for piece, _ in engine.pre_tokenizer.pre_tokenize_str(_PROBE)]
        for name, rule in PRE_TOKENIZERS.items():
            if rule.ignore_merges == ignore_merges:
                splits = [Split(Regex(engine_pattern(pattern)), "isolated") for pattern in rule.patterns]
                ours = PartSequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
                if [piece for piece, _ in ours.pre_tokenize_str(_PROBE)] == wanted:
                    return name
    raise UnsupportedError("this folder's tokenizer cuts words by a rule that has no name in GGUF; load the folder itself instead")


def _vocabulary(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    model, added = values["model"], values.get("added_tokens") or []
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedError(f"tokenizer.json has a model of type {quote(str(kind))}; supported: BPE")
    byte_level = _has_part(values, "ByteLevel")
    texts: dict[int, str] = {_token_id(token): word for word, token in model["vocab"].items()}
    kinds: dict[int, TokenKind] = {}
    # A multimodal model's file may name tokens of images, past the rows of this model.
    for token in added:
        if count and _token_id(token["id"]) >= count:
            texts.pop(token["id"], None)
        else:
            texts[token["id"]] = token["content"]
            kinds[token["id"]] = TokenKind.CONTROL if token.get("special") else TokenKind.USER_DEFINED
    if not byte_level:
        kinds |= {token: TokenKind.BYTE for token, word in texts.items() if re.fullmatch("<0x[0-9A-F]{2}>", word)}
        unknown = model.get("unk_token")
        kinds |= {token: TokenKind.UNKNOWN for token, word in texts.items() if word == unknown}
    size = max(texts, default=-1) + 1
    if count and size > count:
        raise CheckpointError(f"tokenizer.json has {size} tokens, but the embedding has {count} rows")
    size = count or min(size, 1 << 24)
    return {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        "tokenizer.ggml.tokens": [texts.get(token, f"[PAD{token}]") for token in range(size)],
        "tokenizer.ggml.token_type": [
            int(kinds.get(token, TokenKind.NORMAL if token in texts else TokenKind.UNUSED)) for token in range(size)
        ],
        "tokenizer.ggml.add_space_prefix": _prepends_space(values),
    }


def _token_id(token: Any) -> int:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 24:
        raise ValueError(f"{quote(str(token))} is no token id")
    return token


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Normalizer, pre-tokenizer and decoder, sequences taken apart."""
    found: list[Mapping[str, Any]] = []
    waiting = [values.get(stage) for stage in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            found.append(part)
            for name in ("normalizers", "pretokenizers", "decoders"):
                waiting += part.get(name) or []
    return found


def _has_part(values: Mapping[str, Any], kind: str) -> bool:
    return any(part.get("type") == kind for part in _parts(values))


def _prepends_space(values: Mapping[str, Any]) -> bool:
    return any(
        part.get("type") == "Prepend"
        or (
            part.get("type") == "Metaspace" and part.get("prepend_scheme", "always" if part.get("add_prefix_space") else "never") != "never"
        )
        for part in _parts({**values, "decoder": None})
    )


def _special(tokens: Sequence[str], settings: Mapping[str, Any], defaults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ids of tokens with a meaning: by their text in tokenizer_config.json, else by number; further end tokens of a generation besides."""
    ids = {word: token for token, word in enumerate(tokens)}
    keys: dict[str, Any] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = settings.get(f"{role}_token")
        word = value.get("content") if isinstance(value, dict) else value
        if isinstance(word, str) and word in ids:
            keys[f"tokenizer.ggml.{name}_token_id"] = ids[word]
    for role in ("bos", "eos"):
        numbers = [n for values in defaults for n in _numbers(values.get(f"{role}_token_id")) if n < len(tokens)]
        known = [keys[f"tokenizer.ggml.{role}_token_id"]] if f"tokenizer.ggml.{role}_token_id" in keys else []
        found = list(dict.fromkeys([*known, *numbers]))
        # GGUF has three names for tokens that end a generation; a list is never longer in practice.
        names = ("eos", "eot", "eom") if role == "eos" else (role,)
        keys |= {f"tokenizer.ggml.{name}_token_id": number for name, number in zip(names, found, strict=False)}
    return keys


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [n for n in values if isinstance(n, int) and not isinstance(n, bool) and n >= 0]


def _ends(text: str | None, keys: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whether texts get a BOS and an EOS: as tokenizer_config.json says, else as the library adds them (`text` None: it adds nothing)."""
    ids = make_engine(text).encode("", add_special_tokens=True).ids if text is not None else []
    found: dict[str, Any] = {}
    for role, at in (("bos", 0), ("eos", -1)):
        token, stated = keys.get(f"tokenizer.ggml.{role}_token_id"), settings.get(f"add_{role}_token")
        adds = stated if isinstance(stated, bool) else bool(ids) and ids[at] == token
        found[f"tokenizer.ggml.add_{role}_token"] = adds and token is not None
    return found


def _template(value: Any) -> str | None:
    """The text of a chat template; of several, the one called default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
