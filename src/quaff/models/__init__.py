"""Model families, by the architecture name a checkpoint states."""

from __future__ import annotations

from quaff.errors import UnsupportedError, quote
from quaff.models import gemma3, lfm2, llama, qwen2, qwen35
from quaff.models.family import Family

FAMILIES: dict[str, Family] = {f.name: f for f in (llama.FAMILY, qwen2.FAMILY, gemma3.FAMILY, lfm2.FAMILY, qwen35.FAMILY)}


def family(architecture: str) -> Family:
    """The family of an architecture. UnsupportedError names it and lists those that exist."""
    if architecture not in FAMILIES:
        raise UnsupportedError(f"architecture {quote(architecture)} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[architecture]
