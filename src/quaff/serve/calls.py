"""How families write tool calls: one reader per form, from the text after the mark that opens calls to the events of those calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from quaff.serve.reading import Reading, Source

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters, by name of tool."""
Section = Callable[[Source, "Sink", Schemas], Reading]
"""Reads calls up to and including the mark that closes them. Raises `NotACall` when the text is something else."""


class NotACall(Exception):
    """What looked like a call is not one."""


class Sink(Protocol):
    """Where calls go."""

    def start(self, name: str, id: str | None = None) -> None: ...
    def arguments(self, text: str) -> None: ...


def json_calls(close: str | None) -> Section:
    """`{"name": ..., "arguments": {...}}`, or a list of such objects, up to `close` (None: the end of the object or list).

    "parameters" stands for "arguments" in Llama's form. Hermes, Qwen, Mistral before v11, Phi-4, Granite.
    """

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        first = yield from source.blanks()
        if first == "[":
            source.read(1)
            first = yield from source.blanks()
        if first != "{":
            raise NotACall
        while first in ("{", ","):
            if first == "{":
                yield from _json_call(source, sink)
            else:
                source.read(1)
            first = yield from source.blanks()
        if first == "]":
            source.read(1)
        if close is not None:
            yield from source.until((close,), ignore)

    return read


def _json_call(source: Source, sink: Sink) -> Reading:
    """One object. Arguments go out as they come once the name is known, and are held until then."""
    source.read(1)
    held: list[str] = []
    name: str | None = None
    given = False

    def use(text: str) -> None:
        if name is None:
            held.append(text)
        else:
            sink.arguments(text)

    while (first := (yield from source.blanks())) == '"' or first == ",":
        if first == ",":
            source.read(1)
            continue
        key = yield from _json_string(source)
        if (yield from source.blanks()) != ":":
            raise NotACall
        source.read(1)
        first = yield from source.blanks()
        if key == "name" and first == '"' and name is None:
            name = yield from _json_string(source)
            sink.start(name)
            for text in held:
                sink.arguments(text)
        elif key in ("arguments", "parameters") and first in ("{", '"') and not given:
            given = True
            if first == "{":
                yield from _json_value(source, use)
            else:
                # Some models write the arguments as a string that holds JSON.
                text = yield from _json_string(source)
                use(text if isinstance(json_value(text), dict) else _json({"value": text}))
        else:
            yield from _json_value(source, ignore)
    if first != "}" or name is None:
        raise NotACall
    source.read(1)
    if not given:
        sink.arguments("{}")


def _json_string(source: Source) -> Generator[None, None, str]:
    parts: list[str] = []
    yield from _json_value(source, parts.append)
    try:
        text = str(json.loads("".join(parts), strict=False))
        text.encode()
    except ValueError:
        raise NotACall from None
    return text


def _json_value(source: Source, use: Callable[[str], object]) -> Reading:
    """Read one JSON value, in pieces as they arrive. Its inside is only looked at as far as it takes to find its end."""
    depth, quoted, escaped, begun = 0, False, False, False
    while True:
        n = 0
        for c in source.text:
            bare = not quoted and depth == 0
            if bare and begun and c in ",]} \t\r\n":
                break
            n += 1
            if escaped:
                escaped = False
            elif quoted:
                quoted, escaped = c != '"', c == "\\"
            elif c == '"':
                quoted = True
            elif c in "{[":
                depth += 1
            elif c in "}]":
                depth -= 1
                if depth < 0:
                    raise NotACall
            begun = True
            if depth == 0 and not quoted and c in '}]"':
                if n:
                    use(source.read(n))
                return
        else:
            if n:
                use(source.read(n))
            if source.ended:
                raise NotACall
            yield
            continue
        if n:
            use(source.read(n))
        return


def headed_calls(open: str, between: str, close: str | None, end: str | None, name_of: Callable[[str], tuple[str, str | None]]) -> Section:
    """Calls of the form `open` HEADER `between` JSON `close`, one after the other, up to `end`.

    `open` is "" where the section's own mark opens a call. `close` None: the next `open`, `end` or the end of the text closes one.
    `name_of` makes a header the name of a tool and, where the form has one, the id of the call. DeepSeek, Kimi, Mistral from v11.
    """

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        while True:
            if open:
                mark = yield from source.until([m for m in (open, end) if m], ignore)
                if mark != open:
                    return
            header, mark = yield from source.upto((between,))
            name, id = name_of(header)
            if mark is None or not name:
                raise NotACall
            sink.start(name, id)
            fence = yield from source.blanks()
            if fence == "`":
                yield from source.until(("\n",), ignore)
            if (yield from source.blanks()) == "{":
                yield from _json_value(source, sink.arguments)
            else:
                sink.arguments("{}")
            if close is not None:
                yield from source.until((close,), ignore)
            if not open:
                return

    return read


def deepseek_name(header: str) -> tuple[str, str | None]:
    """`function<｜tool▁sep｜>name`, a line, a fence (V3), or the name alone (V3.1)."""
    lines = header.strip().splitlines()
    return (lines[0].rpartition("<\uff5ctool\u2581sep\uff5c>")[2].strip() if lines else ""), None


def kimi_name(header: str) -> tuple[str, str | None]:
    """`functions.name:0`, which is the id of the call too: the template writes it back."""
    text = header.strip()
    return text.removeprefix("functions.").rpartition(":")[0] or text, text


def mistral_name(header: str) -> tuple[str, str | None]:
    """`name`, or `name[CALL_ID]id`."""
    name, _, id = header.partition("[CALL_ID]")
    return name.strip(), id.strip() or None


