"""The machine's ceilings, measured by the native module, and the least time that work can take under them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quaff.batch import Sums
from quaff.measure import counted
from quaff.weights.budget import available_memory_bytes, human_bytes

INT8, INT16, FMA, DRAM = "int8 dot", "int16 dot", "f32 fma", "DRAM"
PROBE_MEGABYTES, LEAST_PROBE_MEGABYTES = 1024, 64
"""Buffer of the memory probe: far beyond any last-level cache. A machine with little memory gets a quarter of what is free."""
PROBE_SECONDS, PROBES = 0.02, 8
"""Short loops, of which the best counts: a neighbour on the machine only ever makes one look slower."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where weights may lie: bytes that fit (all threads together; None: any number) and bytes per second that can be read from it."""

    name: str
    capacity_bytes: int | None
    bytes_per_second: float

    def holds(self, nbytes: int) -> bool:
        """True when `nbytes` fill at most half of it: KV state, activations and scratch want room beside them."""
        return self.capacity_bytes is None or 2 * nbytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the ceilings that whole stages reach, their norms, activations and residuals included."""

    int8: float
    int16: float
    fma: float
    stream: float


EFFICIENCY = Efficiency(int8=0.6, int16=0.54, fma=0.74, stream=0.85)
"""What `predicted` seconds assume; docs/measuring.md says where the figures come from and how to renew them."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Multiply-accumulates per second from registers, of linear ops (int8), attention (int16) and what stays f32, and the levels of memory,
    nearest first, on `threads` threads.

    The last level is memory itself; `dram_samples` are its probes in this run, in bytes per second.
    """

    isa: str
    threads: int
    int8_macs_per_second: float
    int16_macs_per_second: float
    fma_macs_per_second: float
    levels: tuple[Level, ...]
    dram_samples: tuple[float, ...] = ()

    @property
    def bytes_per_second(self) -> float:
        return self.levels[-1].bytes_per_second

    def level(self, nbytes: int) -> Level:
        """The nearest measured level that holds `nbytes` which are read over and over."""
        return next(level for level in self.levels if level.holds(nbytes))

    def probed_again(self, bytes_per_second: float) -> Ceilings:
        """With one more probe of memory: the level becomes the mean of all. Shared hosts drift within minutes."""
        samples = (*self.dram_samples, bytes_per_second)
        memory = replace(self.levels[-1], bytes_per_second=sum(samples) / len(samples))
        return replace(self, levels=(*self.levels[:-1], memory), dram_samples=samples)

    def at(self, efficiency: Efficiency) -> Ceilings:
        """Ceilings lowered to what is assumed to be reached."""
        return replace(
            self,
            int8_macs_per_second=self.int8_macs_per_second * efficiency.int8,
            int16_macs_per_second=self.int16_macs_per_second * efficiency.int16,
            fma_macs_per_second=self.fma_macs_per_second * efficiency.fma,
            levels=tuple(replace(level, bytes_per_second=level.bytes_per_second * efficiency.stream) for level in self.levels),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "int8_macs_per_second": self.int8_macs_per_second,
            "int16_macs_per_second": self.int16_macs_per_second,
            "fma_macs_per_second": self.fma_macs_per_second,
            "bytes_per_second": self.bytes_per_second,
            "levels": [
                {"name": level.name, "capacity_bytes": level.capacity_bytes, "bytes_per_second": level.bytes_per_second}
                for level in self.levels
            ],
            "dram_samples": list(self.dram_samples),
        }

    def sentence(self) -> str:
        caches = "".join(
            f", {level.name} ({human_bytes(level.capacity_bytes)}) {level.bytes_per_second / 1e9:,.0f} GB/s"
            for level in self.levels
            if level.capacity_bytes is not None
        )
        probes = f" (probes {', '.join(f'{s / 1e9:,.1f}' for s in self.dram_samples)})" if len(self.dram_samples) > 1 else ""
        return (
            f"ceilings on {counted(self.threads, 'thread')} ({self.isa}): "
            f"{INT8} {self.int8_macs_per_second / 1e9:,.0f} GMAC/s, {INT16} {self.int16_macs_per_second / 1e9:,.0f} GMAC/s, "
            f"{FMA} {self.fma_macs_per_second / 1e9:,.0f} GMAC/s{caches}, "
            f"{DRAM} {self.bytes_per_second / 1e9:,.1f} GB/s{probes}"
        )


@dataclass(frozen=True, slots=True)
class Work(Sums):
    """What a stage does at least: multiply-accumulates by kind, and bytes of weights and KV state that it reads."""

    int8_macs: int = 0
    int16_macs: int = 0
    fma_macs: int = 0
    stream_bytes: int = 0


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of some work, and how they divide among the ceilings that bind its stages, by name."""

    seconds: float
    parts: tuple[tuple[str, float], ...]

    @property
    def ceiling(self) -> str:
        """The ceiling that binds for most of the time."""
        return max(self.parts, key=lambda part: part[1])[0]


