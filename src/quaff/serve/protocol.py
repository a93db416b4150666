"""HTTP connections that do not wait for ever: a client must send its headers and take its answer in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from quaff.serve.settings import Settings


def protocol_class(settings: Settings) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config(http=...)` with the limits of `settings`."""

    class Patient(H11Protocol):
        _headers_due: asyncio.TimerHandle | None = None
        _reading_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._headers_came()
            elif self._headers_due is None:
                self._expect_headers()

        def pause_writing(self) -> None:
            super().pause_writing()
            # What was written lies in our memory, and the request behind it in the cache, until the client reads.
            self._reading_due = self.loop.call_later(settings.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reading_due is not None:
                self._reading_due.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            if self._reading_due is not None:
                self._reading_due.cancel()
            super().connection_lost(exc)
            if self.timeout_keep_alive_task is not None:  # after an error it would keep the connection, and what hangs on it
                self.timeout_keep_alive_task.cancel()

        def _expect_headers(self) -> None:
            self._headers_due = self.loop.call_later(settings.header_seconds, self.transport.close)

        def _headers_came(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

    return Patient
