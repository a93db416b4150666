"""Faults while a request runs: its client is told in the API's shape, the log has the trace, and the next request is served."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from tests.unit.serve.conftest import Live, serving

from quaff import SamplingParams
from quaff.errors import CheckpointError
from quaff.serve.settings import Settings

OPTIONS = {"model": "tiny", "prompt": "go on", "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[Live]:
    with serving(tiny, Settings("tiny")) as live:
        yield live


@contextmanager
def failing(live: Live, error: Exception, after: int = 0) -> Iterator[None]:
    """Steps fail once `after` have run."""
    runner, left = live.llm.engine.runner, after
    run = runner.run

    def step(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return run(*args, **kwargs)

    runner.run = step
    try:
        yield
    finally:
        runner.run = run


def events(live: Live) -> list[dict]:
    body = {"prompt": "go on", "max_tokens": 40, "stream": True, "ignore_eos": True}
    reply = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200 and "[DONE]" not in reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]


def test_a_fault_of_ours_is_told_without_its_details(plain: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "quaff.serve")
    with failing(plain, RuntimeError("secret detail")), pytest.raises(openai.InternalServerError) as caught:
        plain.client.completions.create(**OPTIONS)
    assert caught.value.type == "api_error" and "secret" not in caught.value.message
    assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)


def test_an_error_with_a_reason_is_told_with_it(plain: Live) -> None:
    with failing(plain, CheckpointError("model.gguf was changed")), pytest.raises(openai.InternalServerError) as caught:
        plain.client.completions.create(**OPTIONS)
    assert "model.gguf was changed" in caught.value.message


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(plain: Live) -> None:
    with failing(plain, RuntimeError("secret detail"), after=3):
        said = events(plain)
    assert len(said) > 1 and all("choices" in event for event in said[:-1])
    assert said[-1]["error"]["type"] == "api_error" and "secret" not in said[-1]["error"]["message"]


def test_a_response_that_fails_says_so_in_its_own_events(plain: Live) -> None:
    body = {"input": "go on", "max_output_tokens": 40, "stream": True, "ignore_eos": True}
    with failing(plain, RuntimeError("secret detail"), after=3):
        reply = httpx.post(f"{plain.url}/v1/responses", json=body, timeout=60)
        with pytest.raises(openai.APIError, match="the server failed"):
            list(plain.client.responses.create(model="tiny", input="go on", stream=True, extra_body={"ignore_eos": True}))
    said = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    assert [event["type"] for event in said[-2:]] == ["error", "response.failed"] and "secret" not in reply.text
    assert said[-2]["message"] == said[-2]["error"]["message"] == said[-1]["response"]["error"]["message"]
    assert said[-1]["response"]["status"] == "failed" and said[-1]["response"]["id"] == said[0]["response"]["id"]


def test_the_next_request_is_served(plain: Live) -> None:
    for error in (RuntimeError("once"), MemoryError()):
        with failing(plain, error), pytest.raises(openai.APIStatusError):
            plain.client.completions.create(**OPTIONS)
        reply = plain.client.completions.create(**OPTIONS)
        assert reply.choices[0].text == plain.llm.generate("go on", SamplingParams(max_tokens=40, ignore_eos=True)).text
    assert plain.llm.engine.cache.sequences == 0
