"""A forked process has the memory of a model but none of its threads: weights in memory go on, streamed ones are refused, nothing hangs."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.laws.paths import Tinyrun, prompt
from tests.laws.test_packed import packed
from tests.streaming import PLANS
from tests.tiny import CASES

import quaff
from quaff.errors import CheckpointError


def forked(run: Callable[[], None]) -> int:
    """Exit status of a forked process that runs it: 1 after an exception, below 0 when a signal ended it, as it does one that hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("form", ["gguf", "packed"])
def test_a_model_in_memory_goes_on_with_the_same_bits(form: str, tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "model.gguf")
    with quaff.load(packed(path) if form == "packed" else path, threads=3, chunk=64) as llm:
        tokens = prompt(llm.config.vocab, 300)
        expected = llm.prefill(tokens).kv_sha256

        def run() -> None:
            assert llm.prefill(tokens).kv_sha256 == expected, "by one thread, which finds the others gone"
            llm.configure(threads=2)
            assert llm.prefill(tokens).kv_sha256 == expected
            llm.close()

        assert forked(run) == 0
        assert llm.prefill(tokens).kv_sha256 == expected


def test_a_streamed_model_is_refused(tmp_path: Path) -> None:
    model = Tinyrun(CASES["llama-gqa"], tmp_path / "model.gguf", stream=PLANS["two slots"])
    tokens = prompt(model.vocab, 40)
    first = model.read(tokens)

    def run() -> None:
        nonlocal model
        with pytest.raises(CheckpointError, match="forked"):
            model.read(tokens)
        model.weights.close()
        del model

    assert forked(run) == 0
    assert not model.read(tokens).difference(first)
