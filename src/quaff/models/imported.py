"""What the families share on the way from a Hugging Face folder to the names and keys of a GGUF file.

Names: `gguf` package, tensor_mapping.py; values: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.errors import UnsupportedError, quote
from quaff.models.family import Imported
from quaff.models.rope import FREQS, LONG, SHORT, llama3_factors, longrope_scale, yarn_scale

Array = NDArray[np.float32]

# Role of a layer's tensor in the table -> its module inside `model.layers.N.`.
DECODER: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Rotary frequencies and causal masks that old versions of transformers stored: both follow from the configuration.
IGNORED = (r"model\.layers\.\d+\.self_attn\.(rotary_emb\.inv_freq|bias|masked_bias)",)


def interleave(heads: int, w: Array) -> Array:
    """Rows of each head, first half and second half, become pairs side by side: how GGUF keeps the q and k of Llama and its kin."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def plus_one(w: Array) -> Array:
    """Gemma's norms multiply by 1 + w; GGUF keeps the sum, rounded to f32."""
    return w + np.float32(1)


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(query heads, KV heads, width of a head); the width is hidden_size / heads where none is given."""
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def rope_parameters(config: Mapping[str, Any], kind: str = "", theta: float = 10000.0) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what a scaling adds, from a config.json of any age: `rope_parameters`, or `rope_theta` and
    `rope_scaling`; `context` and `rotary`, the dimensions of a head that turn, are filled in.

    `kind`: a layer type ("full_attention" ...) where parameters are given for each. `theta`: where the file has none.
    """
    given = config.get("rope_parameters") or {}
    if kind in given:
        given = given[kind]
    elif not given:
        given = config.get("rope_scaling") or {}
    base = {"rope_type": given.get("type", "default"), "rope_theta": config.get("rope_theta", theta)}
    rope = base | {key: value for key, value in given.items() if value is not None}
    context, original = config["max_position_embeddings"], "original_max_position_embeddings"
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    own = {"context": context, original: rope.get(original) or config.get(original) or context}
    return rope | own | {"rotary": int(heads_of(config)[2] * partial)}


def rope_metadata(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without their prefix, as llama.cpp's converter writes them; UnsupportedError names a type that is not known.

    Dynamic NTK scaling begins beyond the context of the file, which nothing here exceeds: it is no scaling.
    """
    kind, original = rope["rope_type"], int(rope["original_max_position_embeddings"])
    keys: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": rope["rotary"]}
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = original
        keys |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)}
        if "attention_factor" in rope:
            keys["rope.scaling.yarn_attn_factor"] = float(rope["attention_factor"])
        elif rope.get("mscale") == 1 and rope.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        elif rope.get("mscale") and rope.get("mscale_all_dim"):
            scale = yarn_scale(float(rope["factor"]), float(rope["mscale"]), float(rope["mscale_all_dim"]))
            keys["rope.scaling.yarn_attn_factor"] = scale
    elif kind in ("longrope", "su"):
        factor = float(rope.get("factor") or rope["context"] / original)
        given = rope.get("attention_factor")
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = float(given) if given is not None else longrope_scale(factor, original)
    elif kind not in ("default", "linear", "llama3", "dynamic"):
        known = "default, linear, dynamic, yarn, llama3, longrope"
        raise UnsupportedError(f"rope scaling of type {quote(str(kind))} is not supported in Hugging Face folders; supported: {known}")
    return keys


def rope_tensors(rope: Mapping[str, Any]) -> Iterator[Imported]:
    """The factors that a converter stores as tensors, not as keys."""
    if rope["rope_type"] == "llama3":
        low, high, original = float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), rope["original_max_position_embeddings"]
        factors = llama3_factors(float(rope["rope_theta"]), rope["rotary"], float(rope["factor"]), low, high, int(original))
        yield Imported(FREQS, (), partial(_f32, factors))
    elif rope["rope_type"] in ("longrope", "su"):
        yield Imported(LONG, (), partial(_f32, rope["long_factor"]))
        yield Imported(SHORT, (), partial(_f32, rope["short_factor"]))


def _f32(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float32)


def expect(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], feature: str) -> None:
    """UnsupportedError naming `feature` when config.json has another value than those allowed; a missing or null one is allowed."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise UnsupportedError(f"{feature} is not supported (config.json has {key} {quote(str(value))})")


def decoder_metadata(config: Mapping[str, Any], architecture: str, activations: tuple[str, ...] = ("silu", "swish")) -> dict[str, Any]:
    """The keys of a decoder with grouped-query attention, RoPE apart. `activations`: values of `hidden_act` that the family computes."""
    expect(config, "hidden_act", activations, "this activation")
    expect(config, "hidden_activation", activations, "this activation")
    heads, kv_heads, size = heads_of(config)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}


def decoder_tensors(
    config: Mapping[str, Any], roles: Mapping[str, str] = DECODER, interleaved: bool = False, one_plus_norms: bool = False
) -> Iterator[Imported]:
    """Embedding, final norm, head, factors of rotary frequencies, and per layer the weight and the bias of every role; what a folder
    lacks, the table may not need.

    `interleaved`: q and k are laid out for rotary pairs side by side. `one_plus_norms`: norms multiply by 1 + w.
    """
    heads, kv_heads, _ = heads_of(config)
    turned = {"attn_q": partial(interleave, heads), "attn_k": partial(interleave, kv_heads)} if interleaved else {}
    norm = plus_one if one_plus_norms else None
    yield Imported("token_embd.weight", ("model.embed_tokens.weight",))
    yield Imported("output_norm.weight", ("model.norm.weight",), norm)
    yield Imported("output.weight", ("lm_head.weight",))
    yield from rope_tensors(rope_parameters(config, "full_attention"))
    for i in range(config["num_hidden_layers"]):
        for role, module in roles.items():
            make = norm if role.endswith("norm") else turned.get(role)
            for part in ("weight", "bias"):
                yield Imported(f"blk.{i}.{role}.{part}", (f"model.layers.{i}.{module}.{part}",), make)
