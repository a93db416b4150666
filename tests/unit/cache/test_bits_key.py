"""The key of the bits: equal for equal weights and modes, whatever the file; another for everything that can change a bit."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny import CASES

import quaff.cache.bits_key as module
from quaff.cache.bits_key import bits_key, remembered_content
from quaff.checkpoint import open_checkpoint
from quaff.checkpoint.hashes import content_sha256
from quaff.graph.builder import build_graph
from quaff.models import read_model
from quaff.weights.packing import write_packed


def key(path: Path, context: int | None = None) -> bytes:
    with open_checkpoint(path) as checkpoint:
        model = read_model(checkpoint, context)
        return bits_key(content_sha256(model.views), model.config, "int8", "int16")


def test_keys_differ_in_everything_that_changes_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(CASES["llama-gqa"].write(tmp_path / "m.gguf")) as checkpoint:
        model = read_model(checkpoint)
        content = content_sha256(model.views)
    config = model.config
    keys = {
        bits_key(content, config, "int8", "int16"),
        bits_key("0" * 64, config, "int8", "int16"),
        bits_key(content, config, "float32", "int16"),
        bits_key(content, config, "int8", "float32"),
        bits_key(content, replace(config, eps=1e-6), "int8", "int16"),
        bits_key(content, replace(config, embedding_scale=2.0), "int8", "int16"),
    }
    monkeypatch.setattr(module._native, "NUMERICS_VERSION", module._native.NUMERICS_VERSION + 1)
    keys.add(bits_key(content, config, "int8", "int16"))
    assert len(keys) == 7
    assert all(len(k) == 32 for k in keys)


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "lfm2moe", "gemma4"])
def test_a_packed_file_has_the_key_of_what_it_was_made_from(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        model = read_model(checkpoint)
        write_packed(tmp_path / "m.quaff", checkpoint, model.views, build_graph(model.config, model.family, model.tensors))
    assert key(tmp_path / "m.quaff") == key(path)


def test_a_name_and_a_context_do_not_count_but_a_weight_does(tmp_path: Path) -> None:
    one = key(CASES["llama-gqa"].write(tmp_path / "one.gguf"))
    assert key(CASES["llama-gqa"].write(tmp_path / "two.gguf"), context=100) == one
    assert key(replace(CASES["llama-gqa"], context=999).write(tmp_path / "three.gguf")) == one
    assert key(replace(CASES["llama-gqa"], seed=99).write(tmp_path / "four.gguf")) != one


def test_every_model_has_a_key_of_its_own_and_the_same_in_another_process(tmp_path: Path) -> None:
    paths = [CASES[name].write(tmp_path / f"{name}.gguf") for name in CASES]
    keys = [key(path).hex() for path in paths]
    assert len(set(keys)) == len(CASES)
    code = "from sys import argv; from tests.unit.cache.test_bits_key import Path, key; print(*[key(Path(p)).hex() for p in argv[1:]])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", code, *paths], env=environment, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert result.stdout.split() == keys


def test_weights_are_read_once_while_their_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    reads = 0

    def counted(views: object, progress: object) -> str:
        nonlocal reads
        reads += 1
        return content_sha256(views, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "content_sha256", counted)

    def content() -> str:
        with open_checkpoint(path) as checkpoint:
            return remembered_content(checkpoint, read_model(checkpoint).views, tmp_path / "content")

    first = content()
    assert (content(), reads) == (first, 2)  # the file is too young to be told by its time
    os.utime(path, (1, 1))
    assert [content(), content(), content()] == [first] * 3
    assert reads == 3
    os.utime(path, (2, 2))
    assert (content(), reads) == (first, 4)
    for kept in (tmp_path / "content").iterdir():
        kept.write_bytes(b"\xff damaged")
    assert (content(), reads) == (first, 5)
    replace(CASES["llama-gqa"], seed=99).write(path)
    os.utime(path, (3, 3))
    assert content() != first


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    os.utime(path, (1, 1))
    (tmp_path / "content").write_bytes(b"a file")
    with open_checkpoint(path) as checkpoint:
        views = read_model(checkpoint).views
        assert remembered_content(checkpoint, views, tmp_path / "content") == content_sha256(views)
