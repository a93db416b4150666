"""Writing packed files: weights as they lie in memory, in the order in which a pass reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff import _native
from quaff.checkpoint import GGML_TYPES, Checkpoint, Hashes, Origin, TensorView
from quaff.checkpoint.packed import PAGE_BYTES, PANEL_ALIGNMENT, Entry, align, encode_header, panel_bytes
from quaff.checkpoint.writing import new_file
from quaff.errors import CheckpointError, ConfigError, UnsupportedError, located, quote
from quaff.graph.program import Graph

Progress = Callable[[int, int], None]
"""(bytes of blocks packed, in all)."""

BLOCK_BYTES = 32 << 20  # of blocks, packed and written at once
_NO_HASHES = Hashes("0" * 64, "0" * 64)


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that are read together, and so lie together. `experts`: stacks of one op whose matrices take turns, expert 0 first."""

    names: tuple[str, ...]
    experts: bool = False


def load_order(graph: Graph, views: Mapping[str, TensorView]) -> list[Group]:
    """Every weight once: vectors and what else is small, token tables, then stage by stage the matrices and the experts; last what no stage
    reads."""
    stages = graph.stages
    wanted = [Group(tuple(name for stage in stages for name in stage.small_weights))]
    wanted.append(Group(tuple(name for stage in stages for name in stage.tables)))
    for stage in stages:
        wanted += [Group(stage.linear_weights), *(Group(names, experts=True) for names in stage.expert_stacks)]
    wanted.append(Group(tuple(views)))
    seen: set[str] = set()
    groups = []
    for group in wanted:
        names = tuple(name for name in dict.fromkeys(group.names) if name not in seen)
        seen.update(names)
        groups += [Group(names, group.experts)] if names else []
    return groups


def place_groups(groups: Sequence[Group], views: Mapping[str, TensorView]) -> list[Entry]:
    """Where every weight goes: groups at multiples of 4096 bytes, weights in them at multiples of 64, every expert at one of 4096."""
    entries: list[Entry] = []
    at = 0
    for group in groups:
        at = align(at, PAGE_BYTES)
        inner = 0  # of an expert
        for name in group.names:
            view = views[name]
            nbytes, matrices = panel_bytes(name, view.shape, view.ggml_type), max(1, view.matrices)
            if not nbytes or len(view.shape) > 3 and not view.is_vector:
                raise UnsupportedError(f"tensor {quote(name)} of shape {view.shape} and type {view.type_name} cannot be packed")
            size = align(nbytes, PANEL_ALIGNMENT)
            offset = at + inner if group.experts else at
            entries.append(Entry(name, view.shape, view.ggml_type, offset, nbytes, size if matrices > 1 else nbytes, _NO_HASHES))
            if group.experts:
                inner += size
            else:
                at += matrices * size
        if group.experts:
            stride, experts = align(inner, PAGE_BYTES), entries[-1].matrices
            if any(views[name].matrices != experts for name in group.names):
                raise ConfigError(f"the stacks {', '.join(group.names)} have different numbers of experts")
            for i in range(len(entries) - len(group.names), len(entries)):
                entries[i] = replace(entries[i], stride=stride if experts > 1 else entries[i].nbytes)
            at += experts * stride
    return entries


def write_packed(
    out: Path, checkpoint: Checkpoint, views: Mapping[str, TensorView], graph: Graph, threads: int = 1, progress: Progress | None = None
) -> None:
    """Pack `views`, the weights of `checkpoint` by the names that stages use, into the new file `out`, in the order of `graph`.

    The space is taken first, the header written last, and the file gets its name when all of it is on disk. Raises ConfigError for what is
    packed already, CheckpointError for values that are not finite and for what the system refuses.
    """
    if checkpoint.format == "packed":
        raise ConfigError(f"{checkpoint.path} is packed already")
    entries = place_groups(load_order(graph, views), views)
    origin = Origin(checkpoint.path.resolve().name, checkpoint.format, checkpoint.quantized, checkpoint.file_bytes)
    _, data, size = encode_header(origin, checkpoint.metadata, entries)
    total, done = sum(views[e.name].nbytes for e in entries), 0
    with new_file(out) as temporary, temporary.open("r+b", buffering=0) as file:
        _take_space(file.fileno(), size)
        for i, e in enumerate(entries):
            with located(checkpoint.path):
                entries[i] = replace(e, hashes=_write_tensor(file.fileno(), data, e, views[e.name], threads))
            done += views[e.name].nbytes
            if progress is not None:
                progress(done, total)
        _write(file.fileno(), encode_header(origin, checkpoint.metadata, entries)[0], 0)


def _write_tensor(fd: int, data: int, e: Entry, view: TensorView, threads: int) -> Hashes:
    panels, blocks = sha256(), sha256()
    at = data + e.offset
    for matrix, offset, raw, packed in _pieces(view, threads):
        blocks.update(raw.data)
        panels.update(packed.data)
        _write(fd, packed, at + matrix * e.stride + offset)
    return Hashes(panels.hexdigest(), blocks.hexdigest())


def _pieces(view: TensorView, threads: int) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.uint8]]]:
    """A weight piece by piece: (matrix, offset of the panels in it, blocks, panels)."""
    if view.is_vector:
        raw = view.data
        if not np.isfinite(raw.view(np.float32)).all():
            raise CheckpointError(f"tensor {quote(view.name)} holds a value that is not finite; the file is damaged")
        yield 0, 0, raw, raw
        return
    form, (rows, cols), place = GGML_TYPES[view.ggml_type], view.shape[-2:], view.place
    row = cols // form.block * form.nbytes
    step = max(1, BLOCK_BYTES // (16 * row)) * 16  # whole panels
    made = view.data if place is None else np.empty(0, np.uint8)
    for matrix in range(max(1, view.matrices)):
        offset = 0
        for begin in range(0, rows, step):
            first, count = matrix * rows + begin, min(step, rows - begin)
            raw = made[first * row : (first + count) * row] if place is None else place.pieces(first, count).read()
            try:
                packed = _native.pack_panels(view.ggml_type, raw, count, cols, threads)
            except ValueError as error:
                where = f", rows from {begin} on" if begin else ""
                raise CheckpointError(f"tensor {quote(view.name)}{where}: {error}") from None
            yield matrix, offset, raw, packed
            offset += packed.nbytes


def _take_space(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def _write(fd: int, content: Any, at: int) -> None:
    left = memoryview(content).cast("B")
    while left:
        n = os.pwrite(fd, left, at)
        left, at = left[n:], at + n
