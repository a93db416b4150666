"""The public API on tiny models: what is refused, what is streamed, what a cancel keeps, what is given back."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CASES, Tiny, prompt

import quaff
import quaff.engine.engine as engine_module
import quaff.engine.runner as runner_module
from quaff import LLM, SamplingParams, _native
from quaff.checkpoint import open_checkpoint
from quaff.errors import ClosedError, ConfigError, MemoryBudgetError, NonFiniteError, PromptError, UnsupportedError

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with quaff.load(path, threads=1, chunk=64) as llm:
        yield llm
        gc.collect()
        llm.engine.sweep()
        assert llm.engine.cache.sequences == 0, "a request or a state kept its pages"


def when(llm: LLM, ready: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Act from another thread once a step is far enough."""

    def watch() -> None:
        deadline = time.monotonic() + 20
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.0005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


# Input


@pytest.mark.parametrize("empty", ["", [], np.array([], dtype=np.int32)])
def test_empty_prompts_are_refused(llm: LLM, empty: object) -> None:
    for call in (llm.generate, llm.prefill, llm.stream, llm.score):
        with pytest.raises(PromptError, match="empty"):
            call(empty)  # type: ignore[operator]


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="token id 300 is outside the vocabulary of 300 tokens"):
        llm.prefill([1, 300])
    with pytest.raises(PromptError, match="-1"):
        llm.generate([[1, 2], [-1]])


