"""One turn of a conversation: what every chat API does between its body and its reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quaff.engine.grammar import Grammar
from quaff.engine.sampler import SamplingParams
from quaff.serve.answer import AnswerReader
from quaff.serve.dialogue import ChatPrompt, Dialogue
from quaff.serve.events import Call, CallStart, Event, Part, joined
from quaff.serve.forms import Form
from quaff.serve.generation import Generation, Job, Progress, Result
from quaff.serve.service import Service
from quaff.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and what its answer may be. `call_prefix` begins the ids of tool calls."""

    dialogue: Dialogue
    prompt: ChatPrompt
    tools: Tools
    grammar: Grammar | None
    call_prefix: str

    def job(self, params: SamplingParams, progress: bool = False, salt: str | None = None) -> Job:
        return Job(
            list(self.prompt.tokens),
            params,
            progress=progress,
            shown=self.dialogue.shown,
            grammar=self.grammar,
            boundaries=self.prompt.boundaries,
            salt=salt or "",
        )

    def reader(self) -> AnswerReader:
        """For one answer."""
        return self.dialogue.reader(self.prompt, self.tools, self.call_prefix)

    async def events(self, service: Service, generation: Generation) -> AsyncIterator[Event | Progress]:
        """An answer as it comes. The reply is kept before the last event, so that the next turn finds it."""
        reader = self.reader()
        first = ""
        async for item in generation:
            if isinstance(item, Progress):
                yield item
                continue
            for event in reader.push(item.text):
                first = first or (event.id if isinstance(event, CallStart) else "")
                yield event
        rest = reader.finish()
        first = first or next((event.id for event in rest if isinstance(event, CallStart)), "")
        if generation.result is not None:
            await service.blocking(self.keep, generation.result, first)
        for event in rest:
            yield event

    def answer(self, result: Result) -> list[Part]:
        """The parts of a finished answer, which is kept."""
        reader = self.reader()
        parts = joined(reader.push(result.text) + reader.finish())
        self.keep(result, next((part.id for part in parts if isinstance(part, Call)), ""))
        return parts

    def keep(self, result: Result, call: str) -> None:
        """Remember an answer; `call` is the id of its first tool call, or ""."""
        # What a stop string cut off was generated, but the client never sees it.
        if result.stop is None and result.finish_reason in ("stop", "length"):
            self.dialogue.keep(self.prompt, result.tokens, call)


def make_turn(
    dialogue: Dialogue,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | None = None,
    form: Form | None = None,
    variables: Mapping[str, Any] | None = None,
    begun: str = "",
    asks: bool = True,
    call_prefix: str = "call_",
) -> Turn:
    """A turn of a conversation in OpenAI's shape; see `Dialogue.prompt` and `Dialogue.grammar`. To be called off the event loop."""
    tools = tools or Tools()
    prompt = dialogue.prompt(messages, tools, variables, begun, asks)
    return Turn(dialogue, prompt, tools, dialogue.grammar(prompt, tools, form), call_prefix)
