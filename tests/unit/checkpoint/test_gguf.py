"""The GGUF reader against the gguf package: same metadata, same tensors, same bytes."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from quaff.checkpoint import GGML_TYPES, SUPPORTED_TYPES, Checkpoint, open_checkpoint
from quaff.checkpoint.types import OTHER_TYPES
from quaff.errors import CheckpointError, UnsupportedError


def write(path: Path, fill: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: GGMLQuantizationType, rows: int, per_row: int, seed: int = 0) -> np.ndarray:
    """Random bytes of a tensor, shaped as GGUFWriter wants them: [rows, bytes per row]."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(seed).integers(0, 256, (rows, per_row // block * size), dtype=np.uint8)


def assert_same(ours: Checkpoint, theirs: GGUFReader) -> None:
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        expected, value = field.contents(), ours.metadata[key]
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable
            assert value.tolist() == expected, key
        else:
            assert value == expected and type(value) is type(expected), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        view = ours.tensors[tensor.name]
        assert view.name == tensor.name
        assert view.shape == tuple(reversed(tensor.shape.tolist()))
        assert view.ggml_type == tensor.tensor_type.value
        assert view.type_name == tensor.tensor_type.name
        assert view.nbytes == tensor.n_bytes
        assert view.data.dtype == np.uint8 and view.data.ndim == 1 and not view.data.flags.writeable
        assert view.data.tobytes() == tensor.data.tobytes()


def test_every_value_type(tmp_path: Path) -> None:
    def fill(w: GGUFWriter) -> None:
        w.add_uint8("a.u8", 255)
        w.add_int8("a.i8", -128)
        w.add_uint16("a.u16", 65535)
        w.add_int16("a.i16", -32768)
        w.add_uint32("a.u32", 2**32 - 1)
        w.add_int32("a.i32", -(2**31))
        w.add_uint64("a.u64", 2**64 - 1)
        w.add_int64("a.i64", -(2**63))
        w.add_float32("a.f32", 0.1)
        w.add_float64("a.f64", 0.1)
        w.add_bool("a.yes", True)
        w.add_bool("a.no", False)
        w.add_string("a.text", "line\nbreak, ünï, 漢字, \u202e")
        w.add_string("a.empty", "")
        w.add_array("a.strings", ["", "a", "漢字", "x" * 5000])
        w.add_array("a.ints", [-1, 0, 2**31 - 1])
        w.add_array("a.floats", [0.5, -1e30])
        w.add_array("a.bools", [True, False])
        w.add_key_value("a.u8s", [1, 2, 255], GGUFValueType.ARRAY, GGUFValueType.UINT8)
        w.add_key_value("a.i64s", [-(2**63), 2**63 - 1], GGUFValueType.ARRAY, GGUFValueType.INT64)
        w.add_key_value("a.f64s", [0.1, 1e300], GGUFValueType.ARRAY, GGUFValueType.FLOAT64)

    path = write(tmp_path / "m.gguf", fill)
    with open_checkpoint(path) as ours:
        assert_same(ours, GGUFReader(path))
        assert ours.architecture == "llama"
        assert ours.path == path
        assert ours.file_bytes == path.stat().st_size
        assert ours.metadata["a.bools"].dtype == np.bool_
        assert ours.metadata["a.ints"].dtype == np.int32
        assert ours.metadata["a.floats"].dtype == np.float32
        assert type(ours.metadata["a.strings"]) is list
        with pytest.raises(TypeError):
            ours.metadata["a.u8"] = 1  # type: ignore[index]


@pytest.mark.parametrize("kind", [GGMLQuantizationType(i) for i in GGML_TYPES], ids=lambda kind: kind.name)
def test_every_tensor_type(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    def fill(w: GGUFWriter) -> None:
        w.add_tensor("matrix.weight", blocks(kind, 3, 512), raw_dtype=kind)
        w.add_tensor("vector.weight", np.arange(7, dtype=np.float32))
        w.add_tensor("cube.weight", blocks(kind, 6, 256, 1).reshape(2, 3, -1), raw_dtype=kind)

    path = write(tmp_path / "m.gguf", fill)
    with open_checkpoint(path) as ours:
        assert_same(ours, GGUFReader(path))
        assert ours.tensors["matrix.weight"].shape == (3, 512)
        assert ours.tensors["vector.weight"].shape == (7,)
        assert ours.tensors["cube.weight"].shape == (2, 3, 256)


def test_type_table_is_ggmls() -> None:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    for i, kind in GGML_TYPES.items():
        assert (kind.id, kind.name) == (i, known[i].name)
        assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[known[i]]
    assert not set(GGML_TYPES) & set(OTHER_TYPES)
    for i, member in known.items():
        assert i in GGML_TYPES or OTHER_TYPES[i] == member.name
    wanted = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4"
    wanted += " IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0"
    assert SUPPORTED_TYPES.split(", ") == wanted.split()


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    def fill(w: GGUFWriter) -> None:
        w.add_custom_alignment(alignment)
        w.add_tensor("a.weight", np.arange(3, dtype=np.float32))
        w.add_tensor("b.weight", np.arange(5, dtype=np.float32))

    path = write(tmp_path / "m.gguf", fill)
    with open_checkpoint(path) as ours:
        assert_same(ours, GGUFReader(path))


def small(path: Path) -> Path:
    return write(path, lambda w: w.add_tensor("a.weight", np.arange(64, dtype=np.float32)))


def test_version_2_reads_the_same(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    with open_checkpoint(path) as ours:
        assert_same(ours, GGUFReader(path))


def test_a_file_without_tensors_opens(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "vocabulary.gguf", lambda w: None)) as ours:
        assert len(ours.tensors) == 0


def test_header_longer_than_one_read(tmp_path: Path) -> None:
    tokens = [f"token {i} " + "x" * (i % 97) for i in range(60_000)]
    scores = [float(i) for i in range(60_000)]

    def fill(w: GGUFWriter) -> None:
        w.add_array("tokenizer.ggml.tokens", tokens)
        w.add_array("tokenizer.ggml.scores", scores)
        w.add_string("long", "y" * 3_000_000)
        w.add_tensor("a.weight", np.arange(64, dtype=np.float32))

    path = write(tmp_path / "m.gguf", fill)
    with open_checkpoint(path) as ours:
        assert ours.metadata["tokenizer.ggml.tokens"] == tokens
        assert ours.metadata["tokenizer.ggml.scores"].tolist() == scores
        assert len(ours.metadata["long"]) == 3_000_000
        assert ours.tensors["a.weight"].data.view(np.float32).tolist() == list(range(64))


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "general.tags"])
def test_a_string_that_is_not_utf8_is_named_by_its_place(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "m.gguf", lambda w: w.add_array(key, [b"ok", b"\xff\xfe"]))
    with pytest.raises(CheckpointError, match=f"entry 1 of metadata '{key}' is not valid UTF-8"):
        open_checkpoint(path)


