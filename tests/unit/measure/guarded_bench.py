"""`quaff` with one phase slowed, as a change might slow it: guarded_bench.py none|prefill|decode bench MODEL ..."""

from __future__ import annotations

import sys
import time
from typing import Any

from quaff.cli import main
from quaff.engine.runner import Runner
from quaff.measure import bench
from quaff.measure.roofline import Ceilings, Level

# Far above what a step of a tiny model takes, so that a busy machine does not hide it.
SLEEP_SECONDS = 0.02

phase, arguments = sys.argv[1], sys.argv[2:]
run = Runner.run


def slowed(self: Runner, batch: Any, *rest: Any, **named: Any) -> Any:
    rows = sum(segment.rows for segment in batch.segments)
    if phase == ("prefill" if rows > 1 else "decode"):
        time.sleep(SLEEP_SECONDS)
    return run(self, batch, *rest, **named)


Runner.run = slowed  # type: ignore[method-assign]
# The guard does not look at ceilings, and measuring them takes most of such a short run.
bench.measure_ceilings = lambda threads, caches=False: Ceilings("none", threads, 1.0, 1.0, (Level("DRAM", None, 1.0),))
bench.probe_memory = lambda threads: 1.0
main(arguments)
