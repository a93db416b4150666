"""/v1/chat/completions, asked by the official client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import openai
import pytest
from tests.unit.serve.conftest import Live

import quaff.engine.loop as loop_module
from quaff import SamplingParams
from quaff.batch import Batch, Logits
from quaff.engine.runner import Draw
from quaff.schedule import Order

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "naïve 水?"}]
OPTIONS = {"model": "tiny", "messages": MESSAGES, "temperature": 0.8, "seed": 7, "max_tokens": 20}
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=7)


def test_an_answer_is_that_of_the_model(live: Live) -> None:
    expected = live.llm.chat(MESSAGES, PARAMS)
    reply = live.client.chat.completions.create(**OPTIONS)
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason and choice.index == 0
    assert reply.object == "chat.completion" and reply.model == "tiny" and reply.id.startswith("chatcmpl-")
    assert reply.usage.prompt_tokens == expected.prompt_tokens
    assert reply.usage.completion_tokens == expected.completion_tokens
    assert reply.usage.total_tokens == expected.prompt_tokens + expected.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0
    assert reply.system_fingerprint.startswith("quaff-")


def test_a_stream_adds_up_to_the_answer(live: Live) -> None:
    expected = live.llm.chat(MESSAGES, PARAMS)
    chunks = list(live.client.chat.completions.create(**OPTIONS, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [expected.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == expected.completion_tokens
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" for c in chunks)


def test_without_include_usage_no_chunk_has_usage(live: Live) -> None:
    chunks = list(live.client.chat.completions.create(**OPTIONS, stream=True))
    assert all(c.usage is None and len(c.choices) == 1 for c in chunks)


def test_choices_are_those_of_their_numbers(live: Live) -> None:
    expected = [live.llm.chat(MESSAGES, replace(PARAMS, choice=i)).text for i in range(3)]
    assert len(set(expected)) > 1
    reply = live.client.chat.completions.create(**OPTIONS, n=3)
    assert [c.message.content for c in reply.choices] == expected
    texts = ["", "", ""]
    for chunk in live.client.chat.completions.create(**OPTIONS, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(live: Live) -> None:
    def text(**more: object) -> str:
        options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, **more}
        return live.client.chat.completions.create(**options).choices[0].message.content

    assert text(seed=1) == text(seed=1)
    assert text(seed=-1) == text(seed=-1)
    assert text(temperature=0) == text(temperature=0)
    assert len({text() for _ in range(4)}) > 1


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(live: Live) -> None:
    whole = live.llm.chat(MESSAGES, PARAMS).text
    stop = whole[3:5]
    reply = live.client.chat.completions.create(**OPTIONS, stop=[stop, "never ever"])
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert live.client.chat.completions.create(**OPTIONS, stop=stop).choices[0].message.content == whole[: whole.index(stop)]


def test_max_completion_tokens_wins_over_max_tokens(live: Live) -> None:
    reply = live.client.chat.completions.create(**OPTIONS, max_completion_tokens=3)
    assert reply.usage.completion_tokens <= 3
    assert reply.choices[0].finish_reason == "length"


def test_logprobs_are_those_of_the_tokens(live: Live) -> None:
    reply = live.client.chat.completions.create(**OPTIONS | {"temperature": 0}, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    prompt = live.llm.encode_chat(MESSAGES)
    completion = live.llm.generate(prompt, replace(PARAMS, temperature=0))
    scores = live.llm.score([*prompt, *completion.tokens]).logprobs[len(prompt) - 1 :]
    shown = [t for t in completion.tokens if t not in live.llm.tokenizer.end_ids]
    assert [bytes(t.bytes) for t in content] == [live.llm.tokenizer.token_bytes(t, skip_special=False) for t in shown]
    assert [t.logprob for t in content] == list(scores[: len(shown)])
    for token in content:
        best = [t.logprob for t in token.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert token.logprob == best[0]  # temperature 0 takes the most likely
        assert math.fsum(map(math.exp, best)) <= 1 + 1e-6


def test_streamed_logprobs_are_the_same(live: Live) -> None:
    options = OPTIONS | {"logprobs": True, "top_logprobs": 2}
    whole = live.client.chat.completions.create(**options).choices[0].logprobs.content
    parts = []
    for chunk in live.client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            parts += chunk.choices[0].logprobs.content
    assert parts == whole


def test_a_logit_bias_forces_and_forbids_a_token(live: Live) -> None:
    token = live.llm.encode("x")[-1]
    forced = live.client.chat.completions.create(**OPTIONS | {"max_tokens": 4}, logit_bias={str(token): 100})
    assert forced.choices[0].message.content == "xxxx"
    greedy = OPTIONS | {"max_tokens": 1, "temperature": 0}
    first = live.llm.chat(MESSAGES, SamplingParams(max_tokens=1)).tokens[0]
    other = live.client.chat.completions.create(**greedy, logit_bias={str(first): -100}, logprobs=True)
    assert bytes(other.choices[0].logprobs.content[0].bytes) != live.llm.tokenizer.token_bytes(first, skip_special=False)


def test_penalties_reach_the_sampler(live: Live) -> None:
    params = replace(PARAMS, temperature=0, frequency_penalty=2.0, presence_penalty=1.0, ignore_eos=True)
    expected = live.llm.chat(MESSAGES, params).text
    options = OPTIONS | {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 1.0, "extra_body": {"ignore_eos": True}}
    assert live.client.chat.completions.create(**options).choices[0].message.content == expected


def test_the_names_and_values_of_other_servers_mean_the_same(live: Live) -> None:
    params = replace(PARAMS, repetition_penalty=1.7, ignore_eos=True)
    expected = live.llm.chat(MESSAGES, params).text
    for extra in ({"repetition_penalty": 1.7}, {"repeat_penalty": 1.7, "top_k": -1}):
        reply = live.client.chat.completions.create(**OPTIONS, extra_body={"ignore_eos": True} | extra)
        assert reply.choices[0].message.content == expected != live.llm.chat(MESSAGES, replace(params, repetition_penalty=1.0)).text


def test_progress_is_asked_for_grows_and_ends_with_all_of_the_prompt(live: Live) -> None:
    """Silence (cline 13843, opencode 49044): a client that asks sees how far its prompt is."""
    messages = [{"role": "user", "content": "long " * 300}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 2, "stream": True}
    seen = []
    for chunk in live.client.chat.completions.create(**options, extra_body={"return_progress": True}):
        if progress := (chunk.model_extra or {}).get("prompt_progress"):
            assert not chunk.choices[0].delta.content
            seen.append(progress)
    total = len(live.llm.encode_chat(messages))
    processed = [p["processed"] for p in seen]
    assert len(seen) > 1 and processed == sorted(set(processed)) and processed[-1] == total
    assert all(p["total"] == total and p["cache"] <= p["processed"] <= total and p["time_ms"] >= 0 for p in seen)
    silent = live.client.chat.completions.create(**options)
    assert not any("prompt_progress" in (chunk.model_extra or {}) for chunk in silent)


def test_progress_grows_while_one_long_step_reads_the_prompt(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence (cline 13843, opencode 49044): what is told while a step runs grows as the work does, and is never all of it."""
    monkeypatch.setattr(loop_module, "TELL_SECONDS", 0.0)
    runner, messages = live.llm.engine.runner, [{"role": "user", "content": "far " * 8}]
    run, total = runner.run, len(live.llm.encode_chat(messages))
    assert 40 < total < live.llm.chunk

    def watched(batch: Batch, order: Order, on_work: Callable[[int], None], draw: Sequence[Draw]) -> Logits:
        work = runner.work(0, sum(s.rows for s in batch.segments), 1)
        for quarter in (1, 2, 5):
            on_work(quarter * work // 4)
        return run(batch, order, on_work, draw)

    monkeypatch.setattr(runner, "run", watched)
    options = {"model": "tiny", "messages": messages, "max_tokens": 2, "stream": True}
    extra = {"return_progress": True, "cache_salt": "far"}
    chunks = live.client.chat.completions.create(**options, extra_body=extra)
    seen = [progress["processed"] for chunk in chunks if (progress := (chunk.model_extra or {}).get("prompt_progress"))]
    assert seen == sorted(set(seen)) and seen[-1] == total and seen[-2] == total - 1
    assert [n for n in seen if 0.2 * total <= n <= 0.3 * total] and [n for n in seen if 0.45 * total <= n <= 0.55 * total]


def test_timings_have_llama_cpps_names(live: Live) -> None:
    timings = live.client.chat.completions.create(**OPTIONS).model_extra["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(live.llm.encode_chat(MESSAGES))
    assert timings["predicted_n"] >= 1 and timings["prompt_ms"] > 0
    assert {"prompt_per_token_ms", "prompt_per_second", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"} <= timings.keys()


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(live: Live) -> None:
    """Silent truncation (ollama 3839): never a shorter prompt than the one that was sent."""
    messages = [{"role": "user", "content": "x" * 6000}]
    with pytest.raises(openai.BadRequestError) as caught:
        live.client.chat.completions.create(model="tiny", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    assert str(len(live.llm.tokenizer.encode_chat(messages))) in caught.value.message and "4096" in caught.value.message


@pytest.mark.parametrize(
    "change, words",
    [
        ({"temperature": 200}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n: "),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"chat_template": "{{ 7 }}"}}, "template"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"max_tokens": "9"}}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(live: Live, change: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        live.client.chat.completions.create(**OPTIONS | change)
    assert caught.value.type == "invalid_request_error" and words in caught.value.message
