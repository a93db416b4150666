"""Routes for text and token ids: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.llm import LLM
from quaff.serve.conversation import Conversation, FunctionTool, turn_of
from quaff.serve.errors import ApiError
from quaff.serve.service import service_of
from quaff.serve.wire import Body, Items, read_body


def routes() -> list[Route]:
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
    ]


class TokenizeBody(Body):
    """A text (`content` is llama.cpp's name, `prompt` vLLM's) or a conversation. `add_special` puts BOS before a text."""

    content: str | None = Field(default=None, validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(default=True, validation_alias=AliasChoices("add_special", "add_special_tokens"))
    parse_special: bool = True
    with_pieces: bool = False
    messages: Items[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[FunctionTool] | None = None

    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )


class DetokenizeBody(Body):
    tokens: Items[int]


async def tokenize(request: Request) -> Response:
    service = service_of(request)
    llm = service.llm
    body = await read_body(request, TokenizeBody)
    if (body.content is None) == (body.messages is None):
        raise ApiError(400, "give either content, a text, or messages, a conversation", param="content")
    if body.content is None:
        ids: Sequence[int] = (await service.blocking(turn_of, service.dialogue, body.conversation())).prompt.tokens
    else:
        ids = await service.blocking(llm.tokenizer.encode, body.content, body.add_special, body.parse_special)
    return await service.blocking(_tokens, llm, ids, body.with_pieces)


def _tokens(llm: LLM, ids: Sequence[int], with_pieces: bool) -> Response:
    tokens: Any = [{"id": t, "piece": llm.tokenizer.token_text(t)} for t in ids] if with_pieces else ids
    return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": llm.context})


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, DetokenizeBody)
    text = await service.blocking(service.llm.tokenizer.decode, body.tokens, skip_special=False)
    return JSONResponse({"content": text})


async def apply_template(request: Request) -> Response:
    """The text that a conversation becomes."""
    service = service_of(request)
    body = await read_body(request, Conversation)
    turn = await service.blocking(turn_of, service.dialogue, body)
    return JSONResponse({"prompt": turn.prompt.text})
