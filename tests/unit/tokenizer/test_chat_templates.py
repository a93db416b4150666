"""Chat templates: what templates expect of their surroundings, and what they are not allowed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.tokenizer.small_vocabulary import byte_level

from quaff.errors import CheckpointError, PromptError
from quaff.tokenizer import ChatTemplate, Tokenizer

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}\n  {% if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}\n"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


def test_blocks_are_trimmed_and_the_generation_prompt_is_optional() -> None:
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": " u\n"}]
    body = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n u\n<|im_end|>\n"
    assert render(CHATML, two) == body + "<|im_start|>assistant\n"
    assert render(CHATML, two, add_generation_prompt=False) == body


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}|{{ nothing }}|{{ tools is none }}") == "<s>|</s>||True"
    assert render("{{ {'k': '<\u00e9&\\''} | tojson }}") == '{"k": "<\u00e9&\'"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{{ loop.last }}{% endfor %}") == "1False3True"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ flag }}", flag="on", self="a name that is ours", kwargs=1) == "on"
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "1"
    assert render("{{ 'a b'.split(' ') | join('-') }}{{ 'x'.strip() ~ 1 }}{{ '%s in %d' % ('May', 2026) }}") == "a-bx1May in 2026"
    assert render("{{ 'a1234' | replace('a', 'b') }}{{ 'a\nb' | indent(2) }}") == "b1234a\n  b"
    assert render("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f(2) }}") == "[1][2]"


def test_text_parts_become_a_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    tool_call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.name }}", tool_call) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([*HI, {"role": 3, "content": "x"}], r"messages\[1\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], "neither a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] is not a text part"),
        ([{"role": "x", "content": ""}], "rejects these messages: no x"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render(CHATML, messages)


@pytest.mark.parametrize("source", ["{% if x %}", "{{ 1 +", "{{ 'a' | nope }}", "{% nope %}", "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}"])
def test_a_broken_template_is_the_files_fault_and_only_when_used(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(CheckpointError, match="tokenizer.chat_template"):
        template.render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set environment = 1 %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}{{ n.x }}",
        "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 60) }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * ['a'] }}",
        "{{ 10 ** 10000000 }}",
        "{{ '%0999999999d' % 3 }}",
        "{{ '%*d' % (999999999, 3) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'a'.center(100000000000) }}",
        "{{ 'a' | center(100000000000) }}",
        "{{ '\t'.expandtabs(1000000000) }}",
        "{{ 'a' | indent(100000000000, true) }}",
        "{{ 'aaa'.ljust(width=100000000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ range(100000) | join('a' * 100000) }}",
        "{{ ('a' * 100000).join('b' * 100000) }}",
        "{{ lipsum(n=100000) }}",
        "{{ messages[0].a.b }}",
        "{% include 'x' %}",
    ],
)
def test_templates_stay_in_their_bounds(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quaff.tokenizer.chat_template.MAX_STEPS", 20_000)
    with pytest.raises(PromptError) as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert render("{% for i in range(1000) %}x{% endfor %}") == "x" * 1000


def test_encode_chat_starts_with_exactly_one_bos() -> None:
    special = {"<s>": 3, "</s>": 3}
    for source, add_bos, expected in [
        ("{{ bos_token }}{{ messages[0].content }}", True, [262]),
        ("{{ messages[0].content }}", True, [262]),
        ("{{ bos_token }}{{ messages[0].content }}", False, [262]),
        ("{{ messages[0].content }}", False, []),
    ]:
        metadata = byte_level(
            special=special, ggml__bos_token_id=262, ggml__eos_token_id=263, ggml__add_bos_token=add_bos, ggml__add_eos_token=True
        )
        tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.chat_template": source})
        assert tokenizer.encode_chat(HI) == expected + tokenizer.encode("hi", add_special=False)


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level())
    assert tokenizer.chat_template is None
    with pytest.raises(PromptError, match="no chat template"):
        tokenizer.encode_chat(HI)
    with pytest.raises(CheckpointError, match="chat_template is not a string"):
        Tokenizer.from_metadata(byte_level(chat_template=3))
