"""Families read their configuration strictly and compare tensors with their table both ways."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.families.cases import FAMILIES as HF_CASES
from tests.tiny import CASES, Tiny, opened, read

import quaff.models
from quaff.checkpoint import TensorView
from quaff.config import ModelConfig, RopeConfig
from quaff.errors import ConfigError, QuaffError, UnsupportedError
from quaff.models import FAMILIES, family
from quaff.models.family import CONFIG_TENSORS, Tensors
from quaff.models.metadata import CONTEXT

Metadata = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Metadata, Tensors]]:
    """Metadata and weights of the first tiny model of every architecture."""
    out: dict[str, tuple[Metadata, Tensors]] = {}
    for name, tiny in CASES.items():
        if tiny.architecture not in out:
            path = tiny.write(tmp_path_factory.mktemp("tiny") / f"{name}.gguf")
            out[tiny.architecture] = (read(path)[0], opened(path)[2])
    return out


@pytest.fixture(scope="module")
def llama(files: dict[str, tuple[Metadata, Tensors]]) -> tuple[Metadata, Tensors]:
    return files["llama"]


@pytest.fixture(scope="module")
def qwen2(files: dict[str, tuple[Metadata, Tensors]]) -> tuple[Metadata, Tensors]:
    return files["qwen2"]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, Tensors]:
    return read(CASES["gemma3-wide"].write(tmp_path_factory.mktemp("tiny") / "gemma3.gguf"))[:2]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["lfm2"].write(tmp_path_factory.mktemp("tiny") / "lfm2.gguf"))[:2]


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["qwen35"].write(tmp_path_factory.mktemp("tiny") / "qwen35.gguf"))[:2]


@pytest.fixture(scope="module")
def deepseek2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["deepseek2"].write(tmp_path_factory.mktemp("tiny") / "deepseek2.gguf"))[:2]


@pytest.fixture(scope="module")
def qwen2moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["qwen2moe"].write(tmp_path_factory.mktemp("tiny") / "qwen2moe.gguf"))[:2]


@pytest.fixture(scope="module")
def qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["qwen3moe"].write(tmp_path_factory.mktemp("tiny") / "qwen3moe.gguf"))[:2]


@pytest.fixture(scope="module")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["mellum"].write(tmp_path_factory.mktemp("tiny") / "mellum.gguf"))[:2]


@pytest.fixture(scope="module", name="gpt-oss")
def gptoss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, dict[str, tuple[tuple[int, ...], int]]]:
    return read(CASES["gpt-oss"].write(tmp_path_factory.mktemp("tiny") / "gptoss.gguf"))[:2]


def refused(error: type[QuaffError], match: str, metadata: Metadata, tensors: Tensors) -> None:
    with pytest.raises(error, match=match) as caught:
        f = family(metadata["general.architecture"])
        f.check(f.config(metadata, tensors), tensors)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'mamba'.*gemma3, gemma4, gpt-oss, granite, kimi-linear, lfm2, lfm2moe, llama"):
        family("mamba")


@pytest.mark.parametrize("name", CASES)
def test_every_tiny_model_fits_its_table(name: str, tmp_path: Path) -> None:
    tiny = CASES[name]
    f, c, tensors, _ = opened(tiny.write(tmp_path / "m.gguf"))
    f.check(c, tensors)
    assert (c.dim, c.ffn_dim, c.vocab, len(c.layers)) == (tiny.dim, tiny.ffn_dim, tiny.vocab, tiny.layers)
    sizes = {(layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) for layer in c.layers}
    assert (tiny.heads, tiny.kv_heads, tiny.head_dim) in sizes and (len(sizes) == 1 or tiny.architecture == "gemma4")
    assert set(tensors) <= {spec.name for spec in f.table(c)}


def test_llama_conventions(llama: tuple[Metadata, Tensors]) -> None:
    c = FAMILIES["llama"].config(*llama)
    layer = c.layers[0]
    assert layer.kind == "full" and layer.rope is not None and layer.rope.interleaved and layer.rope.factors == ()
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


def test_mixtures(tmp_path: Path) -> None:
    experts = {}
    for name in ("mixtral", "qwen2moe", "qwen3moe"):
        metadata, tensors, _ = read(CASES[name].write(tmp_path / "m.gguf"))
        c = family(CASES[name].architecture).config(metadata, tensors)
        assert c.layers[0].experts is not None
        experts[name] = c.layers[0].experts
    e = experts["mixtral"]
    assert (e.count, e.used, e.ffn_dim, e.shared_ffn_dim, e.scoring, e.normalise) == (5, 2, 96, 0, "softmax", True)
    e = experts["qwen2moe"]
    assert (e.count, e.used, e.ffn_dim, e.shared_ffn_dim, e.normalise) == (7, 3, 32, 64, False)
    key = "qwen3moe.expert_gating_func"
    refused(UnsupportedError, "gating function 9", {**metadata, key: 9}, tensors)
    c = family("qwen3moe").config(
        {**metadata, key: 2, "qwen3moe.expert_weights_norm": False, "qwen3moe.expert_weights_scale": 2.5}, tensors
    )
    e = c.layers[0].experts
    assert e is not None and (e.scoring, e.normalise, e.scale) == ("sigmoid", False, 2.5)
    refused(ConfigError, "17 experts of 16", {**metadata, "qwen3moe.expert_used_count": 17}, tensors)
    without = {k: v for k, v in metadata.items() if k != "qwen3moe.expert_count"}
    refused(UnsupportedError, "experts used without experts", without, tensors)
    refused(
        ConfigError,
        "missing tensor blk.1.ffn_up_exps.weight",
        metadata,
        {k: v for k, v in tensors.items() if k != "blk.1.ffn_up_exps.weight"},
    )
    shape, kind = tensors["blk.0.ffn_down_exps.weight"]
    refused(ConfigError, "blk.0.ffn_down_exps.weight has shape", metadata, {**tensors, "blk.0.ffn_down_exps.weight": (shape[1:], kind)})


def test_gemma3_conventions(gemma3: tuple[Metadata, Tensors]) -> None:
    c = FAMILIES["gemma3"].config(*gemma3)
    assert [layer.kind for layer in c.layers] == ["sliding"] * 5 + ["full", "sliding"]
    sliding, full = c.layers[0], c.layers[5]
    assert sliding.rope == RopeConfig(10000.0, 16, False) and sliding.attention.window == 80
    assert full.rope == RopeConfig(1e6, 16, False, (8.0,) * 8) and full.attention.window == 0
    assert full.attention.scale == 0.25
    assert c.embedding_scale == float(np.float32(math.sqrt(64.0)))


def test_gemma3_27b_scales_by_width_per_head(gemma3: tuple[Metadata, Tensors]) -> None:
    metadata = gemma3[0] | {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    c = FAMILIES["gemma3"].config(metadata, gemma3[1])
    assert c.layers[0].attention.scale == float(np.float32(1 / math.sqrt(168.0)))


def test_defaults(llama: tuple[Metadata, Tensors]) -> None:
    optional = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    metadata = {k: v for k, v in llama[0].items() if k not in {f"llama.{o}" for o in optional}}
    assert FAMILIES["llama"].config(metadata, llama[1]) == FAMILIES["llama"].config(*llama)


# No layer has the dense network whose width this is.
OPTIONAL = {("qwen35moe", "feed_forward_length"), ("qwen3next", "feed_forward_length")}


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
def test_missing_and_absurd_metadata(key: str, architecture: str, files: dict[str, tuple[Metadata, Tensors]]) -> None:
    metadata, tensors = files[architecture]
    full = f"{architecture}.{key}"
    if (architecture, key) not in OPTIONAL:
        refused(ConfigError, f"{full} is missing", {k: v for k, v in metadata.items() if k != full}, tensors)
    absurd: list[Any] = [0, -1, 2**31, 2**63, "many", True, float("nan"), float("inf")]
    for value in absurd:
        refused(QuaffError, ".", metadata | {full: value}, tensors)
    for values in ([1, 2], np.array([1, 2])):
        refused(QuaffError, "one value per layer|expected . integers", metadata | {full: values}, tensors)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"attention.head_count_kv": 3}, ConfigError, "4 attention heads cannot share 3"),
        ({"attention.head_count_kv": 0}, ConfigError, "KV head count is 0"),
        ({"attention.key_length": 24, "attention.value_length": 24}, ConfigError, "multiple of 16"),
        ({"attention.key_length": 1040, "attention.value_length": 1040}, ConfigError, "1..1024"),
        ({"attention.value_length": 32}, UnsupportedError, "keys and values"),
        ({"rope.dimension_count": 15}, ConfigError, "even"),
        ({"rope.dimension_count": 32}, ConfigError, "exceeds the head dimension"),
        ({"rope.freq_base": 0.0}, ConfigError, "theta"),
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 4.0}, UnsupportedError, "'dynamic'.*none, linear, yarn, longrope"),
        ({"rope.scaling.type": "yarn"}, ConfigError, "yarn needs a scaling factor"),
        ({"rope.scaling.type": "longrope"}, ConfigError, "needs the tensors rope_factors_long.weight"),
        ({"rope.scaling.factor": -4.0}, ConfigError, "scaling factor"),
        ({"vocab_size": 301}, ConfigError, "300 rows.*301"),
        ({"expert_count": 8}, ConfigError, "llama.expert_used_count is missing"),
        ({"expert_used_count": 2}, UnsupportedError, "experts used without experts"),
        ({"attention.causal": False}, UnsupportedError, "causal"),
        ({"logit_scale": 2.0}, UnsupportedError, "'llama.logit_scale' is not known"),
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
    ],
)
def test_gemma3_refuses(change: Metadata, error: type[QuaffError], match: str, gemma3: tuple[Metadata, Tensors]) -> None:
    refused(error, match, gemma3[0] | {f"gemma3.{k}": v for k, v in change.items()}, gemma3[1])


def test_deepseek2_conventions(deepseek2: tuple[Metadata, Tensors]) -> None:
    c = FAMILIES["deepseek2"].config(*deepseek2)
    a, latent, rope = c.layers[0].attention, c.layers[0].latent, c.layers[0].rope
    assert (a.heads, a.kv_heads, a.head_dim, a.v_dim) == (6, 1, 80, 64), "compressed keys and values, one head of each"
    assert latent is not None and (latent.q_rank, latent.kv_rank, latent.plain_dim, latent.value_dim) == (64, 64, 32, 16)
    assert a.scale == float(np.float32(1 / math.sqrt(48.0))), "by the width before compression"
    assert rope is not None and rope.interleaved and rope.rotary_dim == 16


def test_deepseek2_judges_groups_by_scoring(tmp_path: Path) -> None:
    metadata, tensors, _ = read(CASES["deepseek2-experts"].write(tmp_path / "m.gguf"))
    c = FAMILIES["deepseek2"].config(metadata, tensors)
    assert [layer.experts is not None for layer in c.layers] == [False, True, True, True]
    e = c.layers[1].experts
    assert e is not None and (e.scoring, e.normalise, e.scale, e.shared_ffn_dim) == ("sigmoid", True, 0.75, 64)
    assert (e.groups, e.groups_used, e.group_top) == (4, 2, 2), "V3: by the two best"
    e = FAMILIES["deepseek2"].config(metadata | {"deepseek2.expert_gating_func": 1}, tensors).layers[1].experts
    assert e is not None and (e.scoring, e.group_top) == ("softmax", 1), "V2: by the best"


def test_yarn_in_latent_attention_multiplies_scores(deepseek2: tuple[Metadata, Tensors]) -> None:
    """DeepSeek V3: mscale and mscale_all_dim are 1, the factor 40: scores grow by (0.1 ln 40 + 1)^2, what is turned keeps its length."""
    yarn = {"type": "yarn", "factor": 40.0, "original_context_length": 4096, "yarn_log_multiplier": 0.1}
    layer = FAMILIES["deepseek2"].config(deepseek2[0] | {f"deepseek2.rope.scaling.{k}": v for k, v in yarn.items()}, deepseek2[1]).layers[0]
    assert math.isclose(layer.attention.scale, 1.87385 / math.sqrt(48.0), rel_tol=1e-5)
    assert layer.rope is not None and layer.rope.scale == 1.0 and layer.rope.factors[-1] == 40.0


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"attention.head_count_kv": 6}, ConfigError, r"are \(6, 80, 64\); a latent of 64 and 16 rotary values"),
        ({"attention.key_length": 64}, ConfigError, r"are \(1, 64, 64\)"),
        ({"attention.kv_lora_rank": 2048}, ConfigError, "rank of keys and values is 2048"),
        ({"attention.key_length_mla": 16}, ConfigError, "plain dimension of keys is 0"),
        ({"attention.value_length_mla": 0}, ConfigError, "value dimension is 0"),
        ({"expert_count": 8}, ConfigError, "expert_feed_forward_length is missing"),
        ({"rope.scaling.type": "su"}, UnsupportedError, "'su'"),
    ],
)
def test_deepseek2_refuses(change: Metadata, error: type[QuaffError], match: str, deepseek2: tuple[Metadata, Tensors]) -> None:
    refused(error, match, deepseek2[0] | {f"deepseek2.{k}": v for k, v in change.items()}, deepseek2[1])


def test_joined_matrices_of_latent_attention_are_named(deepseek2: tuple[Metadata, Tensors]) -> None:
    metadata, tensors = deepseek2
    older = {k: v for k, v in tensors.items() if not k.endswith(("attn_k_b.weight", "attn_v_b.weight"))}
    for layer in (0, 1):
        older[f"blk.{layer}.attn_kv_b.weight"] = ((6 * 48, 64), 8)
    refused(UnsupportedError, "k_b and v_b in one tensor.*blk.0.attn_kv_b.weight", metadata, older)


def test_linear_scaling_keys(llama: tuple[Metadata, Tensors]) -> None:
    for keys, factor in (
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0),
    ):
        c = FAMILIES["llama"].config(llama[0] | {f"llama.{k}": v for k, v in keys.items()}, llama[1])
        assert c.layers[0].rope == RopeConfig(10000.0, 16, True, () if factor == 1.0 else (factor,) * 8)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_missing_tensor_is_named(architecture: str, files: dict[str, tuple[Metadata, Tensors]]) -> None:
    metadata, tensors = files[architecture]
    f = FAMILIES[architecture]
    for name in [spec.name for spec in f.table(f.config(metadata, tensors)) if not spec.optional]:
        refused(ConfigError, f"missing tensor {name}", metadata, {k: v for k, v in tensors.items() if k != name})


def test_unexpected_tensors_are_named(llama: tuple[Metadata, Tensors]) -> None:
    metadata, tensors = llama
    for name in ("blk.2.attn_q.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up.bias", "extra"):
        refused(ConfigError, f"unexpected tensor '{name}'", metadata, {**tensors, name: ((64,), 0)})
    refused(ConfigError, "rope_freqs.weight has shape", metadata, {**tensors, "rope_freqs.weight": ((9,), 0)})


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
    for path in Path(quaff.models.__file__).parent.glob("*.py"):
        if path.stem in FAMILIES:
            assert len(path.read_text().splitlines()) <= 160, path.name


def changed(files: dict[str, tuple[Metadata, Tensors]], architecture: str, keys: Metadata) -> ModelConfig:
    metadata, tensors = files[architecture]
    values = {k if k in CONFIG_TENSORS or k == CONTEXT else f"{architecture}.{k}": v for k, v in keys.items()}
    return FAMILIES[architecture].config(metadata | values, tensors)


def test_windows_and_layers_without_positions(files: dict[str, tuple[Metadata, Tensors]]) -> None:
    window = changed(files, "llama", {"attention.sliding_window": 128}).layers[0]
    assert window.kind == "sliding" and window.attention.window == 128
    assert changed(files, "llama", {"attention.sliding_window": 4096}).layers[0].kind == "full", "as long as the context"
    smollm3 = changed(files, "smollm3", {})
    assert [layer.rope is None for layer in smollm3.layers] == [False, False, False, True, False]
    gemma2 = changed(files, "gemma2", {})
    assert [layer.kind for layer in gemma2.layers] == ["sliding", "full"]
    assert (gemma2.layers[0].attention.softcap, gemma2.logit_softcap) == (5.0, 3.0)
    flags = changed(files, "gemma2", {"attention.sliding_window_pattern": [False, True]})
    assert [layer.kind for layer in flags.layers] == ["full", "sliding"]
    for wrong, match in (([True], "expected 2 flags"), ([2, 0], "expected 2 flags")):
        with pytest.raises(ConfigError, match=match):
            changed(files, "gemma2", {"attention.sliding_window_pattern": wrong})


def test_long_factors_apply_by_the_context_alone(files: dict[str, tuple[Metadata, Tensors]]) -> None:
    """The context that the model is opened for, not a prompt's length, chooses: bits stay a function of the tokens."""
    long, short = files["phi3"][0]["rope_factors_long.weight"], files["phi3"][0]["rope_factors_short.weight"]
    for context, factors in ((0, long), (1001, long), (1000, short), (10**6, long)):
        rope = changed(files, "phi3", {CONTEXT: context}).layers[0].rope
        assert rope is not None and rope.scale == float(np.float32(1.19))
        assert rope.factors == (() if set(factors) == {1.0} else tuple(factors.tolist()))


