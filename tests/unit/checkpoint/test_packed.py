"""The header of a packed file: every kind of value comes back as it was, whatever the file was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.laws.test_packed import packed
from tests.tiny import CASES

from quaff.checkpoint import ModelFile, Origin, open_checkpoint
from quaff.checkpoint.hashes import bytes_sha256, check_hashes, content_sha256
from quaff.checkpoint.packed import Entry, encode_header, read_packed
from quaff.checkpoint.views import Hashes
from quaff.models import read_model

ENTRY = Entry("a.weight", (3,), 0, 0, 12, 12, Hashes("1" * 64, "2" * 64))
ORIGIN = Origin("m.gguf", "GGUF", None, 77)


def written(path: Path, metadata: dict[str, Any]) -> Path:
    content, data, size = encode_header(ORIGIN, {"general.architecture": "llama", **metadata}, [ENTRY])
    path.write_bytes(content.ljust(data, b"\0") + np.arange(3, dtype=np.float32).tobytes().ljust(size - data, b"\0"))
    return path


def test_values_come_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "int": -3,
        "large": (1 << 64) - 1,
        "float": float(np.float32(1e-5)),
        "infinite": float("inf"),
        "true": True,
        "text": 'Łukasz "\n\u2028 \U0001f600 \ud800',
        "texts": ["a", "", "ß"],
        "none": [],
        "counts": [3, 1, 3],
        "scores": [0.5, -1.25],
        **{f"array {kind}": np.arange(5).astype(kind) for kind in ("i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")},
        "flags": np.array([True, False]),
        "big-endian": np.arange(3, dtype=">i4"),
    }
    with open_checkpoint(written(tmp_path / "m.quaff", values)) as checkpoint:
        assert (checkpoint.format, checkpoint.quantized, checkpoint.origin, checkpoint.architecture) == ("packed", None, ORIGIN, "llama")
        for key, value in values.items():
            found = checkpoint.metadata[key]
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype.newbyteorder("<") and found.tolist() == value.tolist() and not found.flags.writeable
            else:
                assert type(found) is type(value) and found == value
        view = checkpoint.tensors["a.weight"]
        assert (view.shape, view.nbytes, view.packed, view.hashes) == ((3,), 12, False, ENTRY.hashes)
        assert view.data.view(np.float32).tolist() == [0, 1, 2]


def test_the_length_of_a_header_does_not_depend_on_hashes() -> None:
    other = Entry("a.weight", (3,), 0, 0, 12, 12, Hashes("a" * 64, "f" * 64))
    first, second = (encode_header(ORIGIN, {}, [e]) for e in (ENTRY, other))
    assert first[1:] == second[1:] and len(first[0]) == len(second[0]) and first[0] != second[0]


@pytest.mark.parametrize("name", ["phi3", "gemma4", "gpt-oss", "kimi-linear"])
def test_a_packed_file_has_the_weights_that_stages_use(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path / "m.gguf")
    with open_checkpoint(path) as plain, open_checkpoint(packed(path)) as mapped:
        ours, theirs = read_model(mapped), read_model(plain)
        assert ours.config == theirs.config and dict(sorted(ours.tensors.items())) == dict(sorted(theirs.tensors.items()))
        assert content_sha256(ours.views) == content_sha256(theirs.views)
        check_hashes(mapped.tensors)
        view = ours.views["output_norm.weight"]
        assert bytes_sha256(view) == view.hashes.panels == view.hashes.blocks


def test_the_hash_of_a_model_sees_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    paths = [CASES["llama-gqa"].write(tmp_path / f"{i}.gguf") for i in range(2)]
    content = bytearray(paths[1].read_bytes())
    content[-5] ^= 1
    paths[1].write_bytes(content)
    found = []
    for path in paths:
        with open_checkpoint(path) as checkpoint:
            views = dict(checkpoint.tensors)
            steps: list[tuple[int, int]] = []
            found.append(content_sha256(views, lambda done, total, steps=steps: steps.append((done, total))))
            assert steps[-1][0] == steps[-1][1] == sum(v.nbytes for v in views.values())
            views.pop("output_norm.weight")
            found.append(content_sha256(views))
    assert len(set(found)) == 4


def test_closing_a_packed_file(tmp_path: Path) -> None:
    file = ModelFile(written(tmp_path / "m.quaff", {}))
    checkpoint = read_packed(file)
    checkpoint.close()
    assert file.fd == -1 and not checkpoint.tensors
