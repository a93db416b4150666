// What this processor and this process may use. Built without ISA flags.
#pragma once

#include <cstdint>

namespace quaff {

struct CpuFeatures {
    bool avx2 = false;    // AVX2 + FMA + F16C
    bool avxvnni = false; // the above + AVX-VNNI
    bool avx512 = false;  // F, BW, VL, DQ, VNNI
    bool neon = false;    // aarch64 with dot product
};

CpuFeatures cpu_features();

// LinearArgs::ahead_bytes of this processor.
int64_t fetch_ahead_bytes();

// min(affinity, cgroup quota rounded up, physical cores of the affinity mask), at least 1.
int default_threads();

} // namespace quaff
