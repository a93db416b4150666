"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.engine.sampler import TokenLogprobs
from quaff.llm import LLM
from quaff.serve.conversation import Conversation, turn_of
from quaff.serve.errors import ApiError
from quaff.serve.events import Call, CallDelta, CallStart, Event, Part, Text, Thinking
from quaff.serve.generation import Generation, Progress, Result
from quaff.serve.openai import DONE, envelope, merged, progress_block, usage
from quaff.serve.sampling import MOST_LOGPROBS, Sampling
from quaff.serve.service import Service, service_of
from quaff.serve.turns import Turn
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
    llm, dialogue = service.llm, service.dialogue
    body = await read_body(request, ChatBody)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(service.settings, most, logprobs=body.wanted_logprobs)
    turn = await service.blocking(turn_of, dialogue, body)
    generations = await service.start(turn.job(params, bool(body.return_progress), body.cache_salt), body.choices)
    head = envelope(service.settings.name, llm, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    if body.stream:
        return EventStream(request, generations, _events(service, llm, turn, body, head, generations))
    return await service.blocking(_answer, llm, turn, body, head, await collect(request, generations))


def _answer(llm: LLM, turn: Turn, body: ChatBody, head: dict[str, Any], results: Sequence[Result]) -> Response:
    return JSONResponse(
        head
        | {
            "choices": [_choice(llm, body, i, result, turn.answer(result)) for i, result in enumerate(results)],
            "usage": usage(results[:1], results),
            "timings": results[0].llama_timings(),
        }
    )


def _choice(llm: LLM, body: ChatBody, index: int, result: Result, parts: Sequence[Part]) -> dict[str, Any]:
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thinking = "".join(part.text for part in parts if isinstance(part, Thinking))
    calls = [part for part in parts if isinstance(part, Call)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(llm, body, result.logprobs),
        "finish_reason": _reason(result, bool(calls)),
    }


def _reason(result: Result, called: bool) -> str:
    return "tool_calls" if called and result.finish_reason == "stop" and result.stop is None else result.finish_reason


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Text():
            return {"content": event.text}
        case Thinking():
            return {"reasoning_content": event.text}
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case CallDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}


async def _events(
    service: Service, llm: LLM, turn: Turn, body: ChatBody, base: dict[str, Any], generations: Sequence[Generation]
) -> AsyncIterator[bytes]:
    more: dict[str, Any] = {"usage": None} if body.include_usage else {}
    spoken: set[int] = set()
    readers = [turn.reader() for _ in generations]
    calls = [""] * len(generations)

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse(base | {"choices": [choice]} | more | extra)

    def chunks(index: int, events: Sequence[Event], logprobs: Any = None) -> Iterator[bytes]:
        """The events that a few tokens brought; the log-probabilities of those go with the first."""
        deltas = [_delta(event) for event in events]
        if logprobs and logprobs["content"] and not deltas:
            deltas = [{"content": ""}]
        for i, delta in enumerate(deltas):
            yield chunk(index, delta, None if i else logprobs)
        calls[index] = calls[index] or next((event.id for event in events if isinstance(event, CallStart)), "")

    async for index, item in merged(generations):
        if isinstance(item, Progress):
            yield chunk(index, {}, prompt_progress=progress_block(item))
            continue
        if index not in spoken:
            # With the first token, not before: clients take the first chunk for the end of the prompt.
            spoken.add(index)
            yield chunk(index, {"role": "assistant", "content": ""})
        if item is not None:
            for data in chunks(index, readers[index].push(item.text), _logprobs(llm, body, item.logprobs)):
                yield data
        elif (result := generations[index].result) is not None:
            for data in chunks(index, readers[index].finish()):
                yield data
            await service.blocking(turn.keep, result, calls[index])
            yield chunk(index, {}, None, _reason(result, bool(readers[index].calls)), timings=result.llama_timings())
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
