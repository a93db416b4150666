"""Files of the comparison: made once, named after what they are; their content as the table prints it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks import files
from benchmarks.files import FILES, Source, content, model_file
from tests.tiny import Tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUAFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(FILES, "random", Source(shape="tiny", kind="q8_0"))
    return tmp_path / "cache" / "benchmarks"


def test_a_random_model_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file("random", sys.executable)
    assert path == cache / "random-r1.gguf"
    assert list(cache.iterdir()) == [path]
    assert str(content(path)) == "Q8_0 99 %, F32 1 %"
    assert model_file("random", "no/such/interpreter") == path
    monkeypatch.setattr(files, "REVISION", 2)
    assert model_file("random", sys.executable) == cache / "random-r2.gguf"


def test_what_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "resolve", lambda name: tmp_path / "absent.gguf")
    with pytest.raises(SystemExit, match="smollm2-q8_0 could not be made:\n"):
        model_file("smollm2-q8_0", sys.executable)


def test_other_names_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    assert model_file(str(path), "unused") == path
    monkeypatch.setattr(files, "resolve", lambda name: Path("/models") / name)
    assert model_file("gemma3-270m-q4_k_m", "unused") == Path("/models/gemma3")


def test_an_embedding_beside_a_head_is_not_read_whole(tmp_path: Path) -> None:
    tied, apart = (content(Tiny(tied=t, embedding="F32").write(tmp_path / f"{t}.gguf")) for t in (True, False))
    table = 300 * 64
    assert tied.token_bytes == sum(tied.types.values())
    assert apart.token_bytes == sum(apart.types.values()) - 4 * table
    assert apart.token_bytes == tied.token_bytes - 4 * table + table // 32 * 18
    assert (tied.vocab, apart.vocab) == (300, 300)
