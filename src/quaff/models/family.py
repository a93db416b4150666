"""What a model family is: its configuration, its tensor table, and its stages as lists of ops on a builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from quaff.checkpoint import Place, TensorView
from quaff.config import AttentionConfig, DeltaConfig, ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from quaff.errors import ConfigError, UnsupportedError, quote
from quaff.models.metadata import MetadataReader, model_name

Tensors = Mapping[str, tuple[tuple[int, ...], int]]
"""Name -> (shape as (n,), (rows, cols) or (matrices, rows, cols), ggml type) of every tensor in a checkpoint."""

CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
OUTPUT_SCALE = "layer_output_scale.weight"


def in_config(name: str) -> bool:
    """Whether a vector belongs to the configuration, not to an op."""
    return name in CONFIG_TENSORS or name.endswith(OUTPUT_SCALE)


F32_TYPE, F16_TYPE, BF16_TYPE = 0, 1, 30


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the table. Vectors, and matrices that are `float32`, must be F32."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    float32: bool = False


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A tensor that exists in the checkpoint. Integer weights are codes and scales; their input is quantised (NUMERICS 13)."""

    name: str
    shape: tuple[int, ...]
    integer: bool
    bias: WeightRef | None = None


class Weights:
    """The tensors of one stage by role: `w.attn_q` is `<prefix>attn_q.weight` with `<prefix>attn_q.bias` where the file has one."""

    def __init__(self, tensors: Tensors, prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    @property
    def top(self) -> Weights:
        """Tensors of no layer."""
        return Weights(self._tensors)

    def __contains__(self, role: str) -> bool:
        return f"{self._prefix}{role}.weight" in self._tensors

    def __getitem__(self, name: str) -> WeightRef:
        """One tensor by all of its name but the prefix: `w["shortconv.conv.weight"]`, `w["ssm_a"]`."""
        return self._ref(f"{self._prefix}{name}", None)

    def __getattr__(self, role: str) -> WeightRef:
        return self._ref(f"{self._prefix}{role}.weight", self.bias_of(role))

    def bias_of(self, role: str) -> WeightRef | None:
        """`<prefix><role>.bias` where the file has one: for roles that may have no weight."""
        name = f"{self._prefix}{role}.bias"
        return self._ref(name, None) if name in self._tensors else None

    def _ref(self, name: str, bias: WeightRef | None) -> WeightRef:
        shape, ggml_type = self._tensors[name]
        return WeightRef(name, shape, ggml_type not in (F32_TYPE, F16_TYPE, BF16_TYPE), bias)


@dataclass(eq=False, slots=True)
class Value:
    """Rows of `width` f32 values in a buffer of the stage being built. `g.residual += x` adds in place."""

    builder: Builder
    buffer: int
    width: int

    def __iadd__(self, other: Value) -> Value:
        self.builder.add(self, other)
        return self


class Builder(Protocol):
    """The words a family writes its stages in. Widths are checked; a mismatch raises ConfigError naming the weight."""

    @property
    def residual(self) -> Value: ...
    @residual.setter
    def residual(self, value: Value) -> None: ...
    def embed(self, table: WeightRef, scale: float) -> None: ...
    def token(self, table: WeightRef, scale: float) -> Value: ...
    def copy(self, x: Value) -> Value: ...
    def scale(self, x: Value, factor: float) -> Value: ...
    def rms_norm(self, x: Value, w: WeightRef, eps: float) -> Value: ...
    @overload
    def linear(self, x: Value, w: WeightRef, /) -> Value: ...
    @overload
    def linear(self, x: Value, w1: WeightRef, w2: WeightRef, /) -> tuple[Value, Value]: ...
    @overload
    def linear(self, x: Value, w1: WeightRef, w2: WeightRef, w3: WeightRef, /) -> tuple[Value, Value, Value]: ...
    def head_linear(self, x: Value, w: WeightRef) -> Value:
        """Head h of x times matrix h of w, [heads, rows, cols]: heads*cols values to heads*rows."""
        ...

    def concat(self, a: Value, b: Value, heads: int) -> Value:
        """Head by head, a before b."""
        ...

    def rope(self, x: Value, rope: RopeConfig | None, head_dim: int = 0) -> Value:
        """Turns the first `rope.rotary_dim` values of every head of `head_dim` (0: the attention's), in place; nothing without a rope."""
        ...

    def attention(
        self, q: Value, k: Value | None, v: Value | None, attention: AttentionConfig, sinks: WeightRef | None = None
    ) -> Value: ...
    def gated_conv(self, x: Value, w: WeightRef) -> Value: ...
    def conv(self, x: Value, w: WeightRef) -> Value: ...
    def split(self, x: Value, heads: int, *widths: int) -> tuple[Value, ...]: ...
    def unit_norm(self, x: Value, dim: int, eps: float, scale: float = 1.0) -> Value: ...
    def delta_gates(self, a: Value, b: Value, rate: WeightRef, dt: WeightRef) -> tuple[Value, Value]: ...
    def delta_rule(self, q: Value, k: Value, v: Value, decay: Value, beta: Value, delta: DeltaConfig) -> Value: ...
    def swiglu(self, gate: Value, up: Value) -> Value: ...
    def geglu(self, gate: Value, up: Value) -> Value: ...
    def sigmoid_gate(self, gate: Value, x: Value) -> Value: ...
    def clamped_swiglu(self, gate: Value, up: Value, alpha: float, limit: float) -> Value: ...
    def route(self, x: Value, router: WeightRef, experts: ExpertsConfig, bias: WeightRef | None = None) -> Value: ...
    @overload
    def expert_linear(self, x: Value, routing: Value, w: WeightRef, /) -> Value: ...
    @overload
    def expert_linear(self, x: Value, routing: Value, w1: WeightRef, w2: WeightRef, /) -> tuple[Value, Value]: ...
    def combine(self, x: Value, routing: Value) -> Value: ...
    def gate(self, x: Value, h: Value, w: WeightRef) -> Value: ...
    def add(self, target: Value, x: Value) -> None: ...
    def logits(self, x: Value, w: WeightRef) -> None: ...


@dataclass(frozen=True, slots=True)
class Imported:
    """Tensor `name` of the table, made from tensors of a Hugging Face folder: by `make` from the sources as f32, or the one source.
    Without sources it is made of config.json alone.

    Sources of dtype U8 are handed to `make` as they are.
    """

    name: str
    sources: tuple[str, ...]
    make: Callable[..., NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """How a Hugging Face folder becomes what a GGUF file of the family holds.

    `metadata`: config.json -> metadata keys with `general.architecture`, tokenizer apart. `tensors`: config.json -> every tensor
    of the table that the folder can give; one whose sources are all absent is left out. `ignored`: patterns (re.fullmatch) of tensors that
    carry nothing. The family's `config` may look at shapes of tensors that are taken as they are; those that are made get the table's.
    """

    model_types: tuple[str, ...]
    metadata: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Mapping[str, Any]], Iterator[Imported]]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `refused` names tensors that mean a feature we lack, with the feature's name.

    `parts`: role of a tensor that holds the rows of several weights -> their roles and rows, in order; `columns`: the same for columns;
    the table names the weights.
    Without `huggingface` only GGUF files hold it. The rest is for `quaff models`: what a layer may be, and the implementation whose float32
    logits of a tiny model (tests/goldens/families) ours agree with to `tolerance` times their range.
    """

    name: str
    config: Callable[[Mapping[str, Any], Tensors], ModelConfig]
    table: Callable[[ModelConfig], tuple[TensorSpec, ...]]
    embed: Callable[[Builder, ModelConfig, Weights], None]
    mixer: Callable[[Builder, ModelConfig, LayerConfig, Weights], None]
    ffn: Callable[[Builder, ModelConfig, LayerConfig, Weights], None]
    head: Callable[[Builder, ModelConfig, Weights], None]
    refused: Mapping[str, str]
    huggingface: HuggingFace | None = None
    parts: Callable[[ModelConfig], Mapping[str, Mapping[str, int]]] | None = None
    columns: Callable[[ModelConfig], Mapping[str, Mapping[str, int]]] | None = None
    layer_kinds: tuple[str, ...] = ("attention",)
    oracle: str = "transformers"
    tolerance: float = 1e-4

    def split(self, config: ModelConfig, views: Mapping[str, TensorView]) -> dict[str, TensorView]:
        """The tensors of a checkpoint, those of several `parts` as one view for each. ConfigError when one is not as large as its parts."""
        rows, columns = (f(config) if f is not None else {} for f in (self.parts, self.columns))
        out: dict[str, TensorView] = {}
        for name, view in views.items():
            *prefix, role, suffix = name.split(".") if name.count(".") else ("", name)
            parts, axis = (columns[role], 1) if role in columns else (rows.get(role), 0)
            if not parts:
                out[name] = view
                continue
            names = [".".join((*prefix, part, suffix)) for part in parts]
            if len(view.shape) <= axis or view.shape[axis] != sum(parts.values()):
                what, size = ("rows", "columns")[axis], view.shape[axis] if len(view.shape) > axis else 0
                raise ConfigError(f"tensor {name} has {size} {what}; the metadata says {sum(parts.values())}, of {', '.join(parts)}")
            out |= dict(zip(names, _parts(view, names, list(parts.values()), axis), strict=True))
        return out

    def check(self, config: ModelConfig, tensors: Tensors) -> None:
        """Compare the checkpoint with the table, both ways. ConfigError names the tensor that is missing, unexpected or misshapen."""
        for name, feature in self.refused.items():
            if name in tensors:
                raise UnsupportedError(f"{feature} is not supported (tensor {name})")
        expected = {spec.name: spec for spec in self.table(config)}
        for name in tensors:
            if name not in expected:
                raise ConfigError(f"unexpected tensor {quote(name)} in a {self.name} model of {len(config.layers)} layers")
        for spec in expected.values():
            if spec.name not in tensors:
                if spec.optional:
                    continue
                raise ConfigError(f"missing tensor {spec.name} of shape {spec.shape} in a {self.name} model")
            shape, ggml_type = tensors[spec.name]
            if tuple(shape) != spec.shape:
                raise ConfigError(f"tensor {spec.name} has shape {tuple(shape)}; the metadata says {spec.shape}")
            biases = spec.name.endswith(".bias")
            if (len(shape) == 1 or biases or spec.float32) and ggml_type != F32_TYPE:
                what, which = ("vector", "norms and biases") if len(shape) == 1 or biases else ("matrix", "taps of convolutions")
                raise UnsupportedError(f"{what} {spec.name} has ggml type {ggml_type}; {which} must be F32")


def _parts(view: TensorView, names: list[str], sizes: list[int], axis: int) -> Iterator[TensorView]:
    """Rows (axis 0) or columns of a tensor as tensors of their own; a part is made of whole blocks.

    A tensor that is made when it is read is kept until its last part has been.
    """
    held: list[NDArray[np.uint8]] = []
    unread = set(names)
    whole = view.shape[axis]

    def read(name: str, begin: int, size: int) -> NDArray[np.uint8]:
        data = held[0] if held else view.data
        if not held:
            held.append(data)
        unread.discard(name)
        if not unread:
            held.clear()
            unread.update(names)
        lines = data.reshape(view.shape[0] if axis else 1, -1)
        nbytes = lines.shape[1]
        return np.ascontiguousarray(lines[:, nbytes * begin // whole : nbytes * (begin + size) // whole]).reshape(-1)

    begin = 0
    for name, size in zip(names, sizes, strict=True):
        shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
        nbytes = view.nbytes * size // whole
        source: Place | Callable[[], NDArray[np.uint8]] = partial(read, name, begin, size)
        if (place := view.place) is not None and axis < len(view.shape) - 1:
            source = place.pieces(place.count * begin // whole, place.count * size // whole)
        elif place is not None:
            source = place.within(place.nbytes * begin // whole, place.nbytes * size // whole)
        yield replace(view, name=name, shape=shape, nbytes=nbytes, source=source)
        begin += size


def decoder_table(config: ModelConfig, layer: Mapping[str, tuple[int, ...]], biased: Mapping[str, bool]) -> tuple[TensorSpec, ...]:
    """Table of a decoder: embedding, final norm, optional head (absent: the embedding is the head), optional factors of rotary
    frequencies, and per layer the roles in `layer`; roles in `biased` must (True) or may (False) have a bias."""

    def specs() -> Iterator[TensorSpec]:
        yield TensorSpec("token_embd.weight", (config.vocab, config.dim))
        yield TensorSpec("output_norm.weight", (config.dim,))
        yield TensorSpec("output.weight", (config.vocab, config.dim), optional=True)
        frequencies = max((layer.rope.rotary_dim // 2 for layer in config.layers if layer.rope), default=0)
        for name in CONFIG_TENSORS if frequencies else ():
            yield TensorSpec(name, (frequencies,), optional=True)
        for i in range(len(config.layers)):
            for role, shape in layer.items():
                yield TensorSpec(f"blk.{i}.{role}.weight", shape)
            for role, required in biased.items():
                yield TensorSpec(f"blk.{i}.{role}.bias", layer[role][:-1], optional=not required)

    return tuple(specs())


def decoder_config(
    m: MetadataReader, metadata: Mapping[str, Any], tensors: Tensors, architecture: str, layers: tuple[LayerConfig, ...], **more: Any
) -> ModelConfig:
    """A ModelConfig of the keys that every decoder has; `more`: fields that some have alone, or read in their own way."""
    shared: dict[str, Any] = {
        "architecture": architecture,
        "name": model_name(metadata),
        "dim": m.integer("embedding_length"),
        "vocab": vocab_size(metadata, tensors, m.integer("vocab_size", 0)),
        "context_length": m.integer("context_length"),
        "eps": m.number("attention.layer_norm_rms_epsilon"),
        "layers": layers,
    }
    if "ffn_dim" not in more:
        shared["ffn_dim"] = m.integer("feed_forward_length")
    return ModelConfig(**shared, **more)


def vocab_size(metadata: Mapping[str, Any], tensors: Tensors, declared: int) -> int:
    """Rows of the embedding; ConfigError when the metadata (`declared`, 0 when absent) or the tokenizer's list disagrees."""
    shape = tensors.get("token_embd.weight", ((), 0))[0]
    if len(shape) != 2:
        raise ConfigError(
            "missing tensor token_embd.weight" if not shape else f"token_embd.weight has shape {tuple(shape)}; expected two dimensions"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else 0
    for count, what in ((declared, "metadata key vocab_size"), (listed, "the tokenizer")):
        if count and count != shape[0]:
            raise ConfigError(f"token_embd.weight has {shape[0]} rows but {what} says {count}")
    return shape[0]
