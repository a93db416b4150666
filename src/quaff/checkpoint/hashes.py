"""SHA-256 of what a model's weights are made of, and of what a packed file holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256

from quaff.checkpoint.views import TensorView
from quaff.errors import CheckpointError, quote

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


def bytes_sha256(view: TensorView) -> str:
    """Of the bytes of one view, read in blocks, in hexadecimal digits."""
    digest = sha256()
    for block in [view.data] if view.place is None else view.place.blocks():
        digest.update(block.data)
    return digest.hexdigest()


def content_sha256(views: Mapping[str, TensorView], progress: Progress | None = None) -> str:
    """Of all weights by the names that stages use: name, shape, type and blocks of each. A packed file states the hashes of blocks."""
    total, done = sum(view.nbytes for view in views.values()), 0
    blocks: dict[str, str] = {}
    for name, view in views.items():
        blocks[name] = bytes_sha256(view) if view.hashes is None else view.hashes.blocks
        done += view.nbytes
        if progress is not None:
            progress(done, total)
    return sha256("".join(_lines(views, blocks)).encode()).hexdigest()


def _lines(views: Mapping[str, TensorView], blocks: Mapping[str, str]) -> Iterable[str]:
    for name in sorted(views):
        yield json.dumps([name, views[name].shape, views[name].ggml_type, blocks[name]]) + "\n"


def check_hashes(views: Mapping[str, TensorView], progress: Progress | None = None) -> None:
    """Read every tensor of a packed file. CheckpointError names the first whose bytes are not those that were written."""
    total, done = sum(view.nbytes for view in views.values()), 0
    for name, view in views.items():
        if view.hashes is not None and bytes_sha256(view) != view.hashes.panels:
            raise CheckpointError(
                f"damaged packed file: the bytes of tensor {quote(name)} have changed since it was written: pack the model again"
            )
        done += view.nbytes
        if progress is not None:
            progress(done, total)