def test_granite_multipliers(files: dict[str, tuple[Metadata, Tensors]]) -> None:
    c = changed(files, "granite", {})
    assert (c.embedding_scale, c.residual_scale, c.logit_scale) == (12.0, float(np.float32(0.22)), 0.125)
    assert c.layers[0].attention.scale == 0.125
    plain = changed(files, "granite", {"embedding_scale": 0.0, "residual_scale": 0.0, "attention.scale": 0.0})
    assert (plain.embedding_scale, plain.residual_scale, plain.layers[0].attention.scale) == (1.0, 1.0, 0.25)
    for keys, error, match in (
        ({"logit_scale": 0.0}, ConfigError, "granite.logit_scale"),
        ({"rope.scaling.finetuned": False}, UnsupportedError, "without rotary positions"),
    ):
        with pytest.raises(error, match=match):
            changed(files, "granite", keys)


def test_mistral3_temperature_is_of_queries_alone(files: dict[str, tuple[Metadata, Tensors]]) -> None:
    layer = changed(files, "mistral3", {}).layers[0]
    assert layer.rope is not None and layer.query_rope is not None
    assert layer.query_rope.temperature == float(np.float32(0.1)) and layer.query_rope.temperature_length == 40
    assert layer.rope == replace(layer.query_rope, temperature=0.0, temperature_length=0)
    assert layer.rope.scale == 1.0, "both multipliers of YaRN's attention factor are 1"
    assert changed(files, "mistral3", {"attention.temperature_scale": 0.0}).layers[0].query_rope is None


