// What every Vec type shares. A Vec is a struct of static functions over 16 virtual lanes: F (f32), I (i32) and M (one truth value a lane).
// Kernels are templates over it, so an algorithm is written once and each isa/*.cpp compiles it with its own flags.
#pragma once
#include "../numerics.h"

#include <cstddef>
#include <cstdint>

// Inlined for certain: an out-of-line copy built with wide flags could be merged by the linker into code for older processors.
#define QUAFF_INLINE [[gnu::always_inline]] inline

namespace quaff::isa {

inline constexpr int64_t kNever = INT64_MAX; // in place of a number of tokens from which something pays

// Lanes [0, n) of a tail from memory, the rest a padding value; and back. Kernels use them once a row.
template <class V> QUAFF_INLINE typename V::F load_part(const float* p, int64_t n, float pad) {
    alignas(64) float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        lanes[i] = i < n ? p[i] : pad;
    }
    return V::load(lanes);
}

template <class V> QUAFF_INLINE void store_part(float* p, int64_t n, typename V::F v) {
    alignas(64) float lanes[kLanes];
    V::store(lanes, v);
    for (int64_t i = 0; i < n; ++i) {
        p[i] = lanes[i];
    }
}

// First of 32 lanes that is x; one of them is.
template <class V> QUAFF_INLINE int ifind(typename V::I a, typename V::I b, int32_t x) {
    alignas(64) int32_t lanes[2 * kLanes];
    V::istore(lanes, a);
    V::istore(lanes + kLanes, b);
    int i = 0;
    while (i < 2 * kLanes - 1 && lanes[i] != x) {
        ++i;
    }
    return i;
}

} // namespace quaff::isa
