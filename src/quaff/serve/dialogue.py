"""Conversations become prompts: rendered by the model's chat template, cut into tokens with the ids of our own replies put back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quaff.engine.grammar import Grammar, Grammars
from quaff.errors import PromptError
from quaff.serve.answer import AnswerReader
from quaff.serve.boundaries import boundaries
from quaff.serve.demands import Writer
from quaff.serve.dialects import Dialect, dialect_of, takes_tools
from quaff.serve.events import Call, Text, joined
from quaff.serve.forms import Form
from quaff.serve.pieces import PieceCache, cuts
from quaff.serve.plain_tools import with_plain_calls, with_plain_tools, with_tools_in_system
from quaff.serve.replies import Replies
from quaff.serve.shapes import Message, object_of, plainly, shapes, with_responses, without_billing
from quaff.serve.tools import Tools, arguments_object
from quaff.tokenizer import Tokenizer
from quaff.tokenizer.chat_template import check_messages


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
        self.dialect: Dialect = dialect_of(template, tokenizer.vocabulary.ids)
        self._plain = not takes_tools(template)
        self._writes_calls = "tool_calls" in template
        self._joins_responses = "tool_responses" in template and re.search(r"==\s*['\"]tool['\"]", template) is None
        self._tools_in_system = re.search(r"message\[.tools.\]|message\.tools", template) is not None
        self._thinks = self.dialect.thinking[0].strip() in template or self.dialect.channels
        # Ids mean something to one vocabulary only.
        self._replies = Replies(replies / _fingerprint(tokenizer) if replies is not None else None)
        self._pieces = PieceCache(tokenizer)
        self._cuts = cuts(tokenizer, template)
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
        checked = without_billing([plainly(message) for message in check_messages(messages)])
        written = [self._as_written(message) for message in checked]
        first: PromptError | None = None
        for shape in self._shapes(written, tools) + (self._shapes(checked, tools) if written != checked else []):
            try:
                text = template.render(shape, asks, None if self._plain else tools.shown, **(variables or {}))
            except PromptError as error:
                first = first or error
                continue
            opening, closing = self.dialect.thinking
            thinking = not self.dialect.channels and text.rstrip().endswith(opening.strip()) and closing not in begun
            text += begun
            tokens, edges = self._tokens(text)
            return ChatPrompt(text, tokens, boundaries(text, shape, edges, len(tokens)), thinking)
        raise first or PromptError("messages must be a list of at least one message")

    def reader(self, prompt: ChatPrompt, tools: Tools | None = None, call_prefix: str = "call_") -> AnswerReader:
        """A reader for one answer to a prompt. `call_prefix` begins the ids of its tool calls."""
        tools = tools or Tools()
        return AnswerReader(self.dialect, tools.schemas, prompt.thinking, call_prefix, tools.several)

    def keep(self, prompt: ChatPrompt, ids: Sequence[int], call: str = "") -> None:
        """Remember a finished answer, its end token included. `call`: the id under which its first tool call went out."""
        if not ids or ids[-1] not in self.tokenizer.end_ids:
            self._replies.keep(prompt.text, self._said(ids), tuple(ids), call)
            return
        # A template ends every answer in one way, whichever of the end tokens the model chose.
        for end in dict.fromkeys(end for end in (self.tokenizer.eos_id, ids[-1]) if end is not None):
            self._replies.keep(prompt.text, self._said(ids[:-1]) + self.tokenizer.token_text(end), (*ids[:-1], end), call)

    def grammar(self, prompt: ChatPrompt, tools: Tools | None = None, form: Form | None = None) -> Grammar | None:
        """What an answer to a prompt must look like; None when it is free. Reasoning may come first where the template knows it.

        With both, the answer has the form or is a call. ConfigError for schemas that cannot be used.
        """
        tools = tools or Tools()
        offered = tools.demanded or (list((tools.schemas or {}).items()) if form is not None else [])
        writer = Writer(self.tokenizer, offered, tools.several and tools.named is None)
        demand = self.dialect.demand if offered else None
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
        answers: list[str] = []
        if demand is not None:
            answers.append("calls")
            rules.append(demand(writer))
        if form is not None and not tools.demanded:
            answers.append(f"{writer.text(self.dialect.prelude)} form" if self.dialect.prelude else "form")
            rules.append(f"form: {form.rule}")
        rules.append("answer: " + " | ".join(answers))
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
        text = self._said([token for token in reply.ids if token not in self.tokenizer.end_ids])
        if self._says(text, message.get("content") or "", calls):
            return {"role": message["role"], "content": text}
        return message

    def _said(self, ids: Sequence[int]) -> str:
        """What a client saw of a reply: control tokens that are no marks have no text."""
        decoder = self.tokenizer.decoder(shown=self.shown)
        return "".join([decoder.push(token) for token in ids]) + decoder.finish()

    def _says(self, text: str, content: str, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a reply is this content and these calls: clients may change what they send back."""
        opening, closing = self.dialect.thinking
        reader = AnswerReader(self.dialect, {}, thinking=closing in text and opening.strip() not in text)
        parts = joined(reader.push(text) + reader.finish())
        said = "".join(part.text for part in parts if isinstance(part, Text))
        written = [(part.name, arguments_object(part.arguments)) for part in parts if isinstance(part, Call)]
        given = [(call["function"]["name"], object_of(call["function"].get("arguments"))) for call in calls]
        return said.strip() == content.strip() and written == given

    def _shapes(self, messages: list[Message], tools: Tools) -> list[list[Message]]:
        if self._plain:
            messages = with_plain_tools(messages, tools.shown)
        elif not self._writes_calls:
            messages = with_plain_calls(messages, self.dialect.pythonic)
        if self._joins_responses:
            messages = with_responses(messages)
        if self._tools_in_system:
            messages = with_tools_in_system(messages, tools.shown)
        return shapes(messages, self.dialect)

    # Tokens

    def _tokens(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a rendered text, and its edges: (character, number of ids before it) around every special token."""
        if not self._cuts:
            return self._with_bos(self.tokenizer.encode(text, add_special=False, parse_special=True)), []
        ids: list[int] = []
        edges: list[tuple[int, int]] = []
        at = 0
        for reply in self._replies.find(text):
            rest = self.tokenizer.pieces(text[reply.end : reply.end + 256])
            # Between words a reply's ids and those of the text after it would not be those of the whole.
            if rest and not isinstance(rest[0], int) and not self.tokenizer.vocabulary.is_unique_text(reply.ids[-1]):
                continue
            self._pieces.encode(text[at : reply.start], at, ids, edges)
            ids += reply.ids
            at = reply.end
            edges.append((at, len(ids)))
        self._pieces.encode(text[at:], at, ids, edges)
        begun = self._with_bos(ids)
        shift = len(begun) - len(ids)
        return begun, [(character, count + shift) for character, count in edges]

    def _with_bos(self, ids: list[int]) -> tuple[int, ...]:
        bos = self.tokenizer.bos_id
        # Most templates write BOS themselves; the file's add_bos_token holds for the others.
        missing = self.tokenizer.vocabulary.add_bos and bos is not None and ids[:1] != [bos]
        return (bos, *ids) if missing and bos is not None else tuple(ids)


def _fingerprint(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for text, kind in zip(tokenizer.vocabulary.tokens, tokenizer.vocabulary.kinds, strict=True):
        digest.update(f"{kind} {text}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
