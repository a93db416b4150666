"""The key of the bits: what a model's results depend on beside the tokens. Every tier of the prefix cache uses it.

Equal keys mean equal bytes, whatever file the model came from: a GGUF file, its packed form, a folder that gives the same blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from quaff import _native
from quaff.checkpoint import Checkpoint, TensorView
from quaff.checkpoint.hashes import content_sha256
from quaff.config import Activations, KVDtype, ModelConfig

_HEX = re.compile(r"[0-9a-f]{64}")
_SETTLED_NS = 2_000_000_000
"""A file changed so lately may be changed again without another modification time."""


def bits_key(content: str, config: ModelConfig, activations: Activations, kv_dtype: KVDtype) -> bytes:
    """32 bytes, SHA-256 over `content` (`content_sha256` of the weights), the model as it is run, the modes that change bits, and the
    numerics version. A model's name and the context do not count: where the context chooses rotary factors, those do."""
    model = replace(config, name="", context_length=1)
    parts = (content, repr(model), activations, kv_dtype, str(_native.NUMERICS_VERSION))
    return hashlib.sha256(b"quaff bits\0" + "\0".join(parts).encode()).digest()


def remembered_content(
    checkpoint: Checkpoint, views: Mapping[str, TensorView], folder: Path, progress: Callable[[int, int], None] | None = None
) -> str:
    """`content_sha256` of the weights of an open checkpoint, kept in `folder` by path, size and modification time of its files.

    `progress` gets (bytes read, bytes in all) when they must be read.
    """
    path = folder / _identity(checkpoint)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = path.read_text("ascii")
        if _HEX.fullmatch(known):
            return known
    content = content_sha256(views, progress)
    if all(time.time_ns() - file.mtime_ns > _SETTLED_NS for file in checkpoint.files):
        with contextlib.suppress(OSError):  # it only saves time
            for made in (folder.parent, folder):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f".{secrets.token_hex(8)}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
            os.replace(temporary, path)
    return content


def _identity(checkpoint: Checkpoint) -> str:
    files = [(os.path.realpath(file.path), file.nbytes, file.mtime_ns) for file in checkpoint.files]
    return hashlib.sha256(repr((files, checkpoint.quantized)).encode("utf-8", "surrogateescape")).hexdigest()
