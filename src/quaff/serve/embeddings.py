"""/v1/embeddings."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quaff.engine.embedder import Pooling
from quaff.engine.engine import Engine
from quaff.llm import LLM
from quaff.serve.errors import ApiError, context_exceeded
from quaff.serve.service import Service, service_of
from quaff.serve.wire import Body, Items, read_body, while_connected

MAX_TEXTS = 2048


def routes() -> list[Route]:
    return [Route("/v1/embeddings", create_embeddings, methods=["POST"])]


class EmbeddingsBody(Body):
    """`pooling` is ours: how the rows of a text become one; without it, as the model's file says."""

    model: str | None = None
    input: str | Items[str] | Items[int] | Items[Items[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Pooling | None = None

    def texts(self) -> list[str] | list[list[int]]:
        given: Any = self.input
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        texts: Any = [given] if one else given
        if not texts:
            raise ApiError(400, "input: there is nothing to embed", param="input")
        if len(texts) > MAX_TEXTS:
            raise ApiError(400, f"input has {len(texts)} texts; at most {MAX_TEXTS} are taken at a time", param="input")
        return texts  # type: ignore[no-any-return]


class _Work:
    """Steps that run between those of the server's loop, until someone cancels them."""

    def __init__(self, service: Service) -> None:
        self._loop = service.loop
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def drive(self, engine: Engine) -> None:
        if self._cancelled.is_set():
            raise ClientDisconnect
        self._loop.drive(engine).result()


async def create_embeddings(request: Request) -> Response:
    service = service_of(request)
    llm = service.llm
    body = await read_body(request, EmbeddingsBody)
    if body.dimensions not in (None, llm.config.dim):
        raise ApiError(400, f"dimensions: this model's vectors have {llm.config.dim}, and are not cut", param="dimensions")
    texts = await service.blocking(_encoded, llm, body.texts())
    work = _Work(service)

    async def embed() -> NDArray[np.float32]:
        async with service.embedding:
            return await service.blocking(llm.embed, texts, body.pooling, work.drive)

    vectors = await while_connected(request.receive, embed(), [work])
    return await service.blocking(_answer, service.settings.name, vectors, body.encoding_format, sum(map(len, texts)))


def _answer(model: str, vectors: NDArray[np.float32], form: Literal["float", "base64"], tokens: int) -> Response:
    """The reply, made row by row: numbers become text slowly, and all of them at once would hold up everyone's streams."""
    rows = [
        json.dumps(
            {
                "object": "embedding",
                "index": i,
                "embedding": base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "base64" else row.tolist(),
            }
        )
        for i, row in enumerate(vectors)
    ]
    head = json.dumps({"object": "list", "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    return Response(f'{head[:-1]}, "data": [{", ".join(rows)}]}}', media_type="application/json")


def _encoded(llm: LLM, texts: list[str] | list[list[int]]) -> list[list[int]]:
    """Ids of every text. ApiError for one that is longer than the context, PromptError for one that is empty or no ids."""
    out: list[list[int]] = []
    for text in texts:
        ids = llm.tokenizer.encode(text) if isinstance(text, str) and text else text
        if len(ids) > llm.context:
            raise context_exceeded(len(ids), llm.context, "input")
        out.append(llm.encode(ids))
    return out
