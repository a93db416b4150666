"""Speed of single linear layers on the shapes of real models, every form of weights, from one row (decode) to a chunk of 512.

Few rows are bound by memory: their layer is repeated over copies of the weight that no cache holds, and bytes per second stand beside
a plain read of memory in the same run. Many rows are bound by integer dots: multiply-accumulates stand beside the register-only
ceiling. While it is timed, every element of every result is compared by bytes with what plain C++ computes.

    python benchmarks/ops.py -t 2 --types Q8_0,Q4_K --shapes 8960x1536,1536x8960 -b 1,512

Seconds are those of the linear operation alone, the median of the rounds. The last line of output is one JSON object. Exit status 1:
a bit differed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from quaff import _native
from quaff.graph.program import INT8, LOGITS, NONE, RESIDUAL, SCRATCH, OpKind

# Output rows x input columns: SmolLM2-135M, Gemma 3 270M and 1B, Qwen2-1.5B.
SHAPES = "576x576,1536x576,576x1536,1024x1024,3072x1024,4608x1024,1024x4608,1536x1536,8960x1536,1536x8960"
TYPES = "Q8_0,Q4_0,Q4_1,Q5_0,Q5_1,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4"
BATCHES = "1,4,32,128,512"
# Where a block of a type keeps its f16 scales. MXFP4 and NVFP4 have bytes of their own, IQ1_M an f16 in pieces.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
FEW = 6  # rows up to which a layer is bound by memory
DISTINCT = 8  # different activation rows; larger batches repeat them
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """One type, shape and batch; shares are of the ceilings measured in this run."""

    type: str
    rows: int
    cols: int
    batch: int
    seconds: float
    spread: float  # (slowest - fastest) / median of the rounds
    gmacs: float
    int8_share: float
    gbps: float
    bandwidth_share: float
    mismatches: int


def random_weight(name: str, rows: int, cols: int, seed: int = 1) -> NDArray[np.uint8]:
    """Bytes of a weight as in a file: any codes, scales of about 2^-7 with either sign."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = np.random.default_rng(seed).integers(0, 256, (rows * cols // block, size), dtype=np.uint8)
    for at in HALVES[name]:
        data[:, at + 1] = data[:, at + 1] & 0x83 | 0x20  # the exponent
    if name == "MXFP4":
        data[:, 0] = 118 + data[:, 0] % 8
    if name == "NVFP4":
        data[:, :4] = data[:, :4] % 32
    if name == "IQ1_M":  # sign and exponent are the high bits of bytes 55 and 53
        data[:, 53], data[:, 55] = data[:, 53] & 0x3F, data[:, 55] & 0x8F | 0x20
    return data.reshape(-1)


class Layer:
    """One linear layer, `copies` times in memory: each copy is a stage that norms the rows, quantises them and multiplies."""

    def __init__(self, name: str, rows: int, cols: int, copies: int, threads: int) -> None:
        data, kind = random_weight(name, rows, cols), int(GGMLQuantizationType[name])
        self.weights = [_native.Weight(kind, data, rows, cols, threads) for _ in range(copies)]
        ones = _native.Weight.vector(np.ones(cols, np.float32))
        embed = _native.Program([], [(OpKind.EMBED, [], [RESIDUAL], [0], [], [1.0])])
        norm = (OpKind.RMS_NORM, [RESIDUAL], [NONE, SCRATCH], [1], [1], [1e-5])
        linear = (OpKind.LINEAR, [SCRATCH, NONE], [LOGITS], [0, NONE], [1, 0], [])
        program = _native.Program([(cols, INT8)], [norm, linear])
        self.model = _native.Model(cols, rows, rows)
        self.model.add_stage(embed, [self.weights[0]])  # activations are rows of the weight itself
        for weight in self.weights:
            self.model.add_stage(program, [weight, ones])
        self.rows, self.threads = rows, threads
        self.runtime = _native.Runtime(threads)

    def run(self, batch: int, copies: int) -> tuple[float, F32]:
        """Seconds of one multiplication, and its result [batch, rows]."""
        rows = np.arange(batch, dtype=np.int32)
        stages = np.arange(copies + 1, dtype=np.int32)
        ranges = np.tile(np.array([0, batch], np.int32), (copies + 1, 1))
        out = np.zeros((batch, self.rows), np.float32)
        tokens = rows % min(DISTINCT, self.rows)
        seconds = np.zeros(1 + 2 * len(self.weights))
        cells = (stages, np.arange(copies + 2, dtype=np.int32), ranges)
        done, (poisoned,), _ = self.runtime.step(
            self.model, [], [], [(tokens, 0, [], [])], *cells, rows, out, _native.Control(), _native.Counters(), seconds
        )
        if done != copies + 1 or poisoned:
            raise RuntimeError("the step did not finish")
        linear = seconds[2::2]  # embed, then (norm, linear) per copy
        return float(linear[:copies].sum()) / copies, out


