"""/v1/responses, as the clients of OpenAI's newer API expect it. Responses are not stored: every request brings its whole input."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.serve.dialogue import Dialogue
from quaff.serve.errors import ApiError
from quaff.serve.events import Call, CallDelta, CallStart, Event, Part, Text, Thinking
from quaff.serve.forms import response_form
from quaff.serve.generation import Generation, Progress, Result
from quaff.serve.sampling import Sampling
from quaff.serve.service import Service, service_of
from quaff.serve.tools import Tools, make_tools
from quaff.serve.turns import Turn, make_turn
from quaff.serve.wire import Body, EventStream, Items, collect, read_body, sse, string_of

NOT_STORED = "responses are not stored: send the whole input, and take the answer from the reply to it"


def routes() -> list[Route]:
    return [
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/{rest:path}", no_response, methods=["GET", "POST", "DELETE"]),
    ]


class ToolBody(Body):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class TextConfig(Body):
    format: dict[str, Any] | None = None


class Reasoning(Body):
    effort: str | None = None


class ResponseBody(Sampling):
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Items[ToolBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None

    def offered(self) -> Tools:
        for i, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.name is None:
                raise ApiError(400, f"tools[{i}]: only tools of type 'function' with a name are known here", param=f"tools[{i}]")
        given = [(str(tool.name), tool.description, tool.parameters) for tool in self.tools or ()]
        several = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return make_tools(given, named=self.tool_choice.name, several=several)
        return make_tools(given, self.tool_choice or "auto", several=several)


# Handler


async def create_response(request: Request) -> Response:
    service = service_of(request)
    dialogue = service.dialogue
    body = await read_body(request, ResponseBody)
    params = body.params(service.settings, body.max_output_tokens)
    turn = await service.blocking(turn_of, dialogue, body)
    generations = await service.start(turn.job(params, salt=body.cache_salt), field="input")
    head = _head(service, body)
    if body.stream:
        items = _Items(head)
        return EventStream(request, generations, _events(service, turn, items, generations[0]), failure=items.failed)
    (result,) = await collect(request, generations)
    return await service.blocking(_answer, turn, head, result)


def _answer(turn: Turn, head: dict[str, Any], result: Result) -> Response:
    output = [_item(part, _status(result)) for part in turn.answer(result)]
    return JSONResponse(head | _ended(result, output, _reasoning_tokens(turn, output)))


async def no_response(request: Request) -> Response:
    """Whatever is asked of a response that was made before."""
    raise ApiError(404, NOT_STORED)


def turn_of(dialogue: Dialogue, body: ResponseBody) -> Turn:
    """The turn that a body asks for. ApiError, PromptError or ConfigError for what it is not."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(body, name):
            raise ApiError(400, f"{name}: {NOT_STORED}", param=name)
    if body.choices != 1:
        raise ApiError(400, "a response is one answer: n is not known here", param="n")
    variables = {"reasoning_effort": body.reasoning.effort} if body.reasoning is not None and body.reasoning.effort else {}
    form = response_form(body.text.format if body.text is not None else None, "text.format")
    return make_turn(dialogue, messages_of(body), body.offered(), form, variables)


# The input as a conversation of OpenAI's older shape


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*out, {"role": "user", "content": body.input}]
    if not body.input:
        raise ApiError(400, "input: there is nothing to answer", param="input")
    names: dict[str, str] = {}
    for i, item in enumerate(body.input):
        _add(out, item, f"input[{i}]", names)
    return out