@pytest.mark.parametrize(
    "ids, message",
    [
        ([1, 2.0], "item 1 of the prompt is '2.0'"),
        ([1.5, 2], "item 0"),
        ([True, 2], "item 0 of the prompt is 'True'"),
        ([1, "2"], "item 1"),
        ([1, None], "item 1"),
        ([3, float("nan")], "item 1"),
        ([3, 1 + 0j], "item 1"),
        ([b"ab"], "item 0"),
        (np.array([1.0, 2.0]), "item 0"),
        (np.array([True]), "item 0"),
        (np.array([[1, 2], [3, 4]]), "2 dimensions"),
        (np.array(3), "0 dimensions"),
        (b"abc", "type bytes"),
        ({1: 2}, "type dict"),
        (None, "type NoneType"),
        (7, "type int"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, ids: object, message: str) -> None:
    for call in (llm.generate, llm.prefill, llm.stream, llm.score):
        with pytest.raises(PromptError, match=message):
            call(ids)  # type: ignore[operator]
    with pytest.raises(PromptError):
        llm.generate(["a", ids])  # type: ignore[list-item]


def test_ids_may_be_numpy_integers(llm: LLM) -> None:
    ids = prompt(300, 20)
    completion, logits, score = llm.generate(ids, PARAMS), llm.prefill(ids).logits, llm.score(ids).logprobs
    assert logits is not None
    for same in (np.array(ids), np.array(ids, dtype=np.uint16), [np.int32(t) for t in ids], tuple(ids)):
        assert llm.generate(same, PARAMS).tokens == completion.tokens  # type: ignore[call-overload]
        assert [c.tokens for c in llm.generate([same, same], PARAMS)] == [completion.tokens] * 2  # type: ignore[list-item]
        stream = llm.stream(same, PARAMS)  # type: ignore[arg-type]
        assert "".join(stream) == completion.text
        read = llm.prefill(same)  # type: ignore[arg-type]
        assert read.logits is not None and read.logits.tobytes() == logits.tobytes()
        assert llm.score(same).logprobs == score  # type: ignore[arg-type]


def test_a_wrong_isa_in_the_environment_is_named(path: Path) -> None:
    code = f"import quaff, quaff.errors\ntry:\n    quaff.load({str(path)!r})\nexcept quaff.errors.ConfigError as e:\n    print(e)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "QUAFF_ISA": "mmx"}, capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith("QUAFF_ISA: "), run.stderr
    assert "mmx" in run.stdout and run.stdout.count("\n") == 1


def test_bad_options_are_refused(path: Path) -> None:
    for options, error in (
        ({"schedule": "diagonal"}, ConfigError),
        ({"chunk": 0}, ConfigError),
        ({"threads": -1}, ConfigError),
        ({"activations": "int4"}, ConfigError),
        ({"context": 0}, ConfigError),
        ({"isa": "mmx"}, ConfigError),
        ({"isa": 5}, ConfigError),
    ):
        with pytest.raises(error):
            quaff.load(path, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="as many"), quaff.load(path, threads=1, chunk=64) as llm:
        llm.generate(["a", "b"], [PARAMS])


def test_an_architecture_we_lack_is_named(tmp_path: Path) -> None:
    data = CASES["llama-gqa"].write(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "n.gguf").write_bytes(data.replace(b"llama", b"lemma"))
    with pytest.raises(UnsupportedError, match=r"^/.*n\.gguf: .*'lemma'.*supported: .*gemma3, .*llama"):
        quaff.load(tmp_path / "n.gguf")


def test_context_is_the_smaller_of_model_and_option(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64, context=1 << 20) as llm:
        assert llm.context == 4096
    with quaff.load(path, threads=1, chunk=64, context=20) as llm:
        c = llm.generate(prompt(300, 15), SamplingParams(max_tokens=100, ignore_eos=True))
        assert (c.finish_reason, c.completion_tokens) == ("length", 6)


def test_control_is_kept_alive_by_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAFF_BATCHED_PREFILL", "0")
    with quaff.load(path, threads=1, chunk=64) as llm:
        spent = llm.prefill(prompt(300, 40)).counters
        launches = [s.launches for s in llm.graph.stages]
        assert spent.launches == 40 * sum(launches[:-3]) + sum(launches[-3:])


# Text


def test_completion_of_text_adds_up(llm: LLM) -> None:
    c = llm.generate("the rain in the north", PARAMS)
    assert c.completion_tokens == 12
    assert c.finish_reason == "length"
    assert c.text == llm.tokenizer.decode(c.tokens)
    assert c.prompt_tokens == len(llm.encode("the rain in the north"))
    assert c.timings.prefill_tokens == c.prompt_tokens
    assert c.timings.decode_tokens == 11
    assert 0 < c.timings.prefill_seconds <= c.timings.ttft_seconds
    assert c.counters.head_rows == 12
    assert c.counters.weight_bytes_loaded == 0


def test_stream_pieces_add_up_to_the_completion(llm: LLM) -> None:
    whole = llm.generate("the rain", PARAMS)
    stream = llm.stream("the rain", PARAMS)
    with pytest.raises(ValueError, match="not ended"):
        _ = stream.completion
    assert "".join(stream) == whole.text
    assert stream.completion.tokens == whole.tokens
    assert next(stream, None) is None


def test_a_stop_string_ends_the_text_and_never_leaks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.2, seed=1, ignore_eos=True)
    text = llm.generate("the", params).text
    stop = text[20:24]
    assert len(stop) == 4
    cut = SamplingParams(max_tokens=60, temperature=1.2, seed=1, ignore_eos=True, stop=(stop, "never said"))
    stream = llm.stream("the", cut)
    shown = ""
    for piece in stream:
        shown += piece
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)] == llm.generate("the", cut).text
    assert stream.completion.finish_reason == "stop"
    assert stream.completion.completion_tokens < 60


def test_end_tokens_end_unless_ignored(llm: LLM) -> None:
    first = llm.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True))
    llm.engine.end_ids = frozenset({first.tokens[2]})
    at = first.tokens.index(first.tokens[2])
    c = llm.generate([5, 6], SamplingParams(max_tokens=5))
    assert (c.finish_reason, c.tokens) == ("stop", first.tokens[: at + 1])
    assert llm.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True)).tokens == first.tokens


def test_chat_is_its_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "who is there?"}]
    ids = llm.encode_chat(messages)
    assert ids == llm.tokenizer.encode("<|im_start|>user\nwho is there?<|im_end|>\n<|im_start|>assistant\n", False, True)
    assert llm.chat(messages, PARAMS).tokens == llm.generate(ids, PARAMS).tokens


def test_no_tokens_wanted(llm: LLM) -> None:
    c = llm.generate("abc", SamplingParams(max_tokens=0))
    assert (c.text, c.tokens, c.finish_reason) == ("", (), "length")


# Scores


