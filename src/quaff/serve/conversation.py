"""Conversations of OpenAI's shape as prompts, by the model's chat template."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quaff.errors import PromptError
from quaff.llm import LLM
from quaff.serve.errors import ApiError
from quaff.serve.wire import Body

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template gets from elsewhere: variables of a request must not take its place."""


class Conversation(Body):
    """The part of a body that makes a prompt. `chat_template_kwargs` are variables of the template, `enable_thinking` for one."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    def variables(self) -> dict[str, Any]:
        """Variables for the template; ApiError when they would take the place of something else."""
        if self.chat_template is not None:
            raise ApiError(400, "a request cannot bring a chat template: the model's own is used", param="chat_template")
        given = self.chat_template_kwargs or {}
        if taken := RESERVED & given.keys():
            raise ApiError(400, f"chat_template_kwargs cannot set {min(taken)}", param="chat_template_kwargs")
        return given


def tokens_of(llm: LLM, body: Conversation) -> list[int]:
    """Token ids of the prompt, whatever their number."""
    return llm.tokenizer.encode_chat(body.messages, body.add_generation_prompt, **body.variables())


def render(llm: LLM, body: Conversation) -> str:
    """The prompt's text."""
    variables, template = body.variables(), llm.tokenizer.chat_template
    if template is None:
        raise PromptError("this model has no chat template: it continues plain text")
    return template.render(body.messages, body.add_generation_prompt, **variables)
