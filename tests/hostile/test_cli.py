"""What a user sees of a damaged file: one line, and a failing exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hostile.damage import DAMAGES, Damage, Model
from tests.tiny import CASES

KINDS = [
    "empty",
    "cut-in-metadata",
    "cut-in-tensor-table",
    "cut-in-data",
    "big-endian",
    "huge-tensor-count",
    "bad-utf8-in-value",
    "huge-string-in-array",
    "duplicate-key",
    "no-architecture",
    "zero-dimension",
    "dimensions-that-wrap-to-zero",
    "unsupported-tensor-type",
    "offset-past-the-end",
    "overlapping-tensors",
    "split",
    "architecture-with-line-break",
    "huge-layer-count",
    "epsilon-of-nan",
    "vocabulary-with-too-few-tokens",
    "no-tokenizer",
    "missing-tensor",
    "scale-of-nan",
    "template-that-raises",
]


def quaff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quaff", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("good") / "good.gguf").read_bytes()


def assert_one_error(result: subprocess.CompletedProcess[str], said: str) -> None:
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert said in lines[0]


@pytest.mark.parametrize("kind", [DAMAGES[name] for name in KINDS], ids=lambda kind: kind.name)
def test_run(tmp_path: Path, good: bytes, kind: Damage) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(kind.make(Model.parse(good)))
    assert_one_error(quaff("run", str(path), "hi"), "" if "template" in kind.name else str(path))


@pytest.mark.parametrize("verb", [["run"], ["inspect"], ["verify"], ["bench"], ["score"], ["chat"]], ids=lambda verb: verb[0])
def test_every_verb(tmp_path: Path, good: bytes, verb: list[str]) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(DAMAGES["cut-in-data"].make(Model.parse(good)))
    text = tmp_path / "text.txt"
    text.write_text("some words to read")
    extra = {"run": ["hi"], "score": [str(text)]}.get(verb[0], [])
    assert_one_error(quaff(*verb, str(path), *extra), "unfinished download")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.gguf", "no such file"),
        (".", "is a folder"),
        ("smolm2", "did you mean smollm2?"),
        ("hf:owner", "write hf:owner/repo/file"),
    ],
)
def test_names_that_are_nothing(name: str, said: str) -> None:
    assert_one_error(quaff("run", name, "hi"), said)
