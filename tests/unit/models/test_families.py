"""Families read their configuration strictly and compare tensors with their table both ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import CASES, Tiny, read

from quaff.errors import ConfigError, QuaffError, UnsupportedError
from quaff.models import FAMILIES, family
from quaff.models.family import Tensors

Metadata = dict[str, Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["llama-gqa"].write(tmp_path_factory.mktemp("tiny") / "llama.gguf"))[:2]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["qwen2"].write(tmp_path_factory.mktemp("tiny") / "qwen2.gguf"))[:2]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["gemma3-wide"].write(tmp_path_factory.mktemp("tiny") / "gemma3.gguf"))[:2]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["lfm2"].write(tmp_path_factory.mktemp("tiny") / "lfm2.gguf"))[:2]


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["qwen35"].write(tmp_path_factory.mktemp("tiny") / "qwen35.gguf"))[:2]


def refused(error: type[QuaffError], match: str, metadata: Metadata, tensors: Tensors) -> None:
    with pytest.raises(error, match=match) as caught:
        f = family(metadata["general.architecture"])
        f.check(f.config(metadata, tensors), tensors)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'mamba'.*gemma3, lfm2, llama, qwen2, qwen35"):
        family("mamba")


@pytest.mark.parametrize("name", CASES)
def test_every_tiny_model_fits_its_table(name: str, tmp_path: Path) -> None:
    tiny = CASES[name]
    metadata, tensors, _ = read(tiny.write(tmp_path / "m.gguf"))
    f = family(tiny.architecture)
    c = f.config(metadata, tensors)
    f.check(c, tensors)
    assert (c.dim, c.ffn_dim, c.vocab, len(c.layers)) == (tiny.dim, tiny.ffn_dim, tiny.vocab, tiny.layers)
    assert {(layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) for layer in c.layers} == {
        (tiny.heads, tiny.kv_heads, tiny.head_dim)
    }
    assert set(tensors) <= {spec.name for spec in f.table(c)}


def test_llama_conventions(llama: tuple[Metadata, Tensors]) -> None:
    c = FAMILIES["llama"].config(*llama)
    layer = c.layers[0]
    assert layer.kind == "full" and layer.rope.interleaved and layer.rope.linear_factor == 1.0
    assert layer.attention.scale == 0.25 and c.embedding_scale == 1.0


def test_qwen2_is_llama_with_other_pairs_and_biases_that_must_be_there(qwen2: tuple[Metadata, Tensors]) -> None:
    metadata, tensors = qwen2
    f = FAMILIES["qwen2"]
    c = f.config(metadata, tensors)
    assert c.architecture == "qwen2" and not c.layers[0].rope.interleaved and c.layers[0].rope.theta == 1e6
    assert {s.name.split(".", 2)[2] for s in f.table(c) if s.name.endswith(".bias")} == {"attn_q.bias", "attn_k.bias", "attn_v.bias"}
    assert (f.mixer, f.ffn, f.head) == (FAMILIES["llama"].mixer, FAMILIES["llama"].ffn, FAMILIES["llama"].head)
    refused(ConfigError, "unexpected tensor 'blk.0.attn_output.bias'", metadata, {**tensors, "blk.0.attn_output.bias": ((96,), 0)})
    refused(UnsupportedError, "blk.1.attn_k.bias has ggml type 1", metadata, {**tensors, "blk.1.attn_k.bias": ((32,), 1)})


def test_gemma3_conventions(gemma3: tuple[Metadata, Tensors]) -> None:
    c = FAMILIES["gemma3"].config(*gemma3)
    assert [layer.kind for layer in c.layers] == ["sliding"] * 5 + ["full", "sliding"]
    sliding, full = c.layers[0], c.layers[5]
    assert (sliding.rope.theta, sliding.rope.linear_factor, sliding.attention.window) == (10000.0, 1.0, 80)
    assert (full.rope.theta, full.rope.linear_factor, full.attention.window) == (1e6, 8.0, 0)
    assert not full.rope.interleaved and full.attention.scale == 0.25
    assert c.embedding_scale == float(np.float32(math.sqrt(64.0)))


def test_gemma3_27b_scales_by_width_per_head(gemma3: tuple[Metadata, Tensors]) -> None:
    metadata = gemma3[0] | {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    c = FAMILIES["gemma3"].config(metadata, gemma3[1])
    assert c.layers[0].attention.scale == float(np.float32(1 / math.sqrt(168.0)))


def test_defaults(llama: tuple[Metadata, Tensors]) -> None:
    optional = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    metadata = {k: v for k, v in llama[0].items() if k not in {f"llama.{o}" for o in optional}}
    assert FAMILIES["llama"].config(metadata, llama[1]) == FAMILIES["llama"].config(*llama)


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_and_absurd_metadata(key: str, architecture: str, request: pytest.FixtureRequest) -> None:
    metadata, tensors = request.getfixturevalue(architecture)
    full = f"{architecture}.{key}"
    refused(ConfigError, f"{full} is missing", {k: v for k, v in metadata.items() if k != full}, tensors)
    absurd: list[Any] = [0, -1, 2**31, 2**63, "many", True, float("nan"), float("inf")]
    for value in absurd:
        refused(QuaffError, ".", metadata | {full: value}, tensors)
    refused(UnsupportedError, "one value per layer", metadata | {full: [1, 2]}, tensors)
    refused(UnsupportedError, "one value per layer", metadata | {full: np.array([1, 2])}, tensors)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"attention.head_count_kv": 3}, ConfigError, "4 attention heads cannot share 3"),
        ({"attention.head_count_kv": 0}, ConfigError, "KV head count is 0"),
        ({"attention.key_length": 24, "attention.value_length": 24}, ConfigError, "multiple of 16"),
        ({"attention.key_length": 512, "attention.value_length": 512}, ConfigError, "1..256"),
        ({"attention.value_length": 32}, UnsupportedError, "keys and values"),
        ({"rope.dimension_count": 15}, ConfigError, "even"),
        ({"rope.dimension_count": 32}, ConfigError, "exceeds the head dimension"),
        ({"rope.freq_base": 0.0}, ConfigError, "theta"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, UnsupportedError, "'yarn'"),
        ({"rope.scaling.factor": -4.0}, ConfigError, "scaling factor"),
        ({"vocab_size": 301}, ConfigError, "300 rows.*301"),
        ({"expert_count": 8}, UnsupportedError, "mixture of experts"),
        ({"attention.causal": False}, UnsupportedError, "causal"),
        ({"logit_scale": 2.0}, UnsupportedError, "'llama.logit_scale' is not known"),
        ({"attention.sliding_window": 128}, UnsupportedError, "'llama.attention.sliding_window' is not known"),
        ({"embedding_length": 66, "attention.key_length": 0, "attention.value_length": 0}, ConfigError, "does not divide"),
        ({"attention.layer_norm_rms_epsilon": 2.0}, ConfigError, "epsilon"),
    ],
)
def test_llama_refuses(change: Metadata, error: type[QuaffError], match: str, llama: tuple[Metadata, Tensors]) -> None:
    refused(error, match, llama[0] | {f"llama.{k}": v for k, v in change.items()}, llama[1])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"attention.sliding_window": 0}, ConfigError, "sliding layer needs a window"),
        ({"attention.sliding_window_pattern": 4}, UnsupportedError, "pattern other than 6"),
        ({"final_logit_softcapping": 30.0}, UnsupportedError, "soft capping of logits"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedError, "attention soft capping"),
        ({"rope.scaling.type": "longrope"}, UnsupportedError, "'longrope'"),
    ],
)
def test_gemma3_refuses(change: Metadata, error: type[QuaffError], match: str, gemma3: tuple[Metadata, Tensors]) -> None:
    refused(error, match, gemma3[0] | {f"gemma3.{k}": v for k, v in change.items()}, gemma3[1])


def test_linear_scaling_keys(llama: tuple[Metadata, Tensors]) -> None:
    for keys, factor in (
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0),
    ):
        c = FAMILIES["llama"].config(llama[0] | {f"llama.{k}": v for k, v in keys.items()}, llama[1])
        assert c.layers[0].rope.linear_factor == factor


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_missing_tensor_is_named(architecture: str, request: pytest.FixtureRequest) -> None:
    metadata, tensors = request.getfixturevalue(architecture)
    for name in tensors:
        refused(ConfigError, f"missing tensor {name}", metadata, {k: v for k, v in tensors.items() if k != name})


def test_unexpected_tensors_are_named(llama: tuple[Metadata, Tensors]) -> None:
    metadata, tensors = llama
    for name in ("blk.2.attn_q.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up.bias", "extra"):
        refused(ConfigError, f"unexpected tensor '{name}'", metadata, {**tensors, name: ((64,), 0)})
    refused(UnsupportedError, "frequency factors.*rope_freqs.weight", metadata, {**tensors, "rope_freqs.weight": ((8,), 0)})


def test_wrong_shapes_are_named(llama: tuple[Metadata, Tensors]) -> None:
    metadata, tensors = llama
    for name, (shape, ggml_type) in tensors.items():
        if name != "token_embd.weight":
            wrong = (*shape[:-1], shape[-1] + 32)
            refused(ConfigError, f"tensor {name} has shape", metadata, {**tensors, name: (wrong, ggml_type)})
    refused(ConfigError, "two dimensions", metadata, {**tensors, "token_embd.weight": ((300 * 64,), 0)})
    refused(ConfigError, "299 rows but the tokenizer says 300", metadata, {**tensors, "token_embd.weight": ((299, 64), 8)})
    refused(UnsupportedError, "blk.0.attn_norm.weight has ggml type 1", metadata, {**tensors, "blk.0.attn_norm.weight": ((64,), 1)})


def test_biases_and_head_are_optional(tmp_path: Path) -> None:
    metadata, tensors, _ = read(Tiny(biased=True, tied=False).write(tmp_path / "m.gguf"))
    f = FAMILIES["llama"]
    f.check(f.config(metadata, tensors), tensors)
    assert "blk.1.attn_output.bias" in tensors and "output.weight" in tensors


def test_family_files_stay_short() -> None:
    for f in FAMILIES.values():
        assert len(Path(f.config.__code__.co_filename).read_text().splitlines()) <= 160
