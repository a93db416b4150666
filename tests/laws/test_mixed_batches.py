"""Law: who shares the batch, how long they are, and in what order they arrived never shows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.laws.paths import Tinyrun, Trace, prompt
from tests.tiny import CASES

from quaff.schedule import Order

ORDERS = [Order("token"), Order("chunk", 5), Order("chunk", 64), Order("chunk", 1000), Order("layer", 17)]


def run_mixed(
    model: Tinyrun, prompts: list[list[int]], rng: np.random.Generator, order: Order, batches: list[tuple[int, ...]] | None = None
) -> list[Trace]:
    """Sequences arrive at random times; each step takes random rows of a random part of them, in random order.

    `batches` gets the rows of every sequence in each step.
    """
    traces = [Trace() for _ in prompts]
    sequences = [model.cache.create() for _ in prompts]
    done = [0] * len(prompts)
    arrival = rng.integers(0, 4, len(prompts))
    step = 0
    while any(n < len(p) for n, p in zip(done, prompts, strict=True)):
        ready = [i for i in range(len(prompts)) if arrival[i] <= step and done[i] < len(prompts[i])]
        rng.shuffle(ready)
        chosen = ready[: int(rng.integers(1, len(prompts) + 1))]
        # A decode is one row, a prompt many: both in one step.
        rows = {i: int(rng.integers(1, min(len(prompts[i]) - done[i], int(rng.choice([1, 9, 100]))) + 1)) for i in chosen}
        if chosen:
            pairs = [(sequences[i], prompts[i][done[i] : done[i] + rows[i]]) for i in chosen]
            model.step(pairs, order, [traces[i] for i in chosen])
            if batches is not None:
                batches.append(tuple(rows.values()))
        for i in chosen:
            done[i] += rows[i]
        step += 1
    for sequence in sequences:
        model.cache.free(sequence)
    return traces


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ORDERS, ids=lambda o: f"{o.name}{o.chunk}")
def test_company_never_shows(model: Tinyrun, order: Order, threads: int) -> None:
    rng = np.random.default_rng(order.chunk * 2 + threads)
    prompts = [prompt(model.vocab, int(n), seed=i) for i, n in enumerate(rng.choice([1, 2, 30, 63, 64, 65, 130, 200], 5))]
    model.use(threads=threads)
    alone = [model.read(p) for p in prompts]
    batches: list[tuple[int, ...]] = []
    for round_ in range(2):
        for i, trace in enumerate(run_mixed(model, prompts, rng, order, batches)):
            assert not trace.difference(alone[i]), f"sequence {i}, round {round_}, {order}"
    assert any(min(rows) == 1 and max(rows) > 8 for rows in batches), "no decode shared a step with a prompt"


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(CASES)), st.lists(st.integers(1, 140), min_size=1, max_size=4), st.integers(0, 1 << 30), st.sampled_from(ORDERS)
)
def test_random_batches(models: dict[str, Tinyrun], name: str, lengths: list[int], seed: int, order: Order) -> None:
    model = models[name]
    prompts = [prompt(model.vocab, n, seed=seed + i) for i, n in enumerate(lengths)]
    alone = [model.read(p) for p in prompts]
    for trace, expected in zip(run_mixed(model, prompts, np.random.default_rng(seed), order), alone, strict=True):
        assert not trace.difference(expected)


def test_a_mask_that_sees_a_neighbour_fails_the_comparison(model: Tinyrun) -> None:
    """Negative control: two prompts as one sequence, so that the second one's rows attend to the first."""
    a, b = prompt(model.vocab, 70, seed=1), prompt(model.vocab, 60, seed=2)
    joined = model.read(a + b)
    apart = model.read(b)
    assert joined.after(70).difference(apart)
