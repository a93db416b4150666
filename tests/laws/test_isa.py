"""Law: the instruction set never shows."""

from pathlib import Path

import pytest
from tests.laws.paths import Tinyrun, prompt, tiny_run
from tests.tiny import CASES

from quaff import _native
from quaff.schedule import Order

OTHERS = [name for name in _native.available_isas() if name != "scalar"]


@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("name", list(CASES))
def test_every_set_gives_the_bits_of_plain_scalar(name: str, isa: str, activations: str, models: dict[str, Tinyrun], folder: Path) -> None:
    model = models[name] if activations == "int8" else tiny_run(name, folder, "float32")
    tokens = prompt(model.vocab, 300, seed=1)
    model.use("scalar", 1)
    expected = model.read(tokens)
    model.use(isa, 2)
    for order in (Order("chunk", 300), Order("chunk", 13), Order("token"), Order("layer", 64)):
        assert not model.read(tokens, order).difference(expected), f"{isa}, {order}"


def test_the_set_asked_for_is_the_set_that_runs() -> None:
    for name in _native.available_isas():
        _native.set_isa(name)
        assert _native.isa() == name
    with pytest.raises(ValueError, match="scalar"):
        _native.set_isa("sse9")


def test_another_arithmetic_fails_the_comparison(models: dict[str, Tinyrun], folder: Path) -> None:
    """Negative control: the float kernels compute the same model with other roundings."""
    tokens = prompt(models["llama-gqa"].vocab, 100, seed=1)
    assert tiny_run("llama-gqa", folder, "float32").read(tokens).difference(models["llama-gqa"].read(tokens))
