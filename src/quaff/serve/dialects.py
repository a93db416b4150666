"""How the model families write reasoning and tool calls, told by their chat templates."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field

from quaff.serve import demands
from quaff.serve.calls import (
    Section,
    braced_calls,
    deepseek_name,
    headed_calls,
    json_calls,
    kimi_name,
    mistral_name,
    python_calls,
    tagged_calls,
    xml_calls,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's marks.

    `begin` opens calls, which `section` reads. `bare`: an answer that begins with "{" is a call without a mark. `thinking`: marks around
    reasoning. `channels`: the answer is made of messages with headers (gpt-oss). `demand` writes calls as a grammar; `prelude` is what an
    answer starts with before the form that a request asks for. `short_ids`: the template takes ids of nine letters and digits only.
    `verbatim`: an assistant message may be given to the template as the text that the model wrote, calls included. `pythonic`: calls are
    written in Python's syntax where the template leaves that to others.
    """

    name: str
    begin: str = ""
    section: Section | None = None
    demand: demands.Demand | None = None
    thinking: tuple[str, str] = ("<think>", "</think>")
    bare: bool = False
    channels: bool = False
    prelude: str = ""
    short_ids: bool = False
    verbatim: bool = False
    pythonic: bool = False
    more_marks: tuple[str, ...] = field(default=())

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the reader of answers must see even where they are control tokens."""
        return tuple(m for m in (self.begin, *self.thinking, *self.more_marks) if m)


_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_CLOSE = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_DEEPSEEK_MARKS = (_DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_CLOSE, _DEEPSEEK_END)
_KIMI_MARKS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")

PLAIN = Dialect("plain", "<tool_call>", json_calls("</tool_call>"), demands.objects("<tool_call>\n", "\n</tool_call>", "\n"), verbatim=True)
"""Hermes' form, which the server explains to models whose template knows no tools."""
HERMES = Dialect("hermes", PLAIN.begin, PLAIN.section, PLAIN.demand, verbatim=True)
XML = Dialect("xml", "<tool_call>", xml_calls("</tool_call>"), demands.xml, verbatim=True)
GLM = Dialect("glm", "<tool_call>", tagged_calls("</tool_call>"), demands.tagged, verbatim=True)
LLAMA3 = Dialect("llama3", "<|python_tag|>", json_calls(None), demands.objects("", "", "", "parameters"), bare=True)
MISTRAL_OLD = Dialect(
    "mistral-list", "[TOOL_CALLS]", json_calls(None), demands.lists("[TOOL_CALLS]", ""), ("[THINK]", "[/THINK]"), short_ids=True
)
MISTRAL = Dialect(
    "mistral",
    "[TOOL_CALLS]",
    headed_calls("", "[ARGS]", None, None, mistral_name),
    demands.headed("[TOOL_CALLS]{name}[ARGS]", "", "", ""),
    ("[THINK]", "[/THINK]"),
    short_ids=True,
    more_marks=("[ARGS]", "[CALL_ID]"),
)
PHI4 = Dialect(
    "phi4", "<|tool_call|>", json_calls("<|/tool_call|>"), demands.lists("<|tool_call|>", "<|/tool_call|>"), more_marks=("<|/tool_call|>",)
)
GRANITE3 = Dialect("granite3", "<|tool_call|>", json_calls(None), demands.lists("<|tool_call|>", ""))
LFM2 = Dialect(
    "lfm2",
    "<|tool_call_start|>",
    python_calls("<|tool_call_end|>"),
    demands.python,
    verbatim=True,
    pythonic=True,
    more_marks=("<|tool_call_end|>",),
)
GEMMA4 = Dialect(
    "gemma4",
    "<|tool_call>",
    braced_calls("<tool_call|>", '<|"|>'),
    demands.braced("<|tool_call>", "<tool_call|>", '<|"|>'),
    ("<|channel>thought\n", "<channel|>"),
    more_marks=("<tool_call|>", '<|"|>', "<|channel>"),
)
FUNCTION_GEMMA = Dialect(
    "functiongemma",
    "<start_function_call>",
    braced_calls("<end_function_call>", "<escape>"),
    demands.braced("<start_function_call>", "<end_function_call>", "<escape>"),
    more_marks=("<end_function_call>", "<escape>"),
)
DEEPSEEK3 = Dialect(
    "deepseek3",
    _DEEPSEEK_CALLS,
    headed_calls(_DEEPSEEK_CALL, "\n", _DEEPSEEK_CLOSE, _DEEPSEEK_END, deepseek_name),
    demands.headed(
        f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}{{name}}\n```json\n", f"\n```{_DEEPSEEK_CLOSE}", _DEEPSEEK_CALLS, _DEEPSEEK_END
    ),
    more_marks=_DEEPSEEK_MARKS,
)
DEEPSEEK31 = Dialect(
    "deepseek3.1",
    _DEEPSEEK_CALLS,
    headed_calls(_DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_CLOSE, _DEEPSEEK_END, deepseek_name),
    demands.headed(f"{_DEEPSEEK_CALL}{{name}}{_DEEPSEEK_SEP}", _DEEPSEEK_CLOSE, _DEEPSEEK_CALLS, _DEEPSEEK_END),
    more_marks=_DEEPSEEK_MARKS,
)
KIMI = Dialect(
    "kimi",
    "<|tool_calls_section_begin|>",
    headed_calls(*_KIMI_MARKS, kimi_name),
    demands.headed(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    more_marks=_KIMI_MARKS,
)
HARMONY = Dialect(
    "harmony",
    channels=True,
    thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    demand=demands.headed("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", "", ""),
    prelude="<|channel|>final<|message|>",
    more_marks=("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"),
)

# The first whose words are all in the template; what is more special comes first.
_TOLD_BY: tuple[tuple[tuple[str, ...], Dialect], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    ((_DEEPSEEK_CALLS, "```json"), DEEPSEEK3),
    ((_DEEPSEEK_CALLS,), DEEPSEEK31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("<|tool_call>",), GEMMA4),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|/tool_call|>",), PHI4),
    (("<|/tool|>",), PHI4),
    (("<|tool_call|>",), GRANITE3),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_OLD),
    (("<arg_key>",), GLM),
    (("<tool_call>", "<function="), XML),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", "tools"), LLAMA3),
)


_TOLD_BY_TOKENS = (KIMI, LFM2, GEMMA4, PHI4)


def takes_tools(template: str) -> bool:
    """Whether a chat template writes the tools of a conversation itself."""
    return re.search(r"\btools\b", template) is not None


def dialect_of(template: str, tokens: Container[str] = frozenset()) -> Dialect:
    """The dialect that a chat template is written in, `PLAIN` for one that knows no tools. Some leave calls to the model: then its `tokens`
    tell."""
    if not takes_tools(template):
        return HARMONY if "<|channel|>" in template and "<|message|>" in template else PLAIN
    told = next((dialect for words, dialect in _TOLD_BY if all(word in template for word in words)), None)
    return told or next((dialect for dialect in _TOLD_BY_TOKENS if dialect.begin in tokens), HERMES)
