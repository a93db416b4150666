"""Opening damaged files: one clear error each, and never anything else."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.hostile.damage import DAMAGES, STRING, Damage, Model, u64
from tests.tiny import CASES

from quaff.checkpoint import open_checkpoint
from quaff.errors import QuaffError

AT_OPENING = [kind for kind in DAMAGES.values() if kind.stage == "open"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("good") / "good.gguf").read_bytes()


def test_taking_apart_and_packing_changes_nothing(good: bytes) -> None:
    assert Model.parse(good).pack() == good


def test_there_are_enough_kinds() -> None:
    assert len(AT_OPENING) >= 25
    assert len(DAMAGES) >= 80


@pytest.mark.parametrize("kind", AT_OPENING, ids=lambda kind: kind.name)
def test_damage_is_named(tmp_path: Path, good: bytes, kind: Damage) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(kind.make(Model.parse(good)))
    with pytest.raises(QuaffError, match=kind.said) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable() and len(message) < 500


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES.values() if kind.stage == "load"], ids=lambda kind: kind.name)
def test_other_damage_is_not_the_readers_business(tmp_path: Path, good: bytes, kind: Damage) -> None:
    """A file whose bytes are sound opens, so that `quaff inspect` can show what is wrong with it."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(kind.make(Model.parse(good)))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata


def test_every_cut_of_the_header(tmp_path: Path, good: bytes) -> None:
    """No length of the header is accepted but the whole: checked byte by byte around its parts, in steps elsewhere."""
    model = Model.parse(good)
    start = model.data_start()
    near = {n for edge in (0, len(model.header()), len(model.header() + model.metadata()), start) for n in range(edge - 40, edge + 40)}
    path = tmp_path / "cut.gguf"
    for length in sorted(n for n in near | set(range(0, start, 101)) if 0 <= n <= len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(QuaffError):
            open_checkpoint(path)


def test_a_header_without_end_is_refused_before_it_is_read(tmp_path: Path, good: bytes) -> None:
    """A sparse file that truly has the bytes it claims: 600 MB of text in one metadata entry."""
    model = Model.parse(good)
    model.put("general.name", STRING, u64(600_000_000))
    path = tmp_path / "sparse.gguf"
    path.write_bytes(model.pack())
    os.truncate(path, 700_000_000)
    with pytest.raises(QuaffError, match="makes the header longer than 536870912 bytes"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("fuzz") / "fuzzed.gguf"


SETTINGS = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8)


@SETTINGS
@given(flips=flips, cut=st.one_of(st.none(), st.floats(0, 1)), where=st.sampled_from(["header", "anywhere", "counts"]))
@example(flips=[(0.0, 1)], cut=None, where="counts")
def test_random_damage_raises_only_our_errors(
    scratch: Path, good: bytes, flips: list[tuple[float, int]], cut: float | None, where: str
) -> None:
    """Bytes flipped anywhere, or in the header, or among the first 200 bytes, and the file perhaps cut."""
    span = {"header": Model.parse(good).data_start(), "anywhere": len(good), "counts": 200}[where]
    content = bytearray(good)
    for position, flip in flips:
        content[int(position * span)] ^= flip
    if cut is not None:
        del content[int(cut * len(content)) :]
    # A new file each time: a mapped one must not be rewritten.
    scratch.unlink(missing_ok=True)
    scratch.write_bytes(content)
    try:
        with open_checkpoint(scratch) as checkpoint:
            assert sum(view.nbytes for view in checkpoint.tensors.values()) <= os.path.getsize(scratch)
            for view in checkpoint.tensors.values():
                view.data.sum()
    except QuaffError as error:
        assert str(error).isprintable()


@SETTINGS
@given(tail=st.binary(max_size=300))
def test_random_bytes_after_the_magic(scratch: Path, tail: bytes) -> None:
    scratch.unlink(missing_ok=True)
    scratch.write_bytes(b"GGUF\x03\0\0\0" + tail)
    try:
        open_checkpoint(scratch).close()
    except QuaffError as error:
        assert str(error).isprintable()
