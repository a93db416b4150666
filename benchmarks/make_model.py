"""Write a GGUF model of a real model's shapes with random weights: speed depends on shapes and types, not on what a model has learned.

The same arguments give the same bytes everywhere: codes come from PCG64's raw 64-bit words, whose stream NumPy guarantees. Rows are written
in pieces, so memory stays small whatever the size of the model. The vocabulary is byte-level and holds every byte, so any text works.
Every tensor has the type that llama.cpp's quantiser gives it in a file of that kind.

    python benchmarks/make_model.py qwen2-1.5b model.gguf --type q4_k_m
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, whose embedding is tied unless `untied`, of an architecture that is Llama's but for biases on q, k and v (qwen2),
    or for QK-norms and short convolutions in all layers but `attends` (lfm2), or for QK-norms and `experts` experts of width `ffn_dim`,
    `used` of them for a token (qwen3moe), or for gated attention in every fourth layer and gated delta rules of `delta_heads` heads in the
    others (qwen35), or for latent attention of rank `latent` in every fourth layer, delta rules in the others, and experts, one of them
    shared, after the ffn of the first layer, `dense_dim` wide (kimi-linear).
    """

    dim: int
    ffn_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    context: int
    architecture: str = "llama"
    attends: tuple[int, ...] = ()
    taps: int = 3
    experts: int = 0
    used: int = 0
    delta_heads: int = 0
    latent: int = 0
    dense_dim: int = 0
    untied: bool = False


