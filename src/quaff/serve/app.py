"""The routes of all APIs behind one border: who may enter, what a failure looks like, one log line per request."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quaff.errors import QuaffError, one_line
from quaff.serve import anthropic, chat, completions, embeddings, openai, responses, status, tokens
from quaff.serve.errors import ApiError, shape_of
from quaff.serve.service import Service
from quaff.serve.settings import LOOPBACK, Settings
from quaff.serve.wire import told

log = logging.getLogger("quaff.serve")

OPEN_PATHS = frozenset({"/health"})
"""What needs no key: a probe has none."""
QUIET_PATHS = frozenset({"/health", "/metrics"})
"""What is asked for all the time and not worth a line each."""
CLIENT_LEFT = 499
"""Status in log and metrics when nobody was left to read one."""

Life = Callable[[], AbstractAsyncContextManager[None]]


def make_app(service: Service, life: Life | None = None) -> Starlette:
    """The application. `life` is entered when the server starts and left when it ends."""
    routes = [
        *chat.routes(),
        *completions.routes(),
        *anthropic.routes(),
        *responses.routes(),
        *embeddings.routes(),
        *openai.routes(),
        *tokens.routes(),
        *status.routes(),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if life is None:
            yield
            return
        async with life():
            yield

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Border, service=service, paths=frozenset(route.path for route in routes))],
        exception_handlers={HTTPException: _answer_http, QuaffError: _answer, ValidationError: _answer},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.settings = service.settings
    return app


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(told(error, request.url.path), request.url.path)


async def _answer_http(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = {404: "there is no such path", 405: f"{request.method} is not a method of this path"}.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, what, headers=error.headers or {}), request.url.path)


def error_response(error: ApiError, path: str) -> Response:
    return JSONResponse(error.body(shape_of(path)), error.status, error.headers)


class Border:
    """Checks the host and the key of every request, gives it an id, and lets no exception out."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        state: dict[str, Any] = scope.setdefault("state", {})
        began, answer = time.perf_counter(), CLIENT_LEFT
        id_header = "request-id" if shape_of(path) == "anthropic" else "x-request-id"
        request_id = f"req_{secrets.token_hex(12)}"

        async def noting(message: Message) -> None:
            nonlocal answer
            if message["type"] == "http.response.start":
                answer = message["status"]
                MutableHeaders(scope=message)[id_header] = request_id
            await send(message)

        try:
            check_entry(Headers(scope=scope), path, self._service.settings)
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            pass
        except Exception as error:
            if answer != CLIENT_LEFT:
                raise  # half an answer is out: all that is left is to cut the connection
            await error_response(told(error, path), path)(scope, receive, noting)
        finally:
            self._note(scope, path, answer, state, time.perf_counter() - began)
            state.clear()  # an open connection keeps the scope of its last request

    def _note(self, scope: Scope, path: str, answer: int, state: dict[str, Any], seconds: float) -> None:
        self._service.metrics.count_answer(path if path in self._paths else "other", answer)
        if path in QUIET_PATHS:
            return
        details = "".join(f"; {generation.summary()}" for generation in state.get("generations", ()))
        log.info("%s %s %d, %.2f s%s", scope["method"], one_line(path[:200]), answer, seconds, details)


def check_entry(headers: Headers, path: str, settings: Settings) -> None:
    """ApiError 401 without the right key, 403 for a foreign host name."""
    if settings.api_key is not None:
        if path in OPEN_PATHS:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        # Some clients send both; headers are bytes, which came as Latin-1.
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        if not any([hmac.compare_digest(key.encode("latin-1"), settings.api_key.encode()) for key in given]):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    elif settings.local and host_name(headers.get("host", "")) not in LOOPBACK:
        # A web page whose name was made to point here would otherwise read our answers.
        raise ApiError(403, "this server answers to localhost and 127.0.0.1 only; set an API key to serve it under other names")


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    name = header.rpartition(":")[0] if ":" in header.rpartition("]")[2] else header
    return name.strip("[]").lower()
