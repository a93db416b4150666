"""`quaff` with one phase ten times slower, as a bad change might make it: guarded_bench.py none|prefill|decode bench MODEL ...

Time is processor time of this process: other programs on a busy machine take none of it.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from quaff.cli import main
from quaff.engine.runner import Runner
from quaff.measure import bench
from quaff.measure.roofline import Ceilings, Level

SLOWER = 10

phase, arguments = sys.argv[1], sys.argv[2:]
run = Runner.run


def slowed(self: Runner, batch: Any, *rest: Any, **named: Any) -> Any:
    rows = sum(segment.rows for segment in batch.segments)
    began = time.process_time()
    result = run(self, batch, *rest, **named)
    if phase == ("prefill" if rows > 1 else "decode"):
        until = began + SLOWER * (time.process_time() - began)
        while time.process_time() < until:
            pass
    return result


Runner.run = slowed  # type: ignore[method-assign]
bench.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
# The guard does not look at ceilings, and measuring them takes most of such a short run.
bench.measure_ceilings = lambda threads, caches, megabytes: Ceilings("none", threads, 1.0, 1.0, 1.0, (Level("DRAM", None, 1.0),))
bench.probe_memory = lambda threads, megabytes: 1.0
main(arguments)
