"""One tiny model per family, in transformers' names: what its golden was made of. A family is covered when it has an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.families.tinyhf import Shapes, TinyHF

# Modules of a layer, for `decoder`: a letter or a product of letters per dimension, sizes by `_sizes`.
ATTENTION = {"self_attn.q_proj": "qd", "self_attn.k_proj": "kd", "self_attn.v_proj": "kd", "self_attn.o_proj": "dq"}
GATED = {"mlp.gate_proj": "fd", "mlp.up_proj": "fd", "mlp.down_proj": "df"}
NORMS = {"input_layernorm": "d", "post_attention_layernorm": "d"}
QK_NORMS = {"self_attn.q_norm": "h", "self_attn.k_norm": "h"}


def decoder(config: Mapping[str, Any], modules: Mapping[str, str], biased: tuple[str, ...] = ()) -> Shapes:
    """Embedding, final norm, head unless tied, and the `modules` of every layer; those in `biased` have a bias too."""
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim", dim // heads)
    sizes = {"d": dim, "q": heads * size, "k": config["num_key_value_heads"] * size, "h": size, "f": config["intermediate_size"]}
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    for i in range(config["num_hidden_layers"]):
        for module, letters in modules.items():
            shapes[f"model.layers.{i}.{module}.weight"] = tuple(sizes[letter] for letter in letters)
            if module in biased:
                shapes[f"model.layers.{i}.{module}.bias"] = (sizes[letters[0]],)
    return shapes


def settings(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json: two layers of odd sizes with grouped queries, changed as asked."""
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in (common | changes).items() if value is not None}


LLAMA = settings("llama", "LlamaForCausalLM", num_hidden_layers=3, rope_theta=500000.0)
LLAMA_MQA = settings("llama", "LlamaForCausalLM", num_key_value_heads=1, num_attention_heads=4, head_dim=32, tie_word_embeddings=True)
QWEN2 = settings("qwen2", "Qwen2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)
GEMMA3 = settings(
    "gemma3_text",
    "Gemma3ForCausalLM",
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=32,
    sliding_window=40,
    rope_theta=1e6,
    rope_local_base_freq=10000.0,
    layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    tie_word_embeddings=True,
)
GEMMA_NORMS = NORMS | {"pre_feedforward_layernorm": "d", "post_feedforward_layernorm": "d"} | QK_NORMS

FAMILIES: dict[str, TinyHF] = {
    "llama": TinyHF(LLAMA, decoder(LLAMA, ATTENTION | GATED | NORMS)),
    "llama-mqa": TinyHF(LLAMA_MQA, decoder(LLAMA_MQA, ATTENTION | GATED | NORMS), seed=1),
    "qwen2": TinyHF(QWEN2, decoder(QWEN2, ATTENTION | GATED | NORMS, biased=tuple(ATTENTION)[:3]), seed=2),
    "gemma3": TinyHF(GEMMA3, decoder(GEMMA3, ATTENTION | GATED | GEMMA_NORMS), {".*norm.weight": (0.0, 0.2)}, seed=3),
}