SHAPES = {
    "tiny": Shape(64, 192, 2, 4, 2, 16, 512, 1e4, 512),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, 1e5, 8192),
    "smollm2-360m": Shape(960, 2560, 32, 15, 5, 64, 49152, 1e5, 8192),
    "tiny-lfm2": Shape(256, 512, 4, 4, 2, 64, 512, 1e6, 512, "lfm2", (1,)),
    "lfm2-350m": Shape(1024, 4608, 16, 16, 8, 64, 65536, 1e6, 128000, "lfm2", (2, 5, 8, 10, 12, 14)),
    "tiny-qwen2": Shape(256, 512, 28, 4, 2, 64, 512, 1e6, 512, "qwen2"),
    "tiny-qwen35": Shape(256, 512, 4, 4, 2, 64, 512, 1e7, 512, "qwen35", taps=4, delta_heads=8),
    # As Qwen3.5 0.8B.
    "qwen3.5-0.8b": Shape(1024, 3584, 24, 8, 2, 256, 248320, 1e7, 262144, "qwen35", taps=4, delta_heads=16),
    # Few KV heads, a wide ffn, a large vocabulary; llama-1.5b is the same without biases.
    "qwen2-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, 1e6, 32768, "qwen2"),
    "llama-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, 1e6, 32768),
    "tiny-qwen3moe": Shape(256, 128, 6, 4, 2, 64, 512, 1e6, 512, "qwen3moe", experts=8, used=2),
    # A mixture that fits this size of machine: 1 billion weights, of which a token uses a sixth.
    "qwen3-moe": Shape(1024, 384, 12, 16, 4, 64, 65536, 1e6, 32768, "qwen3moe", experts=64, used=8),
    "tiny-kimi": Shape(
        256, 128, 4, 8, 8, 128, 512, 1e4, 512, "kimi-linear", taps=4, experts=8, used=2, latent=256, dense_dim=512, untied=True
    ),
    # As Kimi Linear 48B in ratios, of 0.9 billion weights.
    "kimi-linear": Shape(
        1024,
        256,
        12,
        8,
        8,
        128,
        65536,
        1e4,
        131072,
        "kimi-linear",
        taps=4,
        experts=128,
        used=8,
        latent=512,
        dense_dim=4096,
        untied=True,
    ),
    # Two of seven billion weights: with as many KV heads as heads, and with a quarter of them.
    "mistral-7b": Shape(4096, 14336, 32, 32, 8, 128, 32000, 1e6, 32768, untied=True),
    "llama2-7b": Shape(4096, 11008, 32, 32, 32, 128, 32000, 1e4, 4096, untied=True),
    "smollm2-1.7b": Shape(2048, 8192, 24, 32, 32, 64, 49152, 1.3e5, 8192),
}
# Matrices that stay F32: taps of convolutions. Layers of Qwen3.5 and Kimi Linear up to one that attends; width of a key or value head of
# their delta rules; values of a latent key that would turn.
TAPS = ("shortconv.conv", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
INTERVAL, DELTA_DIM, TURNED = 4, 128, 64
# What adds to the residual in a mixture.
SMALL = tuple(f"{role}.weight" for role in ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp"))
# Kinds of files, with llama.cpp's number for each (general.file_type), which other readers ask for.
KINDS = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15}
# Of one block: weights, bytes, and the root mean square of code times sub-block scale.
BLOCKS = {
    "q4_0": (32, 18, 4.18),
    "q4_1": (32, 20, 4.61),
    "q5_0": (32, 22, 9.23),
    "q8_0": (32, 34, 73.6),
    "q4_k": (256, 144, 48.39 * 4.61),
    "q6_k": (256, 210, 97.27 * 18.48),
}
# What llama.cpp falls back to where a row is not a multiple of 256.
SHORT_ROWS = {"q4_k": "q5_0", "q6_k": "q8_0"}


def random_bytes(seed: int, name: str) -> Iterator[NDArray[np.uint8]]:
    """An endless stream of pieces of PIECE_BYTES bytes; every tensor has its own."""
    source = np.random.PCG64([seed, zlib.crc32(name.encode())])
    while True:
        yield source.random_raw(PIECE_BYTES // 8).astype("<u8").view(np.uint8)


def blocks(kind: str, stream: Iterator[NDArray[np.uint8]], count: int, deviation: float) -> Iterator[NDArray[np.uint8]]:
    """`count` blocks as [n, bytes of a block] pieces. Codes are uniform, scales vary by a quarter around what gives `deviation`; values
    average to zero: by codes of -7..7 (0 twice as often) or -127..127, by a minimum in the middle of the codes, or by the scales' signs."""
    _, size, unit = BLOCKS[kind]
    for piece in stream:
        out = piece[: len(piece) // size * size].reshape(-1, size)[:count].copy()
        scale = (deviation / unit * (0.75 + out[:, 0].astype(np.float32) / 512)).astype("<f2")
        if kind == "q4_0":
            codes = out[:, 2:]
            codes |= np.where(codes & 0x0F, 0, 0x08).astype(np.uint8)
            codes |= np.where(codes & 0xF0, 0, 0x80).astype(np.uint8)
        elif kind == "q4_1":
            out[:, 2:4] = half_bytes(scale.astype(np.float32) * -7.5)
        elif kind == "q5_0":
            scale = np.where(out[:, 1] & 1, scale, -scale)
        elif kind == "q8_0":
            signed = out[:, 2:].view(np.int8)
            np.maximum(signed, -127, out=signed)
        elif kind == "q4_k":
            # Eight scales of 32..63, each also the minimum's, which counts steps of 7.5; six bits each, the last four in three parts.
            out[:, 2:4] = half_bytes(scale.astype(np.float32) * 7.5)
            first, last = 32 | out[:, 4:8] & 31, 32 | out[:, 8:12] & 31
            out[:, 4:8] = out[:, 8:12] = first | last >> 4 << 6
            out[:, 12:16] = (last & 15) * 17
        elif kind == "q6_k":
            out[:, 192:208] = np.where(out[:, 192:208] & 128, 64 + (out[:, 192:208] & 63), 192 - (out[:, 192:208] & 63))
        at = size - 2 if kind == "q6_k" else 0
        out[:, at : at + 2] = half_bytes(scale)
        yield out
        count -= len(out)
        if count == 0:
            return


def half_bytes(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """f16 values [n] as bytes [n, 2]."""
    return values.astype("<f2")[:, None].view(np.uint8)


def more_bits(index: int, layers: int) -> bool:
    """Layers whose attn_v and ffn_down are Q6_K in a Q4_K_M file: the first and last eighth, and every third between."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def tensor_type(kind: str, layer: int, role: str, layers: int, columns: int) -> str:
    """The type that llama.cpp gives a matrix in a file of this kind (llama-quant.cpp). A tied embedding is treated as the head it is."""
    if role == "output":
        wanted = "q8_0" if kind == "q8_0" else "q6_k"
    elif role == "ffn_gate_inp":
        return "f32"
    elif kind == "q4_k_m":
        wanted = "q6_k" if role in ("attn_v", "ffn_down", "ffn_down_exps") and more_bits(layer, layers) else "q4_k"
    else:
        wanted = kind
    return SHORT_ROWS.get(wanted, wanted) if columns % 256 else wanted


def nbytes(size: tuple[int, ...], kind: str) -> int:
    if kind == "f32":
        return 4 * prod(size)
    weights, block_bytes, _ = BLOCKS[kind]
    return prod(size) // weights * block_bytes


def tensors(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape in rows x columns, type) in file order."""
    yield (
        "token_embd.weight",
        (shape.vocab, shape.dim),
        tensor_type(kind, 0, "token_embd" if shape.untied else "output", shape.layers, shape.dim),
    )
    for layer in range(shape.layers):
        for role, size in roles(shape, layer):
            t = "f32" if len(size) == 1 or role in (*TAPS, "ssm_a") else tensor_type(kind, layer, role, shape.layers, size[-1])
            yield f"blk.{layer}.{role}" + ("" if role == "ssm_a" or role.endswith(".bias") else ".weight"), size, t
            if shape.architecture == "qwen2" and role in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{role}.bias", size[:1], "f32"
    yield "token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight", (shape.dim,), "f32"
    if shape.untied:
        yield "output.weight", (shape.vocab, shape.dim), tensor_type(kind, 0, "output", shape.layers, shape.dim)


def roles(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(role, size) of a layer's tensors in file order."""
    dim, q, kv = shape.dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "attn_norm", (dim,)
    if shape.architecture == "lfm2" and layer not in shape.attends:
        yield "shortconv.in_proj", (3 * dim, dim)
        yield "shortconv.conv", (dim, shape.taps)
        yield "shortconv.out_proj", (dim, dim)
    elif shape.architecture == "qwen35" and (layer + 1) % INTERVAL:
        heads, values = shape.delta_heads, shape.delta_heads * DELTA_DIM
        yield from (("attn_qkv", (3 * values, dim)), ("attn_gate", (values, dim)), ("ssm_conv1d", (3 * values, shape.taps)))
        yield from (("ssm_alpha", (heads, dim)), ("ssm_beta", (heads, dim)), ("ssm_a", (heads,)), ("ssm_dt.bias", (heads,)))
        yield from (("ssm_norm", (DELTA_DIM,)), ("ssm_out", (dim, values)))
    elif shape.architecture == "kimi-linear":
        yield from kimi_mixer(shape, attends=not (layer + 1) % INTERVAL)
    else:
        q *= 2 if shape.architecture == "qwen35" else 1
        yield from (("attn_q", (q, dim)), ("attn_k", (kv, dim)), ("attn_v", (kv, dim)))
        yield "attn_output", (dim, shape.heads * shape.head_dim)
        if shape.architecture in ("lfm2", "qwen3moe", "qwen35"):
            yield from (("attn_q_norm", (shape.head_dim,)), ("attn_k_norm", (shape.head_dim,)))
    yield "post_attention_norm" if shape.architecture == "qwen35" else "ffn_norm", (dim,)
    if shape.architecture == "kimi-linear" and layer:
        yield from mixture(shape)
        yield "exp_probs_b.bias", (shape.experts,)
        yield from ffn(shape, shape.ffn_dim, "_shexp")
    elif shape.experts and not shape.dense_dim:
        yield from mixture(shape)
    else:
        yield from ffn(shape, shape.dense_dim or shape.ffn_dim)


def kimi_mixer(shape: Shape, attends: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, heads, width = shape.dim, shape.heads, shape.heads * shape.head_dim
    if attends:
        yield "attn_q", (heads * (shape.head_dim + TURNED), dim)
        yield from (("attn_kv_a_mqa", (shape.latent + TURNED, dim)), ("attn_kv_a_norm", (shape.latent,)))
        yield from (("attn_k_b", (heads, shape.latent, shape.head_dim)), ("attn_v_b", (heads, shape.head_dim, shape.latent)))
    else:
        yield from ((f"attn_{part}", (width, dim)) for part in "qkv")
        yield from ((f"ssm_conv1d_{part}", (1, width, 1, shape.taps)) for part in "qkv")
        for gate in "fg":
            yield from ((f"ssm_{gate}_a", (DELTA_DIM, dim)), (f"ssm_{gate}_b", (width, DELTA_DIM)))
        yield from (("ssm_beta", (heads, dim)), ("ssm_a", (1, 1, heads, 1)), ("ssm_dt.bias", (width,)), ("ssm_norm", (DELTA_DIM,)))
    yield "attn_output", (dim, width)


def ffn(shape: Shape, width: int, end: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"ffn_gate{end}", (width, shape.dim)), (f"ffn_up{end}", (width, shape.dim)), (f"ffn_down{end}", (shape.dim, width)))


def mixture(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ffn_gate_inp", (shape.experts, shape.dim)
    yield from ((f"{role}_exps", (shape.experts, *size)) for role, size in ffn(shape, shape.ffn_dim))


def byte_names() -> list[str]:
    """The 256 bytes as the printable characters that byte-level vocabularies use: printable bytes stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def add_vocabulary(writer: GGUFWriter, size: int, pre: str) -> None:
    tokens, types = ["<|endoftext|>", *byte_names(), "th"], [TokenType.CONTROL, *[TokenType.NORMAL] * 257]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(len(tokens), size)])
    writer.add_token_types(types + [TokenType.NORMAL] * (size - len(tokens)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def add_latent(writer: GGUFWriter, shape: Shape) -> None:
    """Latent attention and Kimi's delta rules and mixture."""
    writer.add_key_length(shape.latent + TURNED)
    writer.add_value_length(shape.latent)
    writer.add_key_length_mla(shape.head_dim + TURNED)
    writer.add_value_length_mla(shape.head_dim)
    writer.add_kv_lora_rank(shape.latent)
    writer.add_rope_dimension_count(TURNED)
    writer.add_uint32("kimi-linear.kda.head_dim", DELTA_DIM)
    writer.add_ssm_conv_kernel(shape.taps)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def write_model(path: Path, name: str, kind: str = "q4_0", seed: int = 1) -> int:
    """Write the model, whole or not at all, and return the file's size in bytes. `kind` is one of KINDS."""
    shape = SHAPES[name]
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    writer = GGUFWriter(part, shape.architecture)
    writer.add_name(f"{name} with random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.dense_dim or shape.ffn_dim)
    writer.add_head_count(shape.heads)
    if shape.architecture == "lfm2":
        writer.add_head_count_kv([shape.kv_heads if layer in shape.attends else 0 for layer in range(shape.layers)])
        writer.add_shortconv_l_cache(shape.taps)
    elif shape.architecture == "kimi-linear":
        writer.add_head_count_kv([int(not (layer + 1) % INTERVAL) for layer in range(shape.layers)])
    else:
        writer.add_head_count_kv(shape.kv_heads)
    if shape.latent:
        add_latent(writer, shape)
    else:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.architecture == "qwen35":
        writer.add_rope_dimension_count(shape.head_dim // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32("qwen35.full_attention_interval", INTERVAL)
        writer.add_ssm_conv_kernel(shape.taps)
        writer.add_ssm_group_count(shape.delta_heads)
        writer.add_ssm_inner_size(shape.delta_heads * DELTA_DIM)
        writer.add_ssm_state_size(DELTA_DIM)
        writer.add_ssm_time_step_rank(shape.delta_heads)
    elif not shape.latent:
        writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(KINDS[kind])
    writer.add_quantization_version(2)
    add_vocabulary(writer, shape.vocab, "qwen2" if shape.architecture.startswith("qwen") else "smollm")

    plan = list(tensors(shape, kind))
    for tensor, size, t in plan:
        if t == "f32":
            writer.add_tensor_info(tensor, size, np.dtype(np.float32), nbytes(size, t))
        else:
            row = (*size[:-1], nbytes(size, t) // prod(size[:-1]))
            writer.add_tensor_info(tensor, row, np.dtype(np.uint8), nbytes(size, t), GGMLQuantizationType[t.upper()])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        with writer.fout[0] as file:
            writer.write_padding(file, file.tell())
            for tensor, size, t in plan:
                stream = random_bytes(seed, tensor)
                if tensor.endswith(tuple(f"{role}.weight" for role in TAPS)):  # uniform: all taps of a channel have norm one
                    ((next(stream)[: prod(size)].astype("<f4") / 128 - 1) * np.float32((3 / size[-1]) ** 0.5)).tofile(file)
                elif t == "f32" and len(size) == 2:  # a router: values of 1/sqrt(columns) from bytes, whose deviation is 73.9
                    ((next(stream)[: prod(size)].astype("<f4") - 127.5) / np.float32(73.9 * size[1] ** 0.5)).astype("<f4").tofile(file)
                elif t == "f32":
                    least = -0.25 if tensor.endswith(".bias") else 0.75
                    sign = -1 if tensor.endswith("ssm_a") else 1  # a rate of decay
                    (sign * (least + next(stream)[: prod(size)].astype("<f4") / 512)).astype("<f4").tofile(file)
                else:
                    # 1/sqrt(columns) keeps activations near one through any number of layers; the embedding's rows have norm one.
                    # In a mixture what layers add is small, so that rows differ as their tokens do and choose all experts alike.
                    small = 0.01 if shape.experts and tensor.endswith(SMALL) else 1.0
                    for piece in blocks(t, stream, nbytes(size, t) // BLOCKS[t][1], small * size[-1] ** -0.5):
                        piece.tofile(file)
                writer.write_padding(file, nbytes(size, t))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES), help="whose shapes")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--type", choices=KINDS, default="q4_0", help="kind of the file, as llama.cpp names it (default q4_0)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    size = write_model(args.path, args.name, args.type, args.seed)
    print(f"{args.path}: {size / 1e6:.0f} MB", file=sys.stderr)
    print(json.dumps({"path": str(args.path), "bytes": size, "shapes": args.name, "type": args.type, "seed": args.seed}))


if __name__ == "__main__":
    main()