def test_views_outlive_close(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small(tmp_path / "m.gguf"))
    view = checkpoint.tensors["a.weight"].data
    checkpoint.close()
    checkpoint.close()
    assert len(checkpoint.tensors) == 0
    assert view.view(np.float32)[63] == 63.0


def test_no_file_is_left_open(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_checkpoint(path).close()
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_K
    path = write(tmp_path / "m.gguf", lambda w: w.add_tensor("a.weight", blocks(kind, 2, 256), raw_dtype=kind))
    with pytest.raises(UnsupportedError, match=r"m\.gguf: tensor 'a\.weight' has type Q8_K, .*supported types: F32, F16, BF16, Q4_0"):
        open_checkpoint(path)


def test_big_endian_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="big-endian GGUF file"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"GGU", "not a GGUF file"),
        (b"GGUF", "the header needs 8 bytes"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(16), "version 9"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x80\x02}q\x00" + bytes(60), "pickle"),
        (struct.pack("<Q", 20) + b'{"a":1}' + bytes(40), "a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"tjgg" + bytes(60), "a GGJT file"),
        (b"\x1f\x8b\x08\x00" + bytes(60), "gzip"),
        (bytes(64), "begins with zeros"),
        (b"hello there", "not a GGUF file (it begins with 68 65 6c 6c"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    small(tmp_path / "inside.gguf")
    with pytest.raises(CheckpointError, match=r"is a folder; give a GGUF file inside it, such as 'inside\.gguf'"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint("a\0b")
    with pytest.raises(CheckpointError, match="cannot be opened: File name too long"):
        open_checkpoint("x" * 5000)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe")


@pytest.mark.parametrize(("kind", "said"), [("adapter", "a LoRA adapter"), ("mmproj", "projector"), ("imatrix", "importance matrix")])
def test_files_that_are_not_models(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        open_checkpoint(write(tmp_path / "m.gguf", lambda w: w.add_string("general.type", kind)))


def split(folder: Path, tensors: int = 5, each: int = 2) -> list[Path]:
    """A model in parts, cut by the `gguf` package."""
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=each)
    for i in range(tensors):
        writer.add_tensor(f"t{i}.weight", np.full(32, i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_split_model(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert [p.name for p in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with open_checkpoint(parts[0]) as ours:
        assert {name: view.data.view(np.float32).tolist() for name, view in ours.tensors.items()} == {
            f"t{i}.weight": [i] * 32 for i in range(5)
        }
        assert ours.file_bytes == sum(p.stat().st_size for p in parts)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    parts, others = split(tmp_path / "a"), split(tmp_path / "b", tensors=6)
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003\.gguf: is part 2 of 3 of a split model; open the first, 'm-00001-of-00003\.gguf'"
    ):
        open_checkpoint(parts[1])
    with pytest.raises(CheckpointError, match=r"is part 3 of 3 .*; open the first$"):
        open_checkpoint(parts[2].rename(tmp_path / "a" / "renamed.gguf"))
    with pytest.raises(CheckpointError, match=r"m-00001-of-00003\.gguf: part 3 of 3 is missing: 'm-00003-of-00003\.gguf'"):
        open_checkpoint(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf: is part 2 of 3 .* its name says part 3 of 3: parts are mixed up"):
        open_checkpoint(parts[0])
    parts[2].write_bytes(others[2].read_bytes())
    with pytest.raises(CheckpointError, match="the parts hold 6 tensors, but '5' are stated"):
        open_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match=r"its name has to end with -00001-of-00003\.gguf"):
        open_checkpoint(parts[0].rename(tmp_path / "a" / "first.gguf"))


def test_a_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    def part(number: int) -> None:
        writer = GGUFWriter(tmp_path / f"m-0000{number + 1}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_tensor("a.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    part(0), part(1)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: tensor 'a\.weight' is in another part already"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path / "m.gguf")
    read = os.pread

    def cut_then_read(fd: int, n: int, at: int) -> bytes:
        os.truncate(path, 16)
        return read(fd, n, at)

    monkeypatch.setattr(os, "pread", cut_then_read)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        open_checkpoint(path)


def test_a_file_that_is_rewritten_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path / "m.gguf")
    read = os.pread

    def grow_then_read(fd: int, n: int, at: int) -> bytes:
        content = read(fd, n, at)
        with path.open("ab") as file:
            file.write(b"more")
        return content

    monkeypatch.setattr(os, "pread", grow_then_read)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        open_checkpoint(path)
