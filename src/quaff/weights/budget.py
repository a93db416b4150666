"""One accountant for the bytes of weights, pages and scratch: asked before memory is taken."""

from __future__ import annotations

from pathlib import Path

from quaff.errors import MemoryBudgetError


def available_memory_bytes() -> int | None:
    """Bytes the system can give this process now: the smaller of free memory and what the control group leaves; None when unknown."""
    known = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            known.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    return min(known) if known else None


def human_bytes(n: int) -> str:
    """Bytes in the unit a reader expects: 640 B, 12.5 MiB, 3.2 GiB."""
    if n < 1024:
        return f"{n} B"
    power = min(4, (n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


class Accountant:
    """Counts the bytes in use against a limit (None: no limit). Not locked: the engine's lock covers every caller.

    `used_bytes` were asked for; `found_bytes` were not, and are known only since they are in use.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.found_bytes = 0

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.found_bytes

    @property
    def free_bytes(self) -> int | None:
        return None if self.limit_bytes is None else self.limit_bytes - self.total_bytes

    def fits(self, n: int) -> bool:
        return self.limit_bytes is None or self.total_bytes + n <= self.limit_bytes

    def take(self, n: int, what: str) -> None:
        """Count `n` more bytes, or raise MemoryBudgetError with the sum that does not fit and leave the count as it was."""
        if not self.fits(n):
            assert self.limit_bytes is not None
            raise MemoryBudgetError(
                f"{what} needs {human_bytes(n)}, but {human_bytes(self.total_bytes)} of the budget of {human_bytes(self.limit_bytes)} "
                "are in use; raise the memory limit, or shorten the prompt or the context"
            )
        self.used_bytes += n

    def find(self, n: int) -> None:
        """Count `n` bytes that are in use already, whatever the limit: what comes after them is asked with the true sum."""
        self.found_bytes += n

    def give(self, n: int) -> None:
        if n > self.used_bytes:
            raise ValueError(f"{n} bytes given back, only {self.used_bytes} are in use")
        self.used_bytes -= n
