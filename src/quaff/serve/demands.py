"""Grammars of answers that must be tool calls, in the form that the model's family writes: what `tool_choice` asks for.

A demand is the rule `calls` and those it needs.
Grammars are in llguidance's Lark syntax. A `Writer` knows which texts are tokens of their own; those cannot be spelt with letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quaff.engine.grammar import json_rule
from quaff.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Writer:
    """`tools`: (name, JSON schema of the parameters) of those that may be called. `several`: more than one call may follow."""

    tokenizer: Tokenizer
    tools: Sequence[tuple[str, Mapping[str, Any]]]
    several: bool = False

    def text(self, text: str) -> str:
        """`text` as a sequence of strings and special tokens."""
        pieces = self.tokenizer.pieces(text)
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces) or '""'

    def upto(self, name: str, mark: str) -> str:
        """The rule `name`: any text, up to and including the first `mark`."""
        pieces = self.tokenizer.pieces(mark)
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return f"{name}[suffix={json.dumps(mark)}]: /(.|\\n)*/"
        return f"{name}: /(.|\\n)*/ {self.text(mark)}"

    def repeated(self, rule: str, between: str) -> str:
        """One `rule`, or several with `between` among them."""
        again = f"{self.text(between)} {rule}" if between else rule
        return f"{rule} ({again})*" if self.several else rule

    def fields(self, schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
        """(name, schema, required) of every parameter, those that are required first."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return []
        required = schema.get("required")
        listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        names = [name for name in dict.fromkeys(listed) if name in properties]
        rest = [name for name in properties if name not in names]
        return [(name, properties[name] if isinstance(properties[name], Mapping) else {}, name in names) for name in (*names, *rest)]


Demand = Callable[[Writer], str]


def objects(before: str, after: str, between: str, arguments: str = "arguments") -> Demand:
    """`before` {"name": ..., "arguments": ...} `after`, any number of times."""

    def write(w: Writer) -> str:
        return f"calls: {w.repeated('call', between)}\ncall: {_around(w, before, 'object', after)}\n" + _objects(w, arguments)

    return write


def lists(before: str, after: str) -> Demand:
    """`before` [{"name": ..., "arguments": ...}, ...] `after`."""

    def write(w: Writer) -> str:
        return f"calls: {_around(w, before + '[', w.repeated('object', ', '), ']' + after)}\n" + _objects(w, "arguments")

    return write


def headed(before: str, after: str, open: str, close: str) -> Demand:
    """`before`, which holds {name}, the arguments in JSON, `after`; `open` and `close` around all calls."""

    def write(w: Writer) -> str:
        rules = [f"calls: {_around(w, open, w.repeated('call', ''), close)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(w.tools))))
        for i, (name, schema) in enumerate(w.tools):
            rules.append(f"call_{i}: {_around(w, before.replace('{name}', name), f'arguments_{i}', after)}")
            rules.append(f"arguments_{i}: {_json(_object(schema))}")
        return "\n".join(rules) + "\n"

    return write


def xml(w: Writer) -> str:
    """Qwen3-Coder's form: see `calls.xml_calls`."""
    around, field = ("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"), ("<parameter={key}>\n", "\n</parameter>\n")
    return f"calls: {w.repeated('call', chr(10))}\n" + _fielded(w, around, field, _plain_value)


def tagged(w: Writer) -> str:
    """GLM's form: see `calls.tagged_calls`."""
    around, field = ("<tool_call>{name}\n", "</tool_call>"), ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")
    return f"calls: {w.repeated('call', chr(10))}\n" + _fielded(w, around, field, _plain_value)


def python(w: Writer) -> str:
    """LFM2's form: see `calls.python_calls`."""
    start = _around(w, "<|tool_call_start|>[", w.repeated("call", ", "), "]<|tool_call_end|>")
    return f"calls: {start}\n" + _fielded(w, ("{name}(", ")"), ("{key}=", ""), lambda w, schema: _json(schema), comma=", ")


def braced(before: str, after: str, quote: str) -> Demand:
    """Gemma 4's form: see `calls.braced_calls`."""

    def value(w: Writer, schema: Mapping[str, Any]) -> str:
        return f"{w.text(quote)} /[^<]*/ {w.text(quote)}" if schema.get("type") == "string" else _json(schema)

    def write(w: Writer) -> str:
        around = (before + "call:{name}{", "}" + after)
        return f"calls: {w.repeated('call', '')}\n" + _fielded(w, around, ("{key}:", ""), value, comma=",")

    return write


def _fielded(
    w: Writer,
    around: tuple[str, str],
    field: tuple[str, str],
    value: Callable[[Writer, Mapping[str, Any]], str],
    comma: str = "",
) -> str:
    """The rule `call`, whose parameters come one by one: `around` a call, `field` around the value of a parameter."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(w.tools)))]
    for i, (name, schema) in enumerate(w.tools):
        parts: list[str] = []
        for j, (key, field_schema, required) in enumerate(w.fields(schema)):
            rules.append(f"value_{i}_{j}: {value(w, field_schema)}")
            body = _around(w, field[0].replace("{key}", key), f"value_{i}_{j}", field[1])
            if comma and parts:
                body = f"{w.text(comma)} {body}"
            # With commas an optional first one would leave a comma before the second.
            optional = not required and (not comma or bool(parts))
            parts.append(f"({body})?" if optional else body)
        rules.append(f"call_{i}: {_around(w, around[0].replace('{name}', name), ' '.join(parts), around[1])}")
    return "\n".join(rules) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    """Tools bring schemas of all kinds, with words that no grammar can keep: a call is better than none."""
    return json_rule(schema, lenient=True)


def _plain_value(w: Writer, schema: Mapping[str, Any]) -> str:
    """A string as it is, anything else in JSON."""
    return "/[^<]*/" if schema.get("type") == "string" else _json(schema)


def _around(w: Writer, before: str, rule: str, after: str) -> str:
    return " ".join(part for part in (w.text(before) if before else "", rule, w.text(after) if after else "") if part)


def _objects(w: Writer, arguments: str) -> str:
    """The rule `object`: a call as one JSON object. References of a tool's schema start at the root, so each tool has a root of its own."""
    rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(w.tools)))]
    for i, (name, schema) in enumerate(w.tools):
        inner = _object(schema)
        shared = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
        call = {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: inner},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        rules.append(f"object_{i}: {_json(call | shared)}")
    return "\n".join(rules) + "\n"


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's parameters. Where it does not speak of others, there are none but those that it names."""
    closed = {} if schema.keys() & {"additionalProperties", "anyOf", "oneOf", "allOf", "$ref"} else {"additionalProperties": False}
    return {"type": "object", "properties": {}, **closed, **schema}
