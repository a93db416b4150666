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
    sizes |= {"a": sizes["q"] + 2 * sizes["k"], "g": 2 * sizes["f"]}
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    for i in range(config["num_hidden_layers"]):
        for module, letters in modules.items():
            shapes[f"model.layers.{i}.{module}.weight"] = tuple(sizes[letter] for letter in letters)
            if module in biased:
                shapes[f"model.layers.{i}.{module}.bias"] = (sizes[letters[0]],)
    return shapes


def mixture(config: Mapping[str, Any], module: str, projections: tuple[str, str, str], shared: bool = False) -> Shapes:
    """Router and experts of every layer, `projections` being gate, up and down; the shared expert and its gate."""
    dim, width = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    count = config.get("num_local_experts") or config["num_experts"]
    shapes: Shapes = {}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.{module}"
        shapes[f"{at}.gate.weight"] = (count, dim)
        for e in range(count):
            for projection, shape in zip(projections, ((width, dim), (width, dim), (dim, width)), strict=True):
                shapes[f"{at}.experts.{e}.{projection}.weight"] = shape
        if shared:
            width_shared = config["shared_expert_intermediate_size"]
            for projection, shape in zip(projections, ((width_shared, dim), (width_shared, dim), (dim, width_shared)), strict=True):
                shapes[f"{at}.shared_expert.{projection}.weight"] = shape
            shapes[f"{at}.shared_expert_gate.weight"] = (1, dim)
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

