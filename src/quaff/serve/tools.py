"""The tools of a request: checked, and in the shape that chat templates know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quaff.serve.calls import Schemas, json_value
from quaff.serve.errors import ApiError

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is a JSON schema, empty when none was given."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def rendered(self) -> dict[str, Any]:
        """As chat templates know it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters) or _NO_PARAMETERS},
        }


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that the model is shown, and what it must do with them: `choice`, or call the one that is `named`; `several` at once or not."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str | None = None
    several: bool = True

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """For the template; None when the model is to see no tool."""
        return [tool.rendered for tool in self.tools] if self.tools and self.choice != "none" else None

    @property
    def schemas(self) -> Schemas | None:
        """For the reader of the answer; None when it is not to look for calls."""
        return {tool.name: tool.parameters for tool in self.tools} if self.tools and self.choice != "none" else None

    @property
    def demanded(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(name, parameters) of the tools that the answer must call one of; empty when it need not."""
        if self.named is not None:
            return [(tool.name, tool.parameters) for tool in self.tools if tool.name == self.named]
        return [(tool.name, tool.parameters) for tool in self.tools] if self.choice == "required" else []


def make_tools(
    given: Sequence[tuple[str, str | None, Mapping[str, Any] | None]],
    choice: Choice = "auto",
    named: str | None = None,
    several: bool = True,
    where: str = "tools",
) -> Tools:
    """Tools from (name, description, JSON schema of the parameters). ApiError 400 names the field that is wrong.

    `where`: the field of the request that holds them.
    """
    if len(given) > MAX_TOOLS:
        raise ApiError(400, f"there are {len(given)} tools; at most {MAX_TOOLS} are taken", param=where)
    seen: set[str] = set()
    for i, (name, _, parameters) in enumerate(given):
        param = f"{where}[{i}]"
        if not _NAME.fullmatch(name):
            raise ApiError(400, f"{param}: a tool's name has 1 to 128 letters, digits and _ . : -, not {name!r}", param=param)
        if name in seen:
            raise ApiError(400, f"{param}: there are two tools named {name!r}", param=param)
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ApiError(400, f"{param}: the schema of a tool's parameters must be of type object", param=param)
        seen.add(name)
    if named is not None and named not in seen:
        raise ApiError(400, f"tool_choice names {named!r}, which is none of the tools", param="tool_choice")
    if choice == "required" and not given:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
    tools = tuple(Tool(name, description or "", parameters or {}) for name, description, parameters in given)
    return Tools(tools, "required" if named is not None else choice, named, several)


def arguments_object(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object, None when the text is not JSON of one."""
    value = json_value(text if text.strip() else "{}")
    return value if isinstance(value, dict) else None
