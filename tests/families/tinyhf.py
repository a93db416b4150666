"""Tiny random models in Hugging Face folders: `TinyHF(config, weights).write(folder)`. No torch: NumPy arrays by their names there."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tests.tiny import CHAT_TEMPLATE, SPECIAL, byte_level_vocabulary

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TinyHF:
    """`config`: a config.json. `weights`: shapes by name, as transformers stores them.

    Matrices have rows of unit length, norms are near 1, other vectors near 0; `values` maps patterns (re.fullmatch) of names to another
    (mean, deviation), a deviation of 0 being that of a matrix's rows.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, tuple[int, ...]]
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        rng = np.random.default_rng(self.seed)
        return {name: self._array(rng, name, shape) for name, shape in self.weights.items()}

    def _array(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        mean, deviation = (1.0 if "norm" in name and name.endswith("weight") else 0.0), 0.2
        if len(shape) > 1:
            # Attention that is far from uniform.
            mean, deviation = 0.0, (1.5 if re.search(r"\.[qk]_proj\.", name) else 1.0) / math.sqrt(shape[-1])
        for pattern, (m, d) in self.values.items():
            if re.fullmatch(pattern, name):
                mean, deviation = m, d or deviation
        return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    def sha256(self) -> str:
        """Of the configuration and all weights, in order of name."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, array in sorted(self.arrays().items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()

    def tokens(self, length: int = 110) -> list[int]:
        return [int(t) for t in np.random.default_rng(self.seed + 1).integers(0, self.vocab, length)]

    def write(self, folder: Path) -> Path:
        """config.json, model.safetensors and a tokenizer; the same fields give the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        save_file(self.arrays(), folder / "model.safetensors", {"format": "pt"})
        write_tokenizer(folder, self.vocab)
        return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """tokenizer.json and tokenizer_config.json of SmolLM2's kind: digits alone, GPT-2's words, no BOS."""
    tokens, merges = byte_level_vocabulary(min(vocab, 290))
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **added} for i, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges, "unk_token": None},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
