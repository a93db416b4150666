"""Prompts that begin alike and come together are read once: the later ones wait until the first is past what they share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from quaff.batch import PAGE
from quaff.cache.pages import PageCache, pages_for
from quaff.cache.prefix import PrefixCache
from quaff.errors import MemoryBudgetError

if TYPE_CHECKING:
    from quaff.engine.engine import Request


class Convoy:
    """Looks for a request that reads now what another is about to read."""

    def __init__(self, cache: PageCache, prefix: PrefixCache) -> None:
        self._cache = cache
        self._prefix = prefix

    def waits(self, request: Request, readers: Sequence[Request], step_rows: int) -> bool:
        """True while one of `readers`, whose prompts are being read in steps of at most `step_rows`, is on its way to a place where
        `request` can begin. One that has passed it is published: then the prefix tree has more for the request than before."""
        if request.version < 0:
            return False  # it goes on from a state that it was given
        if request.leader not in readers:
            request.leader = None
            shares = [
                (self._shared(request, reader), reader) for reader in readers if reader is not request and reader.salt == request.salt
            ]
            shared, leader = max(shares, key=lambda share: share[0], default=(0, None))
            request.meeting = self._place(leader, shared, request.computed, step_rows) if leader is not None else 0
            if leader is None or request.meeting < request.computed + PAGE:
                return False
            request.leader = leader
        leader = request.leader
        assert leader is not None
        # The page that ends a prefix is shared when its owner does not write into it any more.
        if leader.computed < pages_for(request.meeting) * PAGE:
            return True
        self._prefix.publish(leader.sequence, leader.tokens[: leader.computed], leader.salt, growing=True)
        request.leader = None
        return False

    def _shared(self, request: Request, reader: Request) -> int:
        """Leading tokens that two prompts share and of which the first needs no logits."""
        most = max(0, min(request.prompt_tokens - 1, request.logits_from, reader.prompt_tokens))
        different = np.flatnonzero(request.ids[:most] != reader.ids[:most])
        return int(different[0]) if len(different) else most

    def _place(self, leader: Request, shared: int, known: int, step_rows: int) -> int:
        """The last place of a reader within what is shared. Where it can be left at marked places only, one is marked ahead of it."""
        if self._prefix.anywhere:
            return shared // PAGE * PAGE
        if leader.computed <= shared >= known + PAGE and self._cache.accountant.fits(self._cache.snapshot_bytes(shared)):
            self._cache.snapshot(leader.sequence, shared)
            with suppress(MemoryBudgetError):
                self._cache.reserve(leader.sequence, leader.reserved, step_rows)
            return shared
        return max((place for place in leader.boundaries if place <= shared), default=0)