MIXTRAL = settings("mixtral", "MixtralForCausalLM", num_local_experts=5, num_experts_per_tok=2, rope_theta=1e6)
QWEN2_MOE = settings(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    head_dim=None,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=96,
    norm_topk_prob=False,
    rope_theta=1e6,
)
QWEN3_MOE = settings(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    num_hidden_layers=3,
    num_experts=12,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
GPT_OSS = settings(
    "gpt_oss",
    "GptOssForCausalLM",
    num_hidden_layers=4,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=40,
    intermediate_size=64,
    attention_bias=True,
    max_position_embeddings=2048,
    rope_theta=None,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 172250.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        # Its ramp ends at a whole frequency, which llama.cpp would round to.
        "original_max_position_embeddings": 128,
    },
)
GPT_OSS_LAYER: Shapes = {
    "self_attn.sinks": (6,),
    "mlp.router.weight": (6, 96),
    "mlp.router.bias": (6,),
    "mlp.experts.gate_up_proj": (6, 96, 128),
    "mlp.experts.gate_up_proj_bias": (6, 128),
    "mlp.experts.down_proj": (6, 64, 96),
    "mlp.experts.down_proj_bias": (6, 96),
}
GPT_OSS_SHAPES = decoder(GPT_OSS, ATTENTION | NORMS, biased=tuple(ATTENTION)) | {
    f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in GPT_OSS_LAYER.items()
}
MELLUM = settings(
    "mellum",
    "MellumForCausalLM",
    num_hidden_layers=4,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    sliding_window=40,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    rope_theta=None,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
# A residual that is large beside what experts add, as in a trained model: int8 errors then rarely change a row's choice of experts.
GPT_OSS_VALUES = {
    r".*embed_tokens.*": (0.0, 1.0),
    r".*router\.weight": (0.0, 0.2),
    r".*sinks": (0.0, 1.0),
    r".*_bias": (0.0, 0.1),
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Experts that differ for a row.
ROUTER = {r".*\.gate\.weight": (0.0, 0.2)}


def layers_of(config: Mapping[str, Any], modules: Mapping[str, str], mixers: Mapping[str, Shapes]) -> Shapes:
    """`decoder` whose layers have mixers of their own by layer type: names after `model.layers.N.` and shapes."""
    shapes = decoder(config, modules)
    for i, kind in enumerate(config["layer_types"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in mixers[kind].items()}
    return shapes


LFM2 = settings(
    "lfm2",
    "Lfm2ForCausalLM",
    num_hidden_layers=5,
    rms_norm_eps=None,
    norm_eps=1e-5,
    block_auto_adjust_ff_dim=False,
    conv_L_cache=3,
    conv_bias=False,
    rope_theta=1e6,
    layer_types=["conv", "full_attention", "conv", "full_attention", "conv"],
    tie_word_embeddings=True,
)
LFM2_MODULES = {"operator_norm": "d", "ffn_norm": "d", "feed_forward.w1": "fd", "feed_forward.w3": "fd", "feed_forward.w2": "df"}
LFM2_CONV: Shapes = {"conv.in_proj.weight": (288, 96), "conv.conv.weight": (96, 1, 3), "conv.out_proj.weight": (96, 96)}
LFM2_ATTENTION: Shapes = {
    "self_attn.q_proj.weight": (96, 96),
    "self_attn.k_proj.weight": (32, 96),
    "self_attn.v_proj.weight": (32, 96),
    "self_attn.out_proj.weight": (96, 96),
    "self_attn.q_layernorm.weight": (16,),
    "self_attn.k_layernorm.weight": (16,),
}
LFM2_SHAPES = layers_of(LFM2, LFM2_MODULES, {"conv": LFM2_CONV, "full_attention": LFM2_ATTENTION})
LFM2_SHAPES["model.embedding_norm.weight"] = LFM2_SHAPES.pop("model.norm.weight")

# Three value heads to each of two key heads; a quarter of a head turns.
QWEN35 = settings(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    full_attention_interval=2,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    rms_norm_eps=1e-6,
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
)
QWEN35_DELTA: Shapes = {
    "linear_attn.in_proj_qkv.weight": (320, 96),
    "linear_attn.in_proj_z.weight": (192, 96),
    "linear_attn.in_proj_a.weight": (6, 96),
    "linear_attn.in_proj_b.weight": (6, 96),
    "linear_attn.conv1d.weight": (320, 1, 4),
    "linear_attn.A_log": (6,),
    "linear_attn.dt_bias": (6,),
    "linear_attn.norm.weight": (32,),
    "linear_attn.out_proj.weight": (96, 192),
}
QWEN35_ATTENTION: Shapes = {
    "self_attn.q_proj.weight": (192, 96),
    "self_attn.k_proj.weight": (32, 96),
    "self_attn.v_proj.weight": (32, 96),
    "self_attn.o_proj.weight": (96, 96),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
}
QWEN35_SHAPES = layers_of(QWEN35, GATED | NORMS, {"linear_attention": QWEN35_DELTA, "full_attention": QWEN35_ATTENTION})
# Norms multiply by 1 + w but for that of the delta rule.
# What a delta rule gives is brought to one length, however short it is: a residual of that size keeps its int8 errors small.
QWEN35_VALUES = {
    r".*embed_tokens.*": (0.0, 1.0),
    r"(?!.*linear_attn).*norm\.weight": (0.0, 0.2),
    r".*dt_bias": (0.0, 1.0),
    r".*A_log": (0.0, 1.0),
}

# Short original contexts, so that scaling shows within the golden's tokens.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
LLAMA3 = settings(
    "llama",
    "LlamaForCausalLM",
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
MISTRAL = settings("mistral", "MistralForCausalLM", sliding_window=40)
MINISTRAL3 = settings(
    "ministral3",
    "Ministral3ForCausalLM",
    rope_theta=None,
    rope_parameters=YARN | {"original_max_position_embeddings": 30, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
)
QWEN3 = settings("qwen3", "Qwen3ForCausalLM", head_dim=32, rms_norm_eps=1e-6, rope_theta=None, rope_parameters=YARN)
SMOLLM3 = settings("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=5, no_rope_layer_interval=4, pad_token_id=0, tie_word_embeddings=True)
PHI3 = settings(
    "phi3",
    "Phi3ForCausalLM",
    hidden_size=128,
    num_attention_heads=4,
    head_dim=None,
    pad_token_id=0,
    sliding_window=None,
    original_max_position_embeddings=64,
    partial_rotary_factor=0.75,
    rope_scaling={"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.0 + 0.5 * i for i in range(12)]},
)
PHI3_MODULES = {"self_attn.qkv_proj": "ad", "self_attn.o_proj": "dq", "mlp.gate_up_proj": "gd", "mlp.down_proj": "df"}
GRANITE = settings(
    "granite",
    "GraniteForCausalLM",
    head_dim=None,
    attention_multiplier=0.2,
    embedding_multiplier=6.0,
    residual_multiplier=0.4,
    logits_scaling=0.5,
    attention_bias=False,
)
OLMO2 = settings("olmo2", "Olmo2ForCausalLM", head_dim=None, attention_bias=False)
OLMO2_NORMS = {
    "self_attn.q_norm": "q",
    "self_attn.k_norm": "k",
    "post_attention_layernorm": "d",
    "post_feedforward_layernorm": "d",
}
GEMMA2 = settings(
    "gemma2",
    "Gemma2ForCausalLM",
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=32,
    sliding_window=40,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=4.0,
    tie_word_embeddings=True,
)
GEMMA2_NORMS = {module: letters for module, letters in GEMMA_NORMS.items() if module not in QK_NORMS}

GEMMA4 = settings(
    "gemma4_text",
    "Gemma4ForCausalLM",
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=16,
    global_head_dim=32,
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=40,
    layer_types=["sliding_attention", "full_attention"] * 3,
    rope_theta=None,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    attention_k_eq_v=True,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=32,
    vocab_size_per_layer_input=300,
    enable_moe_block=False,
    final_logit_softcapping=4.0,
    tie_word_embeddings=True,
)


def gemma4(config: Mapping[str, Any]) -> Shapes:
    """Heads of two sizes, keys that are values, layers that read other layers' keys and values, and inputs of every layer."""
    d, layers, each = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    shapes["model.embed_tokens_per_layer.weight"] = (config["vocab_size"], layers * each)
    shapes["model.per_layer_model_projection.weight"] = (layers * each, d)
    shapes["model.per_layer_projection_norm.weight"] = (each,)
    for i, kind in enumerate(config["layer_types"]):
        sliding, own = kind == "sliding_attention", i < layers - config["num_kv_shared_layers"]
        size = config["head_dim"] if sliding else config["global_head_dim"]
        kv = size * (config["num_key_value_heads"] if sliding else config["num_global_key_value_heads"])
        q, f = size * config["num_attention_heads"], config["intermediate_size"] * (1 if own else 2)
        modules: Shapes = {"self_attn.q_proj": (q, d), "self_attn.q_norm": (size,), "self_attn.o_proj": (d, q)}
        if own:
            modules |= {"self_attn.k_proj": (kv, d), "self_attn.k_norm": (size,)}
            modules |= {"self_attn.v_proj": (kv, d)} if sliding else {}
        modules |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
        modules |= {"per_layer_input_gate": (each, d), "per_layer_projection": (d, each), "post_per_layer_input_norm": (d,)}
        modules |= {module: (d,) for module in GEMMA2_NORMS}
        shapes |= {f"model.layers.{i}.{module}.weight": shape for module, shape in modules.items()}
        shapes[f"model.layers.{i}.layer_scalar"] = (1,)
    return shapes


def latent(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """Latent attention, a dense layer and two mixtures; the norms inside it have an epsilon of 1e-6 whatever the configuration says."""
    widths = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
    mixture = {"first_k_dense_replace": 1, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2}
    mixture |= {"moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 4, "topk_group": 2}
    common = {"num_hidden_layers": 3, "num_key_value_heads": 6, "head_dim": None, "rms_norm_eps": 1e-6}
    return settings(model_type, architecture, **(widths | mixture | common | changes))


def latent_decoder(config: Mapping[str, Any]) -> Shapes:
    heads, dim, rank, turned = (config[k] for k in ("num_attention_heads", "hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    q, made = heads * (config["qk_nope_head_dim"] + turned), heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    dense = config.get("first_k_dense_replace", 1)
    shapes = decoder(config | {"head_dim": turned}, GATED | NORMS)
    shapes = {n: s for n, s in shapes.items() if ".mlp." not in n or int(n.split(".")[2]) < dense}
    wide = {"experts.0": config["moe_intermediate_size"], "shared_experts": config["n_shared_experts"] * config["moe_intermediate_size"]}
    wide |= {f"experts.{e}": wide["experts.0"] for e in range(config["n_routed_experts"])}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp"
        for part, width in wide.items() if i >= dense else ():
            shapes |= {f"{at}.{part}.{p}.weight": (dim, width) if p == "down_proj" else (width, dim) for p in PROJECTIONS}
        if i >= dense:
            shapes[f"{at}.gate.weight"] = (config["n_routed_experts"], dim)
            if config["model_type"] != "deepseek_v2":
                shapes[f"{at}.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        at = f"model.layers.{i}.self_attn"
        if config["q_lora_rank"]:
            shapes |= {f"{at}.q_a_proj.weight": (config["q_lora_rank"], dim), f"{at}.q_a_layernorm.weight": (config["q_lora_rank"],)}
            shapes[f"{at}.q_b_proj.weight"] = (q, config["q_lora_rank"])
        else:
            shapes[f"{at}.q_proj.weight"] = (q, dim)
        shapes |= {f"{at}.kv_a_proj_with_mqa.weight": (rank + turned, dim), f"{at}.kv_a_layernorm.weight": (rank,)}
        shapes |= {f"{at}.kv_b_proj.weight": (made, rank), f"{at}.o_proj.weight": (dim, heads * config["v_head_dim"])}
    return shapes


# A residual that is large beside what experts add: int8 errors then rarely change a row's choice.
LATENT_VALUES = {r".*embed_tokens.*": (0.0, 1.0), r".*\.gate\.weight": (0.0, 0.2), r".*e_score.*": (0.0, 0.1)}
DEEPSEEK_V2 = latent("deepseek_v2", "DeepseekV2ForCausalLM", norm_topk_prob=False, topk_method="group_limited_greedy")
DEEPSEEK_V2 |= {"q_lora_rank": None}
DEEPSEEK_V3 = latent("deepseek_v3", "DeepseekV3ForCausalLM", rope_theta=None, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
GLM_LITE = latent("glm4_moe_lite", "Glm4MoeLiteForCausalLM", first_k_dense_replace=None, n_group=1, topk_group=1)
GLM_LITE |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
KIMI_K2 = latent("kimi_k2", "DeepseekV3ForCausalLM", num_attention_heads=4, num_key_value_heads=4, rope_theta=50000.0)

LFM2_MOE = LFM2 | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "use_expert_bias": True,
    "norm_topk_prob": True,
}
del LFM2_MOE["block_auto_adjust_ff_dim"]


def lfm2_moe() -> Shapes:
    """Layers from the second on have experts, chosen with a bias, in place of the dense network."""
    shapes = {name: shape for name, shape in LFM2_SHAPES.items() if ".feed_forward." not in name or ".layers.0." in name}
    routed = mixture(LFM2_MOE, "feed_forward", ("w1", "w3", "w2"))
    routed |= {f"model.layers.{i}.feed_forward.expert_bias": (6,) for i in range(LFM2_MOE["num_hidden_layers"])}
    return shapes | {name: shape for name, shape in routed.items() if ".layers.0." not in name}


QWEN35_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
QWEN35_MOE = QWEN35 | QWEN35_EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
QWEN3_NEXT = QWEN35 | QWEN35_EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "norm_topk_prob": True}
QWEN3_NEXT_DELTA = QWEN35_DELTA | {"linear_attn.in_proj_qkvz.weight": (512, 96), "linear_attn.in_proj_ba.weight": (12, 96)}
for name in ("qkv", "z", "a", "b"):
    del QWEN3_NEXT_DELTA[f"linear_attn.in_proj_{name}.weight"]


def qwen35_moe() -> Shapes:
    """The experts of a layer in one tensor, gates above ups."""
    mixers = {"linear_attention": QWEN35_DELTA, "full_attention": QWEN35_ATTENTION}
    shapes = layers_of(QWEN35_MOE, NORMS, mixers) | mixture(QWEN35_MOE, "mlp", PROJECTIONS, shared=True)
    shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    for i in range(QWEN35_MOE["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.mlp.experts.gate_up_proj": (8, 128, 96), f"model.layers.{i}.mlp.experts.down_proj": (8, 96, 64)}
    return shapes


QWEN3_NEXT_MIXERS = {"linear_attention": QWEN3_NEXT_DELTA, "full_attention": QWEN35_ATTENTION}
QWEN3_NEXT_SHAPES = layers_of(QWEN3_NEXT, NORMS, QWEN3_NEXT_MIXERS) | mixture(QWEN3_NEXT, "mlp", PROJECTIONS, shared=True)

# Norms inside latent attention have an epsilon of 1e-6 whatever the configuration says.
KIMI = settings(
    "kimi_linear",
    "KimiLinearForCausalLM",
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=None,
    max_position_embeddings=None,
    model_max_length=4096,
    rms_norm_eps=1e-6,
    rope_theta=None,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    linear_attn_config={
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    first_k_dense_replace=1,
    num_experts=6,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=64,
    moe_renormalize=True,
    moe_router_activation_func="sigmoid",
    routed_scaling_factor=2.0,
)
KIMI_DELTA: Shapes = {f"{part}_proj.weight": (128, 96) for part in "qkv"} | {f"{part}_conv1d.weight": (128, 1, 4) for part in "qkv"}
KIMI_DELTA |= {"f_a_proj.weight": (32, 96), "f_b_proj.weight": (128, 32), "g_a_proj.weight": (32, 96), "g_b_proj.weight": (128, 32)}
KIMI_DELTA |= {"b_proj.weight": (4, 96), "A_log": (1, 1, 4, 1), "dt_bias": (128,), "o_norm.weight": (32,), "o_proj.weight": (96, 128)}
KIMI_LATENT: Shapes = {"q_proj.weight": (192, 96), "kv_a_proj_with_mqa.weight": (80, 96), "kv_a_layernorm.weight": (64,)}
KIMI_LATENT |= {"kv_b_proj.weight": (320, 64), "o_proj.weight": (96, 192)}


def kimi() -> Shapes:
    """Recurrent layers and layers that attend by turns; the first one is dense."""
    shapes = decoder(KIMI | {"head_dim": 16}, NORMS)
    for i in range(4):
        shapes |= {f"model.layers.{i}.self_attn.{name}": shape for name, shape in (KIMI_LATENT if i % 2 else KIMI_DELTA).items()}
    routed = mixture(KIMI, "block_sparse_moe", ("w1", "w3", "w2"))
    for i in range(4):
        at = f"model.layers.{i}.block_sparse_moe."
        routed |= {f"{at}gate.e_score_correction_bias": (6,)}
        for projection, shape in (("gate_proj", (64, 96)), ("up_proj", (64, 96)), ("down_proj", (96, 64))):
            routed[f"{at}shared_experts.{projection}.weight"] = shape
    shapes |= {name: shape for name, shape in routed.items() if ".layers.0." not in name}
    for projection, shape in (("gate_proj", (160, 96)), ("up_proj", (160, 96)), ("down_proj", (96, 160))):
        shapes[f"model.layers.0.mlp.{projection}.weight"] = shape
    return shapes


KIMI_VALUES = {".*embed_tokens.*": (0.0, 2.0), r".*dt_bias": (0.0, 1.0), r".*A_log": (0.0, 1.0)}

FAMILIES: dict[str, TinyHF] = {
    "gemma4": TinyHF(GEMMA4, gemma4(GEMMA4), {r".*layer_scalar": (0.8, 0.1), r".*\.[qk]_norm\.weight": (0.4, 0.1)}, seed=19),
    "llama3": TinyHF(LLAMA3, decoder(LLAMA3, ATTENTION | GATED | NORMS), seed=10),
    "mistral": TinyHF(MISTRAL, decoder(MISTRAL, ATTENTION | GATED | NORMS), seed=11),
    "ministral3": TinyHF(MINISTRAL3, decoder(MINISTRAL3, ATTENTION | GATED | NORMS), {r".*\.[qk]_proj\.weight": (0.0, 0.11)}, seed=12),
    "qwen3": TinyHF(QWEN3, decoder(QWEN3, ATTENTION | GATED | NORMS | QK_NORMS), seed=13),
    "smollm3": TinyHF(SMOLLM3, decoder(SMOLLM3, ATTENTION | GATED | NORMS), {r".*\.[qk]_proj\.weight": (0.0, 0.08)}, seed=14),
    "phi-longrope": TinyHF(PHI3, decoder(PHI3, PHI3_MODULES | NORMS), seed=15),
    "granite": TinyHF(GRANITE, decoder(GRANITE, ATTENTION | GATED | NORMS), seed=16),
    "olmo2": TinyHF(OLMO2, decoder(OLMO2, ATTENTION | GATED | OLMO2_NORMS), seed=17),
    "gemma2": TinyHF(GEMMA2, decoder(GEMMA2, ATTENTION | GATED | GEMMA2_NORMS), {".*norm.weight": (0.0, 0.2)}, seed=18),
    "llama": TinyHF(LLAMA, decoder(LLAMA, ATTENTION | GATED | NORMS)),
    "llama-mqa": TinyHF(LLAMA_MQA, decoder(LLAMA_MQA, ATTENTION | GATED | NORMS), seed=1),
    "qwen2": TinyHF(QWEN2, decoder(QWEN2, ATTENTION | GATED | NORMS, biased=tuple(ATTENTION)[:3]), seed=2),
    "mixtral": TinyHF(MIXTRAL, decoder(MIXTRAL, ATTENTION | NORMS) | mixture(MIXTRAL, "block_sparse_moe", ("w1", "w3", "w2")), ROUTER, 27),
    "qwen2moe": TinyHF(
        QWEN2_MOE,
        decoder(QWEN2_MOE, ATTENTION | NORMS, biased=tuple(ATTENTION)[:3]) | mixture(QWEN2_MOE, "mlp", PROJECTIONS, shared=True),
        ROUTER,
        seed=21,
    ),
    "qwen3moe": TinyHF(QWEN3_MOE, decoder(QWEN3_MOE, ATTENTION | NORMS | QK_NORMS) | mixture(QWEN3_MOE, "mlp", PROJECTIONS), ROUTER, 22),
    "mellum": TinyHF(MELLUM, decoder(MELLUM, ATTENTION | NORMS | QK_NORMS) | mixture(MELLUM, "mlp", PROJECTIONS), ROUTER, 24),
    "gpt-oss": TinyHF(GPT_OSS, GPT_OSS_SHAPES, GPT_OSS_VALUES, seed=27),
    "gemma3": TinyHF(GEMMA3, decoder(GEMMA3, ATTENTION | GATED | GEMMA_NORMS), {".*norm.weight": (0.0, 0.2)}, seed=3),
    "lfm2": TinyHF(LFM2, LFM2_SHAPES, {".*embed_tokens.*": (0.0, 0.4)}, seed=20),
    "qwen35": TinyHF(QWEN35, QWEN35_SHAPES, QWEN35_VALUES, seed=21),
    "deepseek-v2": TinyHF(DEEPSEEK_V2, latent_decoder(DEEPSEEK_V2), LATENT_VALUES, seed=20),
    "deepseek-v3": TinyHF(DEEPSEEK_V3, latent_decoder(DEEPSEEK_V3), LATENT_VALUES, seed=29),
    "glm-4.7-flash": TinyHF(GLM_LITE, latent_decoder(GLM_LITE), LATENT_VALUES, seed=22),
    "kimi-k2": TinyHF(KIMI_K2, latent_decoder(KIMI_K2), LATENT_VALUES, seed=23),
    "lfm2moe": TinyHF(LFM2_MOE, lfm2_moe(), {".*embed_tokens.*": (0.0, 0.4)} | ROUTER, seed=23),
    "qwen35moe": TinyHF(QWEN35_MOE, qwen35_moe(), QWEN35_VALUES | ROUTER, seed=24),
    "qwen3next": TinyHF(QWEN3_NEXT, QWEN3_NEXT_SHAPES, QWEN35_VALUES | ROUTER, seed=25),
    "kimi-linear": TinyHF(KIMI, kimi(), KIMI_VALUES | ROUTER, seed=30),
}
