"""The smaller routes: models, tokens, properties, metrics."""

from __future__ import annotations

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.serve.conftest import Live

from quaff import _native


def post(live: Live, path: str, **body: object) -> dict:
    reply = httpx.post(f"{live.url}{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_models_lists_the_one_that_there_is(live: Live) -> None:
    (model,) = live.client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.owned_by == "quaff"
    assert live.client.models.retrieve("tiny").model_extra["max_model_len"] == live.llm.context
    with pytest.raises(openai.NotFoundError) as caught:
        live.client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["content", "prompt"])
def test_a_text_becomes_ids_and_comes_back(live: Live, name: str) -> None:
    text = "naïve 水 <|im_end|>"
    reply = post(live, "/tokenize", **{name: text})
    assert reply["tokens"] == live.llm.tokenizer.encode(text, parse_special=True) and reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == live.llm.context
    assert post(live, "/detokenize", tokens=reply["tokens"])["content"] == text
    plain = post(live, "/tokenize", content=text, parse_special=False, with_pieces=True)["tokens"]
    assert [p["id"] for p in plain] == live.llm.tokenizer.encode(text)
    assert all(p["piece"] == live.llm.tokenizer.token_text(p["id"]) for p in plain)


def test_a_conversation_becomes_a_prompt_and_its_ids(live: Live) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = post(live, "/apply-template", messages=messages)["prompt"]
    assert text == live.llm.tokenizer.chat_template.render(messages)
    assert post(live, "/tokenize", messages=messages)["tokens"] == live.llm.encode_chat(messages)
    assert not post(live, "/apply-template", messages=messages, add_generation_prompt=False)["prompt"].endswith("assistant\n")


def test_a_text_and_a_conversation_at_once_are_refused(live: Live) -> None:
    for body in ({}, {"content": "x", "messages": [{"role": "user", "content": "x"}]}):
        reply = httpx.post(f"{live.url}/tokenize", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "content"


def test_properties_say_what_the_bits_depend_on(live: Live) -> None:
    props = httpx.get(f"{live.url}/props").json()
    assert props["model"] == "tiny" and props["context_length"] == live.llm.context
    assert props["chat_template"] == live.llm.tokenizer.chat_template.source
    bits, free = props["determinism"]["bits"], props["determinism"]["free"]
    assert bits["numerics_version"] == _native.NUMERICS_VERSION and bits["activations"] == "int8"
    assert free["isa"] == _native.isa() and free["threads"] == 1
    assert props["determinism"]["batch_invariant"] and not bits.keys() & free.keys()


def metrics(live: Live) -> dict[str, float]:
    """Samples by name, with the labels that are not the model's."""
    text = httpx.get(f"{live.url}/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {s.name + "".join(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "le")): s.value for s in samples}


def test_metrics_count_what_was_done(live: Live) -> None:
    before = metrics(live)
    reply = live.client.completions.create(model="tiny", prompt="count me", max_tokens=6, temperature=0, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError):
        live.client.completions.create(model="tiny", prompt="")
    after = metrics(live)
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    assert gained["quaff:prompt_tokens_total"] == gained["quaff:prefix_cache_queries_total"] == reply.usage.prompt_tokens
    assert gained["quaff:generation_tokens_total"] == 6
    assert gained["quaff:request_success_totallength"] == 1
    assert gained["quaff:time_to_first_token_seconds_count"] == gained["quaff:e2e_request_latency_seconds_count"] == 1
    assert gained["quaff:inter_token_latency_seconds_count"] <= 5
    assert gained["quaff:http_responses_total/v1/completions200"] == gained["quaff:http_responses_total/v1/completions400"] == 1
    assert after["quaff:num_requests_running"] == after["quaff:num_requests_waiting"] == 0
    assert after["quaff:memory_used_bytes"] >= live.llm.weight_bytes
    assert 0 <= after["quaff:kv_cache_usage_perc"] < 1
    assert after["process_resident_memory_bytes"] > 0
