"""Conversations as prompts: what is spliced in, where prompts part, what templates take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tokenizer.small_vocabulary import byte_level, sentencepiece

from quaff.engine.grammar import Grammar
from quaff.errors import ConfigError, PromptError
from quaff.serve.dialogue import Dialogue
from quaff.serve.errors import ApiError
from quaff.serve.events import Call, CallStart, joined
from quaff.serve.forms import choice_form, json_form, object_form, regex_form, response_form
from quaff.serve.tools import Tools, make_tools
from quaff.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}Use <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = {"<|im_start|>": 3, "<|im_end|>": 3, "<|endoftext|>": 3}
TOOLS = make_tools([("f", "does f", {"type": "object", "properties": {"a": {"type": "string"}}})])


def dialogue(template: str = CHATML, replies: Path | None = None, kind: Any = byte_level, **keys: Any) -> Dialogue:
    metadata = kind(None if kind is byte_level else {"a": -1.0, "\u2581a": -0.5}, MARKS, chat_template=template, **keys)
    tokenizer = Tokenizer.from_metadata(metadata)
    return Dialogue(tokenizer, tokenizer.vocab_size, replies)


def said(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation, user first."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return [*start, *({"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents))]


def letters(d: Dialogue, text: str) -> tuple[int, ...]:
    """A reply's ids as no tokenizer would write it: one token per letter."""
    return tuple(d.tokenizer.vocabulary.ids[c] for c in text.replace(" ", "\u0120"))


END = "<|im_end|>"


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \n<|>é😀"), max_size=12) | st.just("<|im_end|> hello " * 30), min_size=1, max_size=5))
def test_without_replies_the_ids_are_those_of_the_tokenizer(kind: Any, contents: list[str]) -> None:
    d = dialogue(kind=kind)
    messages = said(*contents, system="hello")
    for _ in range(2):
        assert list(d.prompt(messages).tokens) == d.tokenizer.encode_chat(messages)


def test_a_reply_comes_back_as_it_was_generated() -> None:
    d = dialogue()
    first = d.prompt(said("hello"))
    reply = (*letters(d, "hello"), d.tokenizer.vocabulary.ids[END])
    assert d.tokenizer.encode("hello", add_special=False) != list(reply[:-1])
    d.keep(first, reply)
    second = d.prompt(said("hello", "hello", "again"))
    assert second.tokens[: len(first.tokens) + len(reply)] == first.tokens + reply
    assert second.tokens[len(first.tokens) + len(reply) :] == tuple(
        d.tokenizer.encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n", False, True)
    )
    assert d.tokenizer.decode(second.tokens, skip_special=False) == second.text


def test_an_answer_with_another_end_than_the_templates_comes_back_too() -> None:
    end = dialogue().tokenizer.vocabulary.ids[END]
    d = dialogue(ggml__eos_token_id=end)
    first = d.prompt(said("hello"))
    d.keep(first, (*letters(d, "hello"), d.tokenizer.vocabulary.ids["<|endoftext|>"]))
    second = d.prompt(said("hello", "hello", "again"))
    assert second.tokens[: len(first.tokens) + 6] == (*first.tokens, *letters(d, "hello"), end)
    assert d.tokenizer.decode(second.tokens, skip_special=False) == second.text


def test_an_answer_that_was_cut_short_comes_back_too() -> None:
    d = dialogue()
    first = d.prompt(said("hello"))
    d.keep(first, letters(d, "hel"))
    second = d.prompt(said("hello", "hel", "go on"))
    assert second.tokens[: len(first.tokens) + 3] == first.tokens + letters(d, "hel")
    assert d.tokenizer.decode(second.tokens, skip_special=False) == second.text


def test_control_tokens_that_a_client_does_not_see_are_part_of_a_reply() -> None:
    d = dialogue()
    ids, first = d.tokenizer.vocabulary.ids, d.prompt(said("hello"))
    reply = (*letters(d, "hel"), ids["<|im_start|>"], *letters(d, "lo"), ids["<|endoftext|>"])
    d.keep(first, (*reply, ids[END]))
    assert d.prompt(said("hello", "hello", "hello")).tokens[: len(first.tokens) + 8] == (*first.tokens, *reply, ids[END])


