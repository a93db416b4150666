"""Law: a memory budget changes no bit. What it does change, disk bytes and memory, is what the plan said.

The process counts as 100 MiB here and the reader's buffers are small, so that a budget means the same in every run and models of some
megabytes are streamed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.laws.test_packed import packed
from tests.tiny import CASES, Tiny

import quaff
from quaff import LLM, SamplingParams
from quaff.config import Workload
from quaff.engine.pace import Policy
from quaff.errors import CheckpointError, MemoryBudgetError
from quaff.weights import planner, streamed
from quaff.weights.plan import Plan

PROCESS_BYTES, BUFFER_BYTES = 100 << 20, 256 << 10
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
TOKENS = 200
# Weights of some megabytes, so that shares of a budget mean something beside buffers.
WIDE = Tiny(dim=512, ffn_dim=2048, layers=4, heads=8, kv_heads=2, head_dim=64, vocab=2048, tied=False)
TAIL = -3  # the last attention, the last feed-forward network and the head
MODELS = {
    "untied": WIDE,
    "tied": replace(WIDE, tied=True, architecture="qwen3"),
    "experts": replace(CASES["qwen3moe"], dim=256, expert_dim=256, experts=16, used=3, layers=3),
    "convolutions": replace(CASES["lfm2"], dim=512, ffn_dim=2048),
    "delta rules": replace(CASES["qwen35"], dim=512, ffn_dim=2048),
    "windows": replace(CASES["gemma3"], dim=512, ffn_dim=2048),
}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (PROCESS_BYTES, PROCESS_BYTES))
    monkeypatch.setattr(planner, "READ_BUFFER_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(streamed, "READ_BUFFER_BYTES", BUFFER_BYTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budgets")


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else MODELS[name].write(path)


def prompt(vocab: int, length: int) -> list[int]:
    return [(i * 7919 + i // 7) % vocab for i in range(length)]


def least(path: Path, workload: Workload, chunk: int | None = None) -> int:
    """The smallest budget, from the refusal that names it."""
    with pytest.raises(MemoryBudgetError) as refused:
        quaff.load(path, threads=1, memory=1, workload=workload, chunk=chunk)
    return int(str(refused.value).split("smallest budget that will do is ")[1].split("MiB")[0]) << 20


@contextmanager
def loaded(path: Path, budget: int | None, workload: Workload | None = None, **options: object) -> Iterator[LLM]:
    with quaff.load(path, threads=1, memory=budget, workload=workload, **options) as llm:  # type: ignore[arg-type]
        yield llm


def bits(llm: LLM, length: int = TOKENS) -> tuple[str, ...]:
    """Hashes of the logits of every row and of the state, and the ids of an answer."""
    tokens = prompt(llm.config.vocab, length)
    with llm.prefill(tokens, logits="sha256").state as state:
        everything = llm.prefill(tokens, logits="sha256")
        with everything.state:
            assert everything.logits_sha256 is not None
            return everything.logits_sha256, state.kv_sha256(), str(llm.generate(tokens, PARAMS).tokens)


@pytest.mark.parametrize("name", MODELS)
def test_every_budget_gives_the_same_bits(folder: Path, name: str) -> None:
    path, workload = written(folder, name), Workload(TOKENS + 8, sequences=2, logits_rows=16)
    with loaded(path, None) as llm:
        expected = bits(llm)
        weights = llm.weight_bytes
    smallest = least(path, workload, chunk=64)
    decoded: list[tuple[int, int]] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        with loaded(path, smallest + int(share * weights), workload, chunk=64) as llm:
            assert bits(llm) == expected, f"{share} of the weights: {llm.plan}"
            assert llm.accountant.total_bytes <= (llm.accountant.limit_bytes or 0)
            assert llm.plan is not None
            decoded.append((llm.plan.token_bytes, llm.streaming.decode.disk_bytes if llm.streaming else 0))
    # Which experts and how many guesses there were does not depend on the budget.
    assert decoded == sorted(decoded, reverse=True) and decoded[0][1] > 0 == decoded[-1][1]


def test_experts_of_a_packed_file_stay_where_the_plan_has_room(folder: Path) -> None:
    """They begin and end within sectors of the disk, which takes more memory than they have bytes: more than what is kept for rounding."""
    tiny = replace(MODELS["experts"], experts=64, expert_dim=64, layers=6)
    path = packed(tiny.write(folder / "many.gguf"))
    workload = Workload(64, logits_rows=1)
    with loaded(path, None) as llm:
        expected, weights = bits(llm, 60), llm.weight_bytes
    smallest, kept = least(path, workload), []
    for share in range(60, 100, 4):
        with loaded(path, smallest + share * weights // 100, workload) as llm:
            assert llm.plan is not None
            if llm.streamed:
                mixtures = [unit for unit in llm.plan.units if unit.experts and unit.stage in llm.plan.pinned]
                kept.append(len(mixtures))
                assert llm.accountant.total_bytes <= llm.plan.planned_bytes - llm.plan.base_bytes
                if len(mixtures) == max(kept):
                    assert bits(llm, 60) == expected
    assert max(kept) >= 2


def test_other_weights_in_the_file_are_noticed(folder: Path) -> None:
    """Negative control: bits that are compared do come from the file, and a file that changed is refused."""
    path = written(folder, "untied")
    twin = folder / "twin.gguf"
    data = bytearray(path.read_bytes())
    data[len(data) - 4096] ^= 0x11
    twin.write_bytes(data)
    workload = Workload(TOKENS + 8, sequences=2, logits_rows=16)
    with loaded(path, least(path, workload), workload) as llm, loaded(twin, least(path, workload), workload) as other:
        assert llm.streamed and other.streamed
        assert bits(llm) != bits(other)
        before = llm.counters
        os.truncate(twin, len(data) - 8192)
        with pytest.raises(CheckpointError, match="twin.gguf"):
            other.generate(prompt(other.config.vocab, 40), PARAMS)
        assert llm.counters == before
        assert bits(llm) == bits(llm)


def cold(path: Path, budget: int, length: int, workload: Workload, **options: object) -> tuple[Plan, object]:
    """A plan, and what reading one prompt streamed for it."""
    with loaded(path, budget, workload, **options) as llm:
        llm.prefill(prompt(llm.config.vocab, length), logits="last").state.close()
        assert llm.plan is not None and llm.streaming is not None
        return llm.plan, llm.streaming


def test_a_prompt_reads_the_model_once(folder: Path) -> None:
    path, workload = written(folder, "untied"), Workload(TOKENS, logits_rows=1)
    budget = least(path, workload)
    for more in (4, 5, 6):
        plan, streaming = cold(path, budget + (more << 20), TOKENS, workload)
        assert streaming.prefill.passes == 1 and streaming.decode.disk_bytes == 0
        # Of a table that does not stay, a page of the disk for every token; pieces of units begin and end at such pages too.
        rows = 4096 * TOKENS if plan.embedding == "rows" else 0
        assert streaming.prefill.disk_bytes == pytest.approx(plan.disk_bytes(1, tail=TAIL) + rows, rel=0.05)


def test_the_control_reads_the_layers_for_every_token(folder: Path) -> None:
    """Token-major over 32 tokens: 32 passes, every one over all layers; the head is read for the last row only."""
    path, workload = written(folder, "untied"), Workload(64, logits_rows=1)
    budget = least(path, workload)
    plan, by_layer = cold(path, budget, 32, workload)
    _, by_token = cold(path, budget, 32, workload, schedule="token")
    _, by_chunk = cold(path, budget, 32, workload, schedule="chunk", chunk=8)
    assert [s.prefill.passes for s in (by_layer, by_chunk, by_token)] == [1, 4, 32]
    assert plan.disk_bytes(32, tail=TAIL) > 16 * plan.disk_bytes(1, tail=TAIL)
    for streaming, times in ((by_layer, 1), (by_chunk, 4), (by_token, 32)):
        assert streaming.prefill.disk_bytes == pytest.approx(plan.disk_bytes(times, tail=TAIL), rel=0.1)


def test_a_long_prompt_takes_the_passes_of_its_plan(folder: Path) -> None:
    path, workload = written(folder, "untied"), Workload(1500, logits_rows=1)
    plan, streaming = cold(path, least(path, workload) + (1 << 20), 1500, workload)
    assert 1 < streaming.prefill.passes == -(-1500 // plan.pass_rows)


def test_sequences_share_the_passes_of_generation(folder: Path) -> None:
    path = written(folder, "untied")
    workload = Workload(64, sequences=3, logits_rows=3)
    with loaded(path, least(path, workload), workload) as llm:
        llm.engine.set_policy(Policy(draft_tokens=0))
        several = llm.generate([prompt(llm.config.vocab, n) for n in (9, 20, 33)], PARAMS)
        assert llm.streaming is not None
        assert (llm.streaming.prefill.passes, llm.streaming.decode.passes) == (1, PARAMS.max_tokens - 1)
    with loaded(path, None) as llm:
        for n, completion in zip((9, 20, 33), several, strict=True):
            assert llm.generate(prompt(llm.config.vocab, n), PARAMS).tokens == completion.tokens


def test_a_pass_checks_guesses_of_several_tokens(folder: Path) -> None:
    """An answer that repeats what came before takes fewer passes than it has tokens, and is the same."""
    path, params = written(folder, "untied"), SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={7: 60.0})
    workload = Workload(64, logits_rows=9)
    tokens = [7] * 20
    with loaded(path, None) as llm:
        expected = llm.generate(tokens, params).tokens
    with loaded(path, least(path, workload), workload) as llm:
        assert llm.generate(tokens, params).tokens == expected
        assert llm.streaming is not None
        assert llm.streaming.decode.passes < params.max_tokens // 2


def test_the_peak_grows_by_residual_rows_and_kv_state_alone(folder: Path) -> None:
    """4,096 tokens against 512, in the same plan: dim f32 values and the state of every further token."""
    path, workload = written(folder, "untied"), Workload(4096, logits_rows=1)
    budget, peaks, states = least(path, workload, chunk=256) + (8 << 20), [], []
    for length in (512, 4096):
        with loaded(path, budget, workload, chunk=256) as llm:
            assert llm.plan is not None and llm.plan.pass_rows == 4096 and llm.streamed
            llm.prefill(prompt(llm.config.vocab, length), logits="last").state.close()
            peaks.append(llm.accountant.peak_bytes)
            states.append(llm.engine.cache.peak_bytes(length, llm.plan.pass_rows))
    assert peaks[1] - peaks[0] == (4096 - 512) * WIDE.dim * 4 + states[1] - states[0]


READ = """
import sys
from quaff.config import Workload
from quaff.llm import load
from quaff.weights.budget import process_memory_bytes
path, tokens = sys.argv[1], int(sys.argv[2])
budget = process_memory_bytes()[0] + (84 << 20)
with load(path, threads=1, memory=budget, workload=Workload(4096, logits_rows=1)) as llm:
    llm.prefill([i * 7919 % llm.config.vocab for i in range(tokens)], logits="last").state.close()
    assert llm.streamed
    print(process_memory_bytes()[1], llm.plan.memory_bytes, llm.plan.base_bytes + llm.accountant.peak_bytes)
"""


def test_the_kernel_counts_no_more_than_the_budget(folder: Path, tmp_path: Path) -> None:
    """A process of its own, with weights that are large beside it."""
    path = replace(WIDE, ffn_dim=4096, layers=12).write(tmp_path / "large.gguf")

    def read(tokens: int) -> tuple[int, ...]:
        command = [sys.executable, "-c", READ, str(path), str(tokens)]
        return tuple(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))

    peak, budget, counted = read(4096)
    assert peak <= 1.05 * budget
    assert counted <= budget
    assert peak - read(512)[0] <= (4096 - 512) * (WIDE.dim * 4 + 12 * 2 * 2 * 64 * 2) + (8 << 20)
