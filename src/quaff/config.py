"""What a model is and how to run it: frozen values, checked when made (ConfigError says which field is wrong)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quaff.errors import ConfigError, quote

LayerKind = Literal["full", "sliding", "conv", "delta"]
Schedule = Literal["token", "chunk", "layer"]
Activations = Literal["int8", "float32"]
KVDtype = Literal["int16", "float32"]
Quantize = Literal["q8_0", "q4_0", "q4_1", "none"]
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]

Memory = int | Literal["auto"]
"""Bytes of resident memory that a process may have; auto: what the system can give."""

MAX_HEAD_DIM = 1024
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_SIZE = 1 << 24
"""No width, vocabulary or context of a real model comes near it; products of two of them still fit 64 bits."""


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ConfigError(what)


def _size(name: str, value: int, most: int = MAX_SIZE) -> None:
    _check(
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most,
        f"{name} is {value!r}; expected an integer in 1..{most}",
    )


def _positive(name: str, value: float) -> None:
    _check(math.isfinite(value) and value > 0, f"{name} is {value!r}; expected a positive finite number")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: inverse frequency i is theta^(-2i/rotary_dim) / factors[i] (no factors: all 1). `interleaved` turns the pairs
    (2i, 2i+1), otherwise (i, i + rotary_dim/2). Dimensions from rotary_dim on are left alone.

    What is turned is multiplied by `scale`, and where `temperature` is not 0 by 1 + temperature * ln(1 + position // temperature_length).
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    factors: tuple[float, ...] = ()
    scale: float = 1.0
    temperature: float = 0.0
    temperature_length: int = 0

    def __post_init__(self) -> None:
        _check(1.0 < self.theta <= 1e12, f"rope theta is {self.theta!r}; expected a number in (1, 1e12]")
        _size("rope dimension count", self.rotary_dim, MAX_HEAD_DIM)
        _check(self.rotary_dim % 2 == 0, f"rope dimension count is {self.rotary_dim}; expected an even number")
        _check(
            len(self.factors) in (0, self.rotary_dim // 2),
            f"there are {len(self.factors)} rope factors; expected one for each of {self.rotary_dim // 2} frequencies",
        )
        for factor in self.factors:
            _check(1e-6 <= factor <= 1e38, f"a rope scaling factor is {factor!r}; expected a number in 1e-6..1e38")
        _check(1e-3 <= self.scale <= 1e3, f"rope attention factor is {self.scale!r}; expected a number in 1e-3..1e3")
        _check(0 <= self.temperature <= 1e3, f"attention temperature is {self.temperature!r}; expected a number in 0..1e3")
        if self.temperature:
            _size("attention temperature length", self.temperature_length, 1 << 30)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention of one layer. `window` 0 sees all earlier positions, otherwise j > i - window. `softcap` 0 is none.

    `head_dim` is the width of a query's and a key's head, `v_dim` that of a value's: `value_dim`, or the same when that is 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    scale: float
    softcap: float = 0.0
    value_dim: int = 0

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim

    def __post_init__(self) -> None:
        _size("attention head count", self.heads, 4096)
        _size("attention KV head count", self.kv_heads, 4096)
        _check(self.heads % self.kv_heads == 0, f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        _size("attention head dimension", self.head_dim, MAX_HEAD_DIM)
        _size("attention value dimension", self.v_dim, MAX_HEAD_DIM)
        for what, n in (("head", self.head_dim), ("value", self.v_dim)):
            _check(n % 16 == 0, f"attention {what} dimension is {n}; expected a multiple of 16")
        _check(0 <= self.window <= MAX_SIZE, f"attention window is {self.window}; expected 0..{MAX_SIZE}")
        _positive("attention scale", self.scale)
        _check(math.isfinite(self.softcap) and self.softcap >= 0, f"attention soft cap is {self.softcap!r}; expected a finite number >= 0")


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Heads of a gated delta rule. Value head j has key head j % key_heads when `tiled`, else j // (value_heads / key_heads).
    With `decay_each` every row of a head's state [key_dim, value_dim] decays by itself."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool
    decay_each: bool = False

    def __post_init__(self) -> None:
        for name, value in (("key head count", self.key_heads), ("value head count", self.value_heads)):
            _size(f"delta rule {name}", value, 4096)
        for name, value in (("key", self.key_dim), ("value", self.value_dim)):
            _size(f"delta rule {name} dimension", value, 1024)
        _check(self.value_heads % self.key_heads == 0, f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")
        _check(self.value_dim % 16 == 0, f"delta rule value dimension is {self.value_dim}; expected a multiple of 16")
        _check(
            not self.decay_each or self.key_heads == self.value_heads, "a decay for every row of a state needs as many key as value heads"
        )

    @property
    def decays(self) -> int:
        """Decays of one row of the batch."""
        return self.value_heads * (self.key_dim if self.decay_each else 1)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention: queries are made from `q_rank` values (0: from the whole row), keys and values of all heads from `kv_rank` values.

    Before compression a head's query and key have `plain_dim` values without a position beside the rotary ones, its value `value_dim`.
    """

    q_rank: int
    kv_rank: int
    plain_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check(0 <= self.q_rank <= MAX_SIZE, f"rank of queries is {self.q_rank}; expected 0..{MAX_SIZE}")
        for what, n in (
            ("rank of keys and values", self.kv_rank),
            ("plain dimension of keys", self.plain_dim),
            ("value dimension", self.value_dim),
        ):
            _size(what, n, MAX_HEAD_DIM)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture: every row goes through `used` of `count` experts of `ffn_dim` and, with `shared_ffn_dim`, through one that all rows share.

    `scoring` makes scores of the router's logits: softmax over all experts, sigmoid, or softmax over the chosen ones alone. `normalise`
    divides a row's weights by their sum, `scale` multiplies them. With `groups` > 1 experts come from the `groups_used` best groups; a
    group is as good as its `group_top` best experts together.
    """

    count: int
    used: int
    ffn_dim: int
    shared_ffn_dim: int = 0
    scoring: Scoring = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_top: int = 1

    def __post_init__(self) -> None:
        _size("expert count", self.count, MAX_EXPERTS)
        _size("number of experts used", self.used, 256)
        _check(self.used <= self.count, f"{self.used} experts of {self.count} cannot be used")
        _size("expert feed-forward length", self.ffn_dim)
        if self.shared_ffn_dim:
            _size("shared expert feed-forward length", self.shared_ffn_dim)
        _check(self.scoring in ("softmax", "sigmoid", "softmax_of_chosen"), f"scoring of experts is {self.scoring!r}")
        _positive("scale of expert weights", self.scale)
        _size("expert group count", self.groups, self.count)
        _check(self.count % self.groups == 0, f"{self.count} experts do not divide into {self.groups} groups")
        _size("number of expert groups used", self.groups_used, self.groups)
        _size("experts that a group is judged by", self.group_top, self.count // self.groups)
        in_groups = self.groups_used * (self.count // self.groups)
        _check(self.used <= in_groups, f"{self.used} experts cannot come from groups of {in_groups} in all")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer; layers with equal KV shape and kind share a page table. Without `rope` its positions are not encoded; queries turn by
    `query_rope` where theirs is another. `ffn_dim` 0 is the model's. A layer with `kv_layer` has no keys and values of its own but reads
    those of that earlier layer. The residual is multiplied by `output_scale` at its end. `experts` is None where the ffn is dense.

    Layers of kinds conv and delta have `conv_taps` taps for every channel and do not use `attention` and `rope`, which are the others'.
    With `latent`, `attention` is that over compressed keys.
    """

    kind: LayerKind
    attention: AttentionConfig
    rope: RopeConfig | None
    conv_taps: int = 0
    delta: DeltaConfig | None = None
    query_rope: RopeConfig | None = None
    latent: LatentConfig | None = None
    ffn_dim: int = 0
    kv_layer: int | None = None
    output_scale: float = 1.0
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        _check(self.kind in get_args(LayerKind), f"layer kind is {self.kind!r}; expected {', '.join(get_args(LayerKind))}")
        _check((self.kind in ("conv", "delta")) == (self.conv_taps > 0), "a conv or delta layer needs taps and other layers have none")
        _check((self.kind == "delta") == (self.delta is not None), "a delta layer needs a delta rule and other layers have none")
        _check((self.kind == "sliding") == (self.attention.window > 0), "a sliding layer needs a window and a full layer has none")
        for rope in (self.rope, self.query_rope):
            _check(
                rope is None or rope.rotary_dim <= self.attention.head_dim,
                f"rope dimension count {rope and rope.rotary_dim} exceeds the head dimension {self.attention.head_dim}",
            )
            # A temperature is meant for all of a query, and the table reaches only what it turns.
            _check(
                rope is None or not rope.temperature or rope.rotary_dim == self.attention.head_dim,
                "an attention temperature needs rope over the whole head",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. `dim`, `ffn_dim`, `vocab` in values, `context_length` in tokens.

    `per_layer_dim` values of every token enter each layer beside the residual (0: none). `embedding_scale` multiplies embedding rows,
    `residual_scale` what a mixer or ffn adds, `logit_scale` logits; then they are capped to cap*tanh(logit/cap) where `logit_softcap` is
    not 0.
    """

    architecture: str
    name: str
    dim: int
    ffn_dim: int
    vocab: int
    context_length: int
    eps: float
    layers: tuple[LayerConfig, ...]
    per_layer_dim: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        _size("embedding length", self.dim)
        _size("feed-forward length", self.ffn_dim)
        _size("vocabulary size", self.vocab)
        _size("context length", self.context_length, 1 << 30)
        _check(0 < self.eps < 1, f"norm epsilon is {self.eps!r}; expected a number in (0, 1)")
        _check(1 <= len(self.layers) <= MAX_LAYERS, f"the model has {len(self.layers)} layers; expected 1..{MAX_LAYERS}")
        _positive("embedding scale", self.embedding_scale)
        _positive("residual scale", self.residual_scale)
        _positive("logit scale", self.logit_scale)
        _check(
            math.isfinite(self.logit_softcap) and self.logit_softcap >= 0,
            f"logit soft cap is {self.logit_softcap!r}; expected a finite number >= 0",
        )


def rows_per_expert(config: ModelConfig) -> float:
    """Share of a cell's rows that meet an expert's weights, the least of all layers: 1 for dense models."""
    return min((layer.experts.used / layer.experts.count for layer in config.layers if layer.experts), default=1.0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. None leaves the choice to the engine. Nothing here but `activations` and `kv_dtype` may change a bit, and
    `context` where a model has other rotary factors for long contexts than for short ones.

    `chunk` in rows, `context` in tokens (None: the model's), `memory_limit_bytes` bounds weights, KV pages and scratch. `memory` bounds all
    of the process instead: what does not fit is streamed from the file.
    `schedule` None: by chunks, or by layers where weights are streamed.
    `activations="float32"` does not quantise activations, `kv_dtype="float32"` rounds nothing of attention to 13 bits: slower, both
    for checking against other implementations. `prefix_cache_bytes` of the limit at most keep what was computed for prompts to come; with
    a folder `store` it is kept in files too, `store_cap_bytes` of them at most.
    """

    threads: int | None = None
    chunk: int | None = None
    schedule: Schedule | None = None
    activations: Activations = "int8"
    context: int | None = None
    memory_limit_bytes: int | None = None
    fuse: bool = True
    kv_dtype: KVDtype = "int16"
    memory: Memory | None = None
    prefix_cache_bytes: int = 0
    store: Path | None = None
    store_cap_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        for name, value, most in (
            ("threads", self.threads, 1024),
            ("chunk", self.chunk, 1 << 20),
            ("context", self.context, 1 << 30),
            ("memory_limit_bytes", self.memory_limit_bytes, 1 << 50),
            ("store_cap_bytes", self.store_cap_bytes, 1 << 50),
        ):
            if value is not None:
                _size(name, value, most)
        if self.prefix_cache_bytes != 0:
            _size("prefix_cache_bytes", self.prefix_cache_bytes, 1 << 50)
        _check(self.store is None or self.prefix_cache_bytes > 0, "a store is filled from the prefix cache; give prefix_cache_bytes too")
        _check(self.schedule in (None, "token", "chunk", "layer"), f"schedule is {self.schedule!r}; expected token, chunk or layer")
        if self.memory is not None and self.memory != "auto":
            _size("memory", self.memory, 1 << 50)
        _check(
            self.memory is None or self.memory_limit_bytes is None,
            "memory and memory_limit_bytes are both given; the first bounds the process, the second the engine alone",
        )
        _check(self.activations in ("int8", "float32"), f"activations is {self.activations!r}; expected int8 or float32")
        _check(self.kv_dtype in ("int16", "float32"), f"kv_dtype is {self.kv_dtype!r}; expected int16 or float32")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a model inside a memory budget is planned for; more than that is taken while there is room.

    `positions` of each of `sequences`, or a function of the tokenizer that counts them (None: the context, at most 4,096), and
    `logits_rows` rows of logits in a step, at most one for each position (None: 16 MiB of them). `spare_bytes` are left for what the
    caller does beside.
    """

    positions: int | Callable[[Any], int] | None = None
    sequences: int = 1
    logits_rows: int | None = None
    spare_bytes: int = 0


_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_memory(text: str) -> Memory:
    """Bytes of "2GiB", "2G" (the same), "2GB" (2e9), "1.5 GiB", "750000000"; or "auto". ConfigError for anything else."""
    text = text.strip().lower()
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?b?)", text)
    if match is None or match[3] == "i" or (match[3] == "ib" and not match[2]):
        raise ConfigError(f"memory is {quote(text)}; expected a size such as 2GiB or 1500MB, or auto")
    unit = 10 ** (_UNITS[match[2]] * 3 // 10) if match[3] == "b" else 1 << _UNITS[match[2]]
    return int(float(match[1]) * unit)