def test_a_reply_that_was_changed_or_moved_is_read_anew() -> None:
    d = dialogue()
    first = d.prompt(said("hello"))
    d.keep(first, (*letters(d, "hello"), d.tokenizer.vocabulary.ids[END]))
    for messages in (said("hello", "hello!", "x"), said("Hello", "hello", "x"), said("hello", "hell", "x"), said("hello", "helloo", "x")):
        assert list(d.prompt(messages).tokens) == d.tokenizer.encode_chat(messages)


def test_a_reply_that_ends_between_letters_is_not_glued_to_the_next_one() -> None:
    d = dialogue("{% for m in messages %}{{ m.content }}{% endfor %}")
    first = d.prompt(said("a"))
    d.keep(first, letters(d, "hel"))
    assert list(d.prompt(said("a", "hel", "lo")).tokens) == d.tokenizer.encode("ahello")
    assert d.prompt(said("a", "hel")).tokens[-3:] == letters(d, "hel")


def test_replies_survive_the_process(tmp_path: Path) -> None:
    d = dialogue(replies=tmp_path / "replies")
    first = d.prompt(said("hello"))
    d.keep(first, (*letters(d, "hello"), d.tokenizer.vocabulary.ids[END]))
    wanted = d.prompt(said("hello", "hello", "x"))
    assert dialogue(replies=tmp_path / "replies").prompt(said("hello", "hello", "x")) == wanted
    assert dialogue().prompt(said("hello", "hello", "x")) != wanted


def test_bos_comes_once() -> None:
    d = dialogue(kind=sentencepiece)
    assert d.prompt(said("a")).tokens[0] == 1 and d.prompt(said("a")).tokens.count(1) == 1
    written = dialogue("<s>" + CHATML, kind=sentencepiece)
    assert written.prompt(said("a")).tokens == d.prompt(said("a")).tokens


def test_boundaries_are_where_prompts_part() -> None:
    d = dialogue()

    def parts(messages: list[dict[str, Any]]) -> list[str]:
        prompt = d.prompt(messages)
        assert all(0 < n < len(prompt.tokens) for n in prompt.boundaries)
        return [d.tokenizer.decode(prompt.tokens[:n], skip_special=False) for n in prompt.boundaries]

    shared = "<|im_start|>system\nrules<|im_end|>\n"
    one = shared + "<|im_start|>user\nhello<|im_end|>"
    assert parts(said("hello", system="rules")) == [shared, one]
    assert parts(said("hello")) == ["<|im_start|>user\nhello<|im_end|>"]
    two = one + "\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nhello<|im_end|>"
    assert parts(said("hello", "hi", "hello", system="rules")) == [shared, two]
    tool = [*said("hello", "hi", system="rules"), {"role": "tool", "content": "42", "tool_call_id": "x"}]
    answered = "\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>"
    assert parts(tool) == [shared, one + answered]
    by_role = dialogue(HERMES)
    prompt = by_role.prompt(tool)
    ends = [by_role.tokenizer.decode(prompt.tokens[:n], skip_special=False) for n in prompt.boundaries]
    assert ends == [shared, one, one + answered.replace("user", "tool").replace("<tool_response>\n42\n</tool_response>", "42")]


def test_short_contents_are_not_taken_for_parts_of_others() -> None:
    d = dialogue()
    for word in ("a", "s", "user", "assistant", "<"):
        prompt = d.prompt(said(word, "x", word))
        assert [d.tokenizer.decode(prompt.tokens[n - 1 : n], False) for n in prompt.boundaries] == ["<|im_end|>"]
        assert prompt.boundaries[0] == len(prompt.tokens) - len(d.tokenizer.encode("\n<|im_start|>assistant\n", False, True))


def test_boundaries_count_bos() -> None:
    d = dialogue(kind=sentencepiece)
    prompt = d.prompt(said("words", system="rules"))
    assert d.tokenizer.decode(prompt.tokens[: prompt.boundaries[-1]], skip_special=False).endswith("words<|im_end|>")


