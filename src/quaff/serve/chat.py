"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.engine.sampler import TokenLogprobs
from quaff.llm import LLM
from quaff.serve.conversation import Conversation, tokens_of
from quaff.serve.errors import ApiError
from quaff.serve.generation import Generation, Job, Progress, Result
from quaff.serve.openai import DONE, envelope, merged, progress_block, usage
from quaff.serve.sampling import MOST_LOGPROBS, Sampling
from quaff.serve.service import Service, service_of
from quaff.serve.wire import EventStream, collect, read_body, sse


def routes() -> list[Route]:
    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


class ChatBody(Sampling, Conversation):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    llm = service.llm
    body = await read_body(request, ChatBody)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(service.settings, most, logprobs=body.wanted_logprobs)
    tokens = await service.blocking(tokens_of, llm, body)
    job = Job(tokens, params, progress=bool(body.return_progress), salt=body.cache_salt or "")
    generations = await service.start(job, body.choices)
    if body.stream:
        return EventStream(request, generations, _events(service, body, generations))
    results = await collect(request, generations)
    return JSONResponse(
        envelope(service, "chatcmpl", "chat.completion")
        | {
            "choices": [_choice(llm, body, i, result) for i, result in enumerate(results)],
            "usage": usage(results[:1], results),
            "timings": results[0].llama_timings(),
        }
    )


def _choice(llm: LLM, body: ChatBody, index: int, result: Result) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": _logprobs(llm, body, result.logprobs),
        "finish_reason": result.finish_reason,
    }


async def _events(service: Service, body: ChatBody, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
    base = envelope(service, "chatcmpl", "chat.completion.chunk")
    more: dict[str, Any] = {"usage": None} if body.include_usage else {}
    spoken: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse(base | {"choices": [choice]} | more | extra)

    async for index, item in merged(generations):
        if isinstance(item, Progress):
            yield chunk(index, {}, prompt_progress=progress_block(item))
            continue
        if index not in spoken:
            # With the first token, not before: clients take the first chunk for the end of the prompt.
            spoken.add(index)
            yield chunk(index, {"role": "assistant", "content": ""})
        if item is not None:
            logprobs = _logprobs(service.llm, body, item.logprobs)
            if item.text or (logprobs and logprobs["content"]):
                yield chunk(index, {"content": item.text}, logprobs)
        elif (result := generations[index].result) is not None:
            yield chunk(index, {}, None, result.finish_reason, timings=result.llama_timings())
    if body.include_usage:
        results = [g.result for g in generations if g.result is not None]
        yield sse(base | {"choices": [], "usage": usage(results[:1], results)})
    yield DONE


def _logprobs(llm: LLM, body: ChatBody, chosen: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Log-probabilities of the tokens of the text; the token that ends it is not one of them."""
    if not body.logprobs:
        return None
    silent = frozenset() if body.ignore_eos else llm.tokenizer.end_ids
    return {"content": [_token(llm, t) for t in chosen if t.id not in silent], "refusal": None}


def _token(llm: LLM, token: TokenLogprobs) -> dict[str, Any]:
    return _piece(llm, token.id, token.logprob) | {"top_logprobs": [_piece(llm, id, logprob) for id, logprob in token.top]}


def _piece(llm: LLM, id: int, logprob: float) -> dict[str, Any]:
    data = llm.tokenizer.token_bytes(id, skip_special=False)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
