"""The lines that a server prints about itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny import Tiny

import quaff
from quaff.engine.pace import Policy
from quaff.errors import MemoryBudgetError
from quaff.serve.overview import overview
from quaff.serve.settings import Settings
from quaff.weights import planner, streamed

SETTINGS = Settings("tiny", queue=7)


def lines(llm: quaff.LLM, settings: Settings = SETTINGS) -> dict[str, str]:
    return dict(line.split(":", 1) for line in overview(llm, settings, "http://h:1"))


def test_it_says_what_is_served_and_what_it_takes(tiny: Path, tmp_path: Path) -> None:
    with quaff.load(tiny, threads=1, chunk=64, context=256, prefix_cache_bytes=1 << 20, store=tmp_path, store_cap_bytes=1 << 30) as llm:
        llm.engine.set_policy(Policy(max_stall_ms=150))
        said = lines(llm)
        assert "tiny llama (llama)" in said["model"] and "1 threads, chunks of 64 rows" in said["machine"]
        assert (
            "256 tokens" in said["context"] and "1.0 MiB in memory, 1.0 GiB in " in said["prefixes"] and str(tmp_path) in said["prefixes"]
        )
        assert "7 may wait" in said["requests"] and "150 ms" in said["requests"]
        assert "http://h:1/v1" in said["listening"]
    with quaff.load(tiny, threads=1, chunk=64) as llm:
        assert lines(llm)["prefixes"].strip() == "not kept"


@pytest.mark.parametrize(
    "host, key, words", [("127.0.0.1", None, "none"), ("0.0.0.0", "k", "needed"), ("0.0.0.0", None, "none: whoever reaches this address")]
)
def test_it_says_who_may_come_in(tiny: Path, host: str, key: str | None, words: str) -> None:
    with quaff.load(tiny, threads=1, chunk=64) as llm:
        assert lines(llm, replace(SETTINGS, host=host, api_key=key))["key"].strip().startswith(words)


def test_it_says_that_streamed_weights_are_read_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Tiny(dim=256, ffn_dim=1024, layers=8, heads=4, head_dim=64, kv_heads=2, tied=False).write(tmp_path / "model.gguf")
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (100 << 20, 100 << 20))
    for module in (planner, streamed):
        monkeypatch.setattr(module, "READ_BUFFER_BYTES", 128 << 10)
    with pytest.raises(MemoryBudgetError) as refused:
        quaff.load(path, threads=1, memory=1, context=128)
    least = re.search(r"smallest budget that will do is (\d+)MiB", str(refused.value))
    assert least is not None
    with quaff.load(path, threads=1, memory=int(least[1]) << 20, context=128) as llm:
        assert llm.streamed and "of weights from the disk" in lines(llm)["requests"]
