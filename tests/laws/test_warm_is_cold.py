"""Law, through the public API: what was cached, how the prompt was cut, and who cancelled before never show.

Kinds of fault from other engines, each with the right value kept as a test.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.laws.paths import prompt
from tests.tiny import CASES, Tiny

import quaff
from quaff import LLM, SamplingParams
from quaff.errors import PromptError

NAMES = ["llama-gqa", "llama-odd", "gemma3", "gemma3-wide", "lfm2", "qwen35"]
BOUNDARIES = [1, 63, 64, 65, 127, 128, 129]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    folder = tmp_path_factory.mktemp("warm")
    llms = {name: quaff.load(CASES[name].write(folder / f"{name}.gguf"), threads=2, chunk=64) for name in NAMES}
    yield llms
    for llm in llms.values():
        llm.close()


@pytest.fixture(params=NAMES)
def llm(request: pytest.FixtureRequest, loaded: dict[str, LLM]) -> LLM:
    return loaded[request.param]


@pytest.mark.parametrize("cached", [*BOUNDARIES, 180, 199])
def test_cold_warm_and_warm_again(llm: LLM, cached: int) -> None:
    """Warm is not cold (llama.cpp 7594, sglang 34683); block boundary (sglang 22819)."""
    tokens = prompt(llm.config.vocab, 200, seed=1)
    cold = llm.prefill(tokens)
    base = llm.prefill(tokens[:cached], logits="none")
    warm = llm.prefill(tokens, state=base.state)
    again = llm.prefill(tokens, state=base.state)
    hot = llm.prefill(tokens, state=again.state)
    assert (cold.cached_tokens, warm.cached_tokens, again.cached_tokens, hot.cached_tokens) == (0, cached, cached, 199)
    assert warm.counters.head_rows == 1
    for result in (warm, again, hot):
        assert result.logits is not None and cold.logits is not None
        assert result.logits.tobytes() == cold.logits.tobytes()
        assert result.kv_sha256 == cold.kv_sha256
    for result in (cold, base, warm, again, hot):
        result.state.close()


def test_prompt_600_cached_590_chunk_512(llm: LLM) -> None:
    """Short suffix (mlxcel 183, mlx-node 33): ten rows are left, fewer than a chunk."""
    llm.configure(chunk=512)
    tokens = prompt(llm.config.vocab, 600, seed=2)
    cold = llm.prefill(tokens)
    with llm.prefill(tokens[:590], logits="none").state as state:
        warm = llm.prefill(tokens, state=state)
    assert warm.cached_tokens == 590
    assert warm.logits is not None and cold.logits is not None
    assert warm.logits.tobytes() == cold.logits.tobytes()
    assert warm.kv_sha256 == cold.kv_sha256
    llm.configure(chunk=64)


@pytest.mark.parametrize("length", [1, 64, 99, 100])
def test_prompt_shorter_than_the_cache_evaluates_its_last_token(llm: LLM, length: int) -> None:
    """Prompt shorter than the cache (llama.cpp 1585): never the stale logits of the longer prompt."""
    tokens = prompt(llm.config.vocab, 100, seed=3)
    with llm.prefill(tokens).state as state:
        short = llm.prefill(tokens[:length], state=state)
        cold = llm.prefill(tokens[:length])
    assert short.counters.head_rows == 1
    assert short.computed_tokens - short.cached_tokens >= 1
    assert short.logits is not None and cold.logits is not None
    assert short.logits.tobytes() == cold.logits.tobytes()
    assert short.kv_sha256 == cold.kv_sha256


def test_every_row_of_every_chunk_size_has_one_hash(llm: LLM) -> None:
    """Chunk size shows (mlx-lm 619): steps of 2048 and 8192 gave other text."""
    tokens = prompt(llm.config.vocab, 300, seed=4)
    seen = set()
    for schedule, chunk in (("token", 1), ("chunk", 1), ("chunk", 64), ("chunk", 512), ("layer", 100)):
        llm.configure(schedule=schedule, chunk=chunk)  # type: ignore[arg-type]
        result = llm.prefill(tokens, logits="sha256")
        seen.add((result.logits_sha256, result.kv_sha256))
        assert result.counters.head_rows == 300
    llm.configure(schedule="chunk", chunk=64)
    assert len(seen) == 1
    # Negative control: one other token somewhere in the prompt.
    tokens[150] = (tokens[150] + 1) % llm.config.vocab
    other = llm.prefill(tokens, logits="sha256")
    assert (other.logits_sha256, other.kv_sha256) not in seen


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_15000_tokens_in_steps_of_2048_and_of_8192(name: str, tmp_path: Path) -> None:
    """Chunk size shows (mlx-lm 619), with the numbers of its report."""
    tiny = replace(CASES[name], context=16384, heads=2, kv_heads=1)
    seen = set()
    with quaff.load(tiny.write(tmp_path / "m.gguf"), threads=2) as llm:
        tokens = prompt(llm.config.vocab, 15_000, seed=6)
        for chunk in (2048, 8192):
            llm.configure(chunk=chunk)
            result = llm.prefill(tokens)
            assert result.logits is not None
            answer = llm.generate(tokens, SamplingParams(max_tokens=20, ignore_eos=True), state=result.state)
            seen.add((result.logits.tobytes(), result.kv_sha256, answer.text))
            result.state.close()
    assert len(seen) == 1


def test_the_head_runs_for_one_row(llm: LLM) -> None:
    """Logits for every row (mlx-vlm 2119): a prompt's length must not show in the logits made."""
    for n in (2, 127, 129, 300):
        result = llm.prefill(prompt(llm.config.vocab, n, seed=5))
        assert result.logits is not None
        assert result.logits.shape == (llm.config.vocab,)
        assert result.counters.head_rows == 1


