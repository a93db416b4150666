"""What was read before is not read again, and nobody can tell but by the time it takes. One test per layer kind where kinds matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.tiny import CASES
from tests.unit.serve.conftest import Live, serving
from tests.unit.serve.holding import held, post, until

from quaff import SamplingParams
from quaff.serve.settings import Settings

KINDS = ("llama-gqa", "gemma3", "lfm2", "qwen35")
TEXT = "The waterworks of the old town stand by the river. " * 8


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path: Path = CASES[request.param].write(tmp_path_factory.mktemp("cache") / "tiny.gguf")
    with serving(path, Settings("tiny"), prefix_cache_bytes=64 << 20) as live:
        yield live


def ask(live: Live, prompt: str | list[int], salt: str = "", **more: object) -> dict:
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "extra_body": {"cache_salt": salt}, **more}
    return live.client.completions.create(**options).model_dump()


def test_warm_is_cold(kind: Live) -> None:
    """Warm is not cold (llama.cpp 7594, sglang 34683): the same prompt again is found but for its last token."""
    length = len(kind.llm.encode(TEXT))
    replies = [ask(kind, TEXT, logprobs=5) for _ in range(3)]
    assert [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies] == [0, length - 1, length - 1]
    assert replies[0]["choices"] == replies[1]["choices"] == replies[2]["choices"]
    assert replies[0]["choices"][0]["text"] == kind.llm.generate(TEXT, SamplingParams(max_tokens=6)).text


def test_a_prompt_shorter_than_the_cache(kind: Live) -> None:
    """Prompt shorter than the cache (llama.cpp 1585): its last token is computed, and the answer is not that of the longer prompt."""
    ids = kind.llm.encode(TEXT + "and so on")
    ask(kind, ids, salt="long")
    for length in (1, 64, 65, len(ids) - 1, len(ids)):
        warm, cold = (ask(kind, ids[:length], salt=salt, logprobs=5) for salt in ("long", f"cold {length}"))
        assert warm["choices"] == cold["choices"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] < length
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_logprobs_with_a_warm_cache(kind: Live) -> None:
    """Logprobs with a warm cache (vllm 3251, 42019): those of the prompt are equal to cold ones, by bytes."""
    ids = kind.llm.encode(TEXT + "end")
    expected = list(kind.llm.score(ids).logprobs)
    for _ in range(3):
        (choice,) = ask(kind, ids, max_tokens=0, echo=True, logprobs=0)["choices"]
        assert choice["logprobs"]["token_logprobs"][1:] == expected
        ask(kind, ids)


def test_a_conversation_goes_on_where_its_last_prompt_ended(kind: Live) -> None:
    messages = [{"role": "user", "content": TEXT}]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4, "extra_body": {"cache_salt": "talk"}}
    for _ in range(3):
        before = len(kind.llm.encode_chat(messages))
        kind.client.chat.completions.create(messages=messages, **options)
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
        reply = kind.client.chat.completions.create(messages=messages, **options)
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert before - 1 <= cached < reply.usage.prompt_tokens
        assert reply.choices[0].message.content == kind.llm.chat(messages, SamplingParams(max_tokens=4)).text


def test_what_was_read_for_a_client_that_left_is_kept_for_its_retry(kind: Live) -> None:
    """Client gone (ds4 333): the finished prefix is kept, whatever the layers, and the retry resumes."""
    prompt = "gone " * 90
    with held(kind, first=3) as hold:
        sock = post(kind, "/v1/completions", {"prompt": prompt})
        until(lambda: hold.steps == 3)
        (request,) = kind.llm.engine._requests.values()
        sock.close()
        until(lambda: request.cancelled)
        hold.let_go()
        until(lambda: request.done)
    assert 2 * kind.llm.chunk <= request.computed < request.prompt_tokens
    reply = ask(kind, prompt)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == request.computed
    cold = ask(kind, prompt, salt="another")
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and reply["choices"] == cold["choices"]


def test_a_salt_keeps_caches_apart(kind: Live) -> None:
    ask(kind, TEXT + "salted", salt="a")
    assert ask(kind, TEXT + "salted", salt="b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(kind, TEXT + "salted", salt="a")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_miss_names_the_first_text_that_differs(live: Live) -> None:
    """Volatile first line (vllm PR 36829, ollama PR 14918): the reply says what changed and what it cost."""
    ask(live, "first line 1\n" + TEXT)
    details = ask(live, "first line 2\n" + TEXT)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == len(live.llm.encode("first line "))
    assert "'2" in details["cache_miss_reason"] and "'1" in details["cache_miss_reason"]
    assert str(len(live.llm.encode("first line 2\n" + TEXT)) - details["cached_tokens"] - 1) in details["cache_miss_reason"]


def test_a_prompt_is_found_again_after_a_restart(tiny: Path, tmp_path: Path) -> None:
    def run() -> tuple[list[dict], str, float]:
        """Replies under two salts, the key of the bits, and tokens that the disk tier says it brought back."""
        with serving(tiny, Settings("tiny"), prefix_cache_bytes=8 << 20, store=tmp_path) as live:
            replies = [ask(live, TEXT, logprobs=2, salt=salt) for salt in ("one", "other")]
            key = httpx.get(f"{live.url}/props").json()["determinism"]["bits"]["key"]
            restored = re.search(r"^quaff:disk_cache_restored_tokens_total.* (\S+)$", httpx.get(f"{live.url}/metrics").text, re.MULTILINE)
            assert restored is not None
            return replies, key, float(restored[1])

    (cold, key, nothing), (warm, same_key, restored) = run(), run()
    assert key == same_key and len(bytes.fromhex(key)) == 32 and warm[0]["system_fingerprint"] == f"quaff-{key[:16]}"
    assert [r["choices"] for r in warm] == [r["choices"] for r in cold] and cold[0]["choices"] == cold[1]["choices"]
    length = cold[0]["usage"]["prompt_tokens"]
    assert [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in cold + warm] == [0, 0, length - 1, length - 1]
    assert (nothing, restored) == (0, 2 * (length - 1))
