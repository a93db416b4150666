"""Law: the number of threads never shows, nor the rounding mode that threads inherit."""

import ctypes
import ctypes.util
import platform
from pathlib import Path

import pytest
from tests.laws.paths import ISAS, Tinyrun, prompt
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.graph.program import OpKind
from quaff.schedule import Order

ORDERS = [Order("token"), Order("chunk", 1), Order("chunk", 33), Order("layer", 50), Order("chunk", 200)]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_thread_count_never_shows(model: Tinyrun, threads: int) -> None:
    tokens = prompt(model.vocab, 150, seed=3)
    model.use(threads=1)
    expected = model.read(tokens)
    model.use(threads=threads)
    for order in ORDERS:
        assert not model.read(tokens, order).difference(expected), f"{threads} threads, {order}"


def test_rows_that_workers_own_and_pages_that_they_share_never_show(models: dict[str, Tinyrun]) -> None:
    """Long cells give each worker rows of his own, and single rows past many pages share the pages out: both must have happened."""
    model = models["llama-gqa"]
    tokens = prompt(model.vocab, 600, seed=9)
    model.use(threads=1)
    expected = model.read(tokens)
    alone = model.runner._runtime
    assert alone.owned_launches == alone.shared_launches == 0
    model.use(threads=2)
    together = model.runner._runtime
    assert not model.read(tokens, Order("chunk", 512)).difference(expected)
    assert together.owned_launches > 0 and together.shared_launches == 0
    before = together.owned_launches
    assert not model.read(tokens, Order("token")).difference(expected)
    assert together.owned_launches == before and together.shared_launches > 0


def test_weights_fetched_beforehand_never_show(models: dict[str, Tinyrun]) -> None:
    """Rows that come one by one let waiting workers fetch the next weights: a few workers must have been told, one or many never are."""
    model = models["llama-gqa"]
    tokens = prompt(model.vocab, 40, seed=10)
    model.use(threads=1)
    expected = model.read(tokens, Order("token"))
    assert model.runner._runtime.expected_launches == 0
    model.use(threads=2)
    assert not model.read(tokens, Order("token")).difference(expected)
    linear = sum(op.kind == OpKind.LINEAR for stage in model.graph.stages for op in stage.program.ops)
    assert model.runner._runtime.expected_launches >= len(tokens) * (linear - 1)
    few = model.read(tokens[:3], Order("token"))
    model.use(threads=9)
    assert not model.read(tokens[:3], Order("token")).difference(few)
    assert model.runner._runtime.expected_launches == 0


@pytest.mark.parametrize("isa", ISAS)
def test_repeated_runs_are_equal(models: dict[str, Tinyrun], isa: str) -> None:
    """Tiles are claimed in another order every time."""
    model = models["llama-odd"]
    model.use(isa, 3)
    tokens = prompt(model.vocab, 90, seed=4)
    first = model.read(tokens, Order("chunk", 40))
    assert all(not model.read(tokens, Order("chunk", 40)).difference(first) for _ in range(20))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="FE_UPWARD has another number on other processors")
@pytest.mark.parametrize("threads", [1, 2])
def test_inherited_rounding_never_shows(models: dict[str, Tinyrun], threads: int) -> None:
    """NUMERICS 3: a host program that rounds upward, in the thread that calls and in those that start meanwhile."""
    libm, upward = ctypes.CDLL(ctypes.util.find_library("m")), 0x800
    model = models["gemma3"]
    tokens = prompt(model.vocab, 90, seed=5)
    model.use(threads=3)
    expected = model.read(tokens)
    before = libm.fegetround()
    assert libm.fesetround(upward) == 0
    try:
        # Negative control: the mode is real, this thread's own arithmetic shows it.
        assert 1.0 + float("1e-17") > 1.0
        model.use(threads=threads)
        trace = model.read(tokens, Order("chunk", 40))
        after = libm.fegetround()
    finally:
        libm.fesetround(before)
    assert after == upward
    assert not trace.difference(expected)


def test_one_changed_weight_fails_the_comparison(folder: Path) -> None:
    """Negative control: the last bit of one scale of one row, as a worker that computes a slightly other sum would leave it."""
    tiny = CASES["llama-gqa"]
    right = Tinyrun(tiny, folder / "right.gguf")
    with open_checkpoint(folder / "right.gguf") as checkpoint:
        scale = checkpoint.tensors["blk.1.ffn_down.weight"].data[:18].tobytes()
    data = bytearray((folder / "right.gguf").read_bytes())
    data[data.index(scale)] ^= 1
    (folder / "wrong.gguf").write_bytes(data)
    wrong = Tinyrun(None, folder / "wrong.gguf")
    tokens = prompt(right.vocab, 100)
    assert wrong.read(tokens).difference(right.read(tokens))
