"""Law: the vector of a text is what the NumPy interpreter says, bit for bit, whatever else is embedded, in whatever chunks, by how many
threads, and whatever the model answers meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import CASES, opened, prompt

import quaff
from quaff import LLM, SamplingParams
from quaff.engine.embedder import Pooling
from quaff.graph.builder import build_graph
from quaff.graph.reference import Reference, lower
from quaff.models.family import Family

LENGTHS = (1, 9, 70)


def pooled(rows: NDArray[np.float32], pooling: Pooling) -> bytes:
    """By the words of the definition: rows added up in f64 in order of position, divided, scaled to length 1, rounded once."""
    total = np.zeros(rows.shape[1], dtype=np.float64)
    for row in rows if pooling == "mean" else rows[-1:]:
        total = total + row
    total = total / (len(rows) if pooling == "mean" else 1)
    return (total / float(np.sqrt(np.square(total).sum()))).astype(np.float32).tobytes()


def texts_of(llm: LLM) -> list[list[int]]:
    return [prompt(llm.config.vocab, length, seed=length) for length in LENGTHS]


@pytest.mark.parametrize("name", list(CASES))
def test_vectors_equal_the_reference(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "tiny.gguf")
    family, config, shapes, data = opened(path)
    assert isinstance(family, Family)
    graph = build_graph(config, family, shapes, hidden=True)
    reference = Reference(graph, {n: lower(kind, data[n], shape) for n, (shape, kind) in shapes.items() if n in graph.weight_names})
    with quaff.load(path, threads=1, chunk=16) as llm:
        text = prompt(llm.config.vocab, 20, seed=3)
        rows, _ = reference.run(text)
        assert rows.shape == (20, config.dim)
        for pooling in ("mean", "last"):
            (vector,) = llm.embed([text], pooling)  # type: ignore[arg-type]
            assert vector.tobytes() == pooled(rows, pooling)  # type: ignore[arg-type]
            # The law can fail: another row, or one row less, is another vector.
            assert vector.tobytes() != pooled(rows[:-1], pooling)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35", "lfm2", "deepseek2"])
def test_neighbours_chunks_and_threads_do_not_show(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "tiny.gguf")
    with quaff.load(path, threads=1, chunk=16) as llm:
        texts = texts_of(llm)
        alone = [llm.embed([text])[0].tobytes() for text in texts]
        assert [vector.tobytes() for vector in llm.embed(texts)] == alone
        stream = llm.stream(texts[1], SamplingParams(max_tokens=6, ignore_eos=True))
        next(stream)
        assert llm.embed(texts[::-1])[0].tobytes() == alone[-1]
        assert len(set(alone)) == len(alone)
        list(stream)
    for options in ({"chunk": 7}, {"threads": 2}, {"schedule": "layer"}, {"schedule": "token"}):
        with quaff.load(path, **{"threads": 1, "chunk": 64} | options) as llm:
            assert [vector.tobytes() for vector in llm.embed(texts)] == alone, options