def test_score_is_the_log_probability_of_each_next_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(300, 50, seed=1)
    result = llm.prefill(tokens, logits="all")
    assert result.logits is not None
    expected = [
        float(_native.logprobs(result.logits[i].copy(), np.array([tokens[i + 1]], dtype=np.int32))[0]) for i in range(len(tokens) - 1)
    ]
    score = llm.score(tokens)
    assert list(score.logprobs) == expected
    wide = result.logits[:-1].astype(np.float64)
    plain = wide[range(49), tokens[1:]] - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) - wide.max(1)
    assert np.allclose(plain, expected, atol=1e-5)
    assert score.perplexity == pytest.approx(float(np.exp(-plain.mean())), rel=1e-6)
    # Blocks of seven rows: the same bytes, and never more logits than that.
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 7 * 300 * 4)
    llm.configure(chunk=64)
    before = llm.engine.steps
    assert llm.score(tokens).logprobs == score.logprobs
    assert llm.engine.steps - before == 7
    with pytest.raises(PromptError, match="two tokens"):
        llm.score([1])


def test_all_logits_and_last_logits_agree(llm: LLM) -> None:
    tokens = prompt(300, 70, seed=2)
    every, last, none = (llm.prefill(tokens, logits=mode) for mode in ("all", "last", "none"))  # type: ignore[arg-type]
    assert every.logits is not None and last.logits is not None
    assert every.logits.shape == (70, 300)
    assert every.logits[-1].tobytes() == last.logits.tobytes()
    assert every.logits_sha256 == llm.prefill(tokens, logits="sha256").logits_sha256
    assert (none.logits, none.counters.head_rows, none.counters.head_bytes_touched) == (None, 0, 0)
    assert every.kv_sha256 == last.kv_sha256 == none.kv_sha256
    with pytest.raises(ConfigError, match="some"):
        llm.prefill(tokens, logits="some")  # type: ignore[arg-type]


# Cancel


