"""Answers of every family, cut anywhere on their way, become the same reasoning, text and calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serve.reading_answers import SCHEMAS, read

from quaff.serve import dialects as d
from quaff.serve.answer import AnswerReader
from quaff.serve.dialects import Dialect, dialect_of
from quaff.serve.events import CallDelta, CallStart

BAR = "\uff5c"
CALLS, CALL, SEP = f"<{BAR}tool\u2581calls\u2581begin{BAR}>", f"<{BAR}tool\u2581call\u2581begin{BAR}>", f"<{BAR}tool\u2581sep{BAR}>"
CLOSE, END = f"<{BAR}tool\u2581call\u2581end{BAR}>", f"<{BAR}tool\u2581calls\u2581end{BAR}>"

F = ("call", "f", '{"a": "b"}')
G = ("call", "g", "{}")
ANSWERS: list[tuple[Dialect, str, list[tuple[str, ...]]]] = [
    (
        d.HERMES,
        "<think>\nhm\n</think>\n\nOk.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<tool_call>", "n": [1, {"b": 2}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"n": 1}, "name": "g"}\n</tool_call>',
        [
            ("thinking", "hm"),
            ("text", "Ok."),
            ("call", "f", '{"a": "}\\"<tool_call>", "n": [1, {"b": 2}]}'),
            ("call", "g", '{"n": 1}'),
        ],
    ),
    (d.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', [("call", "f", '{"a": "b"}')]),
    (d.HERMES, '<tool_call>[{"name": "f", "arguments": {"a": "b"}}, {"name":"g"}]</tool_call>', [F, G]),
    (d.HERMES, '<tool_call>{"name": "g", "id": [1, "]"], "arguments": {}, "n": 1.5}</tool_call> done', [G, ("text", "done")]),
    (d.HERMES, 'a <tool_call> b {"x"', [("text", 'a <tool_call> b {"x"')]),
    (d.HERMES, '<tool_call>{"name" 3}</tool_call>', [("text", '<tool_call>{"name" 3}</tool_call>')]),
    (d.HERMES, "<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
    (d.HERMES, "The mark <think> opens a thought.", [("text", "The mark <think> opens a thought.")]),
    (
        d.XML,
        "hi\n\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>",
        [("text", "hi"), ("call", "f", '{"a": "12", "n": 12}')],
    ),
    (d.XML, "<tool_call>\n<function=g>\n</function>\n</tool_call>", [G]),
    (d.XML, "<tool_call>nothing</tool_call>", [("text", "<tool_call>nothing</tool_call>")]),
    (
        d.GLM,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        "<tool_call>g</tool_call>",
        [("call", "f", '{"a": "x y", "n": 3}'), G],
    ),
    (d.LLAMA3, '{"name": "f", "parameters": {"a": "b"}}', [F]),
    (d.LLAMA3, '<|python_tag|>{"name": "g", "parameters": {}}', [G]),
    (d.LLAMA3, '{"name": "other", "parameters": {}} of JSON', [("text", '{"name": "other", "parameters": {}} of JSON')]),
    (d.LLAMA3, '{"answer": 42}', [("text", '{"answer": 42}')]),
    (d.MISTRAL_OLD, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]', [F]),
    (d.MISTRAL, 'x[TOOL_CALLS]f[ARGS]{"a": "b"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', [("text", "x"), F, G]),
    (d.PHI4, '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]<|/tool_call|>', [F]),
    (d.GRANITE3, '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]', [F]),
    (d.LFM2, '<|tool_call_start|>[f(a="b"), g()]<|tool_call_end|>done', [F, G, ("text", "done")]),
    (
        d.LFM2,
        "<|tool_call_start|>[f(n=-2, a=[true, None, {'k': 1.5}])]<|tool_call_end|>",
        [("call", "f", '{"n": -2, "a": [true, null, {"k": 1.5}]}')],
    ),
    (d.LFM2, "<|tool_call_start|>[f(open('x'))]<|tool_call_end|>", [("text", "<|tool_call_start|>[f(open('x'))]<|tool_call_end|>")]),
    (
        d.GEMMA4,
        '<|channel>thought\nhmm<channel|><|tool_call>call:f{a:<|"|>x, {y}<|"|>,n:3,l:[1,<|"|>q<|"|>],o:{k:true}}<tool_call|>',
        [("thinking", "hmm"), ("call", "f", '{"a": "x, {y}", "n": 3, "l": [1, "q"], "o": {"k": true}}')],
    ),
    (d.GEMMA4, "<|tool_call>call:f{a:[}<tool_call|>", [("text", "<|tool_call>call:f{a:[}<tool_call|>")]),
    (d.FUNCTION_GEMMA, "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>", [F]),
    (
        d.DEEPSEEK3,
        f'ok{CALLS}{CALL}function{SEP}f\n```json\n{{"a": "b"}}\n```{CLOSE}\n{CALL}function{SEP}g\n```json\n{{}}\n```{CLOSE}{END}',
        [("text", "ok"), F, G],
    ),
    (d.DEEPSEEK31, f'{CALLS}{CALL}f{SEP}{{"a": "b"}}{CLOSE}{CALL}g{SEP}{{}}{CLOSE}{END}', [F, G]),
    (
        d.KIMI,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "b"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [F],
    ),
    (
        d.HARMONY,
        "<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}',
        [("thinking", "Need a tool."), F],
    ),
    (
        d.HARMONY,
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        [("thinking", "Easy."), ("text", "Hello")],
    ),
    (d.HARMONY, "Hello", [("text", "Hello")]),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), ANSWERS, ids=lambda value: value.name if isinstance(value, Dialect) else "")
def test_an_answer_is_read_the_same_in_one_piece_and_letter_by_letter(dialect: Dialect, text: str, wanted: list[tuple[str, ...]]) -> None:
    assert read(dialect, [text]) == wanted
    assert read(dialect, text) == wanted


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ANSWERS), st.data())
def test_an_answer_is_read_the_same_however_it_is_cut(answer: tuple[Dialect, str, list[tuple[str, ...]]], data: st.DataObject) -> None:
    dialect, text, wanted = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(dialect, parts) == wanted


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted({a[0].name for a in ANSWERS})), st.data())
def test_no_answer_breaks_a_reader(name: str, data: st.DataObject) -> None:
    dialect = next(a[0] for a in ANSWERS if a[0].name == name)
    bits = [
        *dialect.marks,
        *'{}[]":,()=\\\n f',
        '{"name": "f", "arguments": ',
        "f(a=",
        "call:f{a:",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "to=f",
        "`",
    ]
    parts = data.draw(st.lists(st.sampled_from(bits), max_size=14))
    whole = read(dialect, ["".join(parts)])
    assert read(dialect, parts) == whole == read(dialect, "".join(parts))
    text = "".join(parts)
    if not dialect.channels and dialect.thinking[0] not in text and not any(kind == "call" for kind, *_ in whole):
        assert "".join(said for _, said in whole).split() == text.split()


@pytest.mark.parametrize(("dialect", "text", "wanted"), ANSWERS, ids=lambda value: value.name if isinstance(value, Dialect) else "")
def test_where_one_call_is_asked_for_the_first_counts(dialect: Dialect, text: str, wanted: list[tuple[str, ...]]) -> None:
    calls = [i for i, (kind, *_) in enumerate(wanted) if kind == "call"]
    if len(calls) > 1:
        wanted = wanted[: calls[1]]
    assert read(dialect, [text], several=False) == wanted == read(dialect, text, several=False)


HALF = "\\ud83d"
DEEP = "[" * 3000
NO_CLIENT_READS: list[tuple[Dialect, str, list[tuple[str, ...]] | None]] = [
    (d.HERMES, f'<tool_call>{{"name": "{HALF}"}}</tool_call>', None),
    (d.HERMES, f'<tool_call>{{"name": "f", "arguments": "{DEEP}"}}</tool_call>', [("call", "f", f'{{"value": "{DEEP}"}}')]),
    (d.XML, f"<tool_call><function=f><parameter=n>{DEEP}</parameter></function></tool_call>", [("call", "f", f'{{"n": "{DEEP}"}}')]),
    (d.XML, "<tool_call><function=f><parameter=n>NaN</parameter></function></tool_call>", [("call", "f", '{"n": "NaN"}')]),
    (d.GLM, "<tool_call>f<arg_key>n</arg_key><arg_value>null</arg_value></tool_call>", [("call", "f", '{"n": null}')]),
    (d.GEMMA4, "<|tool_call>call:f{n:1e999,o:[null]}<tool_call|>", [("call", "f", '{"n": "1e999", "o": [null]}')]),
    (d.LFM2, "<|tool_call_start|>[f(n=1e999)]<|tool_call_end|>", None),
    (d.LFM2, f"<|tool_call_start|>[f(a='{HALF}')]<|tool_call_end|>", None),
    (d.LFM2, f"<|tool_call_start|>[f(n={'-' * 3000}1)]<|tool_call_end|>", None),
]


@pytest.mark.parametrize(("dialect", "text", "wanted"), NO_CLIENT_READS)
def test_values_that_no_json_can_hold_are_text(dialect: Dialect, text: str, wanted: list[tuple[str, ...]] | None) -> None:
    answer = read(dialect, [text])
    assert answer == (wanted or [("text", text)])
    for part in (part for parts in answer for part in parts):
        part.encode()


def test_without_tools_every_character_is_text() -> None:
    text = ' \n<tool_call>{"name": "f", "arguments": {}}</tool_call> \n'
    assert read(d.HERMES, [text], None) == [("text", text)]
    assert read(d.HERMES, ["a  \n"]) == [("text", "a  \n")]


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    assert read(d.HERMES, ["so\n</think>\n\nYes", "."], thinking=True) == [("thinking", "so"), ("text", "Yes.")]
    assert read(d.HERMES, ["never closed"], thinking=True) == [("thinking", "never closed")]


def test_arguments_go_out_as_they_come() -> None:
    reader = AnswerReader(d.HERMES, SCHEMAS)
    assert reader.push('<tool_call>\n{"name": "f"') != []
    assert reader.push(', "arguments": {"a": "lo') == [CallDelta(0, '{"a": "lo')]
    assert reader.push("ng") == [CallDelta(0, "ng")]
    assert reader.calls == 1


def test_ids_are_those_that_templates_take() -> None:
    def id_of(dialect: Dialect, text: str) -> str:
        reader = AnswerReader(dialect, SCHEMAS, call_prefix="toolu_")
        (start,) = [event for event in reader.push(text) + reader.finish() if isinstance(event, CallStart)]
        return start.id

    assert id_of(d.HERMES, '<tool_call>{"name": "g"}</tool_call>').startswith("toolu_")
    short = id_of(d.MISTRAL, "[TOOL_CALLS]g[ARGS]{}")
    assert len(short) == 9 and short.isalnum()
    assert id_of(d.MISTRAL, "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}") == "abcdefghi"
    assert id_of(d.KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:3<|tool_call_argument_begin|>{}") == "functions.g:3"


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ messages }}", d.PLAIN),
        ("{% if tools %}<tool_call>{% endif %}", d.HERMES),
        ("{% if tools %}<tool_call><function={% endif %}", d.XML),
        ("{% if tools %}<tool_call><arg_key>{% endif %}", d.GLM),
        ("{% if tools %}[TOOL_CALLS][ARGS]{% endif %}", d.MISTRAL),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", d.MISTRAL_OLD),
        ("<|start_header_id|>{{ tools }}", d.LLAMA3),
        ("<|channel|><|message|>{{ tools }}", d.HARMONY),
        ("{{ tools }}" + CALLS, d.DEEPSEEK31),
        ("{{ tools }}```json" + CALLS, d.DEEPSEEK3),
        ("{{ tools }}", d.HERMES),
    ],
)
def test_templates_tell_the_dialect(template: str, dialect: Dialect) -> None:
    assert dialect_of(template) is dialect
