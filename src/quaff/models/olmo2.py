"""OLMo 2: norms after each half of a layer and none before it, queries and keys normalised over their whole width (arXiv 2501.00656)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quaff.config import LayerConfig, ModelConfig
from quaff.models import llama
from quaff.models.family import Builder, HuggingFace, TensorSpec, Weights, decoder_table
from quaff.models.imported import DECODER, IGNORED, decoder_tensors


def table(c: ModelConfig) -> tuple[TensorSpec, ...]:
    a = c.layers[0].attention
    layer = llama.attention_roles(c, a) | llama.ffn_roles(c) | {"post_attention_norm": (c.dim,), "post_ffw_norm": (c.dim,)}
    layer |= {"attn_q_norm": (a.heads * a.head_dim,), "attn_k_norm": (a.kv_heads * a.head_dim,)}
    return decoder_table(c, layer, biased={})


def mixer(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    q, k, v = g.linear(g.copy(g.residual), w.attn_q, w.attn_k, w.attn_v)
    q = g.rope(g.rms_norm(q, w.attn_q_norm, c.eps), layer.rope)
    k = g.rope(g.rms_norm(k, w.attn_k_norm, c.eps), layer.rope)
    a = g.linear(g.attention(q, k, v, layer.attention), w.attn_output)
    g.residual += g.rms_norm(a, w.post_attention_norm, c.eps)


def ffn(g: Builder, c: ModelConfig, layer: LayerConfig, w: Weights) -> None:
    gate, up = g.linear(g.copy(g.residual), w.ffn_gate, w.ffn_up)
    g.residual += g.rms_norm(g.linear(g.swiglu(gate, up), w.ffn_down), w.post_ffw_norm, c.eps)


ROLES = {role: module for role, module in DECODER.items() if role not in ("attn_norm", "ffn_norm")} | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


FAMILY = replace(
    llama.FAMILY,
    name="olmo2",
    config=partial(llama.config, architecture="olmo2", interleaved=False),
    table=table,
    mixer=mixer,
    ffn=ffn,
    huggingface=HuggingFace(
        ("olmo2",), partial(llama.imported_metadata, architecture="olmo2"), partial(decoder_tensors, roles=ROLES), IGNORED
    ),
)
