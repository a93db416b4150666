"""What is served and how, in a few lines for whoever starts the server."""

from __future__ import annotations

from quaff.llm import LLM
from quaff.serve.settings import Settings
from quaff.weights.budget import human_bytes

ROWS = 1024
"""Tokens that the price of the context is told for."""


def overview(llm: LLM, settings: Settings, url: str) -> list[str]:
    """One line per thing: model, machine, memory, context, caches, requests, endpoints."""
    about, cache = llm.describe(), llm.engine.cache
    rows = {
        "model": f"{settings.name}: {about['name']} ({about['architecture']}), {human_bytes(about['weight_bytes'])} of weights",
        "machine": f"{about['isa']}, {about['threads']} threads, chunks of {about['chunk']} rows, {about['schedule']}-major",
        "memory": _memory(llm),
        "context": f"{llm.context} tokens; {ROWS:,} tokens take {human_bytes(cache.peak_bytes(ROWS, ROWS))}",
        "prefixes": _prefixes(llm),
        "requests": f"{settings.queue} may wait; {_stalls(llm)}",
        "key": "needed" if settings.api_key is not None else "none" if settings.local else "none: whoever reaches this address may come in",
        "listening": f"{url}/v1 (chat/completions, completions, messages, responses, embeddings, models), {url}/health, /metrics, /props",
    }
    return [f"{key + ':':<11}{value}" for key, value in rows.items()]


def _memory(llm: LLM) -> str:
    used, limit = llm.accountant.total_bytes, llm.accountant.limit_bytes
    return f"{human_bytes(used)} in use" + (f" of {human_bytes(limit)}" if limit is not None else "")


def _prefixes(llm: LLM) -> str:
    if llm.engine.prefix is None:
        return "not kept"
    memory = f"{human_bytes(llm.engine.prefix.cap_bytes)} in memory"
    return memory if llm.disk is None else f"{memory}, {human_bytes(llm.disk.store.cap_bytes)} in {llm.disk.store.folder}"


def _stalls(llm: LLM) -> str:
    """How long a stream may pause for someone's prompt."""
    if llm.plan is not None and llm.streamed:
        # A pass reads all of it, whoever needs it: shorter steps would make everyone wait longer.
        return f"every step reads {human_bytes(llm.plan.pass_bytes)} of weights from the disk, and streams wait for those of prompts"
    stall = llm.engine.policy.max_stall_ms
    return "streams wait for prompts" if stall is None else f"a stream pauses for at most about {stall:g} ms"
