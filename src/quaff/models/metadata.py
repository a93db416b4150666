"""Typed reads of a checkpoint's metadata: every key of the architecture is consumed or refused, none is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quaff.config import MAX_LAYERS
from quaff.errors import ConfigError, UnsupportedError, quote

# Written by converters, without any effect on the computation.
HARMLESS = ("tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned", "rope.scaling.original_context_length", "pooling_type")


CONTEXT = "quaff.context"
"""Beside a file's own keys: the context in tokens that the model is opened for."""


class MetadataReader:
    """Reads `<architecture>.<key>` entries and remembers which; `finish` raises UnsupportedError if any are left."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self._seen = {f"{architecture}.{key}" for key in HARMLESS}

    def _get(self, key: str) -> tuple[str, Any]:
        full = f"{self._architecture}.{key}"
        self._seen.add(full)
        value = self._metadata.get(full)
        if isinstance(value, np.ndarray | list):
            raise UnsupportedError(f"metadata key {full} holds one value per layer; only models whose layers share it are supported")
        return full, value.item() if isinstance(value, np.generic) else value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer >= 0; `default` when the key is absent, ConfigError when there is no default either."""
        full, value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"metadata key {full} {_fault(value)}; expected an integer >= 0")
        return value

    def per_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """An integer >= 0 for each layer, from an array of them or from one that all layers share."""
        full = f"{self._architecture}.{key}"
        value = self._metadata.get(full)
        if not isinstance(value, np.ndarray | list):
            return (self.integer(key, default),) * layers
        self._seen.add(full)
        values = value.tolist() if isinstance(value, np.ndarray) else list(value)
        if len(values) != layers or any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in values):
            raise ConfigError(f"metadata key {full} is {quote(str(values))}; expected {layers} integers >= 0")
        return tuple(values)

    def sliding(self, key: str, layers: int, period: int) -> tuple[bool, ...]:
        """Which layers see a window: a flag per layer, or a period whose last layer sees everything (0: none does)."""
        full = f"{self._architecture}.{key}"
        value = self._metadata.get(full)
        if not isinstance(value, np.ndarray | list):
            every = self.integer(key, period)
            return tuple(every == 0 or (i + 1) % every != 0 for i in range(layers))
        self._seen.add(full)
        values = [bool(v) for v in value if v in (0, 1)]
        if len(values) != layers or len(value) != layers:
            raise ConfigError(f"metadata key {full} is {quote(str(list(value)))}; expected {layers} flags")
        return tuple(values)

    def vector(self, name: str) -> tuple[float, ...] | None:
        """Values of a small tensor that is part of the configuration; None when the file has none. `read_model` puts them here."""
        values = self._metadata.get(name)
        return None if values is None else tuple(float(v) for v in values)

    @property
    def context(self) -> int:
        """Tokens that the caller will run the model with at most; 0 when he did not say."""
        return int(self._metadata.get(CONTEXT, 0))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; integers are accepted."""
        full, value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"metadata key {full} {_fault(value)}; expected a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        full, value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"metadata key {full} {_fault(value)}; expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        full, value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"metadata key {full} {_fault(value)}; expected text")
        return value

    def refuse_unless(self, key: str, allowed: tuple[Any, ...], feature: str) -> None:
        """UnsupportedError naming `feature` when the key is present with a value outside `allowed`."""
        full, value = self._get(key)
        if value is not None and value not in allowed:
            raise UnsupportedError(f"{feature} is not supported ({full} {_fault(value)})")

    def skip(self, *keys: str) -> None:
        """Keys that have no effect in this model."""
        self._seen.update(f"{self._architecture}.{key}" for key in keys)

    def layers(self) -> int:
        """Number of layers, bounded before anything is built from it."""
        count = self.integer("block_count")
        if not 1 <= count <= MAX_LAYERS:
            raise ConfigError(f"metadata key {self._architecture}.block_count is {count}; expected 1..{MAX_LAYERS}")
        return count

    def finish(self) -> None:
        prefix = f"{self._architecture}."
        for key in self._metadata:
            if key.startswith(prefix) and key not in self._seen:
                raise UnsupportedError(
                    f"metadata key {quote(key)} is not known for {self._architecture} models; running without it could be wrong"
                )


def head_dim(m: MetadataReader, dim: int, heads: int) -> int:
    """Width of one head of queries, keys and values: `attention.key_length`, by default dim / heads."""
    if heads < 1:
        raise ConfigError("the model has no attention heads")
    if dim % heads and not m.integer("attention.key_length", 0):
        raise ConfigError(f"embedding length {dim} does not divide into {heads} attention heads and there is no attention.key_length")
    size = m.integer("attention.key_length", dim // heads)
    if m.integer("attention.value_length", size) != size:
        raise UnsupportedError("attention whose keys and values have different lengths is not supported")
    return size


def model_name(metadata: Mapping[str, Any]) -> str:
    """`general.name`, or a stand-in; shown to people, never used to decide anything."""
    name = metadata.get("general.name")
    return name if isinstance(name, str) and name else "unnamed"


def _fault(value: object) -> str:
    return "is missing" if value is None else f"is {quote(str(value))}"
