"""Chat templates: Jinja from a model file, which is to say from a stranger. Rendered in an immutable sandbox, with bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from threading import local
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quaff.errors import CheckpointError, PromptError, one_line

MAX_CHARACTERS = 1 << 24
"""Longest rendered prompt and longest string a template may build, in characters."""

MAX_STEPS = 200_000
"""Most loop passes and macro calls of one rendering: far more than a conversation of any context length needs."""

_MAX_WIDTH = 1000
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)|\{[^{}]*:[^{}]*(\d{4,}|\{)")
_SIZED_FILTERS = ("replace", "join", "format", "indent", "center", "wordwrap", "tojson", "batch", "slice", "truncate")
_WIDTH_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class _Raised(TemplateError):
    """The template itself rejected the conversation (`raise_exception`)."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training: its body is rendered, nothing else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also counts loop passes and limits the size of what operators build."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self._state = local()
        self.filters["tojson"] = _to_json
        for name in _SIZED_FILTERS:
            self.filters[name] = _sized(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def start(self) -> None:
        self._state.steps = 0

    def step(self) -> str:
        """Called at each loop pass and macro call; `bounded` and this are reached as environment attributes, which a template can't set."""
        self._state.steps += 1
        if self._state.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop passes")
        return ""

    def bounded(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARACTERS:
            raise SecurityError(f"a value longer than {MAX_CHARACTERS} characters")
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_CHARACTERS:
                    raise SecurityError(f"a value longer than {MAX_CHARACTERS} characters")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise SecurityError("an integer of more than 4096 bits")
        if operator == "%" and isinstance(left, str):
            _check_size("format", [left, *(right if isinstance(right, tuple) else (right,))])
        return self.bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, target: Any, *arguments: Any, **named: Any) -> Any:
        method = getattr(target, "__wrapped__", target)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            name, values = method.__name__, [text, *arguments, *named.values()]
            _check_size(name, values[::-1] if name == "join" else values)
        return self.bounded(super().call(context, target, *arguments, **named))

    def prepare(self, tree: nodes.Template) -> nodes.Template:
        """`tree` with the counter at the start of every loop and macro body, and a size check around every `~` and every output."""
        _check_sizes(tree)
        bodies = [loop.body for loop in tree.find_all(nodes.For)]
        bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
        bodies += [call.body for call in tree.find_all(nodes.CallBlock)]
        for body in bodies:
            body.insert(0, nodes.Output([_method("step", [])]))
        return tree


def _method(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _check_sizes(node: nodes.Node) -> None:
    """Outputs count because `{% set x %}{{ x }}{{ x }}{% endset %}` joins strings as `~` does."""

    def checked(child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        _check_sizes(child)
        grows = isinstance(child, nodes.Concat) or (isinstance(node, nodes.Output) and not isinstance(child, nodes.TemplateData))
        return _method("bounded", [child]) if grows and isinstance(child, nodes.Expr) else child

    for field, value in node.iter_fields():
        setattr(node, field, [checked(item) for item in value] if isinstance(value, list) else checked(value))


def _sized(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result's size is estimated before it is built; `wraps` keeps Jinja's marks of what it passes first."""

    @wraps(function)
    def sized(*arguments: Any, **named: Any) -> Any:
        values = [value for value in arguments if not isinstance(value, (Context, EvalContext, Environment))]
        _check_size(name, [*values, *named.values()])
        return function(*arguments, **named)

    return sized


def _check_size(name: str, values: list[Any]) -> None:
    """Raises SecurityError if the string operation `name` on `values` would build more than MAX_CHARACTERS."""
    first, rest = values[0], values[1:]
    strings = [value for value in rest if isinstance(value, str)]
    width = max((value for value in rest if isinstance(value, int)), default=0)
    size = 0
    if name in _WIDTH_METHODS or name in _SIZED_FILTERS:
        if width > _MAX_WIDTH and name not in ("replace", "join", "format"):
            raise SecurityError(f"a width of more than {_MAX_WIDTH}")
        lines = first.count("\n") + first.count("\t") + 1 if isinstance(first, str) else 1
        size = lines * max(width, len(strings[0]) if strings else 0)
    if name == "replace" and isinstance(first, str) and len(strings) > 1:
        size = first.count(strings[0]) * len(strings[1])
    elif name == "join" and strings and hasattr(first, "__len__"):
        size = len(first) * len(strings[0])
    elif name == "format" and isinstance(first, str):
        if _WIDE_FIELD.search(first):
            raise SecurityError(f"a format field of more than {_MAX_WIDTH} characters")
        size = (first.count("%") + first.count("{")) * max(map(len, strings), default=0)
    if size > MAX_CHARACTERS:
        raise SecurityError(f"a value longer than {MAX_CHARACTERS} characters")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as it is, without Jinja's escapes for HTML: a prompt is not a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A model's chat template. It is compiled at its first use, so that a broken one does not keep a model from reading plain text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: texts under the names templates use, "bos_token" and so on."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        self._code: Any = None

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, special tokens written out as text.

        `messages`: mappings with "role" and "content", the content a string or a list of {"type": "text", "text": ...} parts.
        `add_generation_prompt`: end with the start of the assistant's answer. `variables` are passed to the template. Raises PromptError
        if the messages are malformed, rejected by the template, or too much for its bounds; CheckpointError if the template is broken.
        """
        conversation = check_messages(messages)
        template = self._compiled()
        names = {"tools": tools, "documents": None, **self._special_tokens, **variables}
        names |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        self._environment.start()
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(names):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise SecurityError(f"a prompt longer than {MAX_CHARACTERS} characters")
                parts.append(part)
        except _Raised as error:
            raise PromptError(f"the chat template rejects these messages: {error}") from None
        except SecurityError as error:
            raise PromptError(f"the chat template was stopped: {error}") from None
        except (Exception, RecursionError, MemoryError) as error:
            raise PromptError(f"the chat template failed on these messages: {type(error).__name__}: {error}") from None
        return "".join(parts)

    def _compiled(self) -> Any:
        if self._code is None:
            try:
                tree = self._environment.prepare(self._environment.parse(self.source))
                self._code = self._environment.from_string(tree)
            except TemplateSyntaxError as error:
                raise CheckpointError(f"tokenizer.chat_template, line {error.lineno}: {error.message}") from None
            except (Exception, RecursionError, MemoryError) as error:
                reason = one_line(str(error)) or "too deeply nested"
                raise CheckpointError(f"tokenizer.chat_template cannot be compiled: {type(error).__name__}: {reason}") from None
        return self._code


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of `messages` with text parts joined into strings; raises PromptError that names the first malformed one."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise PromptError("messages must be a list of at least one message")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise PromptError(f"{where} is not an object with a role and a content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise PromptError(f"{where} has no role: expected a string such as 'user'")
        if content is None and "tool_calls" not in message:
            raise PromptError(f"{where} has no content")
        if isinstance(content, (list, tuple)):
            content = "\n".join(_part_text(part, f"{where}.content[{part_index}]") for part_index, part in enumerate(content))
        if content is not None and not isinstance(content, str):
            raise PromptError(f"{where}.content is neither a string nor a list of text parts")
        checked.append({**message, "role": role, "content": content})
    return checked


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise PromptError(f"{where} is not a text part: this model reads text only")
    return str(part["text"])