def plain(layer: Layer) -> F32:
    """The distinct rows' results in plain C++ [DISTINCT, rows]."""
    before = _native.isa()
    _native.set_isa("scalar")
    try:
        return layer.run(min(DISTINCT, layer.rows), 1)[1]
    finally:
        _native.set_isa(before)


def measure(name: str, rows: int, cols: int, batches: Sequence[int], args: argparse.Namespace, int8: float) -> Iterator[Result]:
    nbytes = _native.packed_bytes(int(GGMLQuantizationType[name]), rows, cols)
    copies = 1 + args.memory * 2**20 // nbytes if min(batches) <= FEW else 1
    layer = Layer(name, rows, cols, copies, args.threads)
    want = plain(layer)
    for batch in batches:
        passes = copies if batch <= FEW else 1
        bandwidth = _native.measure_bandwidth(args.threads, args.memory)
        layer.run(batch, passes)
        seconds, mismatches = [], 0
        for _ in range(args.rounds):
            elapsed, got = layer.run(batch, passes)
            seconds.append(elapsed)
            expected = want[np.arange(batch) % len(want)]
            mismatches += int((got.view(np.uint32) != expected.view(np.uint32)).sum())
        bandwidth = max(bandwidth, _native.measure_bandwidth(args.threads, args.memory))
        median = statistics.median(seconds)
        macs, read = rows * cols * batch / median, nbytes / median
        spread = (max(seconds) - min(seconds)) / median
        yield Result(name, rows, cols, batch, median, spread, macs / 1e9, macs / int8, read / 1e9, read / bandwidth, mismatches)


def line(r: Result) -> str:
    bound = f"{r.gbps:6.1f} GB/s {r.bandwidth_share:4.0%} of a read" if r.batch <= FEW else f"{r.int8_share:4.0%} of int8 peak"
    bits = f", {r.mismatches} ELEMENTS DIFFER" if r.mismatches else ""
    return f"{r.type:<7}{r.rows:6}x{r.cols:<6}{r.batch:4} rows {r.gmacs:8.1f} GMAC/s  {bound}, spread {r.spread:.0%}{bits}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=TYPES, help=f"ggml types, of {','.join(HALVES)} (default {TYPES})")
    parser.add_argument("--shapes", default=SHAPES, help="output rows x input columns")
    parser.add_argument("-b", "--batches", default=BATCHES, help="activation rows")
    parser.add_argument("-t", "--threads", type=int, default=_native.default_threads())
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=256, metavar="MIB", help="of copies of a weight that few rows read (default 256)")
    args = parser.parse_args(argv)
    args.types = args.types.split(",")
    if unknown := [name for name in args.types if name not in HALVES]:
        parser.error(f"unknown type {unknown[0]}; known: {TYPES}")
    try:
        args.shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
        args.batches = [int(batch) for batch in args.batches.split(",")]
    except ValueError:
        parser.error("shapes are like 1536x576,576x1536 and batches like 1,512")
    if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes) or min(args.batches) < 1:
        parser.error("shapes are like 1536x576,576x1536 and batches like 1,512")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    int8 = _native.measure_int8(args.threads, 0.2)
    print(f"{_native.isa()}, {args.threads} threads, int8 peak {int8 / 1e9:.0f} GMAC/s", flush=True)
    results = []
    for name in args.types:
        for rows, cols in args.shapes:
            if cols % GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]:
                continue  # llama.cpp gives such a weight another type
            for result in measure(name, rows, cols, args.batches, args, int8):
                results.append(result)
                print(line(result), flush=True)
    mismatches = sum(r.mismatches for r in results)
    summary = {"isa": _native.isa(), "threads": args.threads, "int8_gmacs": int8 / 1e9, "mismatches": mismatches}
    print(json.dumps({**summary, "rows": [asdict(r) for r in results]}))
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