def xml_calls(close: str) -> Section:
    """`<function=name><parameter=key>value</parameter>...</function>`, any number of times, up to `close`. Qwen3-Coder, Qwen3.5."""

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        called = False
        while (yield from source.until(("<function=", close), ignore)) == "<function=":
            name, mark = yield from source.upto((">",))
            if mark is None or not name.strip():
                raise NotACall
            called = True
            fields = _Fields(sink, name.strip(), schemas)
            while (mark := (yield from source.until(("<parameter=", "</function>", close), ignore))) == "<parameter=":
                key, _ = yield from source.upto((">",))
                value, _ = yield from source.upto(("</parameter>",))
                fields.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))
            fields.finish()
            if mark == close:
                return
        if not called:
            raise NotACall

    return read


def tagged_calls(close: str) -> Section:
    """`name <arg_key>key</arg_key> <arg_value>value</arg_value> ...` up to `close`: one call. GLM 4.5 and later."""

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        marks = ("<arg_key>", close)
        name, mark = yield from source.upto(marks)
        if not name.strip() or mark is None:
            raise NotACall
        fields = _Fields(sink, name.strip(), schemas)
        while mark == "<arg_key>":
            key, _ = yield from source.upto(("</arg_key>",))
            yield from source.until(("<arg_value>",), ignore)
            value, _ = yield from source.upto(("</arg_value>",))
            fields.add(key.strip(), value)
            mark = yield from source.until(marks, ignore)
        fields.finish()

    return read


class _Fields:
    """Arguments that come one by one, as texts whose type the tool's schema knows."""

    def __init__(self, sink: Sink, name: str, schemas: Schemas) -> None:
        self._sink = sink
        properties = schemas.get(name, {}).get("properties")
        self._types: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._opened = False
        sink.start(name)

    def add(self, key: str, text: str) -> None:
        self._sink.arguments((", " if self._opened else "{") + f"{_json(key)}: {_json(self._value(key, text))}")
        self._opened = True

    def finish(self) -> None:
        self._sink.arguments("}" if self._opened else "{}")

    def _value(self, key: str, text: str) -> Any:
        schema = self._types.get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        return json_value(text, otherwise=text)


def python_calls(close: str) -> Section:
    """`[name(key=value, ...), ...]` in Python's syntax, up to `close`. LFM2."""

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        text, _ = yield from source.upto((close,))
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
            calls = [(_dotted(node.func), _json(_keywords(node))) for node in nodes if isinstance(node, ast.Call)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise NotACall from None
        if not calls or len(calls) != len(nodes):
            raise NotACall
        for name, arguments in calls:
            sink.start(name)
            sink.arguments(arguments)

    return read


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise NotACall


def _keywords(call: ast.Call) -> dict[str, Any]:
    if call.args or any(k.arg is None for k in call.keywords):
        raise NotACall
    return {str(k.arg): _literal(k.value) for k in call.keywords}


def _literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's words for true, false and null are known too."""
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        return -value if isinstance(value, int | float) else value
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float | bool)):
        return node.value
    raise NotACall


def braced_calls(close: str, quote: str) -> Section:
    """`call:name{key:value,...}` up to `close`: keys are bare, strings stand between two `quote`s, values nest. Gemma 4, FunctionGemma."""
    token = re.compile(rf"{re.escape(quote)}(.*?){re.escape(quote)}|([{{}}\[\],:])|([^{{}}\[\],:]+)", re.DOTALL)

    def read(source: Source, sink: Sink, schemas: Schemas) -> Reading:
        text, _ = yield from source.upto((close,))
        header, brace, rest = text.strip().removeprefix("call:").partition("{")
        if not brace or not header.strip():
            raise NotACall
        words = [m.groups() for m in token.finditer("{" + rest)]
        try:
            value, end = _braced(words, 0)
            arguments = _json(value)
        except (IndexError, RecursionError):
            raise NotACall from None
        if end != len(words) or not isinstance(value, dict):
            raise NotACall
        sink.start(header.strip())
        sink.arguments(arguments)

    return read


def _braced(words: Sequence[tuple[str | None, ...]], at: int) -> tuple[Any, int]:
    """The value that begins at word `at`, and where the next one begins. A word is (quoted text, punctuation, bare text)."""
    quoted, mark, bare = words[at]
    if mark == "{":
        fields: dict[str, Any] = {}
        at += 1
        while words[at][1] != "}":
            if words[at][1] == ",":
                at += 1
                continue
            key = words[at][0] if words[at][0] is not None else words[at][2]
            if key is None or words[at + 1][1] != ":":
                raise NotACall
            fields[key.strip()], at = _braced(words, at + 2)
        return fields, at + 1
    if mark == "[":
        items: list[Any] = []
        at += 1
        while words[at][1] != "]":
            if words[at][1] == ",":
                at += 1
                continue
            item, at = _braced(words, at)
            items.append(item)
        return items, at + 1
    if mark is not None:
        raise NotACall
    if quoted is not None:
        return quoted, at + 1
    text = (bare or "").strip()
    return json_value(text, otherwise=text), at + 1


def json_value(text: str, otherwise: Any = None) -> Any:
    """The value of a JSON text; `otherwise` where it is none, or none that could be sent on: NaN, 1e999, half a surrogate pair."""
    try:
        value = json.loads(text)
        _json(value)
    except (ValueError, RecursionError):
        return otherwise
    return value


def _json(value: Any) -> str:
    """JSON that every client reads; ValueError where there is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def ignore(text: str) -> None:
    pass
