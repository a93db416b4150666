"""Law: a packed file gives the bits of the file it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.laws.paths import Tinyrun, prompt
from tests.streaming import PLANS
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.graph.builder import build_graph
from quaff.models import read_model
from quaff.schedule import Order
from quaff.weights.packing import write_packed
from quaff.weights.resident import ResidentWeights
from quaff.weights.streamed import StreamedWeights

ORDERS = (Order("chunk", 70), Order("layer", 32), Order("token"))


def packed(path: Path) -> Path:
    out = path.with_suffix(".quaff")
    with open_checkpoint(path) as checkpoint:
        model = read_model(checkpoint)
        write_packed(out, checkpoint, model.views, build_graph(model.config, model.family, model.tensors), threads=2)
    return out


@pytest.mark.parametrize("name", list(CASES))
def test_a_packed_file_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    plain = Tinyrun(CASES[name], tmp_path / "m.gguf")
    mapped = Tinyrun(None, packed(tmp_path / "m.gguf"))
    assert dict(mapped.weights.nbytes) == {name: plain.weights.nbytes[name] for name in mapped.weights.nbytes}
    assert mapped.weights.loaded_bytes == plain.weights.loaded_bytes
    assert isinstance(mapped.weights, ResidentWeights) and mapped.weights._mapped
    tokens = prompt(plain.vocab, 70, seed=3)
    expected = plain.read(tokens)
    for order in ORDERS:
        assert not mapped.read(tokens, order).difference(expected), str(order)
        mapped.weights.settle()


@pytest.mark.parametrize("which", ["least", "leading layers pinned"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_streamed_packed_file_gives_the_same_bits(name: str, which: str, tmp_path: Path) -> None:
    plain = Tinyrun(CASES[name], tmp_path / "m.gguf")
    streamed = Tinyrun(None, packed(tmp_path / "m.gguf"), stream=PLANS[which])
    tokens = prompt(plain.vocab, 70, seed=3)
    expected = plain.read(tokens)
    for order in (Order("layer", 32), Order("chunk", 33)):
        assert not streamed.read(tokens, order).difference(expected), str(order)
    assert isinstance(streamed.weights, StreamedWeights) and streamed.weights.stream_counters().disk_bytes > 0
    streamed.weights.close()


def test_a_byte_that_changed_shows(tmp_path: Path) -> None:
    """Negative control: panels are what is computed with, wherever they come from."""
    plain = Tinyrun(CASES["llama-gqa"], tmp_path / "m.gguf")
    path = packed(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        place = checkpoint.tensors["blk.1.ffn_down.weight"].place
    assert place is not None
    content = bytearray(path.read_bytes())
    content[place.offset + place.nbytes // 2] ^= 1
    path.write_bytes(content)
    tokens = prompt(plain.vocab, 70, seed=3)
    assert Tinyrun(None, path).read(tokens).difference(plain.read(tokens))
