"""The benchmark of streaming on a model of fifty megabytes: what it checks, not how fast it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks import coldread, streaming
from tests.tiny import Tiny

LARGE = Tiny(dim=1024, ffn_dim=4096, layers=6, heads=8, kv_heads=2, head_dim=64, vocab=4096, tied=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LARGE.write(tmp_path_factory.mktemp("streaming") / "large.gguf")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["streaming", *map(str, arguments), "--threads", "1"])
    streaming.main()
    report: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def test_the_control(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(monkeypatch, capsys, "control", model, "--tokens", 6)
    assert report["checks"] == {"passes": True, "bytes": True, "decode_apart": True}
    assert 4 < report["ratio"] <= 6


def test_once(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(monkeypatch, capsys, "once", model, "--tokens", 40, "--memory", "128MiB")
    assert report["streamed"]["plan"]["resident"] is False
    assert report["checks"]["one_pass"] and report["checks"]["same_bits"] and report["checks"]["within_budget"]


def test_a_check_that_fails_is_a_status(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights fit: nothing is streamed, and nothing was read in one pass."""
    monkeypatch.setattr(streaming, "cold", lambda *a, **k: json.loads(json.dumps(RUN)))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, capsys, "once", model, "--tokens", 40)
    assert ended.value.code == 1


RUN = {
    "prefill_seconds": 1.0,
    "streaming": {"prefill_passes": 2, "prefill_bytes": 200},
    "peak_rss_bytes": 1,
    "logits_sha256": "a",
    "kv_sha256": "b",
}


@pytest.mark.parametrize("limit", ["memory/", ""])
def test_no_group_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Whether a limit can be set or not, and whatever happens under it."""
    root = tmp_path / limit
    root.mkdir(exist_ok=True)
    monkeypatch.setattr(streaming, "GROUPS", ((tmp_path / "memory", "memory.limit_in_bytes"), (tmp_path, "memory.max")))
    with streaming.limited_memory(5 << 20) as group:
        assert group is not None and group.parent == root
        for file in group.iterdir():
            assert file.read_text() == str(5 << 20)
            file.unlink()  # the kernel's own go with their folder
    monkeypatch.setattr(streaming, "_written", lambda path, number: False)
    with streaming.limited_memory(5 << 20) as group:
        assert group is None
    monkeypatch.setattr(streaming, "_written", lambda path, number: True)
    with pytest.raises(FileNotFoundError, match="a run"), streaming.limited_memory(5 << 20):
        raise FileNotFoundError("a run")
    assert not [path for path in root.iterdir() if path.name != "memory"]


def test_a_budget_that_is_too_small_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="smallest budget that will do is"):
        run(monkeypatch, capsys, "once", model, "--tokens", 40, "--memory", "2MiB")


def test_a_file_is_read_whole_and_its_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom((9 << 20) + 123))
    assert coldread.seconds_to_read(path) > 0
    with open(path, "rb") as file:
        file.read()
        assert coldread.cached_share(file.fileno(), path.stat().st_size) == 1.0


def test_pages_of_memory_cannot_be_dropped() -> None:
    """Negative control: a file that lives in memory stays there, and that is noticed."""
    path = Path("/dev/shm") / f"quaff-{os.getpid()}"
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no file system in memory here")
    try:
        path.write_bytes(bytes(1 << 20))
        with pytest.raises(RuntimeError, match="stays in the page cache"):
            coldread.drop(path)
    finally:
        path.unlink(missing_ok=True)
