"""The machine's ceilings, measured by the native module, and how near a run came to them."""

from __future__ import annotations

from dataclasses import dataclass

from quaff.measure import counted


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Integer and f32 multiply-accumulates per second from registers, and bytes per second read from memory, on `threads` threads."""

    isa: str
    threads: int
    int8_macs_per_second: float
    fma_macs_per_second: float
    bytes_per_second: float

    def as_dict(self) -> dict[str, float]:
        return {
            "int8_macs_per_second": self.int8_macs_per_second,
            "fma_macs_per_second": self.fma_macs_per_second,
            "bytes_per_second": self.bytes_per_second,
        }

    def sentence(self) -> str:
        return (
            f"ceilings on {counted(self.threads, 'thread')} ({self.isa}): "
            f"int8 {self.int8_macs_per_second / 1e9:,.0f} GMAC/s, f32 FMA {self.fma_macs_per_second / 1e9:,.0f} GMAC/s, "
            f"memory {self.bytes_per_second / 1e9:,.1f} GB/s"
        )


def measure_ceilings(threads: int, seconds: float = 0.1, megabytes: int = 256) -> Ceilings:
    """Three short native loops, about half a second together; `megabytes` should exceed the last-level cache."""
    from quaff import _native

    return Ceilings(
        _native.isa(),
        threads,
        _native.measure_int8(threads, seconds),
        _native.measure_fma(threads, seconds),
        _native.measure_bandwidth(threads, megabytes),
    )
