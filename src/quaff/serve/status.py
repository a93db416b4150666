"""Routes for whoever runs the server: /health, /metrics, /props."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff import _native
from quaff.llm import LLM
from quaff.release import release
from quaff.serve.metrics import CONTENT_TYPE
from quaff.serve.service import service_of


def routes() -> list[Route]:
    return [Route("/health", health), Route("/metrics", metrics), Route("/props", props)]


async def health(request: Request) -> Response:
    """200 while requests are served; 503 while the model loads, when the loop is stuck, and on the way out."""
    service_of(request).check_health()
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE)


async def props(request: Request) -> Response:
    """What is served and how, and what the bits of an answer depend on."""
    service = service_of(request)
    llm, settings = service.llm, service.settings
    vocabulary, template = llm.tokenizer.vocabulary, llm.tokenizer.chat_template
    return JSONResponse(
        {
            "model": settings.name,
            "build_info": f"quaff {release() or '(not installed)'}",
            "architecture": llm.config.architecture,
            "context_length": llm.context,
            "default_max_tokens": settings.max_tokens,
            "default_temperature": settings.temperature,
            "queue": settings.queue,
            "modalities": {"vision": False, "audio": False},
            "bos_token": None if vocabulary.bos_id is None else vocabulary.tokens[vocabulary.bos_id],
            "eos_token": None if vocabulary.eos_id is None else vocabulary.tokens[vocabulary.eos_id],
            "chat_template": None if template is None else template.source,
            "weight_bytes": llm.weight_bytes,
            "memory_limit_bytes": llm.accountant.limit_bytes,
            "determinism": determinism(llm),
        }
    )


def determinism(llm: LLM) -> dict[str, Any]:
    """Equal `bits` and token ids give equal logits; `free` values and neighbours never change one.

    `key` is that of the disk tier (cache/bits_key.py), SHA-256 in hex, which covers the weights too; None without a store.
    """
    return {
        "bits": {
            "key": None if llm.disk is None else llm.disk.store.key.hex(),
            "numerics_version": _native.NUMERICS_VERSION,
            "activations": llm.engine_config.activations,
            "kv_dtype": llm.engine_config.kv_dtype,
            "quantized": llm.quantized,
        },
        "free": {"isa": _native.isa(), "threads": llm.threads, "schedule": llm.order.name, "chunk": llm.order.chunk},
        "batch_invariant": True,
        "cache_invariant": True,
    }


def fingerprint(llm: LLM) -> str:
    """`system_fingerprint` of replies: another one where the same prompt and seed may give another answer."""
    bits = determinism(llm)["bits"]
    return f"quaff-{bits['key'][:16]}" if bits["key"] else "-".join(["quaff", *(str(v) for v in bits.values() if v is not None)])
