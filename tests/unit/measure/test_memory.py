"""The memory that `inspect` states: packed bytes as the native module makes them, KV and scratch by the formulas."""

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import CASES

from quaff import _native, load
from quaff.checkpoint import GGML_TYPES, open_checkpoint
from quaff.measure.memory import memory_need
from quaff.weights.sizes import packed_bytes, packed_sizes


@pytest.mark.parametrize("kind", GGML_TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (16, 512), (33, 256)])
def test_packed_bytes_are_those_of_the_native_module(kind, rows: int, cols: int) -> None:
    data = np.zeros(rows * cols // kind.block * kind.nbytes, dtype=np.uint8)
    assert packed_bytes((rows, cols), kind.id) == _native.Weight(kind.id, data, rows, cols).nbytes


def test_a_vector_is_f32() -> None:
    assert packed_bytes((576,), 0) == _native.Weight.vector(np.zeros(576, np.float32)).nbytes


def test_scratch_is_what_the_engine_takes_for_a_long_prompt(tmp_path: Path) -> None:
    with load(CASES["llama-gqa"].write(tmp_path / "tiny.gguf"), chunk=512, threads=1) as llm:
        with open_checkpoint(llm.path) as checkpoint:
            tensors = {name: (view.shape, view.ggml_type) for name, view in checkpoint.tensors.items()}
        need = memory_need(llm.graph, tensors)
        llm.prefill(np.arange(2100) % 200 + 3, logits="none").state.close()
        logits = 4 * llm.config.vocab  # given back with the step
        assert (need.rows, need.chunk) == (2048, 512)
        assert llm.accountant.used_bytes == need.weight_bytes + need.scratch_bytes - logits
        assert need.kv_bytes_per_1024_tokens == sum(16 * pool.page_bytes for pool in llm.engine.cache.pools)


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss"])
def test_experts_are_packed_one_by_one(name: str, tmp_path: Path) -> None:
    with load(CASES[name].write(tmp_path / "tiny.gguf"), threads=1) as llm:
        with open_checkpoint(llm.path) as checkpoint:
            tensors = {name: (view.shape, view.ggml_type) for name, view in checkpoint.tensors.items()}
        assert sum(packed_sizes(tensors).values()) == llm.weight_bytes
