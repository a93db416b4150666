"""A server that is killed while it writes to its store, and started again: the same replies, and what was whole on the disk is used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.laws.paths import prompt
from tests.tiny import CASES

PROMPTS = [prompt(300, 600, seed) for seed in range(4)]


@contextmanager
def server(model: Path, store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, its address) of a server in a process of its own, ready for requests."""
    command = [sys.executable, "-m", "quaff", "serve", str(model), "--port", "0", "--threads", "1", "--chunk", "64", "--store", str(store)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUAFF_")} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(line for line in process.stderr if line.startswith("listening:")).split()[1].rstrip(",").removesuffix("/v1")
            yield process, address
        finally:
            process.kill()


def ask(address: str, tokens: list[int]) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": 4, "temperature": 0.8, "seed": 5, "ignore_eos": True, "logprobs": 3}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.loads(reply.read()))


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_replies_after_kill_9_are_those_before(tmp_path: Path) -> None:
    model, store = CASES["gemma3"].write(tmp_path / "tiny.gguf"), tmp_path / "store"
    expected: list[Any] = []
    with server(model, store) as (process, address):
        expected += [ask(address, tokens)["choices"] for tokens in PROMPTS]
        process.send_signal(signal.SIGKILL)
    # Again and again, a little later each time: some writes are cut off, some are not.
    for delay in (0.0, 0.002, 0.01):
        with server(model, store) as (process, address):
            for tokens, choices in zip(PROMPTS, expected, strict=True):
                assert ask(address, tokens)["choices"] == choices
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    with server(model, store) as (process, address):
        assert [ask(address, tokens)["choices"] for tokens in PROMPTS] == expected
        process.terminate()
        assert process.wait(60) == 0
    with server(model, store) as (process, address):
        replies = [ask(address, tokens) for tokens in PROMPTS]
    assert [r["choices"] for r in replies] == expected
    assert [cached(r) for r in replies] == [599] * 4
    assert not list(store.rglob(".writing-*"))
