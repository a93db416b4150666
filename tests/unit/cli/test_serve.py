"""`quaff serve` as a process: what it prints, how it is configured, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.unit.cli.conftest import Cli

import quaff


@contextmanager
def serving(model: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "quaff", "serve", str(model), "--threads", "1", "--chunk", "64", *options]
    environment = os.environ | {"QUAFF_PORT": "0"} | variables
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def started(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints until it listens, and its URL."""
    assert process.stderr is not None
    plan = ""
    while "listening:" not in plan:
        line = process.stderr.readline()
        assert line, plan
        plan += line
    url = re.search(r"http://127\.0\.0\.1:\d+", plan)
    assert url is not None
    return plan, url[0]


def test_it_prints_a_plan_and_a_line_per_request_and_ends_in_order(model: Path) -> None:
    with serving(model, "--context", "256", "--store", "off", QUAFF_NAME="by variable", QUAFF_CONTEXT="128") as server:
        plan, url = started(server)
        assert "by variable: tiny llama (llama)" in plan and "256 tokens" in plan and "1 threads" in plan
        assert "in memory" in plan
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "four", "max_tokens": 3, "seed": 1}, timeout=60)
        assert reply.status_code == 200 and reply.json()["model"] == "by variable"
        assert httpx.get(f"{url}/%0aforged%1b[1m", timeout=60).status_code == 404
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 0 and out == ""
    lines = err.splitlines()
    assert re.search(r"POST /v1/completions 200, .* s; prompt \d+ \(cached 0\), \d+ tok/s, TTFT .* s, reply 3, .* tok/s, length$", lines[0])
    assert r"GET /\nforged\x1b[1m 404" in lines[1] and len(lines) == 2


def test_what_was_used_last_is_in_memory_when_it_listens(model: Path, tmp_path: Path) -> None:
    with quaff.load(model, threads=1, chunk=64, prefix_cache_bytes=1 << 24, store=tmp_path) as llm:
        llm.prefill(list(range(3, 103)), logits="none").state.close()
    with serving(model, "--store", str(tmp_path)) as server:
        _, url = started(server)
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert re.search(r"^quaff:disk_cache_restored_tokens_total.* 100\.0$", metrics, re.MULTILINE)


def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    result = cli("serve", tmp_path / "bad.gguf", "--port", 0)
    assert result.code == 1 and result.err.startswith("error: ") and result.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--prefix-cache", "--store-size"])
def test_a_size_that_is_none_is_refused_by_the_name_of_its_option(cli: Cli, model: Path, option: str) -> None:
    result = cli("serve", model, "--port", 0, option, "lots")
    assert result.code == 1 and result.err.startswith(f"error: {option}: ")


def test_a_port_that_is_taken_is_named(cli: Cli, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cli("serve", model, "--port", taken.getsockname()[1])
    assert result.code == 1 and "cannot listen on 127.0.0.1, port" in result.err and "--port" in result.err
