"""Tests that need a step to last hold it, and let it go when they have seen what they wanted to see."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.unit.serve.conftest import WAIT_SECONDS, Live


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not ready():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Hold:
    """Steps of a model that have begun; from the `first` on they wait until `let_go`."""

    def __init__(self, first: int) -> None:
        self.steps = 0
        self._first = first
        self._open = threading.Event()

    def step(self) -> None:
        self.steps += 1
        assert self.steps < self._first or self._open.wait(WAIT_SECONDS)

    def let_go(self) -> None:
        self._open.set()


@contextmanager
def held(live: Live, first: int = 1) -> Iterator[Hold]:
    """Steps wait at their beginning, from the `first` on."""
    runner, loop = live.llm.engine.runner, live.service.loop
    run, hold = runner.run, Hold(first)

    def slow(*args: object, **kwargs: object) -> object:
        hold.step()
        return run(*args, **kwargs)

    runner.run = slow
    try:
        yield hold
    finally:
        hold.let_go()
        until(lambda: loop.running == 0)
        runner.run = run


def post(live: Live, path: str, body: dict) -> socket.socket:
    """A connection on which a request has been sent and nothing has been read."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(live.address, timeout=WAIT_SECONDS)
    sock.sendall(head.encode() + data)
    return sock
