"""Law: for any (prompt, cached, chunk) the bits are those of a cold run."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.laws.paths import ISAS, Tinyrun, Trace, prompt
from tests.tiny import CASES

from quaff.schedule import Order


def warm(model: Tinyrun, tokens: list[int], cached: int, order: Order, fork: bool) -> tuple[Trace, Trace]:
    """(trace of the cached part, trace of the rest) through a state that is forked or continued."""
    first, second = Trace(), Trace()
    base = model.cache.create()
    model.step([(base, tokens[:cached])], order, [first])
    sequence = model.cache.fork(base) if fork else base
    model.step([(sequence, tokens[cached:])], order, [second])
    for s in {base, sequence}:
        model.cache.free(s)
    return first, second


def joined(parts: tuple[Trace, Trace]) -> Trace:
    return Trace(parts[0].logits + parts[1].logits, parts[0].kv + parts[1].kv, parts[1].states)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(CASES)),
    st.integers(2, 330).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 340),
    st.sampled_from(["token", "chunk", "layer"]),
    st.booleans(),
    st.sampled_from(ISAS),
    st.integers(1, 3),
)
@example("llama-gqa", (600, 590), 512, "chunk", True, ISAS[-1], 2)
@example("gemma3", (600, 590), 512, "chunk", True, ISAS[-1], 2)
@example("gemma3-wide", (129, 128), 1, "layer", False, ISAS[-1], 1)
def test_random_prompt_cached_chunk(
    models: dict[str, Tinyrun], name: str, lengths: tuple[int, int], chunk: int, schedule: str, fork: bool, isa: str, threads: int
) -> None:
    """Short suffix (mlxcel 183, mlx-node 33): a hit that leaves fewer rows than a chunk must neither crash nor count an offset twice."""
    model, (n, cached) = models[name], lengths
    tokens = prompt(model.vocab, n, seed=n * 1000 + cached)
    model.use(isa, threads)
    cold = model.read(tokens)
    order = Order(schedule, 1 if schedule == "token" else chunk)  # type: ignore[arg-type]
    assert not joined(warm(model, tokens, cached, order, fork)).difference(cold)


@pytest.mark.parametrize("cached", [1, 64, 100])
def test_a_stale_prefix_fails_the_comparison(model: Tinyrun, cached: int) -> None:
    """Negative control: the cached part belongs to another prompt."""
    tokens = prompt(model.vocab, cached + 20, seed=1)
    stale = [(tokens[0] + 1) % model.vocab, *tokens[1:]] if cached == 1 else prompt(model.vocab, cached, seed=2)
    cold = model.read(tokens)
    _, rest = warm(model, stale[:cached] + tokens[cached:], cached, Order("chunk", 64), True)
    assert (rest.logits[0] != cold.logits[0][cached:]).any()