def bound(stages: Iterable[Work], ceilings: Ceilings, weight_bytes: int) -> Bound:
    """Sum over stages of the larger of arithmetic and reading: the two overlap within a stage, stages follow each other.

    `weight_bytes` of the whole model say which level they are read from.
    """
    level = ceilings.level(weight_bytes)
    parts = dict.fromkeys((INT8, INT16, FMA, level.name), 0.0)
    for work in stages:
        arithmetic = {
            INT8: work.int8_macs / ceilings.int8_macs_per_second,
            INT16: work.int16_macs / ceilings.int16_macs_per_second,
            FMA: work.fma_macs / ceilings.fma_macs_per_second,
        }
        stream = work.stream_bytes / level.bytes_per_second
        for name, seconds in ({level.name: stream} if stream > sum(arithmetic.values()) else arithmetic).items():
            parts[name] += seconds
    return Bound(sum(parts.values()), tuple(parts.items()))


def measure_ceilings(threads: int, caches: bool = False, probe_megabytes: int = PROBE_MEGABYTES) -> Ceilings:
    """Short native loops, two seconds together; with `caches`, every level of the cache too. They take `probe_megabytes` of memory."""
    from quaff import _native

    levels = []
    for name, per_thread in cache_sizes(threads) if caches else ():
        # Half of a level: well inside it, and well beyond the level below.
        kilobytes = max(4, per_thread // 2048)
        levels.append(Level(name, per_thread * threads, _best(partial(_native.measure_cache, threads, kilobytes))))
    memory = probe_memory(threads, probe_megabytes)
    return Ceilings(
        _native.isa(),
        threads,
        _best(partial(_native.measure_int8, threads)),
        _best(partial(_native.measure_int16, threads)),
        _best(partial(_native.measure_fma, threads)),
        (*levels, Level(DRAM, None, memory)),
        (memory,),
    )


def _best(probe: Callable[[float], float]) -> float:
    return max(probe(PROBE_SECONDS) for _ in range(PROBES))


def probe_memory(threads: int, megabytes: int = PROBE_MEGABYTES) -> float:
    """Bytes per second read from a buffer that no cache holds."""
    from quaff import _native

    free = available_memory_bytes()
    return _native.measure_bandwidth(threads, megabytes if free is None else max(LEAST_PROBE_MEGABYTES, min(megabytes, free >> 22)))


def cache_sizes(threads: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> list[tuple[str, int]]:
    """Name and bytes of every data cache as one of `threads` threads sees it: a shared level is divided among them.

    From the files of the Linux kernel, else from sysconf; empty when neither knows.
    """
    found: dict[int, int] = {}
    for index in sorted(root.glob("index*")):
        try:
            kind, level, size, shared = ((index / f).read_text().strip() for f in ("type", "level", "size", "shared_cpu_list"))
            if kind != "Instruction":
                found[int(level)] = _size(size) // min(threads, _cpus(shared))
        except (OSError, ValueError):
            continue
    if not found:
        for number, name in enumerate(("SC_LEVEL1_DCACHE_SIZE", "SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE"), 1):
            size_bytes = os.sysconf(name) if name in os.sysconf_names else 0
            if size_bytes > 0:
                found[number] = size_bytes // (threads if number == 3 else 1)
    return [(f"L{level}", size) for level, size in sorted(found.items())]


def _size(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)


def _cpus(text: str) -> int:
    """How many processors a list such as 0-3,8 names."""
    ends = [part.split("-") for part in text.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)
