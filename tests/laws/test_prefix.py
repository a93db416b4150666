"""Law: what the prefix tree gives back is what a cold run computes, byte for byte, whatever was cached, branched off, evicted or cancelled.

Kinds of fault from other engines, each with the right value kept as a test. "Cold" is the same engine with a salt of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.laws.paths import prompt
from tests.tiny import CASES

import quaff
import quaff.engine.engine as engine_module
from quaff import LLM, SamplingParams
from quaff.cache import prefix as prefix_module
from quaff.cache.prefix import PrefixCache
from quaff.engine.engine import NO_LOGITS, Request

SALTS = (f"cold {i}" for i in itertools.count())
PLAIN = [name for name in CASES if name.startswith(("llama-", "qwen2", "qwen3", "mistral3", "granite"))]


@dataclass
class Outcome:
    """What a request left: its logits from the first wanted row on, the tokens that it generated, the state that a next row sees."""

    request: Request
    logits: dict[int, bytes]
    state: str

    @property
    def cached(self) -> int:
        return self.request.cached_tokens

    def same_bits(self, other: Outcome) -> bool:
        return (self.logits, self.state, self.request.tokens) == (other.logits, other.state, other.request.tokens)


def submit(llm: LLM, tokens: Sequence[int], logits: dict[int, bytes], salt: str, generate: int = 0, **options: object) -> Request:
    def on_logits(position: int, row: NDArray[np.float32]) -> None:
        logits[position] = row.tobytes()

    if generate:
        options["params"] = SamplingParams(max_tokens=generate, temperature=0.8, seed=len(tokens), ignore_eos=True)
    elif "logits_from" not in options:
        options["logits_from"] = len(tokens) - 1
    return llm.engine.submit(tokens, on_logits=on_logits, keep=True, salt=salt, **options)  # type: ignore[arg-type]


def finish(llm: LLM, request: Request, logits: dict[int, bytes]) -> Outcome:
    llm.engine.run([request])
    assert request.error is None
    state = llm.engine.cache.kv_sha256(request.sequence)
    llm.engine.release(request.sequence)
    llm.engine.sweep()
    return Outcome(request, logits, state)


def ask(llm: LLM, tokens: Sequence[int], salt: str | None = None, **options: object) -> Outcome:
    """Run one request; without a salt, cold."""
    logits: dict[int, bytes] = {}
    request = submit(llm, tokens, logits, next(SALTS) if salt is None else salt, **options)  # type: ignore[arg-type]
    outcome = finish(llm, request, logits)
    if salt is None:
        assert outcome.cached == 0
    return outcome


def tree(llm: LLM) -> PrefixCache:
    assert llm.engine.prefix is not None
    return llm.engine.prefix


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    folder = tmp_path_factory.mktemp("prefix")
    llms = {
        name: quaff.load(tiny.write(folder / f"{name}.gguf"), threads=2, chunk=64, prefix_cache_bytes=64 << 20)
        for name, tiny in CASES.items()
    }
    yield llms
    for llm in llms.values():
        llm.close()
        assert llm.engine.cache.sequences == 0
        assert set(llm.engine.cache.pages_in_use) <= {0} and set(llm.engine.cache.states.slots_in_use) <= {0}


@pytest.fixture(params=list(CASES))
def llm(request: pytest.FixtureRequest, loaded: dict[str, LLM]) -> LLM:
    llm = loaded[request.param]
    tree(llm).clear()
    assert tree(llm).used_bytes == 0 and llm.engine.cache.sequences == 0
    return llm


@pytest.mark.parametrize("cached", [1, 63, 64, 65, 127, 128, 129, 199])
def test_cold_warm_and_warm_again(llm: LLM, cached: int) -> None:
    """Warm is not cold (llama.cpp 7594, sglang 34683); block boundary (sglang 22819)."""
    tokens = prompt(llm.config.vocab, 200, seed=1)
    cold = ask(llm, tokens)
    ask(llm, tokens[:cached], "a")
    warm, again, hot = (ask(llm, tokens, "a") for _ in range(3))
    assert (warm.cached, again.cached, hot.cached) == (cached, 199, 199)
    assert warm.same_bits(cold) and again.same_bits(cold) and hot.same_bits(cold)


def test_prompt_600_cached_590_chunk_512(llm: LLM) -> None:
    """Short suffix (mlxcel 183, mlx-node 33): ten rows are left, fewer than a chunk."""
    llm.configure(chunk=512)
    tokens = prompt(llm.config.vocab, 600, seed=2)
    ask(llm, tokens[:590], "a")
    warm = ask(llm, tokens, "a")
    assert warm.cached == 590
    assert warm.same_bits(ask(llm, tokens))
    llm.configure(chunk=64)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150, 299, 300])
def test_a_prompt_shorter_than_the_cache_evaluates_its_last_token(llm: LLM, length: int) -> None:
    """Prompt shorter than the cache (llama.cpp 1585): never the stale logits of the longer prompt."""
    tokens = prompt(llm.config.vocab, 300, seed=3)
    ask(llm, tokens, "a", boundaries=[64, 140])
    short = ask(llm, tokens[:length], "a")
    assert short.cached <= length - 1
    assert short.cached >= max(p for p in (0, 64, 140, 299) if p < length)
    assert short.same_bits(ask(llm, tokens[:length]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(CASES)), st.data())
def test_random_prompts_share_what_they_share(loaded: dict[str, LLM], name: str, data: st.DataObject) -> None:
    """Any prompts, cut from one another at any place, in chunks of any size, with any boundaries."""
    llm = loaded[name]
    tree(llm).clear()
    llm.configure(chunk=data.draw(st.integers(1, 300)))
    known: list[list[int]] = []
    for i in range(data.draw(st.integers(2, 5))):
        stem = data.draw(st.sampled_from(known))[: data.draw(st.integers(1, 300))] if known else []
        tokens = [*stem, *prompt(llm.config.vocab, data.draw(st.integers(0 if stem else 1, 150)), seed=i)]
        boundaries = data.draw(st.lists(st.integers(1, 300), max_size=3))
        generate = data.draw(st.sampled_from([0, 0, 1, 70]))
        warm = ask(llm, tokens, "a", boundaries=boundaries, generate=generate)
        assert warm.same_bits(ask(llm, tokens, generate=generate))
        known.append(warm.request.tokens)
    llm.configure(chunk=64)


def test_two_branches_that_take_turns_find_all_that_they_sent_before(llm: LLM) -> None:
    """A main agent and a sub-agent share a system prompt; from the second turn on, everything that is sent again is cached."""
    system = prompt(llm.config.vocab, 150, seed=4)
    talks = {"main": list(system), "sub": list(system)}
    for turn in range(4):
        for i, (name, talk) in enumerate(talks.items()):
            before = len(talk)
            talk += prompt(llm.config.vocab, 40 + 31 * i, seed=10 * turn + i)
            warm = ask(llm, talk, "a", generate=5, boundaries=[150, before])
            assert warm.same_bits(ask(llm, talk, generate=5))
            # The last generated token was chosen but not computed.
            assert warm.cached == (before - 1 if turn else 150 if name == "sub" else 0)
            talk += warm.request.tokens[len(talk) :]


def test_a_small_cap_evicts_what_was_not_used_for_longest(llm: LLM) -> None:
    """Cap ignored (ik_llama.cpp 2320): held bytes stay under the cap, and the books agree with the pools."""
    cache, prefix = llm.engine.cache, tree(llm)
    prompts = [prompt(llm.config.vocab, n, seed=n) for n in (130, 200, 64, 190, 250)]
    expected = [ask(llm, tokens) for tokens in prompts]
    sizes, cap = [], prefix.cap_bytes
    for tokens in prompts:
        prefix.clear()
        ask(llm, tokens, "a")
        sizes.append(prefix.used_bytes)
    largest = max(sizes)
    last = max(i for i, size in enumerate(sizes) if size == largest)
    try:
        for share in (2.2, 1.0, 0.9):
            prefix.clear()
            prefix.cap_bytes = int(share * largest)
            refused = prefix.counters.refused
            for i in (0, 1, 2, 3, 4, 4, 0, 3, 2, 4, last):
                assert ask(llm, prompts[i], "a").same_bits(expected[i])
                held = sum(n * pool.page_bytes for n, pool in zip(cache.pages_in_use, cache.pools, strict=True))
                slots = cache.states.slots_in_use[0] if cache.states.kinds else 0
                assert prefix.used_bytes == held + slots * cache.states.slot_bytes <= prefix.cap_bytes
            # An entry larger than the cap is not cached.
            assert (prefix.counters.refused > refused) == (share < 1)
            assert ask(llm, prompts[last], "a").cached == (len(prompts[last]) - 1 if share >= 1 else 0)
    finally:
        prefix.cap_bytes = cap


def test_a_prefix_in_use_is_not_evicted(llm: LLM) -> None:
    prefix, tokens = tree(llm), prompt(llm.config.vocab, 200, seed=6)
    ask(llm, tokens[:130], "a")
    logits: dict[int, bytes] = {}
    request = submit(llm, tokens, logits, "a")
    llm.engine._admit()
    while prefix.evict(1):
        pass
    hit = prefix.attach(tokens, 199, "a")
    assert hit.length == request.cached_tokens == 130
    llm.engine.cache.free(hit.sequence)
    assert finish(llm, request, logits).same_bits(ask(llm, tokens))
    prefix.clear()
    assert prefix.used_bytes == 0 and prefix.places == 0


def test_what_is_cached_gives_way_to_requests_that_need_the_memory(llm: LLM) -> None:
    """Cap ignored (ik_llama.cpp 2320): with room for one long prompt, others are evicted, and none is refused."""
    accountant, prefix = llm.accountant, tree(llm)
    prompts = [prompt(llm.config.vocab, n, seed=n) for n in (300, 250, 280, 310)]
    expected = [ask(llm, tokens) for tokens in prompts]
    prefix.clear()
    empty = accountant.total_bytes
    ask(llm, prompts[3], "a")
    before = accountant.limit_bytes
    # What the tree has now, and half of it once more; a request also needs room to grow.
    accountant.limit_bytes = accountant.total_bytes + prefix.used_bytes // 2 + llm.engine.cache.peak_bytes(310, 310)
    try:
        for i in (0, 1, 2, 3, 3, 0):
            assert ask(llm, prompts[i], "a").same_bits(expected[i])
            assert accountant.total_bytes <= accountant.limit_bytes
            assert accountant.total_bytes - empty <= prefix.used_bytes + 4 * 310 * llm.config.vocab
        assert prefix.counters.evicted_bytes
    finally:
        accountant.limit_bytes = before


def test_those_that_give_way_begin_again_from_what_is_left_of_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AHEAD_TOKENS", 16)
    llm.configure(chunk=32)
    cache, accountant = llm.engine.cache, llm.accountant
    prompts = [prompt(llm.config.vocab, 60 + 10 * i, seed=i) for i in range(3)]
    expected = [ask(llm, tokens, generate=120) for tokens in prompts]
    tree(llm).clear()
    before, gave_way, logits = accountant.limit_bytes, llm.engine.preemptions, [dict[int, bytes]() for _ in prompts]
    # Room for the prompts of all, not for their answers.
    room = cache.peak_bytes(100, 32) + cache.snapshot_bytes(100)
    accountant.limit_bytes = accountant.total_bytes + 3 * room
    try:
        requests = [submit(llm, tokens, rows, "a", generate=120) for tokens, rows in zip(prompts, logits, strict=True)]
        outcomes = [finish(llm, request, rows) for request, rows in zip(requests, logits, strict=True)]
    finally:
        accountant.limit_bytes = before
    assert all(a.same_bits(b) for a, b in zip(outcomes, expected, strict=True))
    # Windows and states do not grow with the answer.
    assert llm.engine.preemptions > gave_way or not tree(llm).anywhere
    assert all(outcome.cached == 0 for outcome in outcomes), "what a request computed itself is not cached for it"
    monkeypatch.undo()
    llm.configure(chunk=64)


def test_a_cancelled_prompt_resumes_where_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client gone (ds4 333): the finished prefix is kept, and the retry goes on from there."""
    monkeypatch.setattr(engine_module, "BLOCK_ROWS", {"token": 64, "chunk": 64, "layer": 64})
    llm.configure(chunk=32)
    tokens, logits = prompt(llm.config.vocab, 300, seed=7), {}
    cold = ask(llm, tokens)
    for done in (128, 192, 256):
        request = submit(llm, tokens, logits, "a")
        while request.computed < done:
            llm.engine.step()
        assert request.cached_tokens == (done - 64 if done > 128 else 0)
        llm.engine.cancel(request)
        finish(llm, request, logits)
        assert request.finish_reason == "cancelled"
    retry = ask(llm, tokens, "a")
    assert retry.cached == 256
    assert retry.same_bits(cold)
    monkeypatch.undo()
    llm.configure(chunk=64)