@pytest.mark.parametrize("schedule", ["token", "chunk", "layer"])
def test_cancel_keeps_the_finished_prefix_and_a_retry_goes_on(llm: LLM, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client gone (ds4 333): cancelled within a cell, the finished prefix kept, the retry resumes it."""
    monkeypatch.setitem(engine_module.BLOCK_ROWS, "layer", 200)
    llm.configure(schedule=schedule, chunk=4)  # type: ignore[arg-type]
    tokens = prompt(300, 3000, seed=4)
    control = llm.engine.runner.control
    # The second step of layer-major, far inside the only step of the others.
    watcher = when(llm, lambda: llm.engine.steps > 0 or (schedule == "chunk" and control.cells_done > 500), llm.cancel)
    cut = llm.prefill(tokens)
    watcher.join()
    assert cut.cancelled
    assert 0 < cut.computed_tokens < 3000
    assert cut.logits is None
    assert cut.state.tokens == tuple(tokens[: cut.computed_tokens])
    assert cut.kv_sha256 == llm.prefill(tokens[: cut.computed_tokens], logits="none").kv_sha256
    done = llm.prefill(tokens, state=cut.state)
    cold = llm.prefill(tokens)
    assert done.cached_tokens == cut.computed_tokens
    assert done.logits is not None and cold.logits is not None
    assert done.logits.tobytes() == cold.logits.tobytes()
    assert done.kv_sha256 == cold.kv_sha256


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_cancel_takes_recurrent_layers_back_to_where_the_step_began(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_module.BLOCK_ROWS, "chunk", 200)
    with quaff.load(CASES[name].write(tmp_path / "m.gguf"), threads=1, chunk=4) as llm:
        tokens = prompt(llm.config.vocab, 1500, seed=4)
        control = llm.engine.runner.control
        watcher = when(llm, lambda: llm.engine.steps > 1 and control.cells_done > 20, llm.cancel)
        cut = llm.prefill(tokens)
        watcher.join()
        assert cut.cancelled and 0 < cut.computed_tokens < 1500 and cut.computed_tokens % 200 == 0
        assert cut.kv_sha256 == llm.prefill(tokens[: cut.computed_tokens], logits="none").kv_sha256
        done, cold = llm.prefill(tokens, state=cut.state), llm.prefill(tokens)
        assert done.cached_tokens == cut.computed_tokens
        assert done.logits is not None and cold.logits is not None
        assert done.logits.tobytes() == cold.logits.tobytes()
        assert done.kv_sha256 == cold.kv_sha256


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_a_recurrent_state_is_reused_only_where_it_is_known(name: str, tmp_path: Path) -> None:
    """At its end, and before its last token; a prompt that parts from it earlier is computed afresh."""
    with quaff.load(CASES[name].write(tmp_path / "m.gguf"), threads=1, chunk=16) as llm:
        tokens, other = prompt(llm.config.vocab, 80, seed=5), prompt(llm.config.vocab, 80, seed=6)
        base = llm.prefill(tokens[:60]).state
        for ids, reused in ((tokens, 60), (tokens[:60], 59), (tokens[:59] + other, 59), (tokens[:50] + other, 0)):
            warm, cold = llm.prefill(ids, state=base), llm.prefill(ids)
            assert warm.cached_tokens == reused
            assert warm.logits is not None and cold.logits is not None
            assert warm.logits.tobytes() == cold.logits.tobytes()
            assert warm.kv_sha256 == cold.kv_sha256


def test_cancel_ends_a_stream_with_what_it_has(llm: LLM) -> None:
    whole = llm.generate("the rain", SamplingParams(max_tokens=200, ignore_eos=True))
    stream = llm.stream("the rain", SamplingParams(max_tokens=200, ignore_eos=True))
    text = next(stream)
    stream.cancel()
    text += "".join(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert 0 < stream.completion.completion_tokens < 200
    assert whole.text.startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("watched", [False, True])
def test_interrupt_leaves_a_model_that_works(llm: LLM, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if watched:
        monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    tokens = prompt(300, 3000, seed=5)
    expected = llm.prefill(tokens[:100]).kv_sha256
    llm.configure(chunk=4)
    steps = llm.engine.steps
    control = llm.engine.runner.control
    control.reset()
    watcher = when(llm, lambda: control.cells_done > 300, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.prefill(tokens)
    watcher.join()
    assert llm.engine.steps == steps + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.prefill(tokens[:100]).kv_sha256 == expected


def test_an_abandoned_stream_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream("the rain", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.engine.cache.sequences == 1
    del stream
    gc.collect()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.engine.cache.sequences == 0


def test_a_failing_progress_function_does_not_hang_or_leak(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)

    def broken(done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        llm.prefill(prompt(300, 1000), progress=broken)
    assert llm.prefill(prompt(300, 10)).computed_tokens == 10


def test_a_failing_progress_function_ends_its_own_call_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llm.generate(prompt(300, 700), PARAMS)
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.0)
    neighbour = llm.stream(prompt(300, 700), PARAMS)

    def broken(done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        llm.prefill(prompt(300, 1200, seed=1), progress=broken)
    assert "".join(neighbour) == alone.text
    assert neighbour.completion.tokens == alone.tokens


# Progress


def test_progress_counts_work_and_ends_at_the_total(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    monkeypatch.setattr(runner_module, "POLL_SECONDS", 0.001)
    llm.configure(chunk=8)
    calls: list[tuple[int, int]] = []
    result = llm.prefill(prompt(300, 2500), progress=lambda done, total: calls.append((done, total)))
    totals = {total for _, total in calls}
    assert totals == {result.counters.work}
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == result.counters.work
    assert len(done) > 3


# Company and threads


def test_streams_may_be_read_side_by_side(llm: LLM) -> None:
    alone = [llm.generate(p, PARAMS).text for p in ("the rain", "a wind", "on")]
    streams = [llm.stream(p, PARAMS) for p in ("the rain", "a wind", "on")]
    texts = ["", "", ""]
    running = True
    while running:
        running = False
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            if piece is not None:
                texts[i] += piece
                running = True
    assert texts == alone


def test_several_threads_share_one_model(llm: LLM) -> None:
    prompts = [prompt(300, 30 + 7 * i, seed=i) for i in range(6)]
    alone = [llm.generate(p, PARAMS).tokens for p in prompts]
    results: list[tuple[int, ...] | None] = [None] * 6

    def work(i: int) -> None:
        results[i] = llm.generate(prompts[i], PARAMS).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == alone


def test_batched_decode_shares_the_weights(llm: LLM) -> None:
    """Four requests decoded together touch the weights about as often as one."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    one = llm.generate([1, 2, 3], params)
    four = llm.generate([[1, 2, 3]] * 4, params)
    assert [c.tokens for c in four] == [one.tokens] * 4
    assert four[0].counters.weight_bytes_touched == one.counters.weight_bytes_touched


# Memory


def test_memory_is_asked_before_it_is_taken(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=16) as free:
        weights = free.weight_bytes
        free.prefill(prompt(300, 64))
        page = free.engine.cache.pools[0].page_bytes
    with pytest.raises(MemoryBudgetError, match="weight"):
        quaff.load(path, threads=1, chunk=16, memory_limit_bytes=weights - 1)
    with quaff.load(path, threads=1, chunk=16, memory_limit_bytes=weights + 8 * page + 600_000) as llm:
        before = llm.counters
        with pytest.raises(MemoryBudgetError, match="4000 tokens"):
            llm.prefill(prompt(300, 4000))
        assert llm.counters == before
        assert llm.engine.cache.pages_in_use == (0,)
        assert llm.prefill(prompt(300, 64)).computed_tokens == 64


def test_requests_wait_for_memory_that_others_will_give_back(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=16) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        alone = [llm.generate(prompt(300, 100, seed=i), params).tokens for i in range(3)]
        # Room for one request of two pages and what it has already, not for two.
        llm.accountant.limit_bytes = llm.accountant.total_bytes + 3 * llm.engine.cache.pools[0].page_bytes
        together = llm.generate([prompt(300, 100, seed=i) for i in range(3)], params)
        assert [c.tokens for c in together] == alone
        assert max(llm.engine.cache.pages_in_use) == 0


def test_what_fits_nowhere_fails_alone(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=16) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        llm.generate(prompt(300, 100), params)
        llm.accountant.limit_bytes = llm.accountant.total_bytes + 3 * llm.engine.cache.pools[0].page_bytes
        small, large = llm.generate([prompt(300, 100), prompt(300, 1000)], params)
        assert (small.finish_reason, large.finish_reason) == ("length", "error")
        assert isinstance(large.error, MemoryBudgetError)


def test_a_prompt_without_room_for_scratch_leaves_its_neighbours_alone(path: Path) -> None:
    small, large = prompt(300, 10), prompt(300, 1000, seed=1)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    outcomes = set()
    with quaff.load(path, threads=1, chunk=512) as free:
        alone = free.generate(small, params).tokens
        weights = free.weight_bytes
    for more in range(300_000, 2_400_000, 150_000):
        with quaff.load(path, threads=1, chunk=512, memory_limit_bytes=weights + more) as llm:
            a = llm.engine.submit(small, params=params)
            for _ in range(5):
                llm.engine.step()
            if a.done:
                continue
            b = llm.engine.submit(large, params=SamplingParams(max_tokens=5, ignore_eos=True))
            llm.engine.run([a, b])
            assert (a.finish_reason, tuple(a.tokens[10:])) == ("length", alone)
            assert b.finish_reason == "length" or isinstance(b.error, MemoryBudgetError)
            outcomes.add(b.finish_reason)
    assert outcomes == {"length", "error"}


def test_the_account_covers_the_scratch_of_the_threads(path: Path) -> None:
    with quaff.load(path, threads=3, chunk=32) as llm:
        asked = llm.graph.scratch_bytes(700, 32)
        llm.prefill(prompt(300, 700))
        gc.collect()
        llm.engine.sweep()
        assert llm.engine.cache.sequences == 0
        assert 0 < llm.engine.runner.scratch_bytes <= llm.accountant.total_bytes - llm.weight_bytes
        assert llm.accountant.used_bytes == llm.weight_bytes + asked
        free = 10_000_000
        llm.accountant.limit_bytes = llm.accountant.total_bytes + free
        assert llm.accountant.fits(free) and not llm.accountant.fits(free + 1)


def test_all_logits_are_asked_for_before_they_are_made(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=16) as llm:
        ids = prompt(300, 1000)
        llm.prefill(ids, logits="sha256").state.close()
        before = llm.accountant.used_bytes
        llm.accountant.limit_bytes = before + 1_000_000
        spent = llm.counters
        with pytest.raises(MemoryBudgetError, match="the result, logits of 1000 rows, needs 1.1 MiB"):
            llm.prefill(ids, logits="all")
        assert (llm.counters, llm.accountant.used_bytes, llm.engine.cache.sequences) == (spent, before, 0)
        llm.accountant.limit_bytes = None
        with llm.prefill(ids, logits="all").state:
            pass
        assert llm.accountant.used_bytes == before


def test_a_state_serves_its_own_model_only(path: Path) -> None:
    ids = prompt(300, 80)
    with quaff.load(path, threads=1, chunk=64) as a, quaff.load(path, threads=1, chunk=64) as b:
        state, own = a.prefill(ids).state, b.prefill([9] * 100).state
        for call in (b.generate, b.stream, b.prefill):
            with pytest.raises(ConfigError, match="belongs to another model"):
                call([*ids, 7], state=state)
        assert b.engine.cache.sequences == 1
        state.close()
        own.close()


def test_states_share_pages_and_close(llm: LLM) -> None:
    a = llm.prefill(prompt(300, 128))
    b = llm.prefill(prompt(300, 130), state=a.state)
    assert llm.engine.cache.pages_in_use == (3,)
    a.state.close()
    assert llm.engine.cache.pages_in_use == (3,)
    with pytest.raises(ConfigError, match="closed"):
        llm.prefill(prompt(300, 130), state=a.state)
    with pytest.raises(ConfigError, match="closed"):
        _ = a.kv_sha256
    with b.state:
        pass
    assert llm.engine.cache.pages_in_use == (0,)


# Values that are not finite


def overflowing(folder: Path, token: int) -> Path:
    """A model whose embedding of one token is finite but too large to be squared."""
    tiny = Tiny(types={"": "Q4_0"}, embedding="F32", tied=False)
    path = tiny.write(folder / "overflow.gguf")
    with open_checkpoint(path) as checkpoint:
        row = checkpoint.tensors["token_embd.weight"].data.reshape(tiny.vocab, -1)[token].tobytes()
    path.write_bytes(path.read_bytes().replace(row, np.full(tiny.dim, 3e30, np.float32).tobytes()))
    return path


def test_a_request_that_overflows_fails_alone(tmp_path: Path) -> None:
    with quaff.load(overflowing(tmp_path, 77), threads=2, chunk=16) as llm:
        good = [t for t in prompt(300, 40, seed=1) if t != 77]
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        alone = llm.generate(good, params)
        first, bad, last = llm.generate([good, [*good[:20], 77, *good[20:]], good], params)
        assert first.tokens == last.tokens == alone.tokens
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, NonFiniteError)
        assert bad.tokens == ()
        with pytest.raises(NonFiniteError, match="infinite or NaN"):
            llm.prefill([77])
        assert llm.engine.cache.sequences == 0
        assert llm.generate(good, params).tokens == alone.tokens


