"""Law: merging ops never changes a value, and does save launches."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.laws.paths import ISAS, Tinyrun, prompt, tiny_run
from tests.tiny import CASES

from quaff.graph.program import Graph, OpKind
from quaff.schedule import Order


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("name", list(CASES))
def test_fused_equals_plain(name: str, activations: str, isa: str, folder: Path) -> None:
    fused = tiny_run(name, folder, activations, fuse=True)  # type: ignore[arg-type]
    plain = tiny_run(name, folder, activations, fuse=False)  # type: ignore[arg-type]
    tokens = prompt(fused.vocab, 140, seed=5)
    for model in (fused, plain):
        model.use(isa, 2)
    for order in (Order("chunk", 140), Order("chunk", 11), Order("token")):
        assert not fused.read(tokens, order).difference(plain.read(tokens, order)), f"{order}"
    assert fused.counters.launches < plain.counters.launches
    assert fused.counters.macs == plain.counters.macs
    assert fused.counters.weight_bytes_touched == plain.counters.weight_bytes_touched


def other_activation(graph: Graph) -> Graph:
    """The same graph with SiLU and GELU exchanged."""
    stages = []
    for stage in graph.stages:
        ops = tuple(replace(op, ints=(1 - op.ints[0],)) if op.kind == OpKind.GLU else op for op in stage.program.ops)
        stages.append(replace(stage, program=replace(stage.program, ops=ops)))
    return replace(graph, stages=tuple(stages))


def test_a_fusion_that_changes_a_function_fails_the_comparison(models: dict[str, Tinyrun], folder: Path) -> None:
    """Negative control: a wrong activation in a fused op."""
    right = models["llama-gqa"]
    wrong = Tinyrun(CASES["llama-gqa"], folder / "wrong-fusion.gguf", graph=other_activation(right.graph))
    tokens = prompt(right.vocab, 50)
    assert wrong.read(tokens).difference(right.read(tokens))