def test_tools_are_rendered_by_the_template_or_in_plain_words() -> None:
    assert '"name": "f"' in dialogue(HERMES).prompt(said("hi"), TOOLS).text
    assert "<tools>" not in dialogue(HERMES).prompt(said("hi"), TOOLS).text
    plain = dialogue().prompt(said("hi", system="rules"), TOOLS).text
    assert plain.startswith("<|im_start|>system\nrules\n\n") and '<tools>\n{"name": "f", "description": "does f"' in plain
    none = make_tools([("f", None, None)], choice="none")
    assert dialogue(HERMES).prompt(said("hi"), none).text == dialogue(HERMES).prompt(said("hi")).text


def call(arguments: Any, id: str = "call_1", name: str = "f") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def test_arguments_reach_the_template_as_an_object() -> None:
    d = dialogue(HERMES)
    wanted = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call><|im_end|>'
    for arguments in ('{"a":"x"}', {"a": "x"}):
        assert wanted in d.prompt([*said("hi"), call(arguments)], TOOLS).text
        plain = (
            dialogue()
            .prompt([*said("hi"), call(arguments), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], TOOLS)
            .text
        )
        assert (
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>" in plain
        )
    assert '"arguments": "{oops"' in d.prompt([*said("hi"), call("{oops")], TOOLS).text


def test_arguments_are_text_for_a_template_that_joins_them() -> None:
    joins = "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert dialogue(joins).prompt([*said("hi"), call({"a": 1})], TOOLS).text.endswith('x{"a": 1}')


def test_a_call_that_we_wrote_comes_back_as_it_was_written() -> None:
    d = dialogue(HERMES)
    first = d.prompt(said("hi"), TOOLS)
    written = 'Hm.\n\n<tool_call>\n{"arguments": {"a":"x"}, "name": "f"}\n</tool_call>'
    d.keep(first, (*letters_of(d, written), d.tokenizer.vocabulary.ids[END]), "call_1")
    back = call('{"a": "x"}') | {"content": "Hm."}
    result = {"role": "tool", "content": "1", "tool_call_id": "call_1"}
    second = d.prompt([*said("hi"), back, result], TOOLS)
    assert second.tokens[: len(first.tokens)] == first.tokens and written in second.text
    changed = [
        call('{"a": "y"}') | {"content": "Hm."},
        call('{"a": "x"}') | {"content": "No."},
        call('{"a": "x"}', "call_2") | {"content": "Hm."},
    ]
    for other in changed:
        assert written not in d.prompt([*said("hi"), other, result], TOOLS).text


def letters_of(d: Dialogue, text: str) -> list[int]:
    return [token for c in text for token in d.tokenizer.encode(c, add_special=False)]


