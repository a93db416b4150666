"""What OpenAI's endpoints share, and /v1/models."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.llm import LLM
from quaff.serve.errors import ApiError
from quaff.serve.generation import Delta, Generation, Progress, Result
from quaff.serve.service import Service, service_of
from quaff.serve.status import fingerprint
from quaff.serve.wire import sse

DONE = sse("[DONE]")


def routes() -> list[Route]:
    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)]


async def list_models(request: Request) -> Response:
    model = _model(service_of(request))
    # Anthropic's clients ask the same path, and read what OpenAI's do not.
    pages = {"first_id": model["id"], "last_id": model["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": [model]} | pages)


async def get_model(request: Request) -> Response:
    service = service_of(request)
    name = request.path_params["name"]
    if name != service.settings.name:
        raise ApiError(404, f"there is no model of this name; there is {service.settings.name}", code="model_not_found", param="model")
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "quaff",
        "type": "model",
        "display_name": service.settings.name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "max_model_len": service.llm.context,
    }


def envelope(model: str, llm: LLM, prefix: str, kind: str) -> dict[str, Any]:
    """The fields around the choices, equal in every chunk of a stream."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(llm),
    }


def usage(prompts: Sequence[Result], results: Sequence[Result]) -> dict[str, Any]:
    """Token counts of all `results`; each of `prompts` stands for one prompt, however many choices it had."""
    prompt = sum(r.prompt_tokens for r in prompts)
    completion = sum(len(r.tokens) for r in results)
    details: dict[str, Any] = {"cached_tokens": sum(r.cached_tokens for r in prompts)}
    if reason := next((r.cache_miss_reason for r in prompts if r.cache_miss_reason), None):
        details["cache_miss_reason"] = reason
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def progress_block(progress: Progress) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1e3 * progress.seconds),
    }


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta | Progress | None]]:
    """(index, item) of several generations as they come; None when one has ended. The first error of any is raised."""
    if len(generations) == 1:
        async for only in generations[0]:
            yield 0, only
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, Delta | Progress | BaseException | None]] = asyncio.Queue()

    async def feed(index: int, generation: Generation) -> None:
        try:
            async for item in generation:
                queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    feeders = [asyncio.ensure_future(feed(i, g)) for i, g in enumerate(generations)]
    try:
        left = len(generations)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item is None
            yield index, item
    finally:
        for feeder in feeders:
            feeder.cancel()
