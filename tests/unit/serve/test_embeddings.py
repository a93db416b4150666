"""/v1/embeddings, asked by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serve.conftest import WAIT_SECONDS, Live, serving
from tests.unit.serve.holding import until

from quaff.serve.settings import Settings


def vectors(reply: Any) -> np.ndarray:
    return np.array([item.embedding for item in reply.data], dtype=np.float32)


def test_vectors_are_those_of_the_model(live: Live) -> None:
    texts = ["naïve 水", "a longer text about something else"]
    expected = live.llm.embed(texts)
    reply = live.client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert vectors(reply).tobytes() == expected.tobytes() and [item.index for item in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(live.llm.encode(text)) for text in texts)
    # The client asks for base64 unless told otherwise.
    assert vectors(live.client.embeddings.create(model="tiny", input=texts)).tobytes() == expected.tobytes()


def test_one_text_ids_and_pooling(live: Live) -> None:
    ids = live.llm.encode("naïve 水")
    one = live.llm.embed(["naïve 水"]).tobytes()
    for given_input in ("naïve 水", ids, [ids], ["naïve 水"]):
        assert vectors(live.client.embeddings.create(model="tiny", input=given_input)).tobytes() == one
    last = live.client.embeddings.create(model="tiny", input=ids, extra_body={"pooling": "last"})
    assert vectors(last).tobytes() == live.llm.embed([ids], "last").tobytes() != one


def test_many_at_once_beside_an_answer(live: Live) -> None:
    texts = [f"text number {i} " * (i + 1) for i in range(8)]
    alone = [live.llm.embed([text]).tobytes() for text in texts]
    stream = live.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=24)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: vectors(live.client.embeddings.create(model="tiny", input=text)).tobytes(), texts))
    assert found == alone and list(stream)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": ["a", ""]}, None),
        ({"input": [[]]}, None),
        ({"input": [1 << 40]}, None),
        ({"input": "long " * 5000}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
def test_what_is_refused(live: Live, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.client.embeddings.create(model="tiny", **fields)
    assert error.value.param == param


def test_a_text_longer_than_the_context_is_told_with_both_counts(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match=r"has \d+ tokens, the context is 4096") as error:
        live.client.embeddings.create(model="tiny", input="long " * 5000)
    assert error.value.code == "context_length_exceeded"


VALUES: Any = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda c: st.lists(c, max_size=3), max_leaves=6)


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=WAIT_SECONDS) as client:
        yield client


@settings(max_examples=40, deadline=None)
@given(VALUES, VALUES | st.sampled_from(["float", "base64"]), VALUES | st.sampled_from(["mean", "last"]))
def test_no_body_is_a_fault_of_ours(http: httpx.Client, given_input: Any, form: Any, pooling: Any) -> None:
    body = {"input": given_input, "encoding_format": form, "pooling": pooling}
    reply = http.post("/v1/embeddings", json=body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_hangs_up_ends_the_work(live: Live) -> None:
    live.llm.embed(["a"])
    assert live.llm._embedder is not None
    engine = live.llm._embedder._engine
    texts, before = [[1 + i % 200] * 3500 for i in range(60)], engine.counters.macs
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/embeddings", json={"input": texts}, timeout=httpx.Timeout(WAIT_SECONDS, read=0.5))
    until(lambda: not live.service.embedding.locked() and engine.running == 0)
    all_of_it = len(texts) * engine.runner.work(0, 3500, 3500)
    assert engine.counters.macs - before < all_of_it / 2
    assert live.client.embeddings.create(model="tiny", input="still there").data


def test_on_the_way_out_the_work_ends_with_a_503(tiny: Path) -> None:
    with serving(tiny, Settings("tiny", drain_seconds=0)) as live, ThreadPoolExecutor(1) as pool:
        texts = [[1 + i % 200] * 3500 for i in range(60)]
        asked = pool.submit(httpx.post, f"{live.url}/v1/embeddings", json={"input": texts}, timeout=WAIT_SECONDS)
        until(lambda: live.llm._embedder is not None and live.llm._embedder._engine.running > 0)
        live.stop()
        reply = asked.result()
    assert reply.status_code == 503 and reply.json()["error"]["type"] == "overloaded_error" and int(reply.headers["retry-after"]) > 0