def test_templates_that_want_roles_by_turns_get_them() -> None:
    strict = (
        "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
        "{{ raise_exception('by turns') }}{% endif %}"
        "[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    d = dialogue(strict)
    messages = [*said("a", system="s"), {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert d.prompt(messages).text == "[user:s\n\na\n\nb][assistant:c]"
    with pytest.raises(PromptError, match="by turns"):
        d.prompt([{"role": "assistant", "content": "c"}])


def test_the_developer_is_the_system() -> None:
    assert dialogue().prompt([{"role": "developer", "content": "s"}, *said("a")]).text.startswith("<|im_start|>system\ns")


def test_ids_for_templates_that_take_nine_characters() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"
    template = "{{ tools }}[TOOL_CALLS]{% for m in messages %}" + calls + "{{ m.tool_call_id }}{% endfor %}"
    d = dialogue(template)
    text = d.prompt([*said("hi"), call({}, "call_123"), {"role": "tool", "content": "", "tool_call_id": "call_123"}], TOOLS).text
    short = text[-9:]
    assert text.endswith(short * 2) and short.isalnum()


def test_a_prompt_that_ends_in_a_reasoning_says_so() -> None:
    assert dialogue(CHATML + "<think>\n").prompt(said("a")).thinking
    assert not dialogue().prompt(said("a")).thinking


def passes(d: Dialogue, grammar: Grammar | None, text: str) -> bool:
    """Whether a grammar lets all of `text` pass, and end there."""
    assert grammar is not None
    constraint = grammar.start()
    for token in d.tokenizer.encode(text, False, True):
        if not constraint.allowed()[token]:
            return False
        constraint.accept(token)
    return bool(constraint.allowed()[d.tokenizer.vocabulary.ids[END]])


CALL_1 = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_a_reader_takes_one_call_or_several_as_the_request_asks() -> None:
    d, text = dialogue(HERMES), '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call> done'
    for several, calls in ((True, 2), (False, 1)):
        reader = d.reader(d.prompt(said("hi"), TOOLS), replace(TOOLS, several=several))
        assert len([event for event in reader.push(text) + reader.finish() if isinstance(event, CallStart)]) == reader.calls == calls


def test_calls_on_demand() -> None:
    d = dialogue()
    prompt = d.prompt(said("hi"))
    assert d.grammar(prompt) is None and d.grammar(prompt, Tools()) is None and d.grammar(prompt, TOOLS) is None
    named = make_tools([("f", "", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}), ("g", "", None)], named="f")
    assert passes(d, d.grammar(prompt, named), CALL_1)
    assert not passes(d, d.grammar(prompt, named), CALL_1.replace('"f"', '"g"'))
    assert not passes(d, d.grammar(prompt, named), "Sure!")
    with pytest.raises(ConfigError, match="schemas of the tools"):
        d.grammar(prompt, make_tools([("f", "", {"type": "object", "properties": {"a": {"type": "no such type"}}})], choice="required"))


def test_forms_of_answers() -> None:
    d = dialogue()
    prompt = d.prompt(said("hi"))
    assert passes(d, d.grammar(prompt, None, object_form()), '{"a": [1, "b"]}')
    assert not passes(d, d.grammar(prompt, None, object_form()), "[1]")
    assert passes(d, d.grammar(prompt, None, json_form({"enum": [1, 2]}, "schema")), "2")
    assert passes(d, d.grammar(prompt, None, regex_form("a+/")), "aa/")
    assert passes(d, d.grammar(prompt, None, choice_form(["yes", 'n"o'])), 'n"o')
    assert not passes(d, d.grammar(prompt, None, choice_form(["yes", "no"])), "maybe")
    with pytest.raises(ConfigError, match="regular expression"):
        d.grammar(prompt, None, regex_form("("))
    with pytest.raises(ApiError, match="must be a JSON schema"):
        json_form([1], "response_format")


def test_an_answer_has_its_form_or_is_a_call() -> None:
    d = dialogue()
    prompt = d.prompt(said("hi"))
    tools = make_tools([("f", "", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})])
    either = d.grammar(prompt, tools, choice_form(["yes"]))
    assert passes(d, either, "yes") and passes(d, either, CALL_1) and not passes(d, either, "no")
    none = make_tools([("f", "", None)], choice="none")
    assert passes(d, d.grammar(prompt, none, choice_form(["yes"])), "yes")
    assert not passes(d, d.grammar(prompt, none, choice_form(["yes"])), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    demanded = make_tools([("f", "", None)], choice="required")
    assert not passes(d, d.grammar(prompt, demanded, choice_form(["yes"])), "yes")


def test_an_answer_begun_after_its_reasoning_is_not_inside_it() -> None:
    d = dialogue(CHATML + "<think>\n")
    assert d.prompt(said("a"), begun="Hm").thinking and not d.prompt(said("a"), begun="Hm</think>Yes").thinking


@pytest.mark.parametrize("special", [{}, {"<think>": 3, "</think>": 3}])
def test_reasoning_may_come_before_the_form(special: dict[str, int]) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(None, {**MARKS, **special}, chat_template=CHATML + "{{ end }}{# <think> #}"))
    d = Dialogue(tokenizer, tokenizer.vocab_size)
    form = choice_form(["yes"])
    free, inside = d.prompt(said("hi")), d.prompt(said("hi"), variables={"end": "<think>\n"})
    assert inside.thinking and not free.thinking
    for text in ("yes", "<think>\nhm\n</think>\n\nyes"):
        assert passes(d, d.grammar(free, None, form), text)
    for text in ("no", "<think>hm</think>no", "<think>yes", "<think>a</think>b</think>yes"):
        assert not passes(d, d.grammar(free, None, form), text)
    assert passes(d, d.grammar(inside, None, form), "hm\n</think>\n\nyes") and not passes(d, d.grammar(inside, None, form), "yes")


def test_gpt_oss_answers_in_the_final_channel() -> None:
    marks = {mark: 4 for mark in ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")}
    tokenizer = Tokenizer.from_metadata(byte_level(None, {**MARKS, **marks}, chat_template=CHATML + "{# <|channel|><|message|> #}"))
    d = Dialogue(tokenizer, tokenizer.vocab_size)
    grammar = d.grammar(d.prompt(said("hi")), None, choice_form(["yes"]))
    assert passes(d, grammar, "<|channel|>final<|message|>yes") and not passes(d, grammar, "yes")
    assert passes(d, grammar, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes")


@pytest.mark.parametrize("given", [{"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}])
def test_formats_that_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        response_form(given, "response_format")
    assert error.value.status == 400 and str(error.value.param).startswith("response_format")


def test_formats() -> None:
    assert response_form(None, "x") is None and response_form({"type": "text"}, "x") is None
    nested = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}
    assert (
        response_form(nested, "x") == response_form({"type": "json_schema", "schema": {"enum": [1]}}, "x") == json_form({"enum": [1]}, "x")
    )
    assert response_form({"type": "json_object"}, "x") == object_form()


@pytest.mark.parametrize("calls", [5, [], [{}], [{"function": 1}], [{"function": {"arguments": {}}}], ["x"], [{"function": {"name": 1}}]])
def test_broken_calls_are_refused(calls: Any) -> None:
    messages = [*said("hi"), {"role": "assistant", "content": None, "tool_calls": calls}]
    if calls == []:
        assert dialogue(HERMES).prompt(messages).text
        return
    with pytest.raises(PromptError, match="tool_calls"):
        dialogue(HERMES).prompt(messages)


def test_without_a_template_there_is_no_conversation() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level())
    with pytest.raises(PromptError, match="no chat template"):
        Dialogue(tokenizer, tokenizer.vocab_size).prompt(said("a"))


def test_json_of_tools_in_plain_words_is_json() -> None:
    text = dialogue().prompt(said("hi"), TOOLS).text
    lines = text[text.index("<tools>\n") + 8 : text.index("\n</tools>")].splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["f"]


def test_a_template_that_wants_its_calls_gets_them() -> None:
    whose = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('whose?') }}{% endif %}"
    strict = HERMES.replace("{% for m in messages %}<|im", "{% for m in messages %}" + whose + "<|im")
    d = dialogue(strict)
    first = d.prompt(said("hi"), TOOLS)
    d.keep(first, (*letters_of(d, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'), d.tokenizer.vocabulary.ids[END]), "call_1")
    text = d.prompt([*said("hi"), call({}), {"role": "tool", "content": "1", "tool_call_id": "call_1"}], TOOLS).text
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in text


def test_words_that_are_everywhere_do_not_take_long() -> None:
    d = dialogue()
    prompt = d.prompt([{"role": "system", "content": "a" * 300_000}, *said("a" * 100_000, "a" * 100_000, "a")])
    assert prompt.boundaries


# As Qwen3 does: reasoning stays until the user speaks again, and is taken out of the content where a client left it there.
KEEPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("sent_back", [{}, {"reasoning_content": "Let me see."}])
def test_a_call_comes_back_with_its_reasoning(sent_back: dict[str, str]) -> None:
    d = dialogue(KEEPS_REASONING)
    first = d.prompt(said("hi"), TOOLS)
    written = '<think>\nLet me see.\n</think>\n\n<tool_call>\n{"name":"f","arguments":{"a":"x"}}\n</tool_call>'
    ids = (*letters_of(d, written), d.tokenizer.vocabulary.ids[END])
    d.keep(first, ids, "call_1")
    back, result = call('{"a": "x"}') | sent_back, {"role": "tool", "content": "1", "tool_call_id": "call_1"}
    second = d.prompt([*said("hi"), back, result], TOOLS)
    assert second.tokens[: len(first.tokens) + len(ids)] == first.tokens + ids
    # When the user speaks again the reasoning goes, and the call stays as it was written.
    third = d.prompt([*said("hi"), back, result, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "more"}], TOOLS)
    assert "Let me see." not in third.text and '{"name":"f","arguments":{"a":"x"}}' in third.text


def test_calls_that_the_template_does_not_write() -> None:
    lfm2 = (
        "{% if tools %}<|im_start|>system\n<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    d = dialogue(lfm2)
    assert d.dialect.name == "lfm2"
    for arguments in ('{"a": "x", "n": [1, true, null]}', {"a": "x", "n": [1, True, None]}):
        text = d.prompt([*said("hi"), call(arguments) | {"content": "Hm."}, {"role": "tool", "content": "1"}], TOOLS).text
        assert "Hm.\n<|tool_call_start|>[f(a='x', n=[1, True, None])]<|tool_call_end|><|im_end|>" in text
        reader = d.reader(d.prompt(said("hi")), TOOLS)
        parts = joined(reader.push(text[text.index("<|tool_call_start|>") :]))
        assert isinstance(parts[0], Call) and json.loads(parts[0].arguments) == {"a": "x", "n": [1, True, None]}
    assert "f()]" in d.prompt([*said("hi"), call("{oops")], TOOLS).text
    tags = dialogue("{{ tools }}" + CHATML).prompt([*said("hi"), call({"a": 1})], TOOLS).text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in tags


def test_tools_in_the_system_message() -> None:
    phi4 = (
        "{% for message in messages %}{% if message['role'] == 'system' and message['tools'] %}"
        "<|system|>{{ message['content'] }}<|tool|>{{ message['tools'] }}<|/tool|><|end|>"
        "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    d = dialogue(phi4)
    assert d.dialect.name == "phi4"
    for messages in (said("hi"), said("hi", system="rules")):
        text = d.prompt(messages, TOOLS).text
        tools = json.loads(text[text.index("<|tool|>") + 8 : text.index("<|/tool|>")])
        assert [tool["name"] for tool in tools] == ["f"] and ("rules<|tool|>" in text) == (len(messages) == 2)
    assert d.prompt(said("hi")).text == "<|user|>hi<|end|>"


def test_results_join_the_call_where_the_template_wants_them_there() -> None:
    gemma4 = (
        "{% if tools %}<|tool>{{ tools | tojson }}<tool|>{% endif %}"
        "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}"
        "{% for r in m.tool_responses or [] %}<|tool_response>response:{{ r.name }}{value:{{ r.response }}}<tool_response|>{% endfor %}"
        "{{ m.content }}{% if not m.tool_responses %}<turn|>\n{% endif %}{% endfor %}"
    )
    d = dialogue(gemma4)
    assert d.dialect.name == "gemma4"
    own = dialogue(gemma4 + "{% if messages[-1].role == 'tool' %}{% endif %}").prompt(
        [*said("hi"), call({}), {"role": "tool", "content": "1"}], TOOLS
    )
    assert own.text.endswith("<|turn>tool\n1<turn|>\n")
    both = call({}) | {"content": "Hm."}
    both["tool_calls"] = [*both["tool_calls"], *call({}, "call_2", "g")["tool_calls"]]
    results = [{"role": "tool", "content": "1", "tool_call_id": "call_1"}, {"role": "tool", "content": "2", "tool_call_id": "call_2"}]
    text = d.prompt([*said("hi"), both, *results], TOOLS).text
    answered = "<|tool_response>response:f{value:1}<tool_response|><|tool_response>response:g{value:2}<tool_response|>"
    assert text.endswith(
        f"<|turn>model\nHm.<turn|>\n<|turn>model\n<|tool_call>call:f{{}}<tool_call|><|tool_call>call:g{{}}<tool_call|>{answered}"
    )


def test_the_vocabulary_tells_what_the_template_does_not() -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_metadata(byte_level(None, {"<|tool_calls_section_begin|>": 3}, chat_template=template))
    assert Dialogue(tokenizer, tokenizer.vocab_size).dialect.name == "kimi"
    assert dialogue(template).dialect.name == "hermes"


def test_gpt_oss_takes_reasoning_or_content_beside_a_call() -> None:
    strict = (
        "{# <|channel|><|message|> #}{{ tools }}{% for m in messages %}"
        "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
        "[{{ m.thinking }}|{{ m.content }}|{{ m.tool_calls | length if m.tool_calls else 0 }}]{% endfor %}"
    )
    d = dialogue(strict)
    assert d.dialect.name == "harmony"
    text = d.prompt([*said("hi"), call({}) | {"content": "I look.", "reasoning_content": "Hm."}], TOOLS).text
    assert text.endswith("[|hi|0][|I look.|0][Hm.||1]")
