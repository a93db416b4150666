"""Law: the native scalar path computes what the NumPy interpreter says, bit for bit; so do the others, by the law of test_isa.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.laws.paths import ISAS, Tinyrun, Trace, prompt, tiny_run
from tests.tiny import CASES, opened

from quaff.cache.pages import page_rows
from quaff.graph.program import Graph, OpKind
from quaff.graph.reference import Reference, ReferenceWeight, lower
from quaff.schedule import Order

LENGTH = 150


def reference_weights(name: str, folder: Path) -> dict[str, ReferenceWeight]:
    """Read by the `gguf` package and lowered from the file's blocks by NumPy: nothing native has touched them."""
    _, _, shapes, data = opened(CASES[name].write(folder / f"{name}-reference.gguf"))
    return {n: lower(ggml_type, data[n], shape) for n, (shape, ggml_type) in shapes.items()}


def reference_trace(graph: Graph, weights: dict[str, ReferenceWeight], tokens: list[int]) -> Trace:
    logits, state = Reference(graph, weights).run(tokens)
    kv = []
    for k in range(len(graph.kv_kinds)):
        rows = page_rows(state.pages(k), graph.kv_kinds[k])  # [pages, layers, heads, 64, words]
        rows = rows.transpose(1, 2, 0, 3, 4).reshape(*rows.shape[1:3], -1, rows.shape[-1])
        kv.append(rows[:, :, : state.length])
    return Trace([logits], [kv], tuple(np.stack(kind).tobytes() for kind in state.states))


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("name", list(CASES))
def test_native_scalar_equals_the_reference(name: str, activations: str, folder: Path) -> None:
    model = tiny_run(name, folder, activations)  # type: ignore[arg-type]
    tokens = prompt(model.vocab, LENGTH, seed=8)
    expected = reference_trace(model.graph, reference_weights(name, folder), tokens)
    model.use("scalar", 2)
    for order in (Order("chunk", LENGTH), Order("token"), Order("layer", 40)):
        assert not model.read(tokens, order).difference(expected), f"{order}"


def wider_mask(graph: Graph) -> Graph:
    """Every window reaches one position further."""
    stages = []
    for stage in graph.stages:
        ops = tuple(
            replace(op, ints=(*op.ints[:5], op.ints[5] + 1, op.ints[6])) if op.kind == OpKind.ATTEND and op.ints[5] else op
            for op in stage.program.ops
        )
        stages.append(replace(stage, program=replace(stage.program, ops=ops)))
    return replace(graph, stages=tuple(stages))


def test_a_mask_off_by_one_fails_the_comparison(models: dict[str, Tinyrun], folder: Path) -> None:
    """Negative control: the reference sees one position more than the window allows."""
    model = models["gemma3"]
    tokens = prompt(model.vocab, 60, seed=8)
    model.use("scalar")
    wrong = reference_trace(wider_mask(model.graph), reference_weights("gemma3", folder), tokens)
    assert "logits of rows [24 25 26 27 28]" in model.read(tokens).difference(wrong)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama-mqa", "gemma3-wide"])
def test_unrounded_keys_and_values(name: str, isa: str, folder: Path) -> None:
    """kv_dtype="float32": every instruction set stores and reads them as the reference does, in every order."""
    path = CASES[name].write(folder / f"{name}-f32.gguf")
    model = Tinyrun(None, path, "float32", kv_dtype="float32")
    rounded = Tinyrun(None, path, "float32")
    tokens = prompt(model.vocab, LENGTH, seed=8)
    expected = reference_trace(model.graph, reference_weights(name, folder), tokens)
    model.use(isa, 2)
    for order in (Order("chunk", LENGTH), Order("chunk", 7), Order("token"), Order("layer", 40)):
        assert not model.read(tokens, order).difference(expected), f"{order}"
    assert rounded.read(tokens).difference(expected), "negative control: rounded keys and values give other bits"
