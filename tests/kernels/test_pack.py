"""Packed weights hold the values of gguf.quants.dequantize, byte for byte, for every ggml type; what is not finite is refused."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tests.kernels.blocks import HALVES, QUANTISED, TYPES, U8, block_size, random_blocks, write_half

from quaff._native import PANEL_VERSION, Weight, pack_panels, packed_bytes
from quaff.graph.lowering import lower

F32 = NDArray[np.float32]
SHAPES = [(1, 1), (15, 3), (16, 2), (17, 1), (49, 4)]  # rows, blocks in a row


def pack(kind: Type, data: U8, rows: int, cols: int, threads: int = 1) -> Weight:
    return Weight(int(kind), np.ascontiguousarray(data).reshape(-1), rows, cols, threads)


def oracle(kind: Type, data: U8) -> F32:
    with np.errstate(over="ignore"):  # MXFP4 computes both of two shifts
        values: F32 = gguf.quants.dequantize(data.view(np.float32) if kind == Type.F32 else data, kind)
    return values


@pytest.mark.parametrize("rows,blocks", SHAPES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_equal_the_oracle(kind: Type, rows: int, blocks: int) -> None:
    cols = blocks * block_size(kind)
    data = random_blocks(kind, rows, cols, np.random.default_rng(rows))
    weight = pack(kind, data, rows, cols, threads=2)
    assert weight.is_integer == (kind in QUANTISED)
    assert weight.dequantize().tobytes() == oracle(kind, data).tobytes()
    assert weight.dequantize(rows // 2, 1).tobytes() == oracle(kind, data[rows // 2 : rows // 2 + 1]).tobytes()


@pytest.mark.parametrize("kind", [kind for kind in HALVES if kind != Type.F16], ids=lambda kind: kind.name)
def test_every_finite_f16_scale(kind: Type) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[(halves >> 10) & 31 != 31]
    data = random_blocks(kind, len(halves) // 64, 64 * block_size(kind), np.random.default_rng(0)).reshape(len(halves), -1)
    for at in HALVES[kind]:
        write_half(kind, data, at, np.random.default_rng(at).permutation(halves))
    data = data.reshape(len(halves) // 64, -1)
    weight = pack(kind, data, len(data), 64 * block_size(kind))
    assert weight.dequantize().tobytes() == oracle(kind, data).tobytes()


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_a_flipped_bit_of_a_code_shows(kind: Type) -> None:
    """Negative control: the comparison above can fail."""
    cols = block_size(kind)
    data = random_blocks(kind, 3, cols, np.random.default_rng(5), tame=True)
    flipped = data.copy()
    flipped[1, 17 if kind == Type.Q2_K else 9 if cols < 256 else 40] ^= 0x11
    assert pack(kind, flipped, 3, cols).dequantize().tobytes() != oracle(kind, data).tobytes()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_names_its_row(kind: Type, half: int) -> None:
    rows, cols = 40, 2 * block_size(kind)
    data = random_blocks(kind, rows, cols, np.random.default_rng(1), tame=True)
    for row in (23, 37):
        write_half(kind, data.reshape(rows, 2, -1)[row, 1], HALVES[kind][-1], np.array(half, np.uint16))
    with pytest.raises(ValueError, match="row 23 .*not finite"):
        pack(kind, data, rows, cols, threads=2)


@pytest.mark.parametrize("exponent", [252, 255])
def test_mxfp4_exponents_out_of_range(exponent: int) -> None:
    data = random_blocks(Type.MXFP4, 20, 32, np.random.default_rng(2))
    data[18, 0] = exponent
    with pytest.raises(ValueError, match="row 18 .*out of range"):
        pack(Type.MXFP4, data, 20, 32)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("scale", [0x7F, 0xFF])
def test_nvfp4_scales_that_are_no_numbers(at: int, scale: int) -> None:
    data = random_blocks(Type.NVFP4, 20, 128, np.random.default_rng(2))
    data[18, 36 + at] = scale
    with pytest.raises(ValueError, match="row 18 .*not finite"):
        pack(Type.NVFP4, data, 20, 128)


def test_every_nvfp4_scale() -> None:
    scales = np.array([s for s in range(256) if s & 127 != 127], np.uint8)
    data = random_blocks(Type.NVFP4, len(scales), 64, np.random.default_rng(6))
    data[:, :4] = scales[:, None]
    assert pack(Type.NVFP4, data, len(scales), 64).dequantize().tobytes() == oracle(Type.NVFP4, data).tobytes()


GRIDS = {
    Type.IQ1_S: 2048,
    Type.IQ1_M: 2048,
    Type.IQ2_XXS: 256,
    Type.IQ2_XS: 512,
    Type.IQ2_S: 1024,
    Type.IQ3_XXS: 256,
    Type.IQ3_S: 512,
}


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_every_point_of_a_grid(kind: Type) -> None:
    width = 4 if kind in (Type.IQ3_XXS, Type.IQ3_S) else 8
    blocks = 16 * GRIDS[kind] * width // 256  # 16 draws a point
    data = random_blocks(kind, blocks, 256, np.random.default_rng(8), tame=True)
    codes = lower(int(kind), data, (blocks, 256)).codes
    assert codes is not None
    points = np.rint(codes / 8) if GRIDS[kind] == 2048 else np.abs(codes)
    assert len(np.unique(points.reshape(-1, width), axis=0)) == GRIDS[kind]
    assert pack(kind, data, blocks, 256).dequantize().tobytes() == oracle(kind, data).tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", [Type.F32, Type.BF16], ids=lambda kind: kind.name)
def test_float_weights_that_are_not_finite(kind: Type, value: float) -> None:
    values = np.ones((3, 8), np.float32)
    values[2, 5] = value
    bits = values.view(np.uint32)
    data = values.view(np.uint8) if kind == Type.F32 else (bits >> 16).astype(np.uint16).view(np.uint8)
    with pytest.raises(ValueError, match="row 2 holds a weight that is not finite"):
        pack(kind, data, 3, 8)


@pytest.mark.parametrize(
    "kind,size,rows,cols",
    [
        (8, 34, 1, 33),
        (8, 33, 1, 32),
        (8, 0, 0, 32),
        (12, 144, 1, 128),
        (0, 4, -1, 1),
        (0, 4, 1, 0),
        (8, 68, 1, 32),
        (0, 4, 1 << 62, 1 << 62),
    ],
)
def test_shapes_that_do_not_fit(kind: int, size: int, rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match="needs"):
        Weight(kind, np.zeros(size, np.uint8), rows, cols)


def test_unknown_types_are_named_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match="type 41 is not supported; supported: F32, F16.*MXFP4"):
        Weight(41, np.zeros(36, np.uint8), 1, 256)


# Bytes in memory over bytes in the file: 3 or 4 bits a value instead of a place in a grid, 2 bits instead of 1.6.
LARGER = {
    Type.IQ1_S: 2.14,
    Type.IQ1_M: 2.05,
    Type.IQ2_XXS: 1.62,
    Type.IQ2_XS: 1.55,
    Type.IQ2_S: 1.4,
    Type.IQ3_XXS: 1.42,
    Type.IQ3_S: 1.27,
    Type.TQ1_0: 1.24,
}


@pytest.mark.parametrize("cols", [768, 1536, 8960])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_bytes_of_packed_weights_are_those_of_the_file(kind: Type, cols: int) -> None:
    """Codes, scales and minimums stay as compact in memory as they lie in the file: within 5 %, but for grids and powers of 3."""
    data = random_blocks(kind, 32, cols, np.random.default_rng(3), tame=True)
    assert pack(kind, data, 32, cols).nbytes <= LARGER.get(kind, 1.05) * data.size


def test_packed_size_is_exact_where_blocks_are_copied() -> None:
    """16 rows of whole chunks: two-level scales cost what the file pays plus bytes instead of 6 or 4 bits a sub-scale."""
    per_256 = {
        Type.Q4_0: 144,
        Type.Q5_1: 192,
        Type.Q8_0: 272,
        Type.Q2_K: 84,
        Type.Q3_K: 114,
        Type.Q4_K: 148,
        Type.Q5_K: 180,
        Type.Q6_K: 210,
        Type.IQ1_S: 106,
        Type.IQ2_S: 114,
        Type.IQ3_S: 138,
        Type.TQ2_0: 66,
        Type.NVFP4: 144,
    }
    packed = {kind: pack(kind, random_blocks(kind, 16, 512, np.random.default_rng(4), tame=True), 16, 512).nbytes for kind in per_256}
    assert packed == {kind: 16 * 2 * size for kind, size in per_256.items()}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_panels_can_be_read_from_a_file_and_viewed_where_they_lie(kind: Type, tmp_path: Path) -> None:
    """The same values by every way: blocks in memory, blocks in a file with gaps between rows, panels; one matrix and a stack of two."""
    cols = 3 * block_size(kind)
    data = random_blocks(kind, 40, cols, np.random.default_rng(7))
    expected = pack(kind, data[:20], 20, cols).dequantize().tobytes()
    gap, before = 5, 11
    wide = np.zeros((40, data.shape[1] + gap), np.uint8)
    wide[:, : data.shape[1]] = data
    path = tmp_path / "rows"
    path.write_bytes(bytes(before) + wide.tobytes()[:-gap])
    fd = os.open(path, os.O_RDONLY)
    try:
        assert Weight.read(int(kind), fd, before, wide.shape[1], 0, 20, cols, 2).dequantize().tobytes() == expected
        stack = Weight.read(int(kind), fd, before, wide.shape[1], 2, 20, cols, 2)
        assert (stack.experts, stack.rows, stack.cols, stack.nbytes) == (2, 20, cols, 2 * packed_bytes(int(kind), 20, cols))
        with pytest.raises(RuntimeError, match="became shorter"):
            os.truncate(path, path.stat().st_size - 1)
            Weight.read(int(kind), fd, before, wide.shape[1], 2, 20, cols, 2)
    finally:
        os.close(fd)
    with pytest.raises(RuntimeError, match="cannot be read: Bad file descriptor"):
        Weight.read(int(kind), -1, 0, wide.shape[1], 0, 20, cols)
    weight = Weight.view(int(kind), aligned(pack_panels(int(kind), data[:20].reshape(-1), 20, cols, 2)), 0, 0, 20, cols)
    assert weight.dequantize().tobytes() == expected, "panels live as long as the weight"


def test_a_view_is_no_copy() -> None:
    panels = aligned(pack_panels(8, random_blocks(Type.Q8_0, 16, 32, np.random.default_rng(0)).reshape(-1), 16, 32))
    weight = Weight.view(8, panels, 0, 0, 16, 32)
    before = weight.dequantize()
    panels[0] ^= 1
    assert weight.dequantize().tobytes() != before.tobytes()


def aligned(panels: U8) -> U8:
    """A copy that begins at a multiple of 64 bytes."""
    memory = np.empty(panels.size + 64, np.uint8)
    at = -memory.ctypes.data % 64
    memory[at : at + panels.size] = panels
    return memory[at : at + panels.size]


def test_panels_that_do_not_fit_their_shape() -> None:
    panels = aligned(pack_panels(8, random_blocks(Type.Q8_0, 32, 64, np.random.default_rng(0)).reshape(-1), 32, 64))
    assert Weight.view(8, panels, 0, 0, 32, 64).nbytes == panels.size
    half = panels.size // 2
    assert Weight.view(8, panels, half, 2, 16, 64).experts == 2
    for stride, experts, rows, cols in (
        (0, 0, 33, 64),
        (0, 0, 32, 32),
        (0, 0, 0, 64),
        (0, 2, 16, 64),
        (half, 1 << 60, 16, 64),
        (1 << 62, 4, 16, 64),
        (-half, 2, 16, 64),
        (0, 0, 1 << 40, 1 << 40),
    ):
        with pytest.raises(ValueError, match="not the panels of this shape"):
            Weight.view(8, panels, stride, experts, rows, cols)
    with pytest.raises(ValueError, match="multiple of 64"):
        Weight.view(8, np.concatenate([panels[:1], panels])[1:], 0, 0, 32, 64)
    with pytest.raises(ValueError, match="cannot lie 67 bytes apart"):
        Weight.read(8, 0, 0, 67, 0, 32, 64)


# SHA-256 (its first 16 digits) of the panels of the same 40 rows of 3 blocks.
PANELS = {
    "F32": "d4e445794377aff8",
    "F16": "73da4793280550c9",
    "BF16": "f5ea19d9500a6947",
    "Q4_0": "0c76e5d75a3c85e7",
    "Q4_1": "28fdbc6f130f26c7",
    "Q5_0": "2cdad904d5b6b51c",
    "Q5_1": "8c1a18c7854b4a7f",
    "Q8_0": "e1cf77591cfb57ad",
    "Q2_K": "7dae64f49d6b7731",
    "Q3_K": "0fc8228ed8b9c8b7",
    "Q4_K": "a2a9d07a3995cdb6",
    "Q5_K": "111a153232dfe945",
    "Q6_K": "93e91da71d2bb21e",
    "IQ4_NL": "08bd35c2c26acaf3",
    "IQ4_XS": "9eb031743f5e21e0",
    "IQ1_S": "0c553f8495cfbd23",
    "IQ1_M": "446c793fe8058c4e",
    "IQ2_XXS": "2a2d9e4762803f2a",
    "IQ2_XS": "81b358d5dd759bd7",
    "IQ2_S": "4f3cc099602f9cc5",
    "IQ3_XXS": "b479159369f3a0b8",
    "IQ3_S": "de8abde046c469ce",
    "TQ1_0": "7049540f02e2c952",
    "TQ2_0": "3dfd50fc42301ecf",
    "MXFP4": "161bbad8cad2663d",
    "NVFP4": "f182ade6fcbf5a06",
}


def test_panels_are_those_of_their_version() -> None:
    """Packed files hold panels: a layout that changes needs a new kPanelVersion, so that older files are refused, and new hashes here."""
    seen = {}
    for kind in TYPES:
        data = random_blocks(kind, 40, 3 * block_size(kind), np.random.default_rng(9))
        seen[kind.name] = sha256(pack_panels(int(kind), data.reshape(-1), 40, 3 * block_size(kind), 2).data).hexdigest()[:16]
    assert (PANEL_VERSION, seen) == (1, PANELS)