def _add(out: list[dict[str, Any]], item: Mapping[str, Any], where: str, names: dict[str, str]) -> None:
    """Add one item. What an assistant thought, said and called are items of their own here, and one message there."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(400, f"{where}.role must be user, assistant, system or developer", param=f"{where}.role")
        text = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            message = _assistant(out)
            message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        else:
            out.append({"role": role, "content": text})
    elif kind == "function_call":
        name, id, arguments = (string_of(item, key, where) for key in ("name", "call_id", "arguments"))
        names[id] = name
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        _assistant(out).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        id, output = string_of(item, "call_id", where), item.get("output")
        message = {"role": "tool", "tool_call_id": id, "content": _content(output, f"{where}.output")}
        out.append(message | ({"name": names[id]} if id in names else {}))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ApiError(400, f"{where}.content must be a list of parts", param=f"{where}.content")
        out.append({"role": "assistant", "content": "", "reasoning_content": "".join(string_of(part, "text", where) for part in parts)})
    elif kind == "item_reference":
        raise ApiError(400, f"{where}: {NOT_STORED}", param=where)
    else:
        raise ApiError(400, f"{where}: an item of type {kind!r} cannot stand here", param=where)


def _assistant(out: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the next item belongs to."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise ApiError(400, f"{where}[{i}]: this model reads text only, not a part of type {kind!r}", param=f"{where}[{i}]")
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return "\n".join(texts)


# The response


def _head(service: Service, body: ResponseBody) -> dict[str, Any]:
    """The response before there is anything of it."""
    choice = body.tool_choice
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": service.settings.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [tool.model_dump() | {"strict": None} for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }


def _ended(result: Result, output: list[dict[str, Any]], reasoning_tokens: int) -> dict[str, Any]:
    status = _status(result)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0, **_miss(result)},
            "output_tokens": len(result.tokens),
            "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, len(result.tokens))},
            "total_tokens": result.prompt_tokens + len(result.tokens),
        },
    }


def _miss(result: Result) -> dict[str, str]:
    return {"cache_miss_reason": result.cache_miss_reason} if result.cache_miss_reason else {}


def _status(result: Result) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"


def _item(part: Part, status: str, id: str | None = None) -> dict[str, Any]:
    match part:
        case Text():
            return _message(id or _id("msg"), status, [_text_part(part.text)])
        case Thinking():
            content = [{"type": "reasoning_text", "text": part.text}]
            return {"id": id or _id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}
        case Call():
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"id": id or _id("fc"), "type": "function_call", **call, "status": status}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _message(id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_tokens(turn: Turn, output: list[dict[str, Any]]) -> int:
    text = "".join(part["text"] for item in output if item["type"] == "reasoning" for part in item["content"])
    return len(turn.dialogue.tokenizer.encode(text, add_special=False))


# The stream


async def _events(service: Service, turn: Turn, items: _Items, generation: Generation) -> AsyncIterator[bytes]:
    yield items.event("response.created", response=items.head)
    yield items.event("response.in_progress", response=items.head)
    async for item in turn.events(service, generation):
        if not isinstance(item, Progress):
            for data in items.add(item):
                yield data
    if (result := generation.result) is not None:
        for data in items.close(_status(result)):
            yield data
        tokens = await service.blocking(_reasoning_tokens, turn, items.output)
        yield items.event(f"response.{_status(result)}", response=items.head | _ended(result, items.output, tokens))


@dataclass(slots=True)
class _Items:
    """Output items as events: one is open at a time, its whole part in `part`. `head` is the response around them."""

    head: dict[str, Any]
    output: list[dict[str, Any]] = field(default_factory=list)
    part: Part | None = None
    id: str = ""
    number: int = 0

    def event(self, kind: str, **data: Any) -> bytes:
        out = sse({"type": kind, "sequence_number": self.number, **data}, kind)
        self.number += 1
        return out

    def failed(self, error: ApiError) -> bytes:
        told = error.body("openai")["error"]
        response = self.head | {"status": "failed", "output": self.output, "error": {"code": "server_error", "message": told["message"]}}
        # Clients that look for `error` raise it; those that read events are told by the fields beside it and by the response.
        first = self.event("error", error=told, code=told["code"], message=told["message"], param=told["param"])
        return first + self.event("response.failed", response=response)

    def add(self, event: Event) -> list[bytes]:
        match event:
            case Text():
                out = self._open(Text(""))
                self.part = Text((self.part.text if isinstance(self.part, Text) else "") + event.text)
                return [*out, self._in_part("response.output_text.delta", delta=event.text, logprobs=[])]
            case Thinking():
                out = self._open(Thinking(""))
                self.part = Thinking((self.part.text if isinstance(self.part, Thinking) else "") + event.text)
                return [*out, self._in_part("response.reasoning_text.delta", delta=event.text)]
            case CallStart():
                return [*self.close(), *self._open(Call(event.id, event.name, ""))]
            case CallDelta():
                assert isinstance(self.part, Call)
                self.part = Call(self.part.id, self.part.name, self.part.arguments + event.arguments)
                return [self._in_item("response.function_call_arguments.delta", delta=event.arguments)]

    def close(self, status: str = "completed") -> list[bytes]:
        """End the open item."""
        part, self.part = self.part, None
        if part is None:
            return []
        item = _item(part, status, self.id)
        match part:
            case Text():
                out = [
                    self._in_part("response.output_text.done", text=part.text, logprobs=[]),
                    self._in_part("response.content_part.done", part=_text_part(part.text)),
                ]
            case Thinking():
                out = [
                    self._in_part("response.reasoning_text.done", text=part.text),
                    self._in_part("response.content_part.done", part={"type": "reasoning_text", "text": part.text}),
                ]
            case Call():
                out = [self._in_item("response.function_call_arguments.done", name=part.name, arguments=part.arguments)]
        out.append(self.event("response.output_item.done", output_index=len(self.output), item=item))
        self.output.append(item)
        return out

    def _open(self, part: Part) -> list[bytes]:
        """Begin an item, unless one of this kind is open."""
        if type(self.part) is type(part):
            return []
        out = self.close()
        self.part, self.id = part, _id({Text: "msg", Thinking: "rs", Call: "fc"}[type(part)])
        empty = _item(part, "in_progress", self.id)
        if not isinstance(part, Call):
            empty["content"] = []
        out.append(self.event("response.output_item.added", output_index=len(self.output), item=empty))
        if not isinstance(part, Call):
            first = _text_part("") if isinstance(part, Text) else {"type": "reasoning_text", "text": ""}
            out.append(self._in_part("response.content_part.added", part=first))
        return out

    def _in_item(self, kind: str, **data: Any) -> bytes:
        return self.event(kind, item_id=self.id, output_index=len(self.output), **data)

    def _in_part(self, kind: str, **data: Any) -> bytes:
        return self._in_item(kind, content_index=0, **data)
