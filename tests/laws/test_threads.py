"""Law: the number of threads never shows, and a thread that inherits flush-to-zero or another rounding changes nothing."""

from pathlib import Path

import numpy as np
import pytest
from tests.laws.paths import ISAS, Tinyrun, prompt
from tests.tiny import CASES

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


@pytest.mark.parametrize("isa", ISAS)
def test_repeated_runs_are_equal(models: dict[str, Tinyrun], isa: str) -> None:
    """Tiles are claimed in another order every time."""
    model = models["llama-odd"]
    model.use(isa, 3)
    tokens = prompt(model.vocab, 90, seed=4)
    first = model.read(tokens, Order("chunk", 40))
    assert all(not model.read(tokens, Order("chunk", 40)).difference(first) for _ in range(20))


def test_one_changed_weight_fails_the_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one bit of one value of a norm, as a worker that computes another sum would leave it."""
    tiny = CASES["llama-gqa"]
    right = Tinyrun(tiny, folder / "right.gguf")
    vector = np.array
    flipped = []

    def off_by_one_ulp(values: np.ndarray, *args: object, **kwargs: object) -> np.ndarray:
        out = vector(values, *args, **kwargs)  # type: ignore[call-overload]
        if out.dtype == np.float32 and not flipped:
            out.view(np.uint32)[5] += 1
            flipped.append(5)
        return out

    monkeypatch.setattr("quaff.weights.resident.np.array", off_by_one_ulp)
    wrong = Tinyrun(tiny, folder / "wrong.gguf")
    monkeypatch.undo()
    assert flipped
    tokens = prompt(right.vocab, 100)
    assert wrong.read(tokens).difference(right.read(tokens))