PEAKS = """
import contextlib, re, sys
import quaff
from tests.laws.paths import prompt


def peak() -> int:
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", file.read())[1]) << 10


with quaff.load(sys.argv[1], threads=1) as llm:
    tokens = prompt(llm.config.vocab, 2049)
    llm.prefill(tokens[:300])
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak of loading
    peaks = [peak()]
    for chunk in (512, 2048):
        llm.configure(chunk=chunk)
        for length in (2047, 2049):
            llm.prefill(tokens[:length])
    peaks.append(peak())
    llm.prefill(tokens[:2047], logits="all")
    peaks.append(peak())
    print(*peaks)
"""


def test_the_peak_of_memory_does_not_know_of_steps(tmp_path: Path) -> None:
    """Logits for every row (mlx-vlm 2119): 2047 tokens took 1 GB more than 2049, because what fitted into one step got all its logits."""
    path = Tiny(vocab=16_000).write(tmp_path / "m.gguf")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", PEAKS, path], env=environment, capture_output=True, text=True, check=True)
    before, after, control = map(int, result.stdout.split())
    every = 2047 * 16_000 * 4
    assert after - before < every / 4
    # Control: the same prompt with all its logits.
    assert control - after > every / 2


def test_a_prompt_that_is_too_long_is_refused_with_both_counts(tmp_path: Path) -> None:
    """Silent truncation (ollama 3839): nothing is cut, nothing is computed."""
    with quaff.load(CASES["llama-gqa"].write(tmp_path / "m.gguf"), context=50, threads=1, chunk=64) as llm:
        before = llm.counters
        for call in (llm.prefill, llm.score, llm.generate, llm.stream):
            with pytest.raises(PromptError, match=r"51 tokens.*50 tokens"):
                call(prompt(300, 51))
        assert llm.counters == before
        assert llm.prefill(prompt(300, 50)).computed_tokens == 50


def test_generation_is_the_same_alone_in_company_and_after_a_cached_prefix(llm: LLM) -> None:
    prompts = [prompt(llm.config.vocab, n, seed=n) for n in (3, 64, 65, 150)]
    each = [SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True) for n, t in ((20, 0.0), (7, 1.0), (30, 0.7), (1, 1.3))]
    alone = [llm.generate(p, params) for p, params in zip(prompts, each, strict=True)]
    together = llm.generate(prompts, each)
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert [len(c.tokens) for c in together] == [20, 7, 30, 1]
    assert [c.text for c in together] == [c.text for c in alone]
    with llm.prefill(prompts[3][:128], logits="none").state as state:
        warm = llm.generate(prompts[3], each[3], state=state)
    assert warm.cached_tokens == 128
    assert warm.tokens == alone[3].tokens
    # Decoding equals one long prefill of everything that was generated.
    for p, c in zip(prompts, alone, strict=True):
        if c.tokens and each[prompts.index(p)].temperature == 0:
            longer = llm.prefill([*p, *c.tokens[:-1]])
            assert longer.logits is not None
            assert int(longer.logits.argmax()) == c.tokens[-1]
