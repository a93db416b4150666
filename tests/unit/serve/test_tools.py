"""The tools of a request."""

from __future__ import annotations

from typing import Any

import pytest

from quaff.serve.errors import ApiError
from quaff.serve.tools import Tools, arguments_object, make_tools


def test_what_the_model_is_shown_and_must_do() -> None:
    given = [("f", "does f", {"type": "object", "properties": {"a": {}}}), ("g", None, None)]
    tools = make_tools(given)
    assert tools.shown is not None and [tool["function"]["name"] for tool in tools.shown] == ["f", "g"]
    assert tools.shown[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tools.demanded == [] and set(tools.schemas or ()) == {"f", "g"}
    none = make_tools(given, choice="none")
    assert none.shown is None and none.schemas is None and none.demanded == []
    assert [name for name, _ in make_tools(given, choice="required").demanded] == ["f", "g"]
    assert [name for name, _ in make_tools(given, named="g").demanded] == ["g"]
    assert Tools().shown is None and Tools().schemas is None


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([("", None, None)], {}, r"tools\[0\]: a tool's name"),
        ([("a b", None, None)], {}, "letters, digits"),
        ([("f", None, None), ("f", None, None)], {}, "two tools named 'f'"),
        ([("f", None, {"type": "string"})], {}, "of type object"),
        ([("f", None, None)], {"named": "g"}, "none of the tools"),
        ([], {"choice": "required"}, "no tools"),
        ([(f"f{i}", None, None) for i in range(513)], {}, "at most 512"),
    ],
)
def test_tools_that_are_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        make_tools(given, **options)
    assert error.value.status == 400


def test_arguments() -> None:
    assert arguments_object('{"a": 1}') == {"a": 1} and arguments_object(" ") == {}
    for text in ("[1]", "{", "[" * 100_000, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\udc00"}'):
        assert arguments_object(text) is None
