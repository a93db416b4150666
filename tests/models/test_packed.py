"""Real weights from a packed file: the text and the bits of the file it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

import quaff
from quaff import SamplingParams, hub
from quaff.checkpoint import open_checkpoint
from quaff.checkpoint.hashes import check_hashes
from quaff.graph.builder import build_graph
from quaff.models import read_model
from quaff.weights.packing import write_packed

pytestmark = pytest.mark.models

TEXT = "A lighthouse keeper counts the ships that pass at night and writes each one down. In the morning "


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_packed_file_gives_the_bits_of_the_model(name: str, tmp_path: Path) -> None:
    out = tmp_path / "m.quaff"
    with open_checkpoint(hub.resolve(name)) as checkpoint:
        model = read_model(checkpoint)
        write_packed(out, checkpoint, model.views, build_graph(model.config, model.family, model.tensors), threads=2)
    with open_checkpoint(out) as checkpoint:
        check_hashes(checkpoint.tensors)
    found = []
    for path in (hub.resolve(name), out):
        with quaff.load(path) as llm:
            read = llm.prefill(TEXT, logits="sha256")
            found.append((read.logits_sha256, read.kv_sha256, llm.generate(TEXT, SamplingParams(max_tokens=12)).text))
    assert found[0] == found[1] and found[0][2]
