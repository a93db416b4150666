"""Sequences whose memory is a pure function of their token ids, as a model's is, without a model: for tests of the disk tier."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from quaff import _native
from quaff.batch import PAGE
from quaff.cache.entry import Layout
from quaff.cache.memory import Memory
from quaff.cache.pages import PageCache, split_page
from quaff.cache.store import Found, Store
from quaff.graph.program import KVKind, StateKind
from quaff.weights.budget import Accountant

FULL = KVKind("full", (0, 2), 1, 16, 32, 0)
SLIDING = KVKind("sliding", (1,), 2, 32, 16, 100)
FLOAT = KVKind("float", (0,), 1, 16, 16, 0, 4)
STATE = StateKind("delta", (3, 4), 10)
SHAPES: dict[str, tuple[tuple[KVKind, ...], tuple[StateKind, ...]]] = {
    "full": ((FULL,), ()),
    "float": ((FLOAT,), ()),
    "sliding": ((SLIDING, FULL), ()),
    "recurrent": ((FULL,), (STATE,)),
    "everything": ((FULL, SLIDING), (StateKind("conv", (5,), 6), STATE)),
    "states": ((), (STATE,)),
}
KEY = hashlib.sha256(b"a model").digest()


def make_cache(shape: str = "full", limit: int | None = None) -> PageCache:
    kinds, states = SHAPES[shape]
    pools = [_native.PagePool(len(k.layers), k.kv_heads, k.dim, k.value_dim, k.value_bytes) for k in kinds]
    return PageCache(kinds, pools, Accountant(limit), states, [_native.StatePool(len(s.layers), s.size) for s in states])


def make_store(folder: Path, shape: str = "full", key: bytes = KEY, cap_bytes: int = 1 << 30, waiting_bytes: int = 1 << 30) -> Store:
    return Store(folder, key, Layout(*SHAPES[shape]), cap_bytes, waiting_bytes)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1000, length)]


def compute(cache: PageCache, sequence: int, tokens: Sequence[int], start: int = 0) -> None:
    """What a step does with positions `start` .. : every value follows from all tokens up to its position."""
    cache.grow(sequence, len(tokens))
    tables, states = cache.tables(sequence), cache.states.tables(sequence)
    for i in range(start, len(tokens)):
        seed = int.from_bytes(hashlib.sha256(np.array(tokens[: i + 1], "<i4")).digest()[:8], "little")
        for k, kind in enumerate(cache.kinds):
            parts = split_page(cache.pools[k].view(int(tables[k][i // PAGE])), kind)
            for part, value in zip(parts, (seed + k, seed >> 16, seed >> 8, seed >> 24), strict=False):
                part[..., i % PAGE // 2, i % 2, :] = value % 60000
    for pool, table in zip(cache.states.pools, states, strict=True):
        for rows, slot in table[1:].reshape(-1, 2).tolist():
            end = start + rows
            pool.view(slot)[:] = int.from_bytes(hashlib.sha256(np.array(tokens[:end], "<i4")).digest()[:2], "little")
    cache.commit(sequence, len(tokens))


def computed(cache: PageCache, tokens: Sequence[int]) -> int:
    """A sequence of `tokens`, in one step."""
    sequence = cache.create()
    compute(cache, sequence, tokens)
    return sequence


def put(store: Store, cache: PageCache, tokens: Sequence[int], salt: str = "") -> None:
    """Compute a prefix and have it written."""
    sequence = computed(cache, tokens)
    store.put(tokens, Memory.of(cache, sequence), lambda sequence: None, salt)
    assert store.flush(60)
    cache.free(sequence)


def restore(store: Store, cache: PageCache, found: Found) -> int | None:
    """The sequence that a find leads to, or None."""
    sequence = cache.receive(found.full)
    if not store.read(found, Memory.of(cache, sequence)):
        cache.free(sequence)
        return None
    cache.truncate(sequence, found.length)
    return sequence


def cold_hash(shape: str, tokens: Sequence[int]) -> str:
    """Hash of the state of a cold run."""
    return _cold_hash(shape, tuple(tokens))


@lru_cache(maxsize=1000)
def _cold_hash(shape: str, tokens: tuple[int, ...]) -> str:
    cache = make_cache(shape)
    return cache.kv_sha256(computed(cache, tokens))
