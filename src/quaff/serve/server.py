"""The application on a socket: it listens at once, loads the model beside it, and lets running answers end when it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import uvicorn

from quaff.errors import QuaffError
from quaff.llm import LLM, LoadProgress
from quaff.serve.app import make_app
from quaff.serve.protocol import protocol_class
from quaff.serve.service import Service

Load = Callable[[LoadProgress], LLM]
"""Loads the model; what the progress function raises must end it."""

POLL_SECONDS = 0.1
THREADS = 32
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection: the side that closes it must not be the one that the next request surprises."""
GRACE_SECONDS = 5
"""How long it may take to tell clients that their answers were cut off."""


class _Stopped(Exception):
    """The server was told to stop while the model was being loaded."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens (port 0: any free one). QuaffError when that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise QuaffError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with --host and --port"
        ) from None
    return sock


class Server:
    """Serves `service` on a socket that listens. `load` runs in a thread of its own, `on_ready` after it."""

    def __init__(self, service: Service, load: Load, on_ready: Callable[[LLM], None] = lambda llm: None) -> None:
        self._service = service
        self._load = load
        self._on_ready = on_ready
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        settings = service.settings
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(service, self._life),
                http=protocol_class(settings),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=settings.drain_seconds + GRACE_SECONDS,
            )
        )

    def run(self, sock: socket.socket) -> None:
        """Serve until `stop`, or in the main thread SIGINT or SIGTERM. Raises what loading the model raised."""
        main = threading.current_thread() is threading.main_thread()
        # The server repeats the signal that ended it once it is done: that is not news to anyone here.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
        try:
            with suppress(KeyboardInterrupt):
                self._server.run(sockets=[sock])
        finally:
            if main:
                signal.signal(signal.SIGTERM, before)
            self._service.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """From any thread: end as after a signal."""
        self._server.should_exit = True

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        # A thread may wait for the disk, and nobody else is to wait for it.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "quaff-serve"))
        loading, draining = asyncio.create_task(self._open()), asyncio.create_task(self._drain())
        try:
            yield
        finally:
            self._stopping.set()
            await asyncio.gather(loading, draining)

    async def _open(self) -> None:
        def progress(what: str, done: int, total: int) -> None:
            if self._stopping.is_set():
                raise _Stopped

        try:
            llm = await asyncio.to_thread(self._load, progress)
            self._service.open(llm)
            self._on_ready(llm)
            await asyncio.to_thread(self._service.prepare)
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = error
            self.stop()

    async def _drain(self) -> None:
        """Once the server is to stop: let running answers end, then cut off the others, which then say so to their clients."""
        while not self._server.should_exit:
            await asyncio.sleep(POLL_SECONDS)
        self._stopping.set()
        for _ in range(round(self._service.settings.drain_seconds / POLL_SECONDS)):
            if not self._server.server_state.tasks:
                break
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self._service.close)
