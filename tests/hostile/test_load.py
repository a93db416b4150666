"""Loading and running files whose bytes are sound and whose model is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile.damage import DAMAGES, Damage, Model
from tests.tiny import CASES

import quaff
from quaff.checkpoint import open_checkpoint
from quaff.cli.console import print_json
from quaff.cli.inspect import describe, print_report
from quaff.errors import QuaffError

AT_LOADING = [kind for kind in DAMAGES.values() if kind.stage == "load"]


@pytest.fixture(scope="module", params=["llama-gqa", "gemma3"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return CASES[request.param].write(tmp_path_factory.mktemp("good") / "good.gguf").read_bytes()


def run(path: Path) -> str:
    with quaff.load(path, threads=1, chunk=8, memory_limit_bytes=1 << 28) as llm:
        return llm.chat([{"role": "user", "content": "hi"}], quaff.SamplingParams(max_tokens=2)).text


def test_the_undamaged_file_runs(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(Model.parse(good).pack())
    run(path)


@pytest.mark.parametrize("kind", DAMAGES.values(), ids=lambda kind: kind.name)
def test_damage_is_named(tmp_path: Path, good: bytes, kind: Damage) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(kind.make(Model.parse(good)))
    with pytest.raises(QuaffError, match=kind.said) as caught:
        run(path)
    message = str(caught.value)
    assert message.isprintable()
    # A template fails on the messages it is given; all else is the file's fault, which the message names.
    assert message.startswith(f"{path}: ") or "template" in message


@pytest.mark.parametrize("kind", AT_LOADING, ids=lambda kind: kind.name)
def test_inspect_shows_a_file_that_cannot_run(tmp_path: Path, good: bytes, kind: Damage, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(kind.make(Model.parse(good)))
    with open_checkpoint(path) as checkpoint:
        report = describe(checkpoint)
    print_json(report)
    print_report(report)
    assert str(path) in capsys.readouterr().out


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("fuzz") / "fuzzed.gguf"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4), header=st.booleans())
def test_random_damage_runs_or_raises_our_errors(scratch: Path, good: bytes, flips: list[tuple[float, int]], header: bool) -> None:
    """A flipped byte may go unnoticed (another weight, another token); it must never end in anything but text or a QuaffError."""
    span = Model.parse(good).data_start() if header else len(good)
    content = bytearray(good)
    for position, flip in flips:
        content[int(position * span)] ^= flip
    scratch.unlink(missing_ok=True)
    scratch.write_bytes(content)
    try:
        run(scratch)
    except QuaffError as error:
        assert str(error).isprintable()