def test_prompt_logprobs_are_those_of_a_cold_run(llm: LLM) -> None:
    """Logprobs with a warm cache (vllm 3251, 42019): rows whose logits are wanted are computed, and none is shifted."""
    tokens = prompt(llm.config.vocab, 200, seed=8)
    ask(llm, tokens, "a", boundaries=[100])
    for logits_from in (0, 1, 64, 100, 150, 199):
        warm, cold = ask(llm, tokens, "a", logits_from=logits_from), ask(llm, tokens, logits_from=logits_from)
        assert warm.cached <= logits_from
        assert sorted(warm.logits) == list(range(logits_from, 200))
        assert warm.same_bits(cold)
    assert ask(llm, tokens, "a", logits_from=NO_LOGITS).cached == 199


def test_a_request_finds_what_one_that_still_runs_has_read(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 200, seed=9)
    cold, expected = ask(llm, tokens, generate=30), ask(llm, [*tokens[:150], 1, 2, 3])
    logits: dict[int, bytes] = {}
    first = submit(llm, tokens, logits, "a", generate=30, boundaries=[64, 128])
    while not first.generated:
        llm.engine.step()
    second = ask(llm, [*tokens[:150], 1, 2, 3], "a")
    assert not first.done and second.cached == 128 + (22 if tree(llm).anywhere else 0)
    assert second.same_bits(expected)
    assert finish(llm, first, logits).same_bits(cold)


