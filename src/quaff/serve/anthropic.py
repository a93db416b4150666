"""/v1/messages and /v1/messages/count_tokens, as the clients of Anthropic's API expect them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.engine.sampler import SamplingParams
from quaff.serve.dialogue import Dialogue
from quaff.serve.errors import ApiError
from quaff.serve.events import Call, CallDelta, CallStart, Event, Part, Text, Thinking
from quaff.serve.forms import response_form
from quaff.serve.generation import Generation, Progress, Result
from quaff.serve.service import Service, service_of
from quaff.serve.tools import Tools, arguments_object, make_tools
from quaff.serve.turns import Turn, make_turn
from quaff.serve.wire import Body, EventStream, Items, collect, read_body, sse, string_of

PING = sse({"type": "ping"}, "ping")


def routes() -> list[Route]:
    return [
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


class Thought(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class ToolBody(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    format: dict[str, Any] | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class PromptBody(Body):
    """What makes the prompt: the whole of /v1/messages/count_tokens."""

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thought | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=1, le=1 << 30)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=1 << 30)
    stop_sequences: Items[str] | None = Field(default=None, max_length=64)
    stream: bool | None = None

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=secrets.randbits(63),
            # Anthropic's API takes no heed of stop sequences of white space alone.
            stop=tuple(stop for stop in self.stop_sequences or () if stop.strip()),
        )


# Handlers


async def create_message(request: Request) -> Response:
    service = service_of(request)
    dialogue = service.dialogue
    body = await read_body(request, MessagesBody)
    turn = await service.blocking(turn_of, dialogue, body)
    job = turn.job(body.params(service.settings.temperature), progress=bool(body.stream))
    generations = await service.start(job)
    if body.stream:
        return EventStream(request, generations, _events(service, turn, body, generations[0]), PING)
    (result,) = await collect(request, generations)
    parts = await service.blocking(turn.answer, result)
    return JSONResponse(
        _message(service, [_block(part) for part in parts], _usage(result))
        | _stop(body, result, any(isinstance(part, Call) for part in parts))
    )


async def count_tokens(request: Request) -> Response:
    service = service_of(request)
    dialogue = service.dialogue
    body = await read_body(request, PromptBody)
    turn = await service.blocking(turn_of, dialogue, body)
    return JSONResponse({"input_tokens": len(turn.prompt.tokens)})


def turn_of(dialogue: Dialogue, body: PromptBody) -> Turn:
    """The turn that a body asks for. ApiError, PromptError or ConfigError for what it is not."""
    messages = messages_of(body)
    begun = ""
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        begun = messages.pop()["content"]
        if not messages:
            raise ApiError(400, "messages: the first message must be the user's", param="messages")
    variables = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    form = response_form(body.output_config.format if body.output_config is not None else None, "output_config.format")
    return make_turn(dialogue, messages, tools_of(body), form, variables, begun, call_prefix="toolu_")


# The body as a conversation of OpenAI's shape


def messages_of(body: PromptBody) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    system = "\n".join(text for text in texts(body.system or "", "system") if text)
    if system:
        out.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        out += _converted(message, f"messages[{i}]", names)
    if not any(message["role"] != "system" for message in out):
        raise ApiError(400, "messages: there is nothing to answer", param="messages")
    return out


def texts(content: str | Sequence[Mapping[str, Any]], where: str) -> list[str]:
    """The texts of a content that may hold nothing else."""
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _text(block: Mapping[str, Any], where: str) -> str:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return string_of(block, "text", where)
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return string_of(source, "data", f"{where}.source")
    if kind in ("image", "document"):
        raise ApiError(400, f"{where}: this model reads text only, not a block of type {kind!r}", param=where)
    raise ApiError(400, f"{where}: a block of type {kind!r} cannot stand here", param=where)


def _converted(message: Message, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """One message as one or several: results of tools are messages of their own. `names`: of the tools called so far, by id."""
    if message.role == "system":
        return [{"role": "system", "content": "\n".join(texts(message.content, f"{where}.content"))}]
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content:
        raise ApiError(400, f"{where}.content: there must be at least one block", param=f"{where}.content")
    said: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        at, kind = f"{where}.content[{i}]", block.get("type")
        if kind == "tool_use" and message.role == "assistant":
            name, id, given = string_of(block, "name", at), string_of(block, "id", at), block.get("input", {})
            if not isinstance(given, dict):
                raise ApiError(400, f"{at}.input must be an object", param=f"{at}.input")
            names[id] = name
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": given}})
        elif kind == "thinking" and message.role == "assistant":
            thoughts.append(string_of(block, "thinking", at))
        elif kind == "redacted_thinking" and message.role == "assistant":
            continue
        elif kind == "tool_result" and message.role == "user":
            id = string_of(block, "tool_use_id", at)
            content = block.get("content") or ""
            if not isinstance(content, str | list) or not all(isinstance(part, dict) for part in content if not isinstance(content, str)):
                raise ApiError(400, f"{at}.content must be a text or a list of blocks", param=f"{at}.content")
            result = {"role": "tool", "tool_call_id": id, "content": "\n".join(texts(content, f"{at}.content"))}
            results.append(result | ({"name": names[id]} if id in names else {}))
        else:
            said += [_text(block, at)]
    text = "\n".join(said)
    if message.role == "user":
        return results + ([{"role": "user", "content": text}] if said or not results else [])
    out: dict[str, Any] = {"role": "assistant", "content": text}
    return [out | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def tools_of(body: PromptBody) -> Tools:
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise ApiError(
                400, f"tools[{i}]: tools of type {tool.type!r} run on Anthropic's servers; only custom tools are known", param=f"tools[{i}]"
            )
    given = [(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    choice = body.tool_choice
    if choice is None:
        return make_tools(given)
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name is missing", param="tool_choice")
    several = not choice.disable_parallel_tool_use
    named = choice.name if choice.type == "tool" else None
    return make_tools(given, {"any": "required", "none": "none"}.get(choice.type, "auto"), named, several)  # type: ignore[arg-type]


# The answer


def _usage(result: Result) -> dict[str, Any]:
    used: dict[str, Any] = usage(result.prompt_tokens, result.cached_tokens, len(result.tokens))
    return used | ({"cache_miss_reason": result.cache_miss_reason} if result.cache_miss_reason else {})


def usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Tokens that were read for this request, and those that were there already: the prompt is the sum of both."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _message(service: Service, content: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.settings.name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": used,
    }


def _stop(body: MessagesBody, result: Result, called: bool) -> dict[str, Any]:
    reason = "end_turn"
    if result.stop is not None:
        reason = "stop_sequence"
    elif result.finish_reason == "length":
        reason = "max_tokens" if len(result.tokens) >= body.max_tokens else "model_context_window_exceeded"
    elif called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": result.stop}


def _block(part: Part) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Thinking():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case Call():
            arguments = arguments_object(part.arguments)
            # An answer that was cut short, or a model's slip: what it wrote is not lost.
            return {
                "type": "tool_use",
                "id": part.id,
                "name": part.name,
                "input": {"arguments": part.arguments} if arguments is None else arguments,
            }


async def _events(service: Service, turn: Turn, body: MessagesBody, generation: Generation) -> AsyncIterator[bytes]:
    blocks = _Blocks()
    begun = False
    async for item in turn.events(service, generation):
        if not begun:
            # The first of all items says how much of the prompt was there.
            begun = True
            cached = item.cached if isinstance(item, Progress) else 0
            yield _sse("message_start", message=_message(service, [], usage(len(turn.prompt.tokens), cached, 0)))
        if not isinstance(item, Progress):
            for event in blocks.add(item):
                yield event
    for event in blocks.close():
        yield event
    if (result := generation.result) is not None:
        used = _usage(result)
        if not begun:
            yield _sse("message_start", message=_message(service, [], used | {"output_tokens": 0}))
        yield _sse("message_delta", delta=_stop(body, result, blocks.called), usage=used)
        yield _sse("message_stop")


@dataclass(slots=True)
class _Blocks:
    """Content blocks as events: one is open at a time."""

    index: int = -1
    open: type[Text] | type[Thinking] | type[CallStart] | None = None
    called: bool = False

    def add(self, event: Event) -> list[bytes]:
        match event:
            case Text():
                return [*self._start(Text, {"type": "text", "text": ""}), self._delta(type="text_delta", text=event.text)]
            case Thinking():
                start = self._start(Thinking, {"type": "thinking", "thinking": "", "signature": ""})
                return [*start, self._delta(type="thinking_delta", thinking=event.text)]
            case CallStart():
                self.called = True
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return [*self.close(), *self._start(CallStart, block)]
            case CallDelta():
                return [self._delta(type="input_json_delta", partial_json=event.arguments)]

    def close(self) -> list[bytes]:
        if self.open is None:
            return []
        self.open = None
        return [_sse("content_block_stop", index=self.index)]

    def _start(self, kind: type[Text] | type[Thinking] | type[CallStart], block: dict[str, Any]) -> list[bytes]:
        if self.open is kind:
            return []
        out = self.close()
        self.open = kind
        self.index += 1
        return [*out, _sse("content_block_start", index=self.index, content_block=block)]

    def _delta(self, **delta: Any) -> bytes:
        return _sse("content_block_delta", index=self.index, delta=delta)


def _sse(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)