def test_infinite_weights_are_refused(tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        norm = checkpoint.tensors["blk.0.attn_norm.weight"].data.tobytes()
    path.write_bytes(path.read_bytes().replace(norm, norm[:-4] + np.array([np.inf], np.float32).tobytes()))
    with pytest.raises(quaff.errors.CheckpointError, match=r"blk.0.attn_norm.weight.*finite"):  # type: ignore[attr-defined]
        quaff.load(path, threads=1, chunk=16)


# Settings


def test_configure_changes_the_path_and_no_bit(llm: LLM) -> None:
    tokens = prompt(300, 150, seed=9)
    results = []
    for settings in ({"threads": 2}, {"chunk": 7}, {"schedule": "layer"}, {"schedule": "token", "threads": 1}, {"isa": "scalar"}):
        isa = _native.isa()
        llm.configure(**settings)  # type: ignore[arg-type]
        results.append(llm.prefill(tokens, logits="sha256"))
        llm.configure(isa=isa)
    assert len({(r.logits_sha256, r.kv_sha256) for r in results}) == 1
    assert len({r.counters.launches for r in results}) > 2
    with pytest.raises(ConfigError):
        llm.configure(chunk=0)
    with pytest.raises(ConfigError):
        llm.configure(schedule="spiral")  # type: ignore[arg-type]


def test_describe_says_what_runs(llm: LLM) -> None:
    d = llm.describe()
    assert (d["architecture"], d["layers"], d["context"], d["chunk"]) == ("llama", 2, 4096, 64)
    assert d["tensor_types"] == {"Q8_0": 1, "F32": 5, "Q4_0": 14}
    assert d["weight_bytes"] == llm.counters.weight_bytes_loaded


def test_a_closed_model_says_so(path: Path) -> None:
    llm = quaff.load(path, threads=1, chunk=16)
    llm.close()
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        llm.generate("a")


def test_close_ends_what_is_running(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LONG_STEP_MACS", 0)
    monkeypatch.setattr(engine_module, "BLOCK_ROWS", {"token": 4096})
    llm = quaff.load(path, threads=1, chunk=1, schedule="token")
    request = llm.engine.submit(prompt(300, 4000), params=PARAMS)
    driver = threading.Thread(target=llm.engine.run, args=([request],))
    driver.start()
    watcher = when(llm, lambda: llm.engine.runner.control.cells_done > 100, llm.close)
    watcher.join()
    driver.join()
    assert request.finish_reason == "cancelled"
    assert 0 < request.computed < 4000


def test_chunk_is_measured_when_not_given(path: Path) -> None:
    with quaff.load(path, threads=1) as llm:
        assert llm.chunk in range(64, 513, 64)


def test_public_names() -> None:
    assert sorted(quaff.__all__) == ["LLM", "SamplingParams", "load"]
    with pytest.raises(AttributeError, match="no attribute 'scheduler'"):
        _ = quaff.scheduler  # type: ignore[attr-defined]


def test_a_callback_cannot_run_a_step_inside_a_step(llm: LLM) -> None:
    def nested(position: int, row: object) -> None:
        llm.engine.step()

    request = llm.engine.submit([1, 2], logits_from=0, on_logits=nested)
    llm.engine.run([request])
    assert isinstance(request.error, RuntimeError)
    assert llm.engine.cache.sequences == 0


def test_unrounded_keys_and_values(path: Path) -> None:
    """Twice the bytes without scales, other bits, and the same bits in every order; a state is continued and hashed like any other."""
    tokens = prompt(300, 150)
    with quaff.load(path, threads=1, chunk=64) as rounded:
        usual = rounded.prefill(tokens)
    with quaff.load(path, threads=2, chunk=64, kv_dtype="float32") as llm:
        assert llm.describe()["kv_dtype"] == "float32"
        whole = llm.prefill(tokens)
        scales = 150 * sum(len(kind.layers) * kind.kv_heads * 4 for kind in llm.graph.kv_kinds)
        assert whole.counters.kv_bytes_written == 2 * (usual.counters.kv_bytes_written - scales)
        assert whole.kv_sha256 != usual.kv_sha256
        part = llm.prefill(tokens[:70])
        rest = llm.prefill(tokens, state=part.state)
        llm.configure(schedule="token", chunk=1)
        by_token = llm.prefill(tokens)
        assert whole.kv_sha256 == rest.kv_sha256 == by_token.kv_sha256
        assert whole.logits is not None and rest.logits is not None and by_token.logits is not None
        assert whole.logits.tobytes() == rest.logits.tobytes() == by_token.logits.tobytes()


def test_profile_times_every_op_that_ran(path: Path) -> None:
    with quaff.load(path, threads=1, chunk=64) as llm:
        runner = llm.engine.runner
        runner.start_profile()
        llm.prefill(prompt(300, 40), logits="none")
        timed = runner.stop_profile()
        assert [stage for stage, _, _ in timed] == [s for s in llm.graph.stages for _ in s.program.ops]
        # Without logits nothing runs after the last keys and values.
        assert all(
            (seconds > 0) == (stage.kind not in ("attend", "head") and stage is not llm.graph.stages[-2]) for stage, _, seconds in timed
        )
        llm.prefill(prompt(300, 40))
        assert runner.stop_profile() == []