def test_a_fused_tensor_of_other_rows_is_refused(tmp_path: Path) -> None:
    tiny = replace(CASES["phi3"], keys={**CASES["phi3"].keys, "attention.head_count_kv": 1})
    with pytest.raises(ConfigError, match="blk.0.attn_qkv.weight has 256 rows; the metadata says 192, of attn_q, attn_k, attn_v"):
        opened(tiny.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("case", "change", "match"),
    [
        ("qwen3", {"use_sliding_window": True}, "Qwen3 with sliding windows"),
        ("smollm3", {"no_rope_layer_interval": 3}, "another step"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 0]}, "other layers without positions"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "this attention scale"),
        ("gemma2", {"layer_types": ["full_attention"] * 4}, "other sliding layers"),
        ("llama", {"rope_scaling": {"rope_type": "axial"}}, "'axial'"),
    ],
)
def test_folders_whose_features_are_missing_are_refused(case: str, change: Metadata, match: str) -> None:
    config = dict(HF_CASES[case].config) | change
    mapping = next(f.huggingface for f in FAMILIES.values() if f.huggingface and config["model_type"] in f.huggingface.model_types)
    with pytest.raises(UnsupportedError, match=match):
        mapping.metadata(config)


def test_gemma4_conventions(files: dict[str, tuple[Metadata, Tensors]]) -> None:
    c = changed(files, "gemma4", {})
    assert [layer.kind for layer in c.layers] == ["sliding", "full", "sliding", "sliding", "full"]
    assert [layer.kv_layer for layer in c.layers] == [None, None, None, 2, 1], "the last of its kind that has keys"
    assert [layer.ffn_dim for layer in c.layers] == [96, 96, 96, 192, 192]
    assert {layer.attention.scale for layer in c.layers} == {1.0} and c.per_layer_dim == 32 and c.logit_softcap == 4.0
    assert c.layers[0].output_scale == float(files["gemma4"][0]["blk.0.layer_output_scale.weight"][0]) != 1.0
    full = c.layers[1].rope
    assert full is not None and full.rotary_dim == 32 and full.factors[:5] == (1.0, 1.0, 1.0, 1.0, float(np.float32(1e30)))
    for keys, error, match in (
        ({"attention.shared_kv_layers": 5}, ConfigError, "leaves layer 0 no keys"),
        ({"expert_count": 8}, UnsupportedError, "mixture of experts"),
        ({"attention.value_length": 16}, UnsupportedError, "different lengths"),
    ):
        with pytest.raises(error, match=match):
            changed(files, "gemma4", keys)


