"""Gemma 4 from a Hugging Face folder to the keys and names of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from quaff.models import gemma3
from quaff.models.family import OUTPUT_SCALE, Imported
from quaff.models.imported import decoder_metadata, decoder_tensors, expect
from quaff.models.rope import FREQS

# What turns no further than this divisor lets it does not turn at all: how converters say that part of a head is left alone.
STILL = 1e30
ROLES = gemma3.ROLES | {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}


def imported_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    expect(config, "enable_moe_block", (False,), "mixture of experts in gemma4")
    expect(config, "use_bidirectional_attention", ("vision",), "attention without a causal mask")
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    size, size_full = config["head_dim"], config.get("global_head_dim") or 512
    types = config["layer_types"]
    sliding, full = (config["rope_parameters"][f"{kind}_attention"] for kind in ("sliding", "full"))
    expect(sliding, "rope_type", ("default",), "rope scaling of sliding layers in gemma4")
    expect(full, "rope_type", ("proportional", "default"), "this rope scaling in gemma4")
    heads = config["num_key_value_heads"]
    full_heads = (config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None) or heads
    wide = 2 if config.get("use_double_wide_mlp") else 1
    keys = {
        "attention.head_count_kv": [heads if kind == "sliding_attention" else full_heads for kind in types],
        "feed_forward_length": [config["intermediate_size"] * (wide if i >= layers - shared else 1) for i in range(layers)],
        "attention.key_length": size_full,
        "attention.value_length": size_full,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": size_full,
        "rope.dimension_count_swa": size,
    }
    if config.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    return decoder_metadata(config, "gemma4", ("gelu_pytorch_tanh",)) | {f"gemma4.{key}": value for key, value in keys.items()}


def imported_tensors(config: Mapping[str, Any]) -> Iterator[Imported]:
    yield from decoder_tensors(config, ROLES)
    yield Imported("per_layer_token_embd.weight", ("model.embed_tokens_per_layer.weight",))
    yield Imported("per_layer_model_proj.weight", ("model.per_layer_model_projection.weight",))
    yield Imported("per_layer_proj_norm.weight", ("model.per_layer_projection_norm.weight",))
    for i in range(config["num_hidden_layers"]):
        yield Imported(f"blk.{i}.{OUTPUT_SCALE}", (f"model.layers.{i}.layer_scalar",))
    half = (config.get("global_head_dim") or 512) // 2
    turned = int(2 * half * config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0) // 2)
    yield Imported(FREQS, (), partial(np.array, [1.0] * turned + [STILL] * (half - turned), np.float32))
