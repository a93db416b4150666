"""The application called without a socket: a request in, status, headers and body out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

JSON = {"content-type": "application/json", "host": "127.0.0.1"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """Calls an application, one request at a time, on an event loop of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()

    def __call__(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = JSON) -> Answer:
        return self.loop.run_until_complete(self._call(method, path, body, headers))

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        return self("POST", path, json.dumps(body).encode())

    async def _call(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        sent = await self.visit(method, path, body, headers)
        found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent[1:]))

    async def visit(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = JSON, most: int | None = None
    ) -> list[dict[str, Any]]:
        """What the application sends; a client that has enough of `most` messages hangs up."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8080),
        }
        sent: list[dict[str, Any]] = []
        requests, done = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()
        if most == 0:
            done.set()

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if len(sent) == most or (message["type"] == "http.response.body" and not message.get("more_body")):
                done.set()

        await self.app(scope, receive, send)
        return sent


@contextmanager
def calling(app: ASGIApp) -> Iterator[Caller]:
    caller = Caller(app)
    try:
        yield caller
    finally:
        caller.loop.run_until_complete(caller.loop.shutdown_default_executor())
        caller.loop.close()
