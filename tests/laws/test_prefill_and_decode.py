"""Law: a prompt read at once and the same tokens fed one by one leave the same bits; the boundary may lie anywhere."""

import pytest
from tests.laws.paths import ISAS, Tinyrun, prompt

from quaff.schedule import Order

LENGTH = 200


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("prefilled", [1, 63, 64, 65, 127, 128, 129, 150, 199])
def test_prefill_then_decode_is_one_long_prefill(model: Tinyrun, isa: str, prefilled: int) -> None:
    """Warm is not cold (llama.cpp 7594, sglang 34683): one row after a cached prefix must equal the last row of a long prefill."""
    tokens = prompt(model.vocab, LENGTH, seed=7)
    model.use(isa, 2)
    expected = model.read(tokens)
    decoded = model.read(tokens, Order("chunk", 64), cuts=list(range(prefilled, LENGTH)))
    assert not decoded.difference(expected)


def test_each_decode_step_touches_every_weight_once(model: Tinyrun) -> None:
    """The decode path is one row through every stage: it must have fired as such."""
    before = model.counters
    model.read(prompt(model.vocab, 30), cuts=list(range(1, 30)))
    spent = model.counters - before
    assert spent.launches == 30 * sum(stage.launches for stage in model.graph.stages)
    assert spent.head_rows == 30


def test_a_rope_offset_counted_twice_fails_the_comparison(model: Tinyrun) -> None:
    """Short suffix (mlxcel 183), negative control: decode continues at the wrong position."""
    tokens = prompt(model.vocab, 100, seed=7)
    expected = model.read(tokens)
    # One stray row moves all later positions by one, and stays visible.
    shifted = model.read([*tokens[:50], tokens[0], *tokens[50:]], cuts=[50])
    assert (shifted.logits[1][1:] != expected.logits[0][50:]).any()
