"""The form that a request asks its answer to have: JSON of a schema, a text that matches, one of several texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quaff.engine.grammar import json_rule, regex_rule
from quaff.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class Form:
    """`rule` is the body of a Lark rule; `what` names it in messages."""

    rule: str
    what: str


def json_form(schema: Any, param: str) -> Form:
    """JSON that a schema describes. `param`: the field of the request that holds it."""
    if not isinstance(schema, Mapping):
        raise ApiError(400, f"{param} must be a JSON schema, an object", param=param)
    return Form(json_rule(schema), "the JSON schema")


def object_form() -> Form:
    """Any JSON object."""
    return Form(json_rule({"type": "object"}), "a JSON object")


def regex_form(pattern: str) -> Form:
    return Form(regex_rule(pattern), "the regular expression")


def choice_form(choices: Sequence[str]) -> Form:
    return Form(" | ".join(json.dumps(choice) for choice in choices), "the choice")


def response_form(given: Mapping[str, Any] | None, param: str) -> Form | None:
    """OpenAI's `response_format` ({"type": "json_schema", "json_schema": {"schema": ...}}) or, flat, the `text.format` of /v1/responses
    and the `output_config.format` of /v1/messages. None for text. ApiError for what it is not."""
    kind = given.get("type") if given is not None else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return object_form()
    if kind == "json_schema" and given is not None:
        nested = given.get("json_schema")
        return json_form((nested if isinstance(nested, Mapping) else given).get("schema"), f"{param}.schema")
    raise ApiError(400, f"{param}.type must be text, json_object or json_schema", param=param)
