"""Folders become what a GGUF file of the same model holds: names, types, values, tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tests.families.cases import ATTENTION, FAMILIES, GATED, GEMMA_NORMS, LLAMA, LLAMA_MQA, decoder, settings
from tests.families.tinyhf import TinyHF
from tests.tiny import CASES, CHAT_TEMPLATE

import quaff
from quaff.config import Quantize
from quaff.errors import CheckpointError, ConfigError, MemoryBudgetError, UnsupportedError
from quaff.models.convert import convert
from quaff.models.huggingface import open_model
from quaff.tokenizer import Tokenizer
from quaff.weights.budget import Accountant
from quaff.weights.resident import ResidentWeights

NARROW = settings("llama", "LlamaForCausalLM", hidden_size=40, num_attention_heads=2, intermediate_size=64)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return FAMILIES["llama"].write(tmp_path / "llama")


def stored_as(case: TinyHF, folder: Path, dtype: str) -> Path:
    """The case with tensors of F16 or BF16; the bits of BF16 are made by hand, NumPy has no such type."""
    case.write(folder)
    arrays = case.arrays()
    if dtype == "F16":
        save_file({name: a.astype(np.float16) for name, a in arrays.items()}, folder / "model.safetensors")
        return folder
    header, data = {}, b""
    for name, a in arrays.items():
        raw = (a.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(a.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_1", "none", None])
def test_matrices_become_what_is_asked_for(llama: Path, quantize: Quantize | None) -> None:
    arrays = FAMILIES["llama"].arrays()
    name = "model.layers.2.mlp.down_proj.weight"
    kind = {"none": "F32", None: "Q8_0"}.get(quantize, str(quantize).upper())
    with open_model(llama, quantize) as checkpoint:
        assert (checkpoint.format, checkpoint.quantized) == ("safetensors", quantize or "q8_0")
        view = checkpoint.tensors["blk.2.ffn_down.weight"]
        assert (view.type_name, view.shape) == (kind, (96, 160))
        expected = gguf.quants.quantize(arrays[name], gguf.GGMLQuantizationType[kind])
        assert view.data.tobytes() == expected.tobytes() and view.nbytes == expected.nbytes
        norm = checkpoint.tensors["blk.0.attn_norm.weight"]
        assert norm.type_name == "F32" and norm.data.tobytes() == arrays["model.layers.0.input_layernorm.weight"].tobytes()
        types = {v.type_name for n, v in checkpoint.tensors.items() if len(v.shape) == 2}
        assert types == {kind}


def test_a_width_that_does_not_fit_stays_as_it_is_stored(tmp_path: Path) -> None:
    narrow = TinyHF(NARROW, decoder(NARROW, {"input_layernorm": "d", **{k: v for k, v in LAYER.items()}}))
    for dtype in ("F16", "BF16"):
        with open_model(stored_as(narrow, tmp_path / dtype, dtype)) as checkpoint:
            types = {name: view.type_name for name, view in checkpoint.tensors.items()}
        assert types["blk.0.ffn_up.weight"] == dtype and types["blk.0.ffn_down.weight"] == "Q8_0"
        assert types["output_norm.weight"] == "F32"


GEMMA_LAYER = ATTENTION | GATED | GEMMA_NORMS
LAYER = {
    "self_attn.q_proj": "qd",
    "self_attn.k_proj": "kd",
    "self_attn.v_proj": "kd",
    "self_attn.o_proj": "dq",
    "mlp.gate_proj": "fd",
    "mlp.up_proj": "fd",
    "mlp.down_proj": "df",
    "post_attention_layernorm": "d",
}


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_keeps_its_bits_or_becomes_f32_exactly(dtype: str, tmp_path: Path) -> None:
    case = FAMILIES["llama"]
    folder = stored_as(case, tmp_path / "m", dtype)

    def exact(a: NDArray[np.float32]) -> NDArray[np.float32]:
        return a.astype(np.float16).astype(np.float32) if dtype == "F16" else (a.view(np.uint32) >> 16 << 16).view(np.float32)

    arrays = {name: exact(a) for name, a in case.arrays().items()}
    with open_model(folder, "none") as checkpoint:
        up = checkpoint.tensors["blk.1.ffn_up.weight"]
        assert up.type_name == dtype and up.scratch_bytes == 0
        values = gguf.quants.dequantize(up.data.reshape(160, -1), gguf.GGMLQuantizationType[dtype])
        assert values.tobytes() == arrays["model.layers.1.mlp.up_proj.weight"].tobytes()
        # q is laid out anew, in the type it was stored in.
        q = checkpoint.tensors["blk.1.attn_q.weight"]
        values = gguf.quants.dequantize(q.data.reshape(96, -1), gguf.GGMLQuantizationType[dtype])
        assert (
            values.reshape(6, 8, 2, 96)[3, 5].tobytes()
            == arrays["model.layers.1.self_attn.q_proj.weight"].reshape(6, 16, 96)[3, [5, 13]].tobytes()
        )
        assert checkpoint.tensors["output_norm.weight"].data.tobytes() == arrays["model.norm.weight"].tobytes()
    with open_model(folder) as checkpoint:
        expected = gguf.quants.quantize(arrays["model.layers.1.mlp.up_proj.weight"], gguf.GGMLQuantizationType.Q8_0)
        assert checkpoint.tensors["blk.1.ffn_up.weight"].data.tobytes() == expected.tobytes()


def test_large_tensors_are_quantised_block_by_block(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(llama) as checkpoint:
        whole = {name: view.data.tobytes() for name, view in checkpoint.tensors.items()}
    monkeypatch.setattr("quaff.models.huggingface.BLOCK_VALUES", 1000)
    with open_model(llama) as checkpoint:
        assert {name: view.data.tobytes() for name, view in checkpoint.tensors.items()} == whole


def test_what_reading_takes_is_asked_for(llama: Path) -> None:
    """One tensor at a time: weights and the scratch of the largest one fit, a byte less does not."""
    with open_model(llama) as checkpoint:
        free = Accountant()
        weights = ResidentWeights(checkpoint.tensors, 1, free)
        assert free.used_bytes == weights.loaded_bytes
        most = max(v.scratch_bytes for v in checkpoint.tensors.values())
        assert most > 4 * 300 * 96
        ResidentWeights(checkpoint.tensors, 1, Accountant(weights.loaded_bytes + most))
        with pytest.raises(MemoryBudgetError, match="reading weight 'token_embd.weight' needs"):
            ResidentWeights(checkpoint.tensors, 1, Accountant(most))


def test_a_folder_in_the_hubs_cache_is_called_as_its_repository(tmp_path: Path) -> None:
    folder = FAMILIES["llama"].write(tmp_path / "models--some--Tiny-1B" / "snapshots" / "0123abcd")
    with open_model(folder) as checkpoint:
        assert checkpoint.metadata["general.name"] == "Tiny-1B"
    with open_model(FAMILIES["llama"].write(tmp_path / "plain")) as checkpoint:
        assert checkpoint.metadata["general.name"] == "plain"


def test_a_tied_head_is_the_embedding_though_one_is_stored(tmp_path: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    case = TinyHF(tied, FAMILIES["llama"].weights)
    with open_model(case.write(tmp_path / "m")) as checkpoint:
        assert "output.weight" not in checkpoint.tensors


def test_ignored_tensors(llama: Path) -> None:
    arrays = {**FAMILIES["llama"].arrays(), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(arrays, llama / "model.safetensors")
    open_model(llama).close()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_multimodal_one(prefix: str, tmp_path: Path) -> None:
    case = FAMILIES["gemma3"]
    whole, alone = case.write(tmp_path / "whole"), case.write(tmp_path / "alone")
    outer = {"model_type": "gemma3", "vision_config": {"hidden_size": 3}, "text_config": dict(case.config), "eos_token_id": [2, 7]}
    (whole / "config.json").write_text(json.dumps(outer))
    arrays = {name.replace("model.", prefix, 1): a for name, a in case.arrays().items()}
    senses = ("vision_tower.patch.weight", "model.visual.norm.bias", "multi_modal_projector.w")
    save_file(arrays | {name: np.ones(3, np.float32) for name in senses}, whole / "model.safetensors")
    with open_model(whole) as ours, open_model(alone) as expected:
        assert {n: v.data.tobytes() for n, v in ours.tensors.items()} == {n: v.data.tobytes() for n, v in expected.tensors.items()}
        numbers = {k: v for k, v in expected.metadata.items() if k.startswith("gemma3.")}
        assert numbers == {k: v for k, v in ours.metadata.items() if k.startswith("gemma3.")}
        assert {2, 7} <= Tokenizer.from_metadata(ours.metadata).end_ids
    save_file({**case.arrays(), senses[0]: np.ones(3, np.float32)}, alone / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensor 'vision_tower.patch.weight'"):
        open_model(alone)
    save_file(arrays | {"model.taste.weight": np.ones(3, np.float32)}, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensor 'model.taste.weight'"):
        open_model(whole)


def test_gemma3_leaves_out_what_is_usual(tmp_path: Path) -> None:
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
    said = settings(
        "gemma3_text", "Gemma3ForCausalLM", **usual, hidden_act=None, num_hidden_layers=1, sliding_window=4096, layer_types=None
    )
    brief = {key: value for key, value in said.items() if key not in usual and key != "sliding_window"}
    found = []
    for i, config in enumerate((said, brief)):
        case = TinyHF(config, decoder(said, GEMMA_LAYER))
        with open_model(case.write(tmp_path / str(i))) as checkpoint:
            found.append({k: v for k, v in checkpoint.metadata.items() if k.startswith("gemma3.")})
    assert found[0] == found[1]


def test_old_and_new_rope_settings_say_the_same(tmp_path: Path) -> None:
    base = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    linear = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}}
    found = []
    for i, rope in enumerate((linear, new)):
        case = TinyHF(base | rope, FAMILIES["llama"].weights)
        with open_model(case.write(tmp_path / str(i))) as checkpoint:
            found.append({k: v for k, v in checkpoint.metadata.items() if ".rope." in k})
    assert found[0] == found[1]
    assert found[0] | {"llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 500000.0} == found[0]


def test_options_are_checked(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantize is 'q5_0'; expected one of q8_0, q4_0, q4_1, none"):
        open_model(llama, "q5_0")  # type: ignore[arg-type]
    path = CASES["llama-gqa"].write(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="m.gguf: a file is taken as it is"):
        quaff.load(path, quantize="q8_0")
    with pytest.raises(CheckpointError, match="is a folder; give a GGUF file inside it, such as 'm.gguf'"):
        quaff.load(tmp_path)


def test_loaded_folder_says_what_it_is(llama: Path) -> None:
    with quaff.load(llama, threads=1, quantize="q4_0") as llm:
        assert llm.describe()["quantized"] == "q4_0" and llm.describe()["tensor_types"] == {"Q4_0": 23, "F32": 7}
        assert llm.chat([{"role": "user", "content": "hi"}], quaff.SamplingParams(max_tokens=3)).completion_tokens == 3


# Tokens


def engine(folder: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokenizer(folder: Path) -> Tokenizer:
    with open_model(folder) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata)


TEXTS = ("the rain in Spain 1234", "<|im_start|>user\nhé\n<|im_end|>", " x", "", "😀\r\n\t'll")


def test_ids_are_those_of_the_library_and_of_the_converted_file(llama: Path, tmp_path: Path) -> None:
    ours, theirs = tokenizer(llama), engine(llama)
    convert(llama, tmp_path / "m.gguf", "f16")
    converted = tokenizer_of_file(tmp_path / "m.gguf")
    for text in TEXTS:
        special = ours.encode(text, parse_special=True)
        assert special == theirs.encode(text, add_special_tokens=False).ids == converted.encode(text, parse_special=True)
        plain = ours.encode(text)
        assert plain == converted.encode(text) and not any(ours.vocabulary.is_special(t) for t in plain)
        assert ours.decode(special, skip_special=False) == text == converted.decode(special, skip_special=False)
    assert (ours.bos_id, ours.eos_id) == (0, 2) and ours.end_ids == converted.end_ids
    assert ours.vocab_size == 300 and ours.token_text(299) == ""


def tokenizer_of_file(path: Path) -> Tokenizer:
    with open_model(path) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata)


def change(path: Path, **values: Any) -> None:
    there = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (there | values).items() if v is not None}))


def test_begin_and_end_of_a_text(llama: Path) -> None:
    plain = tokenizer(llama).encode("the")
    change(llama / "tokenizer_config.json", add_bos_token=True)
    assert tokenizer(llama).encode("the") == [0, *plain]
    change(llama / "tokenizer_config.json", add_bos_token=None)
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    change(llama / "tokenizer.json", post_processor=template)
    assert tokenizer(llama).encode("the") == [0, *plain] == engine(llama).encode("the").ids
    change(llama / "tokenizer_config.json", add_bos_token=False)
    assert tokenizer(llama).encode("the") == plain


def test_end_tokens_come_from_the_generation_settings_too(llama: Path) -> None:
    change(llama / "generation_config.json", eos_token_id=[2, 40, 41])
    assert {2, 40, 41} <= tokenizer(llama).end_ids
    change(llama / "tokenizer_config.json", eos_token=None, bos_token={"content": "<|im_start|>"})
    change(llama / "generation_config.json", eos_token_id=7)
    found = tokenizer(llama)
    assert (found.bos_id, found.eos_id) == (1, 7)


def test_chat_templates(llama: Path) -> None:
    def text() -> str:
        found = tokenizer(llama).chat_template
        return found.source if found is not None else ""

    assert text() == CHAT_TEMPLATE
    change(llama / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert text() == "d"
    (llama / "chat_template.jinja").write_text("its own file")
    assert text() == "its own file"


# Converting


def test_conversion_is_whole_or_not_there(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    seen: list[tuple[int, int]] = []
    convert(llama, out, "q4_1", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(CheckpointError, match="out.gguf: exists already"):
        convert(llama, out)
    with pytest.raises(CheckpointError, match="there is no folder"):
        convert(llama, tmp_path / "no" / "out.gguf")
    with pytest.raises(ConfigError, match="type is 'q2_k'"):
        convert(llama, tmp_path / "b.gguf", "q2_k")  # type: ignore[arg-type]
    before = sorted(tmp_path.iterdir())

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama, tmp_path / "c.gguf", "q4_1", fail)
    assert sorted(tmp_path.iterdir()) == before
    with open_model(out) as file, open_model(llama, "q4_1") as folder:
        assert {n: (v.shape, v.type_name, v.data.tobytes()) for n, v in file.tensors.items()} == {
            n: (v.shape, v.type_name, v.data.tobytes()) for n, v in folder.tensors.items()
        }
        assert file.metadata["general.file_type"] == 3 and file.metadata["tokenizer.ggml.pre"] == "starcoder"
        numbers = {k: v for k, v in folder.metadata.items() if k.startswith("llama.")}
        assert numbers == {k: v for k, v in file.metadata.items() if k.startswith("llama.")}


def test_a_value_that_f16_cannot_hold_is_refused(tmp_path: Path) -> None:
    case = FAMILIES["llama-mqa"]
    folder = case.write(tmp_path / "m")
    arrays = case.arrays()
    arrays["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="'blk.0.ffn_up.weight' holds a value that F16 cannot"):
        convert(folder, tmp_path / "m.gguf", "f16")


def test_a_rule_without_a_name_is_refused(llama: Path, tmp_path: Path) -> None:
    change(llama / "tokenizer.json", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
    quaff.load(llama, threads=1).close()
    with pytest.raises(UnsupportedError, match="cuts words by a rule that has no name in GGUF"):
        convert(llama, tmp_path / "m.gguf")


def test_interleaving_is_undone_by_the_definition() -> None:
    from quaff.models.imported import interleave

    w = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    made = interleave(2, w)
    for head in range(2):
        for i in range(4):
            assert (made[8 * head + 2 * i] == w[8 * head + i]).all() and (made[8 * head + 2 * i + 1] == w[8 * head + 4 + i]).all()
    assert math.prod(interleave(1, w[:, 0]).shape) == 16
    assert replace(FAMILIES["llama-mqa"], config=LLAMA_MQA).sha256() == FAMILIES["llama-mqa"].sha256()
