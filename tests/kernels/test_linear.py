"""The native linear layer equals the reference by bytes, on every instruction set: through a model that embeds, norms and multiplies."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tests.kernels.blocks import QUANTISED, U8, block_size, random_blocks

from quaff import _native
from quaff.graph import arithmetic
from quaff.graph import program as p
from quaff.graph import reference as plain
from quaff.graph.arithmetic import quantise, rms_norm
from quaff.graph.lowering import BLOCKS, lower
from quaff.graph.reference import linear_float, linear_int

F32 = NDArray[np.float32]
TOKENS = [1, 2, 3, 4, 6, 7, 13, 47]  # every tile of tokens, alone and as a remainder; packed weights, prepared ones
FLOATS = (Type.F32, Type.F16, Type.BF16)
LOWERED = tuple(kind for kind in QUANTISED if int(kind) in BLOCKS)
EPS = 1e-5


def multiply(x: F32, bias: F32, kind: Type, data: U8, int8: bool, threads: int) -> F32:
    """rms_norm(x) [n, k] times a packed weight [m, k] plus bias: x enters as the embedding of tokens 0..n-1."""
    (n, k), m = x.shape, len(bias)
    weight = _native.Weight(int(kind), data.reshape(-1), m, k)
    rows_of_table = np.concatenate([x, np.zeros((m - n, k), np.float32)])  # one row per vocabulary id
    table = _native.Weight(int(Type.F32), rows_of_table.reshape(-1).view(np.uint8), m, k)
    vectors = [_native.Weight.vector(v) for v in (bias, np.ones(k, np.float32))]
    normed, codes = p.SCRATCH, p.SCRATCH + 1 if int8 else p.NONE
    model = _native.Model(k, m, m)
    model.add_stage(_native.Program([], [(p.OpKind.EMBED, [], [p.RESIDUAL], [0], [], [1.0])]), [table])
    norm = (p.OpKind.RMS_NORM, [p.RESIDUAL], [normed, codes], [2], [1], [EPS])
    linear = (p.OpKind.LINEAR, [codes, normed], [p.LOGITS], [0, 1], [1, 0], [])
    buffers = [(k, p.F32), (k, p.INT8)] if int8 else [(k, p.F32)]
    model.add_stage(_native.Program(buffers, [norm, linear]), [weight, *vectors])
    rows = np.arange(n, dtype=np.int32)
    stages, ranges = np.array([0, 1], np.int32), np.array([[0, n], [0, n]], np.int32)
    logits = np.zeros((n, m), np.float32)
    segments, cells, control = [(rows, 0, [], [])], (stages, np.arange(3, dtype=np.int32), ranges), _native.Control()
    done = _native.Runtime(threads).step(model, [], [], segments, *cells, rows, logits, control, _native.Counters())
    assert done == (2, (False,), ())
    return logits


def reference(x: F32, bias: F32, kind: Type, data: U8, int8: bool) -> F32:
    normed = rms_norm(x, np.ones(x.shape[1], np.float32), EPS)
    weight = lower(int(kind), data, (len(bias), x.shape[1]))
    return (linear_int(quantise(normed), weight) if int8 else linear_float(normed, weight.dequantised())) + bias


pytestmark = pytest.mark.usefixtures("isa")


def case(kind: Type, tokens: int) -> tuple[F32, F32, U8]:
    """x [tokens, k], bias [m] and weight bytes: m is not a multiple of a panel, one block of k is not a multiple of a chunk of groups."""
    rng = np.random.default_rng(tokens)
    block = max(32, block_size(kind))
    m, k = int(rng.integers(tokens, 150)), block * int(rng.integers(1, 6 if block == 256 else 40))
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    return x, rng.standard_normal(m).astype(np.float32), random_blocks(kind, m, k, rng, tame=True)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", LOWERED, ids=lambda kind: kind.name)
def test_integer_weights(kind: Type, tokens: int) -> None:
    x, bias, data = case(kind, tokens)
    assert multiply(x, bias, kind, data, True, threads=2).tobytes() == reference(x, bias, kind, data, True).tobytes()


@pytest.mark.parametrize("tokens", [1, 13, 47])
def test_scales_that_are_denormal_numbers(tokens: int) -> None:
    """Only the exponents of MXFP4 make such products of scales; few and many rows must round them alike."""
    rng = np.random.default_rng(tokens)
    data = random_blocks(Type.MXFP4, 50, 96, rng, tame=True)
    data.reshape(50, 3, -1)[..., 0] = rng.integers(0, 12, (50, 3))
    x, bias = rng.standard_normal((tokens, 96)).astype(np.float32), np.zeros(50, np.float32)
    found = multiply(x, bias, Type.MXFP4, data, True, threads=1)
    assert found.tobytes() == reference(x, bias, Type.MXFP4, data, True).tobytes()
    assert 0 < np.abs(found).max() < 2.0**-100


@pytest.mark.parametrize("tokens", [3, 47])
@pytest.mark.parametrize(("name", "value"), [("OUTLIER_BLOCK", 256), ("SCALE_FRACTION", np.int32(0x1FFFFF))])
def test_the_comparison_sees_other_rounding(name: str, value: object, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the largest of every 256 activations kept apart instead of every 1,024; scales of four mantissas instead of eight."""
    rng = np.random.default_rng(0)
    x, data = rng.standard_normal((tokens, 512)).astype(np.float32), random_blocks(Type.Q4_1, 50, 512, rng, tame=True)
    bias = np.zeros(50, np.float32)
    found = multiply(x, bias, Type.Q4_1, data, True, threads=1)
    assert found.tobytes() == reference(x, bias, Type.Q4_1, data, True).tobytes()
    for module in (arithmetic, plain):
        monkeypatch.setattr(module, name, value, raising=False)
    assert found.tobytes() != reference(x, bias, Type.Q4_1, data, True).tobytes()


@pytest.mark.parametrize("kind", (*FLOATS, *LOWERED), ids=lambda kind: kind.name)
def test_float_activations(kind: Type) -> None:
    x, bias, data = case(kind, 7)
    assert multiply(x, bias, kind, data, False, threads=1).tobytes() == reference(x, bias, kind, data, False).tobytes()


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tokens", [13, 47])
def test_a_row_does_not_see_its_neighbours(kind: Type, int8: bool, tokens: int) -> None:
    """Every type, also those without a Python lowering: many rows at once equal one row at a time."""
    x, bias, data = case(kind, tokens)
    together = multiply(x, bias, kind, data, int8, threads=1)
    alone = [multiply(x[t : t + 1], bias, kind, data, int8, threads=1) for t in range(tokens)]
    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_a_flipped_bit_shows() -> None:
    """Negative control: the comparison above can fail."""
    x, bias, data = case(Type.Q4_1, 7)
    flipped = data.copy()
    flipped[-1, -1] ^= 1
    assert multiply(x, bias, Type.Q4_1, flipped, True, threads=1).tobytes() != reference(x, bias, Type.Q4_1, data, True).tobytes()
