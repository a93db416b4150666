"""Damaged Hugging Face folders: one clear line, whatever is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.families.cases import FAMILIES
from tests.hostile.test_cli import assert_one_error, quaff

from quaff.errors import QuaffError
from quaff.models.huggingface import open_model

MODEL = "model.safetensors"
Header = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"].write(tmp_path_factory.mktemp("sound") / "model")


def header(edit: Callable[[Header], None]) -> Callable[[Path], None]:
    """Damage that rewrites the JSON header of model.safetensors, the data left as they are."""

    def damage(folder: Path) -> None:
        content = (folder / MODEL).read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        values = json.loads(content[8 : 8 + length])
        edit(values)
        raw = json.dumps(values).encode()
        (folder / MODEL).write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])

    return damage


def tensor(**changes: Any) -> Callable[[Path], None]:
    return header(lambda values: values["model.norm.weight"].update(changes))


def raw(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / MODEL).write_bytes(edit((folder / MODEL).read_bytes())) and None


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return damage


def arrays(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = load_file(folder / MODEL)
        edit(values)
        save_file(values, folder / MODEL)

    return damage


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "tokenizer.json").read_text())
        edit(values)
        (folder / "tokenizer.json").write_text(json.dumps(values))

    return damage


def infinite(values: dict[str, Any]) -> None:
    values["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "config.json is missing"),
    "config is no JSON": (write("config.json", "{"), "config.json is not valid JSON"),
    "config is a list": (write("config.json", "[]"), "config.json is not a JSON object"),
    "config is not text": (write("config.json", b'{"a": "\xff"}'), "config.json is not"),
    "config is deep": (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
    "config with a key twice": (write("config.json", '{"model_type": "llama", "model_type": "x"}'), "'model_type' appears twice"),
    "no model type": (config(model_type=None), "config.json has no model_type"),
    "unknown model type": (config(model_type="mamba\n"), r"model_type 'mamba\\n' is not supported; supported: .*llama"),
    "a key is missing": (config(hidden_size=None), "config.json has no 'hidden_size'"),
    "a size is text": (config(hidden_size="many"), "embedding_length"),
    "heads are a list": (config(num_attention_heads=[1]), "value of the wrong kind|one value per layer"),
    "no heads": (config(num_attention_heads=0), "value of the wrong kind|no attention heads"),
    "huge layer count": (config(num_hidden_layers=1 << 30), "block_count|too large"),
    "another width": (config(hidden_size=128), "has shape"),
    "another activation": (config(hidden_act="relu"), "hidden_act 'relu'"),
    "yarn": (config(rope_scaling={"type": "nonsense", "factor": 2.0}), "rope scaling of type 'nonsense'"),
    "no tensors": (remove(MODEL), "neither model.safetensors nor model.safetensors.index.json"),
    "empty": (raw(lambda b: b""), "it has 0 bytes"),
    "cut in the header": (raw(lambda b: b[:50]), "its header claims"),
    "cut in the data": (raw(lambda b: b[:-100]), "unfinished download"),
    "bytes after the data": (raw(lambda b: b + b"more"), "its tensors end at byte"),
    "huge header": (raw(lambda b: b"\xff" * 8 + b[8:]), "its header claims 18446744073709551615 bytes"),
    "header is no JSON": (raw(lambda b: b[:8] + b"x" + b[9:]), "its header is not valid JSON"),
    "header is a number": (raw(lambda b: struct.pack("<Q", 1) + b"1"), "its header is not a JSON object"),
    "LFS pointer": (raw(lambda b: b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "entry is no object": (header(lambda h: h.update({"model.norm.weight": 1})), "the entry of tensor 'model.norm.weight'"),
    "unknown dtype": (tensor(dtype="F4"), "has dtype 'F4'; known"),
    "dtype that we lack": (arrays(lambda a: a.update({"model.norm.weight": np.ones(96, np.float64)})), "has dtype F64; supported"),
    "integers": (arrays(lambda a: a.update({"lm_head.weight": np.ones((300, 96), np.int32)})), "has dtype I32; supported: BF16, F16, F32"),
    "negative size": (tensor(shape=[-96]), r"has the shape '\[-96\]'"),
    "sizes that wrap": (tensor(shape=[1 << 40, 1 << 40]), "bytes"),
    "shape is text": (tensor(shape="96"), "has the shape '96'"),
    "another shape": (tensor(shape=[95]), "of shape .95,. and dtype F32 has 384 bytes"),
    "offsets turned round": (tensor(data_offsets=[96, 0]), "lies at bytes 96 to 0"),
    "offsets past the end": (tensor(data_offsets=[1 << 50, (1 << 50) + 384]), "it may be an unfinished download"),
    "offsets of another": (tensor(data_offsets=[0, 384]), "without gaps or overlaps"),
    "three offsets": (tensor(data_offsets=[0, 1, 2]), "expected two byte positions"),
    "missing tensor": (
        arrays(lambda a: a.pop("model.layers.2.mlp.up_proj.weight")),
        "missing tensor 'model.layers.2.mlp.up_proj.weight', which is",
    ),
    "no head": (arrays(lambda a: a.pop("lm_head.weight")), "missing tensor 'lm_head.weight', which is output.weight"),
    "no embedding": (arrays(lambda a: a.pop("model.embed_tokens.weight")), "missing tensor token_embd.weight"),
    "unexpected tensor": (arrays(lambda a: a.update({"model.extra\n": np.ones(4, np.float32)})), r"unexpected tensor 'model.extra\\n'"),
    "layer too many": (config(num_hidden_layers=2), "unexpected tensor 'model.layers.2"),
    "empty tensor": (arrays(lambda a: a.update({"model.norm.weight": np.ones(0, np.float32)})), "has shape .0,."),
    "infinite weight": (arrays(infinite), "blk.1.ffn_up.weight' holds a value that is not finite"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json is missing"),
    "tokenizer is no JSON": (write("tokenizer.json", "tokens"), "tokenizer.json is not valid JSON"),
    "tokenizer is empty": (write("tokenizer.json", "{}"), "tokenizer.json holds a value of the wrong kind"),
    "another kind of tokenizer": (tokenizer(lambda t: t["model"].update(type="Unigram")), "type 'Unigram'; supported: BPE"),
    "merges of nothing": (tokenizer(lambda t: t["model"].update(merges=[["q", "zz"]])), "tokenizer.json cannot be used"),
    "token past the embedding": (
        tokenizer(lambda t: t["model"]["vocab"].update(more=300)),
        "has 301 tokens, but the embedding has 300 rows",
    ),
    "token of a huge id": (tokenizer(lambda t: t["model"]["vocab"].update(more=1 << 60)), "no token id"),
    "settings are no object": (write("tokenizer_config.json", "3"), "tokenizer_config.json is not a JSON object"),
    "template is not text": (
        write("chat_template.jinja", b"\xff\xfe"),
        "chat_template.jinja is not UTF-8 text: invalid start byte at byte 0",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, sound: Path, tmp_path: Path) -> None:
    damage, said = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage(folder)
    with pytest.raises(QuaffError, match=said) as caught, open_model(folder) as checkpoint:
        for view in checkpoint.tensors.values():
            assert view.data.nbytes == view.nbytes
        from quaff.llm import load

        load(folder).close()
    assert str(caught.value).isprintable()


def sharded(folder: Path) -> dict[str, str]:
    """The same tensors in two files and an index."""
    values = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    names = sorted(values)
    owner = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(owner.values()):
        save_file({name: values[name] for name in names if owner[name] == file}, folder / file)
    index(folder, owner)
    return owner


def index(folder: Path, owner: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owner}))


def test_shards(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    owner = sharded(folder)
    with open_model(folder, "none") as ours, open_model(sound, "none") as whole:
        assert {name: view.data.tobytes() for name, view in ours.tensors.items()} == {
            name: view.data.tobytes() for name, view in whole.tensors.items()
        }
    first = "model-00001-of-00002.safetensors"
    for damaged, said in (
        ({**owner, "model.norm.weight": "../model.safetensors"}, "names the file '../model.safetensors'"),
        ({**owner, "model.norm.weight": "other.safetensors"}, "the shard 'other.safetensors' is missing"),
        ({**owner, "model.more.weight": first}, "has no tensor 'model.more.weight', though"),
        ({name: file for name, file in owner.items() if name != "model.norm.weight"}, "does not name it"),
        ({name: first for name in owner}, "has no tensor"),
        ({}, "has no weight_map"),
        ({"model.norm.weight": 3}, "has no weight_map"),
    ):
        index(folder, damaged)
        with pytest.raises(QuaffError, match=said):
            open_model(folder)
    index(folder, owner)
    (folder / first).unlink()
    with pytest.raises(QuaffError, match=f"the shard '{first}' is missing"):
        open_model(folder)


@pytest.mark.parametrize("name", ["no config", "config is no JSON", "cut in the data", "unknown dtype", "no tokenizer", "infinite weight"])
def test_the_command_line_says_it_in_one_line(name: str, sound: Path, tmp_path: Path) -> None:
    damage, said = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage(folder)
    assert_one_error(quaff("run", str(folder), "hello", "--max-tokens", "1"), said.split(".*")[0])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_random_damage_of_the_header_opens_or_raises_our_errors(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(sound, folder)
    content = bytearray((folder / MODEL).read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    for position, flip in flips:
        content[int(position * (8 + length))] ^= flip
    (folder / MODEL).write_bytes(content)
    try:
        with open_model(folder) as checkpoint:
            for view in checkpoint.tensors.values():
                assert view.data.nbytes == view.nbytes
    except QuaffError as error:
        assert str(error).isprintable()
    finally:
        shutil.rmtree(folder)
