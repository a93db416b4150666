"""One accountant for the bytes of weights, pages and scratch: asked before memory is taken."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from quaff.errors import MemoryBudgetError


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes the system can give this process now: the smallest of free memory and what its control groups leave; None when unknown."""
    known = []
    if (free := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        known.append(free * 1024)
    for folder, limit, used, reclaimable in _control_groups(root):
        try:
            most = int((folder / limit).read_text())
            # The page cache counts as used, but what of it is idle makes room for others.
            idle = _field(folder / "memory.stat", reclaimable) or 0
            known.append(max(0, most - int((folder / used).read_text()) + idle))
        except (OSError, ValueError):
            continue
    return min(known) if known else None


def usable_memory_bytes() -> int | None:
    """Nine tenths of what the system can give: the rest is for the system and for Python. None when that is unknown."""
    available = available_memory_bytes()
    return None if available is None else available * 9 // 10


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The smallest limit of the control groups that this process is in, whatever is in use; None where there is none."""
    limits = []
    for folder, limit, _, _ in _control_groups(root):
        try:
            limits.append(int((folder / limit).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits, default=None)


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """(folder, names of its limit and usage, its field of idle page cache) of the groups that this process is in, each with those above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield (base / folder, *names)


def process_memory_bytes() -> tuple[int, int]:
    """(resident memory of this process now, and at its peak) as the kernel counts it; the peak for both where it does not tell."""
    status = Path("/proc/self/status")
    now, peak = _field(status, "VmRSS:"), _field(status, "VmHWM:")
    if now is not None and peak is not None:
        return now * 1024, peak * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of such lines."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def human_bytes(n: int) -> str:
    """Bytes in the unit a reader expects: 640 B, 12.5 MiB, 3.2 GiB."""
    if n < 1024:
        return f"{n} B"
    power = min(4, (n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


class Accountant:
    """Counts the bytes in use against a limit (None: no limit). Not locked: the engine's lock covers every caller.

    `used_bytes` were asked for; `found_bytes` were not, and are known only since they are in use. `peak_bytes` is the largest sum of both.
    `reclaim`, when set, is asked for the bytes that are missing before anything is refused: a cache gives way to work.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.found_bytes = 0
        self.peak_bytes = 0
        self.reclaim: Callable[[int], object] | None = None

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.found_bytes

    def fits(self, n: int) -> bool:
        return self.limit_bytes is None or self.total_bytes + n <= self.limit_bytes

    def take(self, n: int, what: str) -> None:
        """Count `n` more bytes, or raise MemoryBudgetError with the sum that does not fit and leave the count as it was."""
        if not n:
            return  # what was found may be over the limit already, and nothing is asked for
        if self.limit_bytes is not None and self.reclaim is not None and not self.fits(n):
            self.reclaim(self.total_bytes + n - self.limit_bytes)
        if not self.fits(n):
            assert self.limit_bytes is not None
            raise MemoryBudgetError(
                f"{what} needs {human_bytes(n)}, but {human_bytes(self.total_bytes)} of the budget of {human_bytes(self.limit_bytes)} "
                "are in use; raise the memory limit, or shorten the prompt or the context"
            )
        self.used_bytes += n
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    def find(self, n: int) -> None:
        """Count `n` bytes that are in use already, whatever the limit: what comes after them is asked with the true sum."""
        self.found_bytes += n
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    def give(self, n: int) -> None:
        if n > self.used_bytes:
            raise ValueError(f"{n} bytes given back, only {self.used_bytes} are in use")
        self.used_bytes -= n
