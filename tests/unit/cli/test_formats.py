"""Folders on the command line: --quantize, convert, and the table of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.families.cases import FAMILIES
from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_verbs import assert_error

from quaff.models import FAMILIES as REGISTRY

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"].write(tmp_path_factory.mktemp("folder") / "tiny")


def test_inspect_says_what_becomes_of_the_matrices(cli: Cli, folder: Path) -> None:
    report = json.loads(cli("inspect", folder, "--quantize", "q4_1", "--json").out)
    assert (report["format"], report["quantized"], report["name"], report["supported"]) == ("safetensors", "q4_1", "tiny", True)
    assert set(report["tensor_types"]) == {"Q4_1", "F32"} and report["file_bytes"] == (folder / "model.safetensors").stat().st_size
    assert "safetensors, matrices become q8_0 on load" in cli("inspect", folder).out
    assert "safetensors, matrices as stored" in cli("inspect", folder, "--quantize", "none").out


def test_every_verb_that_loads_takes_quantize(cli: Cli, folder: Path, tmp_path: Path, model: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the rain in spain")
    runs = {q: cli("run", folder, "hi", "--max-tokens", 12, "--json", "--quantize", q).out for q in ("q8_0", "q4_0", "none")}
    assert len({json.loads(out)["text"] for out in runs.values()}) > 1
    scores = {q: json.loads(cli("score", folder, text, "--json", "--quantize", q).out)["perplexity"] for q in ("q8_0", "q4_0", "none")}
    assert len(set(scores.values())) == 3
    for verb in (("verify", "--tokens", 130), ("explain", "-p", 64), ("bench", "-p", 16, "-n", 0, "-r", 1)):
        assert cli(verb[0], folder, *verb[1:], "--quantize", "q4_0", "--json").code == 0
    assert cli("chat", folder, "--quantize", "q4_0", "--max-tokens", 2, stdin=b"hi\n").code == 0
    assert_error(cli("bench", folder, "--ledger", tmp_path / "ledger.jsonl"), 1, "the ledger keeps figures of model files", "quaff convert")
    assert_error(cli("run", model, "hi", "--quantize", "q8_0"), 1, "a file is taken as it is")
    assert_error(cli("run", folder, "hi", "--quantize", "q5_0"), 2, "q5_0")


def test_convert_writes_a_file_that_runs_alike(cli: Cli, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    assert cli("convert", folder, out, "--type", "q4_0").out.strip() == str(out)
    assert_error(cli("convert", folder, out), 1, "exists already")
    other = tmp_path / "n.gguf"
    assert json.loads(cli("convert", folder, other, "--json").out) == {
        "path": str(other),
        "file_bytes": other.stat().st_size,
        "type": "q8_0",
    }
    for path, kind in ((out, "q4_0"), (other, "q8_0")):
        ours = json.loads(cli("run", path, "hello", "--max-tokens", 8, "--json").out)
        theirs = json.loads(cli("run", folder, "hello", "--max-tokens", 8, "--json", "--quantize", kind).out)
        assert (ours["text"], ours["prompt_tokens"]) == (theirs["text"], theirs["prompt_tokens"])


def test_models_lists_the_registry(cli: Cli) -> None:
    found = json.loads(cli("models", "--json").out)["models"]
    assert [entry["architecture"] for entry in found] == sorted(REGISTRY)
    for entry in found:
        assert entry.keys() == {"architecture", "layer_kinds", "formats", "oracle", "tolerance"}
        assert entry["layer_kinds"] and entry["formats"][0] == "gguf" and entry["oracle"] and 0 < entry["tolerance"] <= 1e-3


def test_the_table_in_the_docs_is_up_to_date(cli: Cli) -> None:
    assert "\n\n" + cli("models").out in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_a_packed_file_runs_alike_under_every_verb(cli: Cli, folder: Path, model: Path, tmp_path: Path) -> None:
    packed, of_folder = tmp_path / "m.quaff", tmp_path / "f.quaff"
    assert cli("pack", model, packed).out.strip() == str(packed)
    assert json.loads(cli("pack", folder, of_folder, "--quantize", "q4_0", "--json").out) == {
        "path": str(of_folder),
        "file_bytes": of_folder.stat().st_size,
    }
    for ours, theirs in (((packed,), (model,)), ((of_folder,), (folder, "--quantize", "q4_0"))):
        found, expected = (json.loads(cli("run", *of, "--max-tokens", 8, "--json", stdin=b"hello").out) for of in (ours, theirs))
        assert (found["text"], found["prompt_tokens"]) == (expected["text"], expected["prompt_tokens"])
    text = tmp_path / "text.txt"
    text.write_text("the rain in spain")
    assert (
        json.loads(cli("score", packed, text, "--json").out)["logprobs"] == json.loads(cli("score", model, text, "--json").out)["logprobs"]
    )
    for verb in (("verify", "--tokens", 130), ("explain", "-p", 64), ("bench", "-p", 16, "-n", 0, "-r", 1)):
        assert cli(verb[0], packed, *verb[1:], "--json").code == 0
    assert cli("chat", packed, "--max-tokens", 2, stdin=b"hi\n").code == 0
    assert_error(cli("pack", packed, tmp_path / "again.quaff"), 1, "m.quaff is packed already")
    assert_error(cli("pack", model, packed), 1, "m.quaff: exists already")
    assert_error(cli("run", packed, "hi", "--quantize", "q8_0"), 1, "a file is taken as it is")


def test_inspect_shows_and_checks_packed_files(cli: Cli, folder: Path, model: Path, tmp_path: Path) -> None:
    packed, of_folder = tmp_path / "m.quaff", tmp_path / "f.quaff"
    cli("pack", model, packed)
    cli("pack", folder, of_folder, "--quantize", "q4_1")
    report, plain = (json.loads(cli("inspect", path, "--json").out) for path in (packed, model))
    assert report["format"] == "packed" and plain["packed_from"] is None
    assert report["packed_from"] == {"name": model.name, "format": "GGUF", "file_bytes": model.stat().st_size}
    for key in ("architecture", "name", "parameters", "context_length", "layers", "tokenizer", "vocabulary", "memory"):
        assert report[key] == plain[key]
    assert "packed from tiny (safetensors, q4_1)" in cli("inspect", of_folder).out
    assert cli("inspect", packed, "--check").code == 0
    assert_error(cli("inspect", model, "--check"), 1, "--check compares with the hashes of a packed file, and this is none")
    content = bytearray(packed.read_bytes())
    content[-8192] ^= 4
    packed.write_bytes(content)
    assert cli("inspect", packed).code == 0
    assert_error(cli("inspect", packed, "--check"), 1, "m.quaff: damaged packed file: the bytes of tensor", "pack the model again")
