"""A live server on a tiny model, for clients; and its application, to be called without a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from tests.tiny import CASES

import quaff
from quaff import LLM
from quaff.engine.pace import Policy
from quaff.serve.server import Server, listen
from quaff.serve.service import Service
from quaff.serve.settings import Settings

WAIT_SECONDS = 60.0
"""Nothing takes so long; a test that would hang fails instead."""


@dataclass
class Live:
    """A server that runs. `llm` is its model: what is asked of it directly must equal what the server answers."""

    address: tuple[str, int]
    service: Service
    llm: LLM
    stop: Callable[[], None]
    url: str = field(init=False)
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_SECONDS)


@contextmanager
def serving(path: Path, settings: Settings, policy: Policy | None = None, **options: object) -> Iterator[Live]:
    """A server in a thread of its own, ready when the block begins and gone when it has ended."""

    def load(progress: object) -> LLM:
        llm = quaff.load(path, threads=1, chunk=64, **options)
        llm.engine.set_policy(policy or Policy(max_stall_ms=200))
        return llm

    ready, models = threading.Event(), []

    def on_ready(llm: LLM) -> None:
        models.append(llm)
        ready.set()

    service = Service(settings)
    with listen("127.0.0.1", 0) as sock:
        server = Server(service, load, on_ready)
        thread = threading.Thread(target=server.run, args=(sock,))
        thread.start()
        try:
            assert ready.wait(WAIT_SECONDS)
            yield Live(sock.getsockname(), service, models[0], server.stop)
        finally:
            server.stop()
            thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["llama-gqa"].write(tmp_path_factory.mktemp("serve") / "tiny.gguf")


@pytest.fixture(scope="module")
def live(tiny: Path) -> Iterator[Live]:
    with serving(tiny, Settings("tiny", max_tokens=24), prefix_cache_bytes=8 << 20) as live:
        yield live
        assert live.llm.engine.cache.sequences == 0, "a request kept its pages"
