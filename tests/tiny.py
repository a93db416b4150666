"""Tiny random models in real GGUF files, written by the `gguf` package: `CASES["llama-gqa"].write(path)`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quaff.config import ModelConfig
    from quaff.models.family import Family

TYPES = {t.name: t for t in gguf.GGMLQuantizationType}
# Byte offsets of the f16 factors of a block, for types that `gguf` reads but cannot make: their codes are drawn at random.
FACTORS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
FACTORS |= {"IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,)}
FACTORS["IQ1_M"] = (48,)  # spread over the high four bits of bytes 49, 51, 53 and 55

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """Shape and types of a model. `types` maps a role (attn_q, ffn_down ...) or "" (all others) to a ggml type name."""

    architecture: str = "llama"
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn_dim: int = 96
    vocab: int = 300
    window: int = 0
    context: int = 4096
    types: Mapping[str, str] = field(default_factory=lambda: {"": "Q4_0"})
    embedding: str = "Q8_0"
    tied: bool = True
    biased: bool = False
    rope_factor: float = 0.0
    keys: Mapping[str, Any] = field(default_factory=dict)
    """More metadata, without the architecture; None takes a key away."""
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """More tensors, with their values."""
    experts: int = 0
    used: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    seed: int = 0

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, type name), in file order."""
        out: dict[str, tuple[tuple[int, ...], str]] = {"token_embd.weight": ((self.vocab, self.dim), self.embedding)}
        out["output_norm.weight"] = ((self.dim,), "F32")
        if not self.tied:
            out["output.weight"] = ((self.vocab, self.dim), self._type("output"))
        for i in range(self.layers):
            for role, shape in self.layer_matrices().items():
                out[f"blk.{i}.{role}.weight"] = (shape, self._type(role))
                if role in self._biased_roles():
                    out[f"blk.{i}.{role}.bias"] = (shape[:-1], "F32")
            for role, n in self.layer_norms().items():
                out[f"blk.{i}.{role}.weight"] = ((n,), "F32")
        return out | {name: ((len(values),), "F32") for name, values in self.vectors.items()}

    def layer_matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes by role."""
        q, kv, d, f = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.dim, self.ffn_dim
        if self.architecture == "phi3":
            return {"attn_qkv": (q + 2 * kv, d), "attn_output": (d, q), "ffn_up": (2 * f, d), "ffn_down": (d, f)}
        attention = {"attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
        if not self.experts:
            return {**attention, "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
        e, f, s = self.experts, self.expert_dim or f, self.shared_dim
        experts = {"ffn_gate_inp": (e, d), "ffn_gate_exps": (e, f, d), "ffn_up_exps": (e, f, d), "ffn_down_exps": (e, d, f)}
        return {**attention, **experts} | ({"ffn_gate_shexp": (s, d), "ffn_up_shexp": (s, d), "ffn_down_shexp": (d, s)} if s else {})

    def layer_norms(self) -> dict[str, int]:
        """Lengths by role."""
        d = self.dim
        norms = {} if self.architecture == "olmo2" else {"attn_norm": d, "ffn_norm": d}
        if self.architecture == "gpt-oss":
            norms = {"attn_norm": d, "post_attention_norm": d, "attn_sinks": self.heads}
        if self.shared_dim:
            norms["ffn_gate_inp_shexp"] = d
        if self.architecture in ("gemma3", "qwen3", "qwen3moe", "mellum"):
            norms |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        if self.architecture == "olmo2":
            norms |= {"attn_q_norm": self.heads * self.head_dim, "attn_k_norm": self.kv_heads * self.head_dim}
        if self.architecture in ("gemma2", "gemma3", "olmo2"):
            norms |= {"post_attention_norm": d, "post_ffw_norm": d}
        return norms

    def metadata(self) -> dict[str, Any]:
        """Architecture keys as they appear in the file."""
        keys: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.dim,
            "feed_forward_length": self.ffn_dim,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0 if self.architecture == "llama" else 1e6,
            "rope.dimension_count": self.head_dim,
        }
        if self.experts:
            keys |= {"expert_count": self.experts, "expert_used_count": self.used}
            if self.expert_dim:
                keys["expert_feed_forward_length"] = self.expert_dim
            if self.shared_dim:
                keys["expert_shared_feed_forward_length"] = self.shared_dim
        if self.window:
            keys["attention.sliding_window"] = self.window
        if self.rope_factor:
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rope_factor}
        keys |= self.keys
        return {f"{self.architecture}.{key}": value for key, value in keys.items() if value is not None}

    def write(self, path: Path) -> Path:
        """Write the file; the same fields give the same bytes."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(f"tiny {self.architecture}")
        for key, value in self.metadata().items():
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
                bool: writer.add_bool,
            }[type(value)]
            add(key, value)
        self._write_tokenizer(writer)
        rng = np.random.default_rng(self.seed)
        for name, (shape, type_name) in self.tensors().items():
            given = self.vectors.get(name)
            data = random_tensor(rng, name, shape, type_name) if given is None else np.array(given, dtype=np.float32)
            writer.add_tensor(name, data, raw_dtype=TYPES[type_name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _biased_roles(self) -> tuple[str, ...]:
        if self.architecture in ("qwen2", "qwen2moe"):
            return ("attn_q", "attn_k", "attn_v")
        attention = ("attn_q", "attn_k", "attn_v", "attn_output")
        if self.architecture == "gpt-oss":
            return (*attention, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        return attention if self.biased else ()

    def _type(self, role: str) -> str:
        if role == "ffn_gate_inp":
            return "F32"  # llama.cpp's quantiser leaves routers alone
        return self.types.get(role, self.types[""])

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        tokens, merges = byte_level_vocabulary(self.vocab)
        kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(tokens.index("<|endoftext|>"))
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)


@dataclass(frozen=True)
class TinyLfm2(Tiny):
    """Short convolutions of `taps` taps in all layers but `attends`; the first `dense` layers have no experts."""

    architecture: str = "lfm2"
    layers: int = 4
    attends: tuple[int, ...] = (1,)
    taps: int = 3
    dense: int = 0

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        d, out = self.dim, {}
        plain = replace(self, experts=0).tensors() if self.experts else {}
        for name, tensor in super().tensors().items():
            _, layer, role, *_ = [*name.split("."), "", ""]
            number = int(layer) if layer.isdigit() else -1
            if name == "output_norm.weight":
                out["token_embd_norm.weight"] = tensor
            elif role == "attn_q" and number not in self.attends:
                out[f"blk.{layer}.shortconv.in_proj.weight"] = ((3 * d, d), self._type("in_proj"))
                out[f"blk.{layer}.shortconv.conv.weight"] = ((d, self.taps), "F32")
                out[f"blk.{layer}.shortconv.out_proj.weight"] = ((d, d), self._type("out_proj"))
            elif role == "ffn_gate_inp" and number < self.dense:
                out |= {n: plain[n] for n in (f"blk.{layer}.ffn_{part}.weight" for part in ("gate", "up", "down"))}
            elif role == "ffn_gate_inp":
                out |= {name: tensor, f"blk.{layer}.exp_probs_b.bias": ((self.experts,), "F32")}
            elif not self._left_out(role, number):
                out[name] = tensor
        for i in self.attends:
            out |= {f"blk.{i}.{role}.weight": ((self.head_dim,), "F32") for role in ("attn_q_norm", "attn_k_norm")}
        return out

    def _left_out(self, role: str, layer: int) -> bool:
        if role.startswith("attn_") and role != "attn_norm":
            return layer not in self.attends
        return role.endswith("_exps") and layer < self.dense

    def metadata(self) -> dict[str, Any]:
        heads = [self.kv_heads if i in self.attends else 0 for i in range(self.layers)]
        keys: dict[str, Any] = {"attention.head_count_kv": heads, "shortconv.l_cache": self.taps}
        if self.experts:
            keys |= {"leading_dense_block_count": self.dense, "expert_gating_func": 2}
        return super().metadata() | {f"{self.architecture}.{key}": value for key, value in keys.items()}


@dataclass(frozen=True)
class TinyGemma4(Tiny):
    """Global layers at `full` with heads twice as wide, whose keys are their values; the last `borrowed` layers read the KV state of
    earlier ones and have networks twice as wide."""

    architecture: str = "gemma4"
    layers: int = 5
    heads: int = 4
    window: int = 40
    full: tuple[int, ...] = (1, 4)
    borrowed: int = 2
    each: int = 32

    def _sizes(self, layer: int) -> tuple[int, int]:
        """(width of a head, of the feed-forward network)."""
        return self.head_dim * (2 if layer in self.full else 1), self.ffn_dim * (2 if layer >= self.layers - self.borrowed else 1)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        d, n, out = self.dim, self.each, {}
        for name, (_, kind) in super().tensors().items():
            _, layer, role, *_ = [*name.split("."), "", ""]
            if name in self.vectors:
                continue
            if not layer.isdigit():
                out[name] = ((self.vocab, d) if kind != "F32" else (d,), kind)
                continue
            size, f = self._sizes(int(layer))
            own = int(layer) < self.layers - self.borrowed
            shapes = {"attn_q": (self.heads * size, d), "attn_k": (self.kv_heads * size, d), "attn_output": (d, self.heads * size)}
            shapes |= {"attn_v": (self.kv_heads * size, d), "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
            if role in ("attn_k", "attn_v") and not own or role == "attn_v" and int(layer) in self.full:
                continue
            out[name] = (shapes.get(role, (d,)), kind)
            if role == "ffn_down":
                more = {"inp_gate": (n, d), "proj": (d, n)}
                out |= {f"blk.{layer}.{role}.weight": (shape, self._type(role)) for role, shape in more.items()}
                vectors = {"post_attention_norm": d, "post_ffw_norm": d, "post_norm": d, "attn_q_norm": size, "layer_output_scale": 1}
                vectors |= {"attn_k_norm": size} if own else {}
                out |= {f"blk.{layer}.{role}.weight": ((size,), "F32") for role, size in vectors.items()}
        out["rope_freqs.weight"] = ((self.head_dim,), "F32")
        out["per_layer_token_embd.weight"] = ((self.vocab, self.layers * n), self.embedding)
        out["per_layer_model_proj.weight"] = ((self.layers * n, d), self._type("per_layer_model_proj"))
        out["per_layer_proj_norm.weight"] = ((n,), "F32")
        return out

    def metadata(self) -> dict[str, Any]:
        keys = {
            "feed_forward_length": [self._sizes(i)[1] for i in range(self.layers)],
            "attention.key_length": 2 * self.head_dim,
            "attention.value_length": 2 * self.head_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "attention.sliding_window_pattern": [i not in self.full for i in range(self.layers)],
            "attention.shared_kv_layers": self.borrowed,
            "embedding_length_per_layer_input": self.each,
            "rope.dimension_count": 2 * self.head_dim,
            "rope.dimension_count_swa": self.head_dim,
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 4.0,
        }
        return super().metadata() | {f"gemma4.{key}": value for key, value in keys.items()}


@dataclass(frozen=True)
class TinyQwen35(Tiny):
    """Gated delta rules in all layers but every `interval`-th."""

    architecture: str = "qwen35"
    layers: int = 4
    head_dim: int = 32
    interval: int = 2
    taps: int = 4
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 24
    value_dim: int = 32

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        d, values, out = self.dim, self.value_heads * self.value_dim, {}
        qkv = 2 * self.key_heads * self.key_dim + values
        recurrent = {"attn_qkv": (qkv, d), "attn_gate": (values, d), "ssm_out": (d, values)}
        joined = self.architecture == "qwen3next"
        recurrent |= {f"ssm_{gate}": ((1 + joined) * self.value_heads, d) for gate in (("ba",) if joined else ("alpha", "beta"))}
        for name, (shape, kind) in super().tensors().items():
            _, layer, role, *_ = [*name.split("."), "", ""]
            attends = layer.isdigit() and (int(layer) + 1) % self.interval == 0
            if role == "attn_q" and not attends:
                out |= {f"blk.{layer}.{role}.weight": (shape, self._type(role)) for role, shape in recurrent.items()}
                out[f"blk.{layer}.ssm_conv1d.weight"] = ((qkv, self.taps), "F32")
                out |= {f"blk.{layer}.{vector}": ((self.value_heads,), "F32") for vector in ("ssm_a", "ssm_dt.bias")}
                out[f"blk.{layer}.ssm_norm.weight"] = ((self.value_dim,), "F32")
            elif role == "attn_q":
                out[name] = ((2 * shape[0], d), kind)
                out |= {f"blk.{layer}.{norm}.weight": ((self.head_dim,), "F32") for norm in ("attn_q_norm", "attn_k_norm")}
            elif role not in ("attn_k", "attn_v", "attn_output") or attends:
                out[name.replace("ffn_norm", "post_attention_norm")] = (shape, kind)
        return out

    def metadata(self) -> dict[str, Any]:
        keys = {
            "full_attention_interval": self.interval,
            "rope.dimension_count": self.head_dim // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": self.taps,
            "ssm.group_count": self.key_heads,
            "ssm.inner_size": self.value_heads * self.value_dim,
            "ssm.state_size": self.key_dim,
            "ssm.time_step_rank": self.value_heads,
        }
        return super().metadata() | {f"{self.architecture}.{key}": value for key, value in keys.items()}


@dataclass(frozen=True)
class TinyLatent(Tiny):
    """DeepSeek's latent attention. `kv_heads` and `head_dim` are those of the compressed keys: one head, its rank and the rotary part."""

    architecture: str = "deepseek2"
    kv_heads: int = 1
    head_dim: int = 80
    q_rank: int = 0
    rope_dim: int = 16
    plain_dim: int = 32
    value_dim: int = 16
    dense_layers: int = 1

    @property
    def kv_rank(self) -> int:
        return self.head_dim - self.rope_dim

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        out = super().tensors()
        for i in range(self.layers if self.experts else 0):
            if i >= self.dense_layers:
                out[f"blk.{i}.exp_probs_b.bias"] = ((self.experts,), "F32")
                continue
            out = {name: tensor for name, tensor in out.items() if not name.startswith(f"blk.{i}.ffn_") or "norm" in name}
            dense = replace(self, experts=0).layer_matrices()
            out |= {f"blk.{i}.{role}.weight": (shape, self._type(role)) for role, shape in dense.items() if role.startswith("ffn")}
        return out

    def layer_matrices(self) -> dict[str, tuple[int, ...]]:
        q, d = self.heads * (self.plain_dim + self.rope_dim), self.dim
        return {
            **({"attn_q_a": (self.q_rank, d), "attn_q_b": (q, self.q_rank)} if self.q_rank else {"attn_q": (q, d)}),
            "attn_kv_a_mqa": (self.head_dim, d),
            "attn_k_b": (self.heads, self.kv_rank, self.plain_dim),
            "attn_v_b": (self.heads, self.value_dim, self.kv_rank),
            "attn_output": (d, self.heads * self.value_dim),
            **{role: shape for role, shape in super().layer_matrices().items() if role.startswith("ffn")},
        }

    def layer_norms(self) -> dict[str, int]:
        ranks = {"attn_q_a_norm": self.q_rank} if self.q_rank else {}
        return {"attn_norm": self.dim, "ffn_norm": self.dim} | ranks | {"attn_kv_a_norm": self.kv_rank}

    def metadata(self) -> dict[str, Any]:
        keys = {
            "attention.kv_lora_rank": self.kv_rank,
            "attention.value_length": self.kv_rank,
            "attention.key_length_mla": self.plain_dim + self.rope_dim,
            "attention.value_length_mla": self.value_dim,
            "rope.dimension_count": self.rope_dim,
        }
        if self.q_rank:
            keys["attention.q_lora_rank"] = self.q_rank
        if self.experts:
            keys |= {"leading_dense_block_count": self.dense_layers, "expert_shared_count": self.shared_dim // self.expert_dim}
        mine = {f"{self.architecture}.{key}": value for key, value in keys.items() if key not in self.keys}
        return {key: value for key, value in (super().metadata() | mine).items() if not key.endswith("shared_feed_forward_length")}


@dataclass(frozen=True)
class TinyKimi(TinyLatent):
    """Delta rules whose states decay row by row in all layers but `attends`."""

    architecture: str = "kimi-linear"
    layers: int = 4
    attends: tuple[int, ...] = (1, 3)
    taps: int = 4
    delta_dim: int = 96  # a block of 64 columns and a rest

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        out = {}
        for name, tensor in super().tensors().items():
            _, layer, role, *_ = [*name.split("."), "", ""]
            number = int(layer) if layer.isdigit() else -1
            if number >= 0 and number not in self.attends and role.startswith("attn_") and role != "attn_norm":
                out |= self._delta(number) if role == "attn_output" else {}
            else:
                out[name] = tensor
        return out

    def _delta(self, layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
        d, size, width = self.dim, self.delta_dim, self.heads * self.delta_dim
        shapes = {"attn_q": (width, d), "attn_k": (width, d), "attn_v": (width, d), "ssm_beta": (self.heads, d), "attn_output": (d, width)}
        shapes |= {"ssm_f_a": (size, d), "ssm_f_b": (width, size), "ssm_g_a": (size, d), "ssm_g_b": (width, size)}
        out = {f"blk.{layer}.{role}.weight": (shape, self._type(role)) for role, shape in shapes.items()}
        out |= {f"blk.{layer}.ssm_conv1d_{part}.weight": ((1, width, 1, self.taps), "F32") for part in "qkv"}
        out |= {f"blk.{layer}.ssm_norm.weight": ((size,), "F32"), f"blk.{layer}.ssm_dt.bias": ((width,), "F32")}
        return out | {f"blk.{layer}.ssm_a": ((1, 1, self.heads, 1), "F32")}

    def metadata(self) -> dict[str, Any]:
        keys = {
            "attention.head_count_kv": [int(i in self.attends) for i in range(self.layers)],
            "kda.head_dim": self.delta_dim,
            "ssm.conv_kernel": self.taps,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_scale": 2.0,
        }
        return super().metadata() | {f"{self.architecture}.{key}": value for key, value in keys.items()}


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Special tokens, the 256 bytes in GPT-2's printable alphabet, merges of common English pairs, fillers up to `size`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    tokens = [*SPECIAL, *(letters[b] for b in range(256))]
    pairs = [
        "Ġ t",
        "Ġ a",
        "i n",
        "h e",
        "r e",
        "o n",
        "Ġt he",
        "e r",
        "Ġ s",
        "a t",
        "Ġ w",
        "n d",
        "Ġ o",
        "o u",
        "i s",
        "e n",
        "in g",
        "o r",
    ]
    merges = pairs[: max(0, size - len(tokens))]
    tokens += [pair.replace(" ", "") for pair in merges]
    if size < len(SPECIAL) + 256:
        raise ValueError(f"a byte-level vocabulary needs {len(SPECIAL) + 256} tokens, not {size}")
    return tokens + [f"<filler{i}>" for i in range(size - len(tokens))], merges


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], type_name: str) -> NDArray[Any]:
    """Values of the size that training leaves: norms near 1, rows of matrices of unit length."""
    if name.endswith(".ssm_a"):
        return -rng.uniform(0.05, 4, shape).astype(np.float32)
    if len(shape) == 1 or name.endswith(".bias"):
        near = 0.0 if name.endswith((".bias", "_shexp.weight")) else 1.0
        return (near + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    deviation = 1.0 / math.sqrt(shape[-1])
    if name.endswith("ffn_gate_inp.weight"):
        deviation *= 2.0  # experts that differ for a row
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        deviation *= 1.5  # attention that is far from uniform
    if type_name in FACTORS or type_name in ("MXFP4", "NVFP4"):
        blocks = random_blocks(rng, (math.prod(shape[:-1]), shape[-1]), type_name, deviation)
        return blocks.reshape(*shape[:-1], -1)
    return gguf.quants.quantize((deviation * rng.standard_normal(shape)).astype(np.float32), TYPES[type_name])


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], type_name: str, deviation: float) -> NDArray[np.uint8]:
    """Blocks of random codes whose factors are set so that values have the given root mean square."""
    per_block, size = gguf.GGML_QUANT_SIZES[TYPES[type_name]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // per_block, size), dtype=np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = 127 + round(math.log2(deviation / 2)) + rng.integers(-1, 2, blocks.shape[:2])
        return blocks.reshape(shape[0], -1)
    if type_name == "NVFP4":  # e4m3: three bits of fraction below the exponent
        blocks[..., :4] = 8 * (7 + round(math.log2(deviation / 3))) + rng.integers(0, 8, (*blocks.shape[:2], 4))
        return blocks.reshape(shape[0], -1)
    factor = np.ones((*blocks.shape[:2], len(FACTORS[type_name])))
    if len(FACTORS[type_name]) == 2:
        factor[..., 1] = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[type_name]  # the minimum centres codes that are not signed
    factor *= rng.uniform(0.7, 1.4, (*blocks.shape[:2], 1))
    for scale in (2.0**-10, None):
        if scale is None:
            values = gguf.quants.dequantize(blocks.reshape(shape[0], -1), TYPES[type_name])
            scale = 2.0**-10 * deviation / float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        for i, offset in enumerate(FACTORS[type_name]):
            half = (factor[..., i : i + 1] * scale).astype(np.float16)
            if type_name == "IQ1_M":
                quarters = (half.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)) & 15
                blocks[..., 49::2] = blocks[..., 49::2] & 15 | (quarters << 4).astype(np.uint8)
            else:
                blocks[..., offset : offset + 2] = half.view(np.uint8)
    return blocks.reshape(shape[0], -1)


MIXED = {"": "Q4_1", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_up": "F16", "ffn_down": "Q5_1"}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 40,
    "rope.scaling.yarn_beta_fast": 4.0,
}
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.125, "logit_scale": 8.0}
SMALL = {
    "": "IQ3_S",
    "attn_q": "IQ2_XXS",
    "attn_k": "IQ2_S",
    "attn_v": "IQ3_XXS",
    "ffn_gate": "IQ1_S",
    "ffn_up": "IQ1_M",
    "ffn_down": "IQ2_XS",
}
K_QUANTS = {"": "Q4_K", "attn_q": "Q5_K", "attn_k": "IQ4_XS", "attn_v": "Q6_K", "ffn_gate": "Q3_K", "ffn_down": "Q2_K"}

CASES: dict[str, Tiny] = {
    "llama-gqa": Tiny(),
    "llama-mqa": Tiny(heads=6, kv_heads=1, dim=96, types=MIXED, tied=False, vocab=301, seed=1),
    "llama-odd": Tiny(
        dim=160, heads=5, kv_heads=5, head_dim=32, ffn_dim=224, vocab=303, types={"": "Q4_1"}, biased=True, rope_factor=4.0, seed=2
    ),
    "llama-k": Tiny(dim=256, heads=4, kv_heads=2, head_dim=64, ffn_dim=256, types=K_QUANTS, embedding="Q6_K", seed=3),
    "llama-iq": Tiny(dim=256, heads=4, kv_heads=2, head_dim=64, ffn_dim=256, types=SMALL, embedding="IQ3_S", seed=8),
    "llama-ternary": Tiny(
        dim=256,
        kv_heads=1,
        head_dim=64,
        ffn_dim=256,
        types={"": "TQ2_0", "attn_v": "NVFP4", "ffn_down": "TQ1_0"},
        embedding="NVFP4",
        seed=9,
    ),
    "llama-float": Tiny(
        dim=40, heads=3, kv_heads=3, ffn_dim=72, types={"": "F16", "attn_k": "BF16", "ffn_up": "F32"}, embedding="F16", seed=4
    ),
    # Llama 3's factors by wavelength, and a window.
    "llama3": Tiny(window=50, vectors={"rope_freqs.weight": (1.0, 1.0, 1.0, 1.5, 3.25, 8.0, 8.0, 8.0)}, seed=8),
    "qwen3": Tiny("qwen3", head_dim=32, keys=YARN, types={"": "Q4_0", "attn_k": "Q8_0"}, seed=9),
    "mistral3": Tiny("mistral3", keys={**YARN, "attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}, seed=10),
    "smollm3": Tiny("smollm3", layers=5, types={"": "Q8_0", "attn_q": "F16", "attn_k": "F16"}, seed=11),
    "phi3": Tiny(
        "phi3",
        heads=4,
        kv_heads=2,
        head_dim=32,
        dim=128,
        keys={
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.sliding_window": 100,
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 1000,
            "rope.scaling.attn_factor": 1.19,
        },
        vectors={"rope_factors_long.weight": tuple(1.0 + 0.5 * i for i in range(12)), "rope_factors_short.weight": (1.0,) * 12},
        seed=12,
    ),
    "granite": Tiny("granite", types={"": "Q5_1"}, keys=GRANITE, seed=13),
    "olmo2": Tiny("olmo2", heads=4, kv_heads=2, types={"": "Q4_0", "attn_v": "F16", "ffn_up": "F32"}, tied=False, seed=14),
    "gemma2": Tiny(
        "gemma2", heads=2, kv_heads=1, head_dim=32, window=40, keys={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, seed=15
    ),
    "qwen2": Tiny("qwen2", dim=96, heads=6, kv_heads=2, types={"": "Q8_0", "attn_v": "Q4_1"}, vocab=304, seed=7),
    "mixtral": Tiny(experts=5, used=2, types={"": "Q4_0", "ffn_down_exps": "Q8_0", "ffn_up_exps": "F16"}, vocab=306, seed=8),
    "qwen2moe": Tiny("qwen2moe", heads=4, kv_heads=1, dim=96, experts=7, used=3, expert_dim=32, shared_dim=64, types={"": "Q5_1"}, seed=9),
    "qwen3moe": Tiny("qwen3moe", layers=3, dim=64, experts=16, used=4, expert_dim=48, types={"": "Q8_0", "ffn_down_exps": "F32"}, seed=10),
    "mellum": Tiny(
        "mellum",
        layers=4,
        window=24,
        experts=9,
        used=3,
        expert_dim=32,
        types={"": "Q4_1"},
        keys={"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": [True, False, True, True]},
        seed=12,
    ),
    "gpt-oss": Tiny(
        "gpt-oss",
        layers=4,
        heads=6,
        kv_heads=2,
        window=24,
        experts=6,
        used=2,
        expert_dim=64,
        types={"": "Q8_0", "ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"},
        seed=11,
    ),
    "gemma3": Tiny("gemma3", layers=6, heads=2, kv_heads=1, head_dim=32, window=24, types=MIXED, seed=5),
    "deepseek2": TinyLatent(heads=6, q_rank=64, dim=96, types={"": "Q8_0", "attn_k_b": "Q4_0", "attn_v_b": "Q5_1"}, seed=8),
    "deepseek2-lite": TinyLatent(
        layers=3, heads=3, head_dim=64, plain_dim=40, value_dim=32, ffn_dim=72, types={"": "F16", "attn_k_b": "F32"}, tied=False, seed=9
    ),
    "deepseek2-experts": TinyLatent(
        layers=4,
        heads=2,
        experts=12,
        used=3,
        expert_dim=32,
        shared_dim=64,
        keys={
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 0.75,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
        types={"": "Q8_0", "ffn_up_exps": "Q4_0"},
        vocab=307,
        seed=10,
    ),
    "gemma3-wide": Tiny("gemma3", layers=7, heads=4, kv_heads=2, head_dim=16, window=80, rope_factor=8.0, vocab=305, seed=6),
    "lfm2": TinyLfm2(types={"": "Q8_0", "in_proj": "Q4_0"}, seed=8),
    "lfm2-float": TinyLfm2(
        dim=40, heads=3, kv_heads=1, layers=3, ffn_dim=72, attends=(0, 2), taps=4, types={"": "F16"}, embedding="F16", seed=9
    ),
    "gemma4": TinyGemma4(
        vectors={"rope_freqs.weight": (1.0,) * 4 + (1e30,) * 12}
        | {f"blk.{i}.attn_q_norm.weight": (0.4,) * (32 if i in (1, 4) else 16) for i in range(5)},
        types={"": "Q8_0", "attn_k": "F16", "ffn_up": "Q4_1"},
        seed=30,
    ),
    "qwen35": TinyQwen35(types={"": "Q8_0", "attn_qkv": "Q4_0"}, seed=10),
    "lfm2moe": TinyLfm2("lfm2moe", dense=1, experts=6, used=2, expert_dim=32, types={"": "Q8_0", "ffn_up_exps": "Q4_0"}, seed=12),
    "qwen35moe": TinyQwen35("qwen35moe", layers=3, experts=8, used=3, expert_dim=32, shared_dim=64, types={"": "Q8_0"}, seed=13),
    "qwen3next": TinyQwen35("qwen3next", layers=3, interval=3, experts=6, used=2, expert_dim=64, shared_dim=32, seed=14),
    "kimi-linear": TinyKimi(heads=2, experts=6, used=2, expert_dim=32, shared_dim=32, types={"": "Q8_0", "ssm_f_b": "Q4_0"}, seed=15),
    "qwen35-odd": TinyQwen35(
        dim=96, heads=6, kv_heads=1, head_dim=16, layers=5, interval=3, value_heads=2, value_dim=80, types=MIXED, seed=11
    ),
}


def opened(path: Path) -> tuple[Family, ModelConfig, dict[str, tuple[tuple[int, ...], int]], dict[str, NDArray[np.uint8]]]:
    """(family, config, name -> (shape, ggml type), name -> bytes) of the weights as stages name them, read by the `gguf` package."""
    # Goldens are made where there is no quaff.
    from quaff.checkpoint import TensorView
    from quaff.models import family

    metadata, shapes, data = read(path)
    model_family = family(metadata["general.architecture"])
    config = model_family.config(metadata, shapes)
    views = {
        name: TensorView(name, shape, kind, "", data[name].nbytes, partial(np.asarray, data[name]))
        for name, (shape, kind) in shapes.items()
    }
    split = model_family.split(config, views)
    return model_family, config, {n: (v.shape, v.ggml_type) for n, v in split.items()}, {n: v.data for n, v in split.items()}


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]], dict[str, NDArray[np.uint8]]]:
    """(metadata, name -> (shape, ggml type), name -> bytes) through the `gguf` package, independent of our own reader."""
    reader = gguf.GGUFReader(path)
    metadata = {name: value.contents() for name, value in reader.fields.items() if not name.startswith("GGUF.")}
    shapes = {t.name: (tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type)) for t in reader.tensors}
    data = {t.name: np.ascontiguousarray(t.data).view(np.uint8).reshape(-1) for t in reader.tensors}
    values = {name: data[name].view(np.float32) for name in data if name.startswith("rope_") or name.endswith("layer_output_scale.weight")}
    return metadata | values, shapes, data


def prompt(vocab: int, length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]
