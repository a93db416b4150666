"""What an answer must look like: a JSON schema, a regular expression or a Lark grammar, as the tokens that may come next.

The grammars are llguidance's (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quaff.errors import ConfigError, UnsupportedError
from quaff.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CHARACTERS = 1 << 18
"""Longest schema, regular expression or grammar."""
MAX_LEXER_STATES = 20_000
"""A state takes up to 2 kB."""
JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as Python's `json.dumps` writes it: what models were trained on, and white space cannot go on for ever."""
_KEPT = 16


class Constraint:
    """One answer on its way through a grammar. Not for two threads at once."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]: True where the next token may be. End tokens are allowed where the answer may end. ConfigError when it gives up."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        out = np.zeros(self._vocab, dtype=np.bool_)
        # Logits may be wider than the vocabulary, for no token.
        known = np.unpackbits(bits, bitorder="little")[: self._vocab]
        out[: len(known)] = known
        return out

    def accept(self, token: int) -> None:
        """The token that was chosen, one of those allowed; ConfigError otherwise."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def ended(self) -> bool:
        """Nothing may follow but the end."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"the grammar of the answer gave up: {_first_line(self._matcher.get_error())}")


class Grammar:
    """A grammar that was understood; `start` as often as there are answers."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def start(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._vocab)


class Grammars:
    """Grammars over the vocabulary of one tokenizer; the last few are kept. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab`: width of the logits, at least the number of tokens."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        self._words: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def lark(self, text: str, what: str = "the grammar") -> Grammar:
        """A grammar in llguidance's Lark syntax, which starts at `start`. ConfigError when it is wrong; `what` names it to the user."""
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"{what} is longer than {MAX_CHARACTERS} characters")
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                return known
            guidance, words = self._library()
        limits = guidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = guidance.LLMatcher(words, json.dumps({"grammars": [{"lark_grammar": text}]}), log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"{what} cannot be used: {_first_line(matcher.get_error())}")
        grammar = Grammar(matcher, self._vocab)
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    def prepare(self) -> None:
        """Make ready what all grammars need: half a second in which no other thread runs, and seconds for a large vocabulary."""
        with suppress(Exception), self._lock:  # what is wrong is told to whoever asks for a grammar
            self._library()

    def _library(self) -> tuple[Any, llguidance.LLTokenizer]:
        try:
            import llguidance
        except ImportError:
            raise UnsupportedError("answers in a given form need llguidance: pip install 'quaff[serve]'") from None
        if self._words is None:
            wrapper = llguidance.TokenizerWrapper(_Words(self._tokenizer))
            ends = sorted(self._tokenizer.end_ids) or None
            self._words = llguidance.LLTokenizer(wrapper, n_vocab=self._tokenizer.vocab_size, eos_token=ends)
        return llguidance, self._words


class _Words:
    """A tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token, skip_special=False) for token in range(len(vocabulary))]
        # A user-defined token is text like any other, unless it is written like a mark: then a string must not hold it.
        self.special_token_ids = [
            token
            for token, text in enumerate(vocabulary.tokens)
            if vocabulary.is_special(token) or (vocabulary.is_unique_text(token) and text.startswith("<") and text.endswith(">"))
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special=False)


def json_rule(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """The body of a rule for the values that a JSON schema describes; `lenient`: as far as a grammar can say it, else it is refused."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_FORM | ({"lenient": True, "coerce_one_of": True} if lenient else {})})


def regex_rule(pattern: str) -> str:
    """The body of a rule for texts that match from beginning to end, in the syntax of Rust's `regex` crate."""
    out, escaped = [], False
    for c in pattern:
        out.append("\\/" if c == "/" and not escaped else "\\n" if c == "\n" else c)
        escaped = c == "\\" and not escaped
    return f"/{''.join(out)}/" if pattern else '""'


def _first_line(message: str) -> str:
    return message.partition("\n")[0].strip()[:200]
