"""Conversations of OpenAI's shape as prompts, by the model's chat template."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quaff.serve.dialogue import Dialogue
from quaff.serve.errors import ApiError
from quaff.serve.forms import Form, choice_form, json_form, regex_form, response_form
from quaff.serve.tools import Tools, make_tools
from quaff.serve.turns import Turn, make_turn
from quaff.serve.wire import Body, Items

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template gets from elsewhere: variables of a request must not take its place."""


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class StructuredOutputs(Body):
    """vLLM's field: one of these forms."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = Field(default=None, min_length=1)

    def form(self) -> Form | None:
        given = [
            json_form(self.json_schema, "structured_outputs.json") if self.json_schema is not None else None,
            regex_form(self.regex) if self.regex is not None else None,
            choice_form(self.choice) if self.choice is not None else None,
        ]
        forms = [form for form in given if form is not None]
        if len(forms) > 1:
            raise ApiError(400, "structured_outputs: give one of json, regex and choice", param="structured_outputs")
        return forms[0] if forms else None


class Conversation(Body):
    """The part of a body that makes a prompt. `chat_template_kwargs` are variables of the template, `enable_thinking` for one."""

    messages: Items[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def variables(self) -> dict[str, Any]:
        """Variables for the template; ApiError when they would take the place of something else."""
        if self.chat_template is not None:
            raise ApiError(400, "a request cannot bring a chat template: the model's own is used", param="chat_template")
        given = self.chat_template_kwargs or {}
        if taken := RESERVED & given.keys():
            raise ApiError(400, f"chat_template_kwargs cannot set {min(taken)}", param="chat_template_kwargs")
        return ({"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}) | given

    def offered(self) -> Tools:
        """The tools, and what the model must do with them."""
        given = [(tool.function.name, tool.function.description, tool.function.parameters) for tool in self.tools or ()]
        several = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return make_tools(given, named=self.tool_choice.function.name, several=several)
        return make_tools(given, self.tool_choice or "auto", several=several)

    def form(self) -> Form | None:
        """What the answer must look like."""
        form = response_form(self.response_format, "response_format")
        other = self.structured_outputs.form() if self.structured_outputs is not None else None
        if form is not None and other is not None:
            raise ApiError(400, "give either response_format or structured_outputs", param="structured_outputs")
        return form or other


def turn_of(dialogue: Dialogue, body: Conversation) -> Turn:
    """The turn that a conversation asks for. ApiError, PromptError or ConfigError for what it is not. To be called off the event loop."""
    return make_turn(dialogue, body.messages, body.offered(), body.form(), body.variables(), asks=body.add_generation_prompt)
