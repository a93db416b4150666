"""Law: a prefix that comes back from the disk gives the bytes of a cold run, in its state and in every row that follows."""

from pathlib import Path

import numpy as np
import pytest
from tests.laws.paths import Tinyrun, Trace, prompt, state_hash, tiny_run

from quaff.batch import PAGE
from quaff.cache.entry import BLOCK, Layout
from quaff.cache.memory import Memory
from quaff.cache.pages import split_page
from quaff.cache.store import Store
from quaff.schedule import Order

KEY = bytes(32)
LENGTH = 2 * BLOCK + 70
PLACES = (1, *(n * size + i for size in (PAGE, BLOCK) for n in (1, 2) for i in (-1, 0, 1)), LENGTH - 30)


def make_store(model: Tinyrun, folder: Path) -> Store:
    return Store(folder, KEY, Layout(model.cache.kinds, model.cache.states.kinds), 1 << 30)


def put(model: Tinyrun, store: Store, tokens: list[int], places: tuple[int, ...]) -> None:
    """Read `tokens` in steps that end at `places`, and have the prefix at each of them written."""
    sequence = model.cache.create()
    for begin, end in zip((0, *places), places, strict=False):
        model.step([(sequence, tokens[begin:end])], Order("chunk", 64), [Trace()])
        store.put(tokens[:end], Memory.of(model.cache, sequence), lambda sequence: None)
        assert store.flush(60)
    model.cache.free(sequence)


def restore(model: Tinyrun, store: Store, tokens: list[int]) -> tuple[int, int]:
    """(sequence, positions) of the longest prefix on disk."""
    found = store.find(tokens)
    assert found is not None
    sequence = model.cache.receive(found.full)
    assert store.read(found, Memory.of(model.cache, sequence))
    model.cache.truncate(sequence, found.length)
    return sequence, found.length


def test_a_restored_prefix_continues_with_the_bits_of_a_cold_run(model: Tinyrun, tmp_path: Path) -> None:
    """Block boundary (sglang 22819), of pages and of files, and the positions beside them; into memory that held something else."""
    tokens = prompt(model.vocab, LENGTH, seed=1)
    cold = model.read(tokens)
    held = model.cache.pages_in_use, model.cache.states.slots_in_use
    put(model, make_store(model, tmp_path), tokens, PLACES)
    store = make_store(model, tmp_path)
    for place in PLACES:
        sequence, length = restore(model, store, [*tokens[:place], (tokens[place] + 1) % model.vocab])
        assert length == place
        assert model.cache.kv_sha256(sequence) == state_hash(model, tokens[:place])
        trace = Trace()
        model.step([(sequence, tokens[place:])], Order("chunk", 50), [trace])
        assert not trace.difference(cold.after(place)), f"continued at {place}"
        model.cache.free(sequence)
    assert store.counters.hits == len(PLACES)
    assert (model.cache.pages_in_use, model.cache.states.slots_in_use) == held


def test_files_do_not_depend_on_the_path_to_them(model: Tinyrun, tmp_path: Path) -> None:
    """What is stored follows from the tokens: read whole, in steps, or in steps after a restart, every byte is the same."""
    tokens = prompt(model.vocab, LENGTH - 30, seed=2)
    put(model, make_store(model, tmp_path / "whole"), tokens, (len(tokens),))
    put(model, make_store(model, tmp_path / "steps"), tokens, (BLOCK - 7, BLOCK + 5, len(tokens)))
    put(model, make_store(model, tmp_path / "again"), tokens, (BLOCK - 7, BLOCK + 5))
    store = make_store(model, tmp_path / "again")
    sequence, length = restore(model, store, tokens)
    assert length == BLOCK + 5
    model.step([(sequence, tokens[length:])], Order("chunk", 33), [Trace()])
    store.put(tokens, Memory.of(model.cache, sequence), model.cache.free)
    assert store.flush(60)

    def content(name: str) -> dict[str, bytes]:
        ends = f"-{len(tokens)}.place"
        return {p.name: p.read_bytes() for p in (tmp_path / name).rglob("*-*") if p.suffix == ".block" or p.name.endswith(ends)}

    assert content("whole") == content("steps") == content("again")
    assert len(content("whole")) == 3


def test_a_restored_byte_that_is_wrong_fails_the_comparison(model: Tinyrun, tmp_path: Path) -> None:
    """Negative control: a file whose checksum was made to fit a changed value."""
    tokens = prompt(model.vocab, BLOCK + 20, seed=3)
    cold = model.read(tokens)
    store = make_store(model, tmp_path)
    sequence = model.cache.create()
    model.step([(sequence, tokens[: BLOCK + 10])], Order("chunk", 64), [Trace()])
    twin = model.cache.fork(sequence)
    memory = Memory.of(model.cache, twin)
    # The newest position, which all windows see; of a page that two sequences share a copy is changed.
    model.cache.grow(twin, BLOCK + 11)
    for k, table in enumerate(model.cache.tables(twin)):
        page = model.cache.pools[k].view(int(table[-1]))
        values = split_page(page, model.cache.kinds[k])[1]
        values[:] = np.where(values, values ^ 0x0040, values)
    changed = Memory(twin, memory.layout, memory.pools, memory.state_pools, model.cache.tables(twin), memory.slots)
    store.put(tokens[: BLOCK + 10], changed, lambda sequence: None)
    assert store.flush(60)
    restored, length = restore(model, make_store(model, tmp_path), tokens)
    assert length == BLOCK + 10
    assert model.cache.kv_sha256(restored) != state_hash(model, tokens[:length])
    trace = Trace()
    model.step([(restored, tokens[length:])], Order("chunk", 50), [trace])
    assert trace.difference(cold.after(length))
    for s in (sequence, twin, restored):
        model.cache.free(s)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_another_load_of_the_same_model_goes_on_from_the_disk(name: str, tmp_path: Path) -> None:
    """A restart: other memory, another order of pages, another instruction set would do too."""
    first = tiny_run(name, tmp_path)
    tokens = prompt(first.vocab, LENGTH, seed=4)
    cold = first.read(tokens)
    put(first, make_store(first, tmp_path / "cache"), tokens, (LENGTH - 30,))
    second = tiny_run(name, tmp_path)
    sequence, length = restore(second, make_store(second, tmp_path / "cache"), tokens)
    assert length == LENGTH - 30
    trace = Trace()
    second.step([(sequence, tokens[length:])], Order("chunk", 50), [trace])
    assert not trace.difference(cold.after(length))
