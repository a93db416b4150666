"""Real weights inside budgets that do not hold them, from the file and from a packed one: the text and the state of a resident run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quaff
from quaff import SamplingParams, hub
from quaff.config import Workload
from quaff.errors import MemoryBudgetError
from quaff.graph.builder import build_graph
from quaff.models import read_model
from quaff.models.huggingface import open_model
from quaff.weights import planner
from quaff.weights.packing import write_packed

pytestmark = pytest.mark.models

TEXT = "A lighthouse keeper counts the ships that pass at night and writes each one down. In the morning "
PARAMS = SamplingParams(max_tokens=6)
WORKLOAD = Workload(128, sequences=2, logits_rows=9)


def least(path: Path) -> int:
    with pytest.raises(MemoryBudgetError) as refused:
        quaff.load(path, memory=1, workload=WORKLOAD)
    found = re.search(r"smallest budget that will do is (\d+)MiB", str(refused.value))
    assert found is not None
    return int(found[1]) + 2 << 20


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_text_is_that_of_a_resident_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test's own process grows from load to load: a budget is to mean the same each time.
    monkeypatch.setattr(planner, "process_memory_bytes", lambda: (100 << 20, 100 << 20))
    path = hub.resolve(name)
    with quaff.load(path) as llm:
        read = llm.prefill(TEXT)
        expected = (llm.generate(TEXT, PARAMS).text, read.kv_sha256, read.logits is not None and read.logits.tobytes())
        read.state.close()
    packed = tmp_path / "packed.quaff"
    with open_model(path, None) as checkpoint:
        opened = read_model(checkpoint)
        write_packed(packed, checkpoint, opened.views, build_graph(opened.config, opened.family, opened.tensors), 2)
    for file, more in ((path, 24 << 20), (packed, 0)):
        with quaff.load(file, memory=least(file) + more, workload=WORKLOAD) as llm:
            assert llm.streamed
            read = llm.prefill(TEXT)
            assert (llm.generate(TEXT, PARAMS).text, read.kv_sha256, read.logits is not None and read.logits.tobytes()) == expected
            read.state.close()
            assert llm.streaming is not None and llm.streaming.prefill.passes == 2
            assert llm.streaming.decode.disk_bytes > 0