def test_prompts_that_begin_alike_and_come_together_are_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BLOCK_ROWS", {"token": 64, "chunk": 64, "layer": 64})
    llm.configure(chunk=64)
    stem, tails = prompt(llm.config.vocab, 200, seed=12), [prompt(llm.config.vocab, n, seed=n) for n in (170, 3, 64, 130)]
    prompts = [[*stem, *tail] for tail in tails] + [[*stem[:100], *tails[0]], tails[0]]
    before = llm.engine.counters.macs
    expected = [ask(llm, tokens, generate=3) for tokens in prompts]
    between, logits = llm.engine.counters.macs, [dict[int, bytes]() for _ in prompts]
    requests = [submit(llm, tokens, rows, "a", generate=3) for tokens, rows in zip(prompts, logits, strict=True)]
    outcomes = [finish(llm, request, rows) for request, rows in zip(requests, logits, strict=True)]
    assert all(a.same_bits(b) for a, b in zip(outcomes, expected, strict=True))
    # Where a page must be whole, its rest is read again; elsewhere a state was kept just where they part.
    stem_tokens, part = (192, 64) if tree(llm).anywhere else (200, 100)
    assert [outcome.cached for outcome in outcomes] == [0, *[stem_tokens] * 3, part, 0]
    rows = [sum(len(o.request.tokens) - 1 - o.cached for o in some) for some in (outcomes, expected)]
    assert (llm.engine.counters.macs - between) * rows[1] == (between - before) * rows[0]
    monkeypatch.undo()
    llm.configure(chunk=64)


def test_salts_share_nothing(llm: LLM) -> None:
    tokens = prompt(llm.config.vocab, 100, seed=10)
    ask(llm, tokens, "a")
    assert ask(llm, tokens, "b").cached == 0
    assert ask(llm, tokens, "a").cached == 99


def test_ids_that_are_not_compared_fail_the_comparison(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a tree that looks at the first id of a page only."""
    tokens = prompt(llm.config.vocab, 200, seed=11)
    ask(llm, tokens, "a")
    other = [*tokens[:170], (tokens[170] + 1) % llm.config.vocab, *tokens[171:]]
    closest = prefix_module._Node.closest

    def careless(node: prefix_module._Node, ids: bytes) -> tuple[prefix_module._Node | None, int]:
        child, common = closest(node, ids)
        return child, min(len(child.ids), len(ids)) // 4 if child is not None else common

    monkeypatch.setattr(prefix_module._Node, "closest", careless)
    stale = ask(llm, other, "a")
    monkeypatch.undo()
    assert stale.cached == 199
    assert not stale.same_bits(ask(llm, other))