def test_parts_are_rows_and_columns_of_a_tensor_that_is_read_once(tmp_path: Path) -> None:
    """Q8_0 blocks: a column part takes whole blocks of every row. A tensor made when it is read is made once for all its parts."""
    c = opened(CASES["gemma4"].write(tmp_path / "m.gguf"))[1]
    reads = []

    def view(name: str, rows: int, cols: int) -> TensorView:
        blocks = np.arange(rows * cols // 32 * 34, dtype=np.uint32).astype(np.uint8)

        def read() -> NDArray[np.uint8]:
            reads.append(name)
            return blocks

        return TensorView(name, (rows, cols), 8, "Q8_0", blocks.nbytes, read)

    table, projection = view("per_layer_token_embd.weight", 300, 5 * 32), view("per_layer_model_proj.weight", 5 * 32, 64)
    parts = FAMILIES["gemma4"].split(c, {v.name: v for v in (table, projection)})
    whole = {v.name: v.data for v in (table, projection)}
    reads.clear()
    for i in range(5):
        columns, rows = parts[f"blk.{i}.per_layer_token_embd.weight"], parts[f"blk.{i}.per_layer_model_proj.weight"]
        assert columns.shape == (300, 32) and rows.shape == (32, 64)
        assert columns.data.tobytes() == whole[table.name].reshape(300, 5, 34)[:, i].tobytes()
        assert rows.data.tobytes() == whole[projection.name].reshape(5, -1)[i].tobytes()
        assert columns.nbytes == 300 * 34 and rows.nbytes == 32 * 68
    assert reads == [table.name, projection.name]
    assert parts["blk.4.per_layer_token_embd.weight"].data.nbytes == 300 * 34 and len(reads) == 3, "given back when all parts were read"
