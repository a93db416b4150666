"""Give a GGUF model another kind of weights with llama.cpp's own quantiser. Runs where llama-cpp-python is installed.

Weights that are quantised already are dequantised first. The same input and version give the same bytes, whatever the number of threads.

    python benchmarks/requantize.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2.q8_0.gguf --type q8_0
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

# llama.cpp's numbers of file types (enum llama_ftype).
KINDS = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q6_k": 18, "q4_k_m": 15, "q5_k_m": 17}


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write `target`, whole or not at all. `kind` is a key of KINDS."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = KINDS[kind]
    params.allow_requantize = True
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(params))
        if status != 0:
            raise SystemExit(f"error: llama.cpp could not quantise {source} to {kind} (status {status})")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file to read")
    parser.add_argument("target", type=Path, help="file to write")
    parser.add_argument("--type", choices=KINDS, required=True, help="kind of the file, as llama.cpp names it")
    args = parser.parse_args()
    requantize(args.source, args.target, args.type)


if __name__ == "__main__":
    main()
