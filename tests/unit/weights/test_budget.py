"""What the system can give, and the accountant's sums."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from quaff.errors import MemoryBudgetError
from quaff.weights.budget import Accountant, available_memory_bytes, memory_limit_bytes, process_memory_bytes


def machine(root: Path, free_kilobytes: int, groups: str, files: dict[str, str]) -> Path:
    """A system's files under `root`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {free_kilobytes} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_counts_where_no_group_is_smaller(tmp_path: Path) -> None:
    root = machine(tmp_path, 4096, "0::/user\n", {"user/memory.max": "max\n", "user/memory.current": "1\n"})
    assert available_memory_bytes(root) == 4096 * 1024


def test_the_groups_above_count_too(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "3000000",
        "a/memory.current": "1000000",
        "a/memory.stat": "anon 7\ninactive_file 500000\n",
        "a/b/memory.max": "max",
        "a/b/memory.current": "900000",
    }
    assert available_memory_bytes(machine(tmp_path, 4096, "0::/a/b\n", files)) == 2_500_000


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "2000000",
        "memory/job/memory.usage_in_bytes": "1900000",
        "memory/job/memory.stat": "inactive_file 5\ntotal_inactive_file 300000\n",
        "memory/memory.limit_in_bytes": str(1 << 62),
        "memory/memory.usage_in_bytes": "0",
        "cpu/memory.limit_in_bytes": "1",
        "cpu/memory.usage_in_bytes": "0",
    }
    assert available_memory_bytes(machine(tmp_path, 4096, "5:cpu:/\n4:memory:/job\n", files)) == 400_000


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "2000"}
    assert available_memory_bytes(machine(tmp_path, 4096, "0::/\n", files)) == 0


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None and memory_limit_bytes(tmp_path) is None


def test_a_limit_is_the_smallest_of_all_groups(tmp_path: Path) -> None:
    """Whatever is in use, and read anew each time."""
    files = {"a/memory.max": "3000000", "a/memory.current": "2999999", "a/b/memory.max": "max"}
    root = machine(tmp_path, 4096, "0::/a/b\n", files)
    assert memory_limit_bytes(root) == 3_000_000
    (root / "sys/fs/cgroup/a/b/memory.max").write_text("2000\n")
    assert memory_limit_bytes(root) == 2000
    for name in ("a", "a/b"):
        (root / "sys/fs/cgroup" / name / "memory.max").write_text("max\n")
    assert memory_limit_bytes(root) is None


def test_memory_of_this_process() -> None:
    now, peak = process_memory_bytes()
    assert 8 << 20 < now <= peak
    with mmap.mmap(-1, 64 << 20) as held:  # not of a heap that may have kept as much from earlier tests
        for at in range(0, len(held), 4096):
            held[at] = 1
        assert process_memory_bytes()[0] >= now + (48 << 20)
    assert process_memory_bytes()[1] >= now + (48 << 20)


def test_the_peak_is_of_all_that_was_in_use_at_once() -> None:
    accountant = Accountant(100)
    accountant.take(60, "a")
    accountant.give(50)
    accountant.take(20, "b")
    assert (accountant.total_bytes, accountant.peak_bytes) == (30, 60)
    accountant.find(45)
    assert (accountant.total_bytes, accountant.peak_bytes) == (75, 75)
    with pytest.raises(MemoryBudgetError):
        accountant.take(26, "c")
    assert accountant.peak_bytes == 75
