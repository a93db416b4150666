"""quaff: an LLM inference engine for CPUs that reads prompts fast, with the same bits on every path."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes longer to import than all that lies before the handler of an early interrupt
if TYPE_CHECKING:
    from typing import Any

    from quaff.engine.sampler import SamplingParams
    from quaff.llm import LLM, load

__all__ = ["LLM", "SamplingParams", "load"]


def __getattr__(name: str) -> Any:
    # Imported on first use: verbs that run no model start without the native module.
    if name == "SamplingParams":
        from quaff.engine.sampler import SamplingParams

        return SamplingParams
    if name in ("LLM", "load"):
        from quaff import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'quaff' has no attribute {name!r}")
