"""/v1/completions, asked by the official client."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest
from tests.unit.serve.conftest import Live

from quaff import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
OPTIONS = {"model": "tiny", "temperature": 0.9, "seed": 5, "max_tokens": 12}


def test_a_text_and_its_ids_give_the_same_completion(live: Live) -> None:
    expected = live.llm.generate("once upon", PARAMS)
    for prompt in ("once upon", live.llm.encode("once upon")):
        reply = live.client.completions.create(**OPTIONS, prompt=prompt)
        assert reply.choices[0].text == expected.text and reply.object == "text_completion"
        assert reply.choices[0].finish_reason == expected.finish_reason
        assert reply.usage.prompt_tokens == expected.prompt_tokens


def test_control_tokens_in_a_text_are_those_tokens(live: Live) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    reply = live.client.completions.create(**OPTIONS, prompt=text)
    assert reply.usage.prompt_tokens == len(live.llm.tokenizer.encode(text, parse_special=True)) < len(live.llm.tokenizer.encode(text))


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_choices_are_numbered_in_order(live: Live, stream: bool) -> None:
    prompts = ["one", "two two"]
    expected = [live.llm.generate(p, replace(PARAMS, choice=c)).text for p in prompts for c in range(2)]
    reply = live.client.completions.create(**OPTIONS, prompt=prompts, n=2, stream=stream)
    texts = [""] * 4
    for choice in (c for chunk in reply for c in chunk.choices) if stream else reply.choices:
        texts[choice.index] += choice.text
    assert texts == expected
    if not stream:
        assert reply.usage.prompt_tokens == sum(len(live.llm.encode(p)) for p in prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_scores_the_prompt(live: Live, stream: bool) -> None:
    prompt = live.llm.encode("score this text")
    reply = live.client.completions.create(**OPTIONS | {"max_tokens": 1}, prompt=prompt, echo=True, logprobs=2, stream=stream)
    columns: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for choice in (c for chunk in reply for c in chunk.choices) if stream else reply.choices:
        text += choice.text
        for name, column in columns.items():
            if choice.logprobs is not None:
                column += getattr(choice.logprobs, name)
    assert text.startswith("score this text")
    assert columns["tokens"][: len(prompt)] == [live.llm.tokenizer.token_text(t) for t in prompt]
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1 : len(prompt)] == list(live.llm.score(prompt).logprobs)
    assert all(1 <= len(top) <= 2 for top in columns["top_logprobs"][1:])
    assert columns["text_offset"] == [sum(map(len, columns["tokens"][:i])) for i in range(len(columns["tokens"]))]


def test_no_tokens_at_all_can_be_asked_for(live: Live) -> None:
    reply = live.client.completions.create(model="tiny", prompt="only score me", max_tokens=0, echo=True, logprobs=0)
    (choice,) = reply.choices
    assert choice.text == "only score me" and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs[1:] == list(live.llm.score("only score me").logprobs)
    assert live.client.completions.create(model="tiny", prompt="nothing", max_tokens=0).choices[0].text == ""


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompts"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": ["a"] * 65}, "65"),
        ({"prompt": [[1, 2], "x"]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(live: Live, change: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        live.client.completions.create(**OPTIONS | {"prompt": "x"} | change)
    assert caught.value.type == "invalid_request_error" and words in caught.value.message
