"""Damaged packed files: a header that was not written so, or cannot be true, is refused; changed weights are found when asked."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.laws.test_packed import packed
from tests.tiny import CASES

import quaff
from quaff import _native
from quaff.checkpoint import Checkpoint, open_checkpoint
from quaff.checkpoint.hashes import check_hashes
from quaff.errors import CheckpointError, QuaffError, UnsupportedError

PREAMBLE = struct.Struct("<8sIIIIQQ")
FIRST = PREAMBLE.size + 32


@dataclass
class Packed:
    """A packed file taken apart. `lay` puts it together again with lengths and hash that fit; `stated`: numbers that do not."""

    numbers: list[Any]
    header: Any
    data: bytes

    @classmethod
    def parse(cls, content: bytes) -> Packed:
        numbers = list(PREAMBLE.unpack_from(content))
        end = FIRST + numbers[5]
        return cls(numbers, json.loads(content[FIRST:end]), content[(end + 4095) // 4096 * 4096 :])

    def lay(self, text: bytes | None = None, **stated: int) -> bytes:
        text = json.dumps(self.header, separators=(",", ":")).encode() if text is None else text
        data = (FIRST + len(text) + 4095) // 4096 * 4096
        self.numbers[5:] = [len(text), data + len(self.data)]
        for name, value in stated.items():
            self.numbers[("magic", "version", "panels", "numerics", "zero", "length", "size").index(name)] = value
        preamble = PREAMBLE.pack(*self.numbers)
        return (preamble + sha256(preamble + text).digest() + text).ljust(data, b"\0") + self.data

    def tensor(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(entry for entry in self.header["tensors"] if entry["name"] == name)
        return found


def entry(name: str, /, **changed: Any) -> Callable[[Packed], bytes]:
    def make(p: Packed) -> bytes:
        values = p.tensor(name)
        for key, value in changed.items():
            values[key] = value(values[key]) if callable(value) else value
        return p.lay()

    return make


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Packed], bytes]:
    def make(p: Packed) -> bytes:
        change(p.header)
        return p.lay()

    return make


def metadata(key: str, value: Any) -> Callable[[Packed], bytes]:
    return header(lambda h: h["metadata"].update({key: value}))


def array(dtype: str, content: bytes) -> dict[str, str]:
    return {"dtype": dtype, "base64": base64.b64encode(content).decode()}


DOWN, GATE, UP, NORM = "blk.0.ffn_down.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.attn_norm.weight"
TOO_FAR = 1 << 40

DAMAGES: dict[str, tuple[Callable[[Packed], bytes], str]] = {
    "version": (lambda p: p.lay(version=2), "with version 2; this quaff has 1: pack the model again"),
    "panels": (lambda p: p.lay(panels=77), "with panels of version 77; this quaff has"),
    "numerics": (lambda p: p.lay(numerics=9), f"with numerics version 9; this quaff has {_native.NUMERICS_VERSION}"),
    "zero": (lambda p: p.lay(zero=1), "a number that should be zero"),
    "only the magic": (lambda p: p.lay()[:8], "8 bytes; its header alone needs more"),
    "only the preamble": (lambda p: p.lay()[:70], "70 bytes; its header alone needs more"),
    "length past the end": (lambda p: p.lay(length=1 << 20), "its header claims 1048576 bytes"),
    "length that wraps": (lambda p: p.lay(length=(1 << 64) - 1), "its header claims 18446744073709551615 bytes"),
    "length zero": (lambda p: p.lay(length=0), "hash differs"),
    "header changed": (lambda p: p.lay().replace(b'"stride"', b'"Stride"', 1), "hash differs"),
    "cut in the data": (lambda p: p.lay()[:-4096], "it may be an unfinished download"),
    "cut in the header": (lambda p: p.lay()[:4000], "unfinished download"),
    "more at the end": (lambda p: p.lay() + bytes(64), "but was written with"),
    "no JSON": (lambda p: p.lay(text=b"{"), "not valid JSON"),
    "no UTF-8": (lambda p: p.lay(text=b'{"\xff":0}'), "not UTF-8"),
    "deep JSON": (lambda p: p.lay(text=b"[" * 100000), "not valid JSON"),
    "no object": (lambda p: p.lay(text=b"[]"), "not a JSON object"),
    "a key twice": (lambda p: p.lay(text=b'{"origin":{},"origin":{}}'), "appears twice"),
    "an empty object": (lambda p: p.lay(text=b"{}"), "no 'origin'"),
    "no tensors": (header(lambda h: h.pop("tensors")), "no 'tensors'"),
    "tensors that are none": (header(lambda h: h["tensors"].append(3)), "not a JSON object"),
    "no metadata": (header(lambda h: h.pop("metadata")), "no 'metadata'"),
    "no origin": (header(lambda h: h.pop("origin")), "no 'origin'"),
    "origin without a name": (header(lambda h: h["origin"].pop("name")), "no 'name'"),
    "origin quantised to 7": (header(lambda h: h["origin"].update(quantized=7)), "no 'quantized'"),
    "no architecture": (header(lambda h: h["metadata"].pop("general.architecture")), "name no architecture"),
    "architecture of 3": (metadata("general.architecture", 3), "name no architecture"),
    "null": (metadata("x", None), "of a kind that does not exist"),
    "a list of two kinds": (metadata("x", [1, "2"]), "of a kind that does not exist"),
    "a list of lists": (metadata("x", [[1]]), "of a kind that does not exist"),
    "an unknown dtype": (metadata("x", array("<f16", b"")), "of a kind that does not exist"),
    "an object dtype": (metadata("x", array("|O8", bytes(8))), "of a kind that does not exist"),
    "no base64": (metadata("x", {"dtype": "<i4", "base64": "?"}), "no array of type <i4"),
    "half a number": (metadata("x", array("<i4", bytes(7))), "no array of type <i4"),
    "a boolean of 2": (metadata("x", array("|b1", b"\x02")), "neither 0 nor 1"),
    "a name of 3": (entry(DOWN, name=3), "no 'name'"),
    "a name twice": (entry(DOWN, name=NORM), "appears twice|is a vector"),
    "no shape": (entry(DOWN, shape=[]), "expected one to four sizes"),
    "five dimensions": (entry(DOWN, shape=[1, 1, 1, 64, 96]), "expected one to four sizes"),
    "a dimension of zero": (entry(DOWN, shape=[0, 96]), "expected one to four sizes"),
    "a dimension of true": (entry(DOWN, shape=[True, 96]), "expected one to four sizes"),
    "a dimension of 1.5": (entry(DOWN, shape=[64, 1.5]), "expected one to four sizes"),
    "a huge dimension": (entry(DOWN, shape=[1 << 40, 96]), "expected one to four sizes"),
    "another shape": (entry(DOWN, shape=[96, 64]), "has matrices of"),
    "more rows": (entry(DOWN, shape=[(1 << 32) - 1, 96]), "has matrices of"),
    "a width that does not fit": (entry(DOWN, shape=[64, 97]), "has matrices of"),
    "no type": (entry(DOWN, type=None), "no 'type'"),
    "type of true": (entry(DOWN, type=True), "no 'type'"),
    "an unknown type": (entry(DOWN, type=4), "unknown type number 4"),
    "another type": (entry(DOWN, type=0), "has matrices of"),
    "a vector of halves": (entry(NORM, type=1), "is a vector of type F16"),
    "a longer vector": (entry(NORM, shape=[65]), "has matrices of"),
    "no offset": (entry(DOWN, offset="0"), "no 'offset'"),
    "an odd offset": (entry(DOWN, offset=lambda n: n + 32), "does not begin at a multiple of 64"),
    "an offset below zero": (entry(DOWN, offset=-64), "'offset' -64, which cannot be"),
    "an offset past the end": (entry(DOWN, offset=TOO_FAR), "ends beyond the end of the file"),
    "an offset that wraps": (entry(DOWN, offset=(1 << 64) - 64), "which cannot be"),
    "more bytes": (entry(DOWN, bytes=lambda n: n + 64, stride=lambda n: n + 64), "has matrices of"),
    "no bytes": (entry(DOWN, bytes=0, stride=0), "has matrices of"),
    "a stride of one matrix": (entry(DOWN, stride=lambda n: n + 64), "bytes apart"),
    "over another": (entry(DOWN, offset=0), "overlap"),
    "no hash": (entry(DOWN, sha256="00"), "has a hash that is none"),
    "a hash in capitals": (entry(DOWN, blocks_sha256="A" * 64), "has a hash that is none"),
}
OF_STACKS: dict[str, tuple[Callable[[Packed], bytes], str]] = {
    "experts on each other": (entry(GATE, stride=64), "bytes apart"),
    "an odd stride": (entry(GATE, stride=lambda n: n + 32), "does not begin at a multiple of 64"),
    "a stride past the end": (entry(GATE, stride=TOO_FAR), "ends beyond the end of the file"),
    "a stride that wraps": (entry(GATE, stride=1 << 63), "which cannot be"),
    "experts of another stack": (entry(GATE, offset=lambda n: n + 64), "overlap"),
    "more experts": (entry(UP, shape=lambda s: [1 << 20, *s[1:]]), "more than 1048576 matrices"),
    "more experts than are there": (entry(UP, shape=lambda s: [1 << 10, *s[1:]]), "ends beyond the end of the file|overlap"),
    "experts of experts": (entry(UP, shape=lambda s: [1 << 31, 1 << 31, *s[1:]]), "more than 1048576 matrices"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return packed(CASES["llama-gqa"].write(tmp_path_factory.mktemp("good") / "good.gguf")).read_bytes()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return packed(CASES["mixtral"].write(tmp_path_factory.mktemp("good") / "good.gguf")).read_bytes()


def refused(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedError), match=said) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 500


def test_taking_apart_and_laying_together_changes_nothing(good: bytes, mixture: bytes) -> None:
    assert Packed.parse(good).lay() == good
    assert Packed.parse(mixture).lay() == mixture


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, tmp_path: Path, good: bytes) -> None:
    make, said = DAMAGES[name]
    refused(tmp_path / "m.quaff", make(Packed.parse(good)), said)


@pytest.mark.parametrize("name", OF_STACKS)
def test_damage_of_stacks_is_named(name: str, tmp_path: Path, mixture: bytes) -> None:
    make, said = OF_STACKS[name]
    refused(tmp_path / "m.quaff", make(Packed.parse(mixture)), said)


def test_every_cut_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m.quaff"
    end = FIRST + PREAMBLE.unpack_from(good)[5]
    for length in sorted({*range(8, 200, 3), *range(200, end, 977), *range(end - 3, end + 3), *range(end, len(good), 4099), len(good) - 1}):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_every_flipped_byte_of_the_header_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m.quaff"
    for at in [*range(FIRST), *range(FIRST, FIRST + PREAMBLE.unpack_from(good)[5], 499)]:
        content = bytearray(good)
        content[at] ^= 0x20
        path.write_bytes(content)
        with pytest.raises(QuaffError):
            open_checkpoint(path)


def run(path: Path) -> str:
    with quaff.load(path, threads=1, chunk=8, memory_limit_bytes=1 << 28) as llm:
        return llm.chat([{"role": "user", "content": "hi"}], quaff.SamplingParams(max_tokens=2)).text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path, good: bytes, value: float) -> None:
    p, path = Packed.parse(good), tmp_path / "m.quaff"
    at = p.tensor(NORM)["offset"]
    p.data = p.data[:at] + np.float32(value).tobytes() + p.data[at + 4 :]
    path.write_bytes(p.lay())
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_norm\.weight' holds a value that is not finite"):
        run(path)


def test_a_missing_tensor_is_named(tmp_path: Path, good: bytes) -> None:
    p, path = Packed.parse(good), tmp_path / "m.quaff"
    p.header["tensors"].remove(p.tensor(DOWN))
    path.write_bytes(p.lay())
    with pytest.raises(QuaffError, match=r"missing tensor blk\.0\.ffn_down\.weight"):
        run(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("fuzz") / "fuzzed.quaff"


def covered(checkpoint: Checkpoint) -> NDArray[np.bool_]:
    """Which bytes of a packed file are weights."""
    mask = np.zeros(checkpoint.file_bytes, np.bool_)
    for view in checkpoint.tensors.values():
        assert view.place is not None
        for i in range(view.place.count):
            begin = view.place.offset + i * view.place.stride
            mask[begin : begin + view.place.nbytes] = True
    return mask


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=200), filled=st.booleans())
def test_any_weights_run_and_the_check_finds_them(
    scratch: Path, good: bytes, mixture: bytes, flips: list[tuple[float, int]], filled: bool
) -> None:
    """Whatever the bytes of weights are, they are computed with or refused; that they have changed is found by reading them all."""
    for content in (good, mixture):
        p = Packed.parse(content)
        data = bytearray(b"\xff" * len(p.data) if filled else p.data)
        for position, flip in flips:
            data[int(position * len(data))] ^= flip
        p.data = bytes(data)
        # A new file each time: a mapped one must not be rewritten.
        scratch.unlink(missing_ok=True)
        scratch.write_bytes(p.lay())
        changed = np.frombuffer(p.lay(), np.uint8) != np.frombuffer(content, np.uint8)
        with open_checkpoint(scratch) as checkpoint:
            if changed[covered(checkpoint)].any():
                with pytest.raises(CheckpointError, match="have changed since it was written"):
                    check_hashes(checkpoint.tensors)
            else:
                check_hashes(checkpoint.tensors)
        try:
            run(scratch)
        except QuaffError as error:
            assert str(error).isprintable()


def test_a_file_that_grows_under_the_reader(tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.quaff"
    path.write_bytes(good)
    read = os.preadv

    def grow_then_read(fd: int, buffers: list[memoryview], at: int) -> int:
        with path.open("ab") as file:
            file.write(b"more")
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", grow_then_read)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        open_checkpoint(path)
