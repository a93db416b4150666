"""The recurrent layers of Qwen3.5, Qwen3-Next and Kimi Linear, delta rules behind short convolutions: metadata, tensors, ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from quaff.config import DeltaConfig, ModelConfig
from quaff.errors import ConfigError
from quaff.models.family import Builder, Imported, Value, Weights
from quaff.models.imported import Array
from quaff.models.metadata import MetadataReader


def delta_config(m: MetadataReader, tiled: bool) -> DeltaConfig:
    """`tiled`: the converter has laid value heads out so that they take key heads by turns."""
    heads, width = m.integer("ssm.time_step_rank"), m.integer("ssm.inner_size")
    if heads < 1 or width % heads:
        raise ConfigError(f"the width {width} of all values does not divide into {heads} heads of a delta rule")
    return DeltaConfig(m.integer("ssm.group_count"), heads, m.integer("ssm.state_size"), width // heads, tiled)


def delta_tensors(c: ModelConfig, d: DeltaConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Names after `blk.N.` and shapes; the projection of the two gates is the family's."""
    values = d.value_heads * d.value_dim
    qkv = 2 * d.key_heads * d.key_dim + values
    return {
        "attn_qkv.weight": (qkv, c.dim),
        "attn_gate.weight": (values, c.dim),
        "ssm_conv1d.weight": (qkv, taps),
        "ssm_a": (d.value_heads,),
        "ssm_dt.bias": (d.value_heads,),
        "ssm_norm.weight": (d.value_dim,),
        "ssm_out.weight": (c.dim, values),
    }


def delta_net(g: Builder, c: ModelConfig, d: DeltaConfig, w: Weights, h: Value) -> Value:
    qkv, z = g.linear(h, w.attn_qkv, w.attn_gate)
    if "ssm_ba" in w:
        share = d.value_heads // d.key_heads
        beta, alpha = g.split(g.linear(h, w.ssm_ba), d.key_heads, share, share)
    else:
        alpha, beta = g.linear(h, w.ssm_alpha, w.ssm_beta)
    keys = d.key_heads * d.key_dim
    q, k, v = g.split(g.conv(qkv, w["ssm_conv1d.weight"]), 1, keys, keys, d.value_heads * d.value_dim)
    q = g.unit_norm(q, d.key_dim, c.eps, float(np.float32(1 / np.sqrt(float(d.key_dim)))))
    k = g.unit_norm(k, d.key_dim, c.eps)
    decay, step = g.delta_gates(alpha, beta, w["ssm_a"], w["ssm_dt.bias"])
    return g.linear(g.swiglu(z, g.rms_norm(g.delta_rule(q, k, v, decay, step, d), w.ssm_norm, c.eps)), w.ssm_out)


def delta_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
    }


def by_turns(key_heads: int, value_heads: int, keys: int, w: Array) -> Array:
    """Rows of value heads, after `keys` other rows: those of one key head come apart, so that value head j has key head j % key_heads."""
    values = w[keys:].reshape(key_heads, value_heads // key_heads, -1, *w.shape[1:]).swapaxes(0, 1)
    return np.concatenate([w[:keys], values.reshape(-1, *w.shape[1:])])


def delta_imported(config: Mapping[str, Any], layer: int) -> Iterator[Imported]:
    """Tensors of one layer of Qwen3.5."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    turned = partial(by_turns, key_heads, value_heads, 0)
    after_keys = partial(by_turns, key_heads, value_heads, 2 * key_heads * config["linear_key_head_dim"])
    sources: dict[str, tuple[str, Callable[[Array], Array] | None]] = {
        "attn_qkv.weight": ("in_proj_qkv.weight", after_keys),
        "attn_gate.weight": ("in_proj_z.weight", turned),
        "ssm_conv1d.weight": ("conv1d.weight", lambda w: after_keys(w[:, 0])),
        "ssm_alpha.weight": ("in_proj_a.weight", turned),
        "ssm_beta.weight": ("in_proj_b.weight", turned),
        "ssm_a": ("A_log", lambda w: -turned(np.exp(w))),
        "ssm_dt.bias": ("dt_bias", turned),
        "ssm_norm.weight": ("norm.weight", None),
        "ssm_out.weight": ("out_proj.weight", lambda w: np.ascontiguousarray(turned(w.T).T)),
    }
    for name, (source, make) in sources.items():
        yield Imported(f"blk.{layer}.{name}", (f"model.layers.{layer}.linear_attn.{source}",), make)


def kda_roles(c: ModelConfig, d: DeltaConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Shapes by role of Kimi's delta rule, whose states decay row by row."""
    size, width = d.key_dim, d.value_heads * d.value_dim
    shapes: dict[str, tuple[int, ...]] = {f"attn_{part}": (width, c.dim) for part in "qkv"}
    shapes |= {f"ssm_conv1d_{part}": (width, taps) for part in "qkv"}
    shapes |= {"ssm_f_a": (size, c.dim), "ssm_f_b": (width, size), "ssm_g_a": (size, c.dim), "ssm_g_b": (width, size)}
    return shapes | {"ssm_beta": (d.value_heads, c.dim), "ssm_norm": (d.value_dim,), "attn_output": (c.dim, width)}


def kda(g: Builder, c: ModelConfig, d: DeltaConfig, w: Weights, h: Value) -> Value:
    q, k, v = g.linear(h, w.attn_q, w.attn_k, w.attn_v)
    forget, opening = g.linear(h, w.ssm_f_a, w.ssm_g_a)
    beta = g.linear(h, w.ssm_beta)
    q, k, v = (g.conv(x, w[f"ssm_conv1d_{part}.weight"]) for x, part in ((q, "q"), (k, "k"), (v, "v")))
    q = g.unit_norm(q, d.key_dim, c.eps, float(np.float32(1 / np.sqrt(float(d.key_dim)))))
    k = g.unit_norm(k, d.key_dim, c.eps)
    decay, step = g.delta_gates(g.linear(forget, w.ssm_f_b), beta, w["ssm_a"], w["ssm_dt.bias"])
    y = g.rms_norm(g.delta_rule(q, k, v, decay, step, d), w.ssm_norm, c.eps)
    return g.linear(g.sigmoid_gate(g.linear(opening, w.ssm_g_b), y), w.attn_output)


def kda_imported(layer: int) -> Iterator[Imported]:
    """What one layer of Kimi Linear has beside projections."""
    at, attention = f"blk.{layer}.", f"model.layers.{layer}.self_attn."
    for part in "qkv":
        yield Imported(f"{at}ssm_conv1d_{part}.weight", (f"{attention}{part}_conv1d.weight",), lambda w: w.reshape(len(w), -1))
    yield Imported(f"{at}ssm_a", (f"{attention}A_log",), lambda w: -np.exp(w.reshape(-1)))
    yield Imported(f"{at}ssm_dt.bias", (f"{attention}dt_bias",))
