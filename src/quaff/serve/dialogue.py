"""Conversations become prompts: rendered by the model's chat template, cut into tokens with the ids of our own replies put back."""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quaff.engine.grammar import Grammar, Grammars
from quaff.errors import PromptError
from quaff.serve.answer import AnswerReader
from quaff.serve.demands import Writer
from quaff.serve.dialects import Dialect, dialect_of, takes_tools
from quaff.serve.events import Call, Text, joined
from quaff.serve.forms import Form
from quaff.serve.plain_tools import with_plain_tools
from quaff.serve.replies import Replies
from quaff.serve.tools import Tools, arguments_object
from quaff.tokenizer import Tokenizer
from quaff.tokenizer.chat_template import check_messages

Message = dict[str, Any]

_CACHED_CHARACTERS = 8 << 20
_WORTH_CACHING = 200
MAX_TRIES = 64
"""Places where the words of a message are looked for: a boundary that is not found costs time in a later turn, nothing else."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as its model reads it. `boundaries`: numbers of tokens at which a later prompt is likely to part from this one,
    ascending, all inside. `thinking`: it ends inside a reasoning."""

    text: str
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()
    thinking: bool = False


class Dialogue:
    """Everything about one model's conversations that is not running it. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, replies: Path | None = None) -> None:
        """`vocab`: width of the logits. `replies`: the folder that keeps ids of replies between runs."""
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, vocab)
        template = tokenizer.chat_template.source if tokenizer.chat_template is not None else ""
        self.dialect: Dialect = dialect_of(template)
        self._plain = not takes_tools(template)
        self._thinks = self.dialect.thinking[0].strip() in template or self.dialect.channels
        # Ids mean something to one vocabulary only.
        self._replies = Replies(replies / _fingerprint(tokenizer) if replies is not None else None)
        self._cache = _PieceCache(tokenizer)
        ids = tokenizer.vocabulary.ids
        self.shown = frozenset(ids[mark.strip()] for mark in self.dialect.marks if mark.strip() in ids)
        """Control tokens that a reader of answers must see as text."""

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        begun: str = "",
        asks: bool = True,
    ) -> ChatPrompt:
        """The prompt that asks for the next message, which is to go on from `begun`. Without `asks` it ends with the last message.

        `messages` are in OpenAI's shape; `reasoning_content` may hold an assistant's reasoning. `variables` go to the template. PromptError
        when there is no template, or when it takes these messages in no form.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise PromptError("this model has no chat template: it continues plain text; use /v1/completions")
        tools = tools or Tools()
        checked = [_plainly(message) for message in check_messages(messages)]
        written = [self._as_written(message) for message in checked]
        first: PromptError | None = None
        for form in self._forms(written, tools) + (self._forms(checked, tools) if written != checked else []):
            try:
                text = template.render(form, asks, None if self._plain else tools.shown, **(variables or {}))
            except PromptError as error:
                first = first or error
                continue
            text += begun
            tokens, edges = self._tokens(text)
            opening = self.dialect.thinking[0].strip()
            thinking = not self.dialect.channels and text.rstrip().endswith(opening)
            return ChatPrompt(text, tokens, _boundaries(text, form, edges, len(tokens)), thinking)
        raise first or PromptError("messages must be a list of at least one message")

    def reader(self, prompt: ChatPrompt, tools: Tools | None = None, call_prefix: str = "call_") -> AnswerReader:
        """A reader for one answer to a prompt. `call_prefix` begins the ids of its tool calls."""
        return AnswerReader(self.dialect, tools.schemas if tools is not None else None, prompt.thinking, call_prefix)

    def keep(self, prompt: ChatPrompt, ids: Sequence[int], call: str = "") -> None:
        """Remember a finished answer, its end token included. `call`: the id under which its first tool call went out."""
        # A template ends every answer in one way, whichever of the end tokens the model chose.
        ends = (self.tokenizer.eos_id, ids[-1]) if ids and ids[-1] in self.tokenizer.end_ids else ids[-1:]
        for end in dict.fromkeys(end for end in ends if end is not None):
            whole = (*ids[:-1], end)
            self._replies.keep(prompt.text, self.tokenizer.decode(whole, skip_special=False), whole, call)

    def grammar(self, prompt: ChatPrompt, tools: Tools | None = None, form: Form | None = None) -> Grammar | None:
        """What an answer to a prompt must look like; None when it is free. Reasoning may come first where the template knows it.

        ConfigError for schemas that cannot be used.
        """
        writer = Writer(self.tokenizer, tools.demanded if tools else (), tools is not None and tools.several and tools.named is None)
        demand = self.dialect.demand if writer.tools else None
        if demand is None and form is None:
            return None
        opening, closing = self.dialect.thinking
        rules = ["start: answer"]
        if prompt.thinking or self._thinks:
            thought = "thought /[ \\n]{0,2}/"
            rules = [
                f"start: {thought if prompt.thinking else f'({writer.text(opening)} {thought})?'} answer",
                writer.upto("thought", closing),
            ]
        if demand is not None:
            rules += ["answer: calls", demand(writer)]
        elif form is not None:
            before = f"{writer.text(self.dialect.prelude)} " if self.dialect.prelude else ""
            rules += [f"answer: {before}form", f"form: {form.rule}"]
        return self.grammars.lark("\n".join(rules), form.what if form is not None else "the schemas of the tools")

    # Messages

    def _as_written(self, message: Message) -> Message:
        """A message; an assistant's calls that we wrote are the text that was written."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        reply = self._replies.with_call(str(calls[0].get("id"))) if self.dialect.verbatim else None
        if reply is None:
            return message
        ids = [token for token in reply.ids if token not in self.tokenizer.end_ids]
        text = self.tokenizer.decode(ids, skip_special=False)
        if self._says(text, message.get("content") or "", calls):
            return {"role": message["role"], "content": text}
        return message

    def _says(self, text: str, content: str, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a reply is this content and these calls: clients may change what they send back."""
        opening, closing = self.dialect.thinking
        reader = AnswerReader(self.dialect, {}, thinking=closing in text and opening.strip() not in text)
        parts = joined(reader.push(text) + reader.finish())
        said = "".join(part.text for part in parts if isinstance(part, Text))
        written = [(part.name, arguments_object(part.arguments)) for part in parts if isinstance(part, Call)]
        given = [(call["function"]["name"], _object_of(call["function"].get("arguments"))) for call in calls]
        return said.strip() == content.strip() and written == given

    def _forms(self, messages: list[Message], tools: Tools) -> list[list[Message]]:
        """The conversation in the forms that templates take, the usual one first."""
        if self._plain:
            messages = with_plain_tools(messages, tools.shown)
        if self.dialect.short_ids:
            messages = [_with_short_ids(message) for message in messages]
        if self.dialect.channels:
            messages = [{**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]
        objects = [_with_arguments(message, as_text=False) for message in messages]
        forms = [objects]
        if any(message.get("tool_calls") for message in messages):
            # DeepSeek's templates join the arguments to other texts.
            forms.append([_with_arguments(message, as_text=True) for message in messages])
        alternating = _alternating(objects)
        if alternating != objects:
            forms.append(alternating)
        return forms

    # Tokens

    def _tokens(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a rendered text, and its edges: (character, number of ids before it) around every special token."""
        if not self._cache.cuts:
            return self._with_bos(self.tokenizer.encode(text, add_special=False, parse_special=True)), []
        ids: list[int] = []
        edges: list[tuple[int, int]] = []
        at = 0
        for reply in self._replies.find(text):
            rest = self.tokenizer.pieces(text[reply.end : reply.end + 256])
            # Between words a reply's ids and those of the text after it would not be those of the whole.
            if rest and not isinstance(rest[0], int) and not self.tokenizer.vocabulary.is_unique_text(reply.ids[-1]):
                continue
            self._cache.encode(text[at : reply.start], at, ids, edges)
            ids += reply.ids
            at = reply.end
            edges.append((at, len(ids)))
        self._cache.encode(text[at:], at, ids, edges)
        begun = self._with_bos(ids)
        shift = len(begun) - len(ids)
        return begun, [(character, count + shift) for character, count in edges]

    def _with_bos(self, ids: list[int]) -> tuple[int, ...]:
        bos = self.tokenizer.bos_id
        # Most templates write BOS themselves; the file's add_bos_token holds for the others.
        missing = self.tokenizer.vocabulary.add_bos and bos is not None and ids[:1] != [bos]
        return (bos, *ids) if missing and bos is not None else tuple(ids)


class _PieceCache:
    """Ids of texts between special tokens: agents send the same messages every turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._characters = 0

    @property
    def cuts(self) -> bool:
        """Whether a text may be cut at special tokens: a tokenizer.json may let those swallow the white space beside them."""
        return not self._tokenizer.runs_json

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

    def _piece(self, piece: str) -> list[int]:
        if len(piece) < _WORTH_CACHING:
            return self._tokenizer.encode(piece, add_special=False)
        with self._lock:
            if piece in self._ids:
                self._ids.move_to_end(piece)
                return self._ids[piece]
        ids = self._tokenizer.encode(piece, add_special=False)
        with self._lock:
            if piece not in self._ids and len(piece) <= _CACHED_CHARACTERS:
                self._ids[piece] = ids
                self._characters += len(piece)
                while self._characters > _CACHED_CHARACTERS:
                    self._characters -= len(self._ids.popitem(last=False)[0])
        return ids


def _fingerprint(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for text, kind in zip(tokenizer.vocabulary.tokens, tokenizer.vocabulary.kinds, strict=True):
        digest.update(f"{kind} {text}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _boundaries(text: str, messages: Sequence[Message], edges: Sequence[tuple[int, int]], count: int) -> tuple[int, ...]:
    """Where later prompts part from this one: after what all conversations share, after the last thing the user said (reasoning that
    follows may be dropped), and after the last message."""
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


def _plainly(message: Message) -> Message:
    """A message with one name for each thing. PromptError for calls that are none."""
    role = "system" if message["role"] == "developer" else message["role"]
    if message.get("tool_calls"):
        check_calls(message["tool_calls"])
        return {**message, "role": role}
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "role": role, "content": message.get("content") or ""}


def _content(message: Message) -> str:
    return str(message.get("content") or "").strip()


def check_calls(calls: Any) -> None:
    """PromptError unless `calls` are an assistant's tool calls: [{"function": {"name": ..., "arguments": ...}}]."""
    ok = isinstance(calls, list) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and isinstance(call["function"].get("name"), str)
        for call in calls
    )
    if not ok:
        raise PromptError("tool_calls must be a list of {'function': {'name': ..., 'arguments': ...}}")


def _object_of(arguments: Any) -> dict[str, Any] | None:
    return arguments_object(arguments) if isinstance(arguments, str) else arguments if isinstance(arguments, dict) else {}


def _with_arguments(message: Message, as_text: bool) -> Message:
    """A message whose calls have arguments as JSON text, or as the object that most templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"].get("arguments")
        value = _object_of(given)
        arguments: Any = value if value is not None else given
        if as_text:
            arguments = given if isinstance(given, str) else json.dumps(given if given is not None else {}, ensure_ascii=False)
        calls.append({"type": "function", **call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_short_ids(message: Message) -> Message:
    """Ids of nine letters and digits, the same for the same id."""
    out = dict(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in message["tool_calls"]]
    if isinstance(message.get("tool_call_id"), str):
        out["tool_call_id"] = _short(message["tool_call_id"])
    return out


def _short(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """User and assistant by turns: the system's words go before the user's first, neighbours of one role become one."""
    out: list[Message] = []
    system: list[str] = []
    for message in messages:
        if message["role"] == "system":
            system.append(message["content"] or "")
            continue
        if system and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*system, message["content"] or ""])}
            system = []
        last = out[-1] if out else None
        if last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant") and not last.get("tool_calls"):
            out[-1] = {**last, **message, "content": "\n\n".join(filter(None, (last["content"], message["content"])))}
        else:
            out.append(message)
    if system:
        out.append({"role": "user", "content": "\n\n".join(system)})
    return out
