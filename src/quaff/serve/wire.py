"""Bodies in, answers and event streams out, and the clients that are slow or go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quaff.serve.errors import ApiError, Shape, as_api_error, shape_of
from quaff.serve.generation import Generation, Result
from quaff.serve.settings import Settings

log = logging.getLogger("quaff.serve")

PING = b": ping\n\n"
"""A comment of the event stream: clients skip it, and see that someone is there."""
LONG_BODY = 1 << 16


class Body(BaseModel):
    """A request's JSON. Types are exact (no "5" for 5); fields that are not ours are not ours to judge."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


B = TypeVar("B", bound=Body)
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body. It is read up to its first wrong item: an error for each of millions would take gigabytes."""


def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def read_body(request: Request, model: type[B]) -> B:
    """The body as `model`. ApiError: 415 not JSON, 413 too long, 408 too slow; ValidationError for the first field that is wrong."""
    # Other content types are those that any web page may send to a local port without asking.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send it with Content-Type: application/json")
    settings = settings_of(request)
    too_long = ApiError(413, f"the body is longer than {settings.body_bytes} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > settings.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > settings.body_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {settings.body_seconds:g} s", headers={"Connection": "close"}) from None
    if len(body) <= LONG_BODY:
        return model.model_validate_json(bytes(body))
    # A whole conversation: parsing it must not hold up everyone's streams.
    return await asyncio.to_thread(model.model_validate_json, bytes(body))


def string_of(part: Mapping[str, Any], key: str, where: str) -> str:
    """A string in a part of a body whose types depend on one another. ApiError names its place."""
    value = part.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value


def sse(data: Any, event: str | None = None) -> bytes:
    """One event of a stream; `data` becomes JSON on one line, a string is sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def error_event(error: ApiError, shape: Shape) -> bytes:
    return sse(error.body(shape), "error" if shape == "anthropic" else None)


def told(error: Exception, where: str) -> ApiError:
    """What a client is told of an error; a fault of ours goes to the log, with its trace."""
    known = as_api_error(error)
    if known is None:
        log.error("%s failed", where, exc_info=error)
        return ApiError(500, "the server failed on this request; its log says why")
    return known


async def collect(request: Request, generations: Sequence[Generation]) -> list[Result]:
    """The results of all generations. Raises the error of the first that fails, ClientDisconnect when the client hangs up."""
    request.state.generations = generations

    async def ends() -> list[Result]:
        return [await generation.end() for generation in generations]

    return await while_connected(request.receive, ends(), generations)


class Cancellable(Protocol):
    """What a client's request has set going."""

    def cancel(self) -> None: ...


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], going: Sequence[Cancellable]) -> T:
    """The result of `work`. What is `going` is cancelled when it fails, or when the client hangs up first (ClientDisconnect)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in going:
            one.cancel()
        for future in (task, gone):
            future.cancel()
        await asyncio.wait((task, gone))


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: headers at once, then `events`, with `ping` after every `ping_seconds` of silence.

    A client that hangs up ends the `generations` behind it. An error of `events` becomes what is sent last, in the shape of the route or
    as `failure` writes it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        generations: Sequence[Generation],
        events: AsyncIterator[bytes],
        ping: bytes = PING,
        failure: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        request.state.generations = generations
        self._path = request.url.path
        self._ping_seconds = settings_of(request).ping_seconds
        self._generations = generations
        self._events = events
        self._ping = ping
        self._failure = failure or (lambda error: error_event(error, shape_of(self._path)))
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send_all(send), self._generations)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._send_pings(send))
        try:
            async for event in self._events:
                await self._send(send, event)
        except Exception as error:
            await self._send(send, self._failure(told(error, self._path)))
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_pings(self, send: Send) -> None:
        time = asyncio.get_running_loop().time
        self._sent_at = time()
        while True:
            silent = time() - self._sent_at
            if silent >= self._ping_seconds:
                await self._send(send, self._ping)
            else:
                await asyncio.sleep(self._ping_seconds - silent)
