"""How the server behaves towards its clients: frozen values with defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Settings:
    """`name` is what replies call the model. `api_key` None lets everyone in who reaches the port.

    Times in seconds: a client must send its headers within `header_seconds` and its body within `body_seconds`, and must take what is
    sent within `write_seconds`; `ping_seconds` of silence in a stream are broken by a comment. A body may have `body_bytes`.
    `queue` requests may wait. `max_tokens` and `temperature` are those of requests that name none.
    `replies` is the folder where ids of replies are kept for the next run.
    The loop counts as wedged after `stuck_seconds` without a sign of life. On the way out running answers have `drain_seconds` to end.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    queue: int = 64
    max_tokens: int = 4096
    temperature: float = 1.0
    body_bytes: int = 32 << 20
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    ping_seconds: float = 5.0
    stuck_seconds: float = 8.0
    drain_seconds: int = 5
    replies: Path | None = None

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in LOOPBACK
