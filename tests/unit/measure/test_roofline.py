"""Ceilings and what they allow, on numbers that can be checked by hand; nothing here looks at the clock."""

from pathlib import Path

import pytest

from quaff import _native
from quaff.measure import roofline
from quaff.measure.roofline import DRAM, FMA, INT8, INT16, Ceilings, Efficiency, Level, Work, bound, cache_sizes, measure_ceilings

MIB = 1 << 20
LEVELS = (Level("L2", 2 * MIB, 100e9), Level("L3", 32 * MIB, 50e9), Level(DRAM, None, 10e9))
CEILINGS = Ceilings("avx512", 2, 400e9, 200e9, 100e9, LEVELS, (10e9,))


def test_each_stage_takes_the_larger_of_arithmetic_and_reading() -> None:
    compute, stream = Work(800 * 10**9, 60 * 10**9, 50 * 10**9, 10**9), Work(10**9, 0, 0, 40 * 10**9)
    both = bound([compute, stream], CEILINGS, 100 * MIB)
    assert both.seconds == pytest.approx(2.0 + 0.3 + 0.5 + 4.0)
    assert dict(both.parts) == pytest.approx({INT8: 2.0, INT16: 0.3, FMA: 0.5, DRAM: 4.0}) and both.ceiling == DRAM
    # In one stage they overlap; the sum of the same work is less than the sum of its stages.
    assert bound([compute + stream], CEILINGS, 100 * MIB).seconds == pytest.approx(4.1)
    assert bound([compute], CEILINGS, 100 * MIB).ceiling == INT8
    assert bound([], CEILINGS, 100 * MIB).seconds == 0


@pytest.mark.parametrize(
    ("nbytes", "name"), [(1, "L2"), (MIB, "L2"), (MIB + 1, "L3"), (16 * MIB, "L3"), (16 * MIB + 1, DRAM), (1 << 40, DRAM)]
)
def test_weights_are_read_from_the_nearest_level_that_they_fill_by_half(nbytes: int, name: str) -> None:
    assert CEILINGS.level(nbytes).name == name
    assert name in dict(bound([Work(0, 0, 0, 1)], CEILINGS, nbytes).parts)


def test_probes_are_averaged_and_kept() -> None:
    again = CEILINGS.probed_again(14e9)
    assert again.bytes_per_second == 12e9 and again.dram_samples == (10e9, 14e9) and again.levels[:2] == LEVELS[:2]
    assert "DRAM 12.0 GB/s (probes 10.0, 14.0)" in again.sentence() and "L3 (32.0 MiB) 50 GB/s" in again.sentence()
    assert again.as_dict()["bytes_per_second"] == 12e9


def test_efficiency_lowers_every_ceiling() -> None:
    lower = CEILINGS.at(Efficiency(int8=0.5, int16=0.75, fma=0.25, stream=0.8))
    assert (lower.int8_macs_per_second, lower.int16_macs_per_second, lower.fma_macs_per_second) == (200e9, 150e9, 25e9)
    assert [level.bytes_per_second for level in lower.levels] == [80e9, 40e9, 8e9]


def write_cache(root: Path, index: int, level: int, kind: str, size: str, shared: str) -> None:
    folder = root / f"index{index}"
    folder.mkdir()
    for name, text in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(text + "\n")


def test_cache_sizes_come_from_the_kernel_and_shared_levels_are_divided(tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 1, "Data", "48K", "0")
    write_cache(tmp_path, 1, 1, "Instruction", "32K", "0")
    write_cache(tmp_path, 2, 2, "Unified", "2M", "0,8")
    write_cache(tmp_path, 3, 3, "Unified", "32768K", "0-3,8-11")
    assert cache_sizes(1, tmp_path) == [("L1", 48 << 10), ("L2", 2 * MIB), ("L3", 32 * MIB)]
    assert cache_sizes(4, tmp_path) == [("L1", 48 << 10), ("L2", MIB), ("L3", 8 * MIB)]
    assert cache_sizes(16, tmp_path)[-1] == ("L3", 4 * MIB)


def test_damaged_files_of_a_cache_are_passed_over(tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 1, "Data", "48K", "0")
    write_cache(tmp_path, 1, 2, "Unified", "", "0")
    write_cache(tmp_path, 2, 3, "Unified", "8M", "none")
    assert cache_sizes(2, tmp_path) == [("L1", 48 << 10)]
    assert all(size > 0 for _, size in cache_sizes(2, tmp_path / "no-such-folder"))  # sysconf, or nothing


def test_measured_ceilings_have_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "PROBE_MEGABYTES", 2)
    monkeypatch.setattr(roofline, "PROBE_SECONDS", 0.001)
    monkeypatch.setattr(roofline, "cache_sizes", lambda threads: [("L1", 32 << 10), ("L2", MIB)])
    found = measure_ceilings(2, caches=True)
    assert [(level.name, level.capacity_bytes) for level in found.levels] == [("L1", 64 << 10), ("L2", 2 * MIB), (DRAM, None)]
    assert found.isa == _native.isa() and found.threads == 2 and len(found.dram_samples) == 1
    assert (
        min(
            found.int8_macs_per_second,
            found.int16_macs_per_second,
            found.fma_macs_per_second,
            *(level.bytes_per_second for level in found.levels),
        )
        > 0
    )
    assert [level.name for level in measure_ceilings(1).levels] == [DRAM]


@pytest.mark.parametrize("arguments", [(0, 16, 0.001), (2000, 16, 0.001), (1, 0, 0.001), (1, 1 << 21, 0.001), (1, 16, 0.0), (1, 16, 100.0)])
def test_native_probe_refuses_what_makes_no_sense(arguments: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="measure"):
        _native.measure_cache(*arguments)
