"""Write a GGUF model of a real model's shapes with random weights: speed depends on shapes and types, not on what a model has learned.

The same arguments give the same bytes everywhere: codes come from PCG64's raw 64-bit words, whose stream NumPy guarantees. Rows are written
in pieces, so memory stays small whatever the size of the model. The vocabulary is byte-level and holds every byte, so any text works.

    python benchmarks/make_model.py llama-1.5b model.gguf --type q4_0
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

PIECE_BYTES = 8 << 20
BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of the Llama architecture with a tied embedding."""

    dim: int
    ffn_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    context: int


SHAPES = {
    "tiny": Shape(64, 192, 2, 4, 2, 16, 512, 1e4, 512),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, 1e5, 8192),
    "smollm2-360m": Shape(960, 2560, 32, 15, 5, 64, 49152, 1e5, 8192),
    # Qwen2-1.5B's sizes without its biases: few KV heads, a wide ffn, a large vocabulary.
    "llama-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, 1e6, 32768),
    "smollm2-1.7b": Shape(2048, 8192, 24, 32, 32, 64, 49152, 1.3e5, 8192),
}
# One block of 32 weights: f16 scale (and minimum), then the codes.
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
# Codes are made to average to zero: -7..7 (0 twice as often), 0..15 around a minimum of -7.5 steps, -127..127.
CODE_DEVIATION = {"q4_0": 4.18, "q4_1": 4.61, "q8_0": 73.6}


def random_bytes(seed: int, name: str) -> Iterator[NDArray[np.uint8]]:
    """An endless stream of pieces of PIECE_BYTES bytes; every tensor has its own."""
    source = np.random.PCG64([seed, zlib.crc32(name.encode())])
    while True:
        yield source.random_raw(PIECE_BYTES // 8).astype("<u8").view(np.uint8)


def blocks(kind: str, stream: Iterator[NDArray[np.uint8]], count: int, deviation: float) -> Iterator[NDArray[np.uint8]]:
    """`count` blocks as [n, bytes of a block] pieces. Codes are uniform, scales vary by a quarter around what gives `deviation`."""
    size = BLOCK_BYTES[kind]
    unit = deviation / CODE_DEVIATION[kind]
    for piece in stream:
        out = piece[: len(piece) // size * size].reshape(-1, size)[:count].copy()
        scale = (unit * (0.75 + out[:, 0].astype(np.float32) / 512)).astype("<f2")
        out[:, 0:2] = scale[:, None].view(np.uint8)
        if kind == "q4_0":
            codes = out[:, 2:]
            codes |= np.where(codes & 0x0F, 0, 0x08).astype(np.uint8)
            codes |= np.where(codes & 0xF0, 0, 0x80).astype(np.uint8)
        elif kind == "q4_1":
            out[:, 2:4] = (scale.astype(np.float32) * -7.5).astype("<f2")[:, None].view(np.uint8)
        elif kind == "q8_0":
            signed = out[:, 2:].view(np.int8)
            np.maximum(signed, -127, out=signed)
        yield out
        count -= len(out)
        if count == 0:
            return


def tensors(shape: Shape, kind: str, embedding: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape in rows x columns, type) in file order."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab, shape.dim), embedding
    for layer in range(shape.layers):
        for name, size in (
            ("attn_norm", (shape.dim,)),
            ("attn_q", (q, shape.dim)),
            ("attn_k", (kv, shape.dim)),
            ("attn_v", (kv, shape.dim)),
            ("attn_output", (shape.dim, q)),
            ("ffn_norm", (shape.dim,)),
            ("ffn_gate", (shape.ffn_dim, shape.dim)),
            ("ffn_up", (shape.ffn_dim, shape.dim)),
            ("ffn_down", (shape.dim, shape.ffn_dim)),
        ):
            yield f"blk.{layer}.{name}.weight", size, kind if len(size) == 2 else "f32"
    yield "output_norm.weight", (shape.dim,), "f32"


def byte_names() -> list[str]:
    """The 256 bytes as the printable characters that byte-level vocabularies use: printable bytes stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    tokens, types = ["<|endoftext|>", *byte_names(), "th"], [TokenType.CONTROL, *[TokenType.NORMAL] * 257]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(len(tokens), size)])
    writer.add_token_types(types + [TokenType.NORMAL] * (size - len(tokens)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def write_model(path: Path, name: str, kind: str = "q4_0", embedding: str = "q8_0", seed: int = 1) -> int:
    """Write the model and return the file's size in bytes. `kind` and `embedding` are keys of BLOCK_BYTES."""
    shape = SHAPES[name]
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"{name} with random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    add_vocabulary(writer, shape.vocab)

    plan = list(tensors(shape, kind, embedding))
    sizes = [4 * size[0] if t == "f32" else size[0] * size[1] // BLOCK * BLOCK_BYTES[t] for _, size, t in plan]
    for (tensor, size, t), nbytes in zip(plan, sizes, strict=True):
        if t == "f32":
            writer.add_tensor_info(tensor, size, np.dtype(np.float32), nbytes)
        else:
            row = (size[0], size[1] // BLOCK * BLOCK_BYTES[t])
            writer.add_tensor_info(tensor, row, np.dtype(np.uint8), nbytes, GGMLQuantizationType[t.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    with writer.fout[0] as file:
        writer.write_padding(file, file.tell())
        for (tensor, size, t), nbytes in zip(plan, sizes, strict=True):
            stream = random_bytes(seed, tensor)
            if t == "f32":
                (0.75 + next(stream)[: size[0]].astype("<f4") / 512).tofile(file)
            else:
                # 1/sqrt(columns) keeps activations near one through any number of layers; the embedding's rows have norm one.
                for piece in blocks(t, stream, nbytes // BLOCK_BYTES[t], size[1] ** -0.5):
                    piece.tofile(file)
            writer.write_padding(file, nbytes)
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES), help="whose shapes")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--type", choices=sorted(BLOCK_BYTES), default="q4_0", help="type of the layers' weights (default q4_0)")
    parser.add_argument("--embedding", choices=sorted(BLOCK_BYTES), default="q8_0", help="type of the tied embedding (default q8_0)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    size = write_model(args.path, args.name, args.type, args.embedding, args.seed)
    print(f"{args.path}: {size / 1e6:.0f} MB", file=sys.stderr)
    print(json.dumps({"path": str(args.path), "bytes": size, "shapes": args.name, "type": args.type, "seed": args.seed}))


if __name__ == "__main__":
    main()
