"""Law: a state that was paused, forked, shortened or shared continues with the bits of a fresh run."""

import numpy as np
import pytest
from tests.laws.paths import Tinyrun, Trace, pairs, prompt

from quaff.cache.pages import PageCache
from quaff.schedule import Order

BOUNDARIES = (1, 63, 64, 65, 127, 128, 129)


def continued(model: Tinyrun, sequence: int, tokens: list[int], order: Order, cuts: list[int] | None = None) -> Trace:
    """Reads what `sequence` does not have yet."""
    trace = Trace()
    for begin, end in pairs([model.cache.written(sequence), *(cuts or []), len(tokens)]):
        model.step([(sequence, tokens[begin:end])], order, [trace])
    return trace


@pytest.mark.parametrize("cached", BOUNDARIES)
def test_pause_fork_and_continue(model: Tinyrun, cached: int) -> None:
    """Block boundary (sglang 22819): prefixes of b-1, b, b+1, 2b-1, 2b, 2b+1 positions."""
    a, b = prompt(model.vocab, 200, seed=1), prompt(model.vocab, 200, seed=2)
    b[:cached] = a[:cached]
    cold_a, cold_b = model.read(a), model.read(b)
    base = model.cache.create()
    model.step([(base, a[:cached])], Order("chunk", 50), [Trace()])
    before = model.cache.kv_sha256(base)
    twin, other = model.cache.fork(base), model.cache.fork(base)
    # Other work in between, in pages that may be reused.
    model.read(prompt(model.vocab, 300, seed=9))
    warm_b = continued(model, twin, b, Order("chunk", 33))
    warm_a = continued(model, other, a, Order("layer", 7), cuts=[cached + 1, 190])
    assert model.cache.kv_sha256(base) == before
    again_a = continued(model, base, a, Order("token"))
    assert not warm_a.difference(cold_a.after(cached))
    assert not again_a.difference(cold_a.after(cached))
    assert not warm_b.difference(cold_b.after(cached))
    assert model.cache.kv_sha256(base) == model.cache.kv_sha256(other) != model.cache.kv_sha256(twin)
    for sequence in (base, twin, other):
        model.cache.free(sequence)


@pytest.mark.parametrize("length", [100, 127, 128, 129, 150])
def test_shortened_state_continues_as_if_it_had_never_been_longer(model: Tinyrun, length: int) -> None:
    tokens = prompt(model.vocab, 160, seed=3)
    sequence = model.cache.create()
    model.step([(sequence, tokens[:length] + prompt(model.vocab, 10, seed=4))], Order("chunk", 64), [Trace()])
    if not model.cache.can_shorten(sequence, length):
        # The window has left a page behind that a row at `length` would see, or the state there was not kept.
        assert model.graph.state_kinds or any(kind.window for kind in model.graph.kv_kinds)
        with pytest.raises(ValueError, match="left behind"):
            model.cache.truncate(sequence, length)
        model.cache.free(sequence)
        return
    model.cache.truncate(sequence, length)
    trace = continued(model, sequence, tokens, Order("chunk", 9))
    assert not trace.difference(model.read(tokens).after(length))
    fresh = model.cache.create()
    model.step([(fresh, tokens)], Order("chunk", 64), [Trace()])
    assert model.cache.kv_sha256(sequence) == model.cache.kv_sha256(fresh)
    model.cache.free(sequence)
    model.cache.free(fresh)


def test_a_page_shared_without_a_copy_fails_the_comparison(model: Tinyrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two continuations write into one partly filled page."""
    a, b = prompt(model.vocab, 100, seed=1), prompt(model.vocab, 100, seed=2)
    b[:40] = a[:40]
    expected = model.read(a).after(60)
    base = model.cache.create()
    model.step([(base, a[:40])], Order("chunk", 64), [Trace()])
    twin = model.cache.fork(base)
    grow = PageCache.grow

    def without_copies(cache: PageCache, sequence: int, end: int) -> None:
        counts = [dict(c) for c in cache._counts]
        for held in cache._counts:
            held.update(dict.fromkeys(held, 1))
        grow(cache, sequence, end)
        for held, old in zip(cache._counts, counts, strict=True):
            held.update(old)

    monkeypatch.setattr(PageCache, "grow", without_copies)
    first = continued(model, base, a[:60], Order("chunk", 64))
    continued(model, twin, b, Order("chunk", 64))
    second = continued(model, base, a, Order("chunk", 64))
    monkeypatch.undo()
    assert first.logits
    assert (np.concatenate(second.logits) != np.concatenate(expected.logits)).any()
    model.cache.free(base)
    model.cache.free(twin)
