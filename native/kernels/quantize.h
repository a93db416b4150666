// NUMERICS 12: int8 activations with one scale per 32. Rounding to nearest even of x * (127/amax) never exceeds 127, which integer dots rely on.
#pragma once
#include "functions.h"

namespace quaff::kernels {

// 64 codes of x, and their sums of 16: where an instruction set has a short way, its Vec has store_codes.
template <class V> QUAFF_INLINE void two_groups(const float* x, const float* factor, int8_t* q, int32_t* sum16) {
    typename V::I codes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        codes[i] = V::to_int(V::rint(V::mul(V::load(x + i * kLanes), V::set(factor[i / 2]))));
    if constexpr (requires { V::store_codes(q, codes, sum16); }) {
        V::store_codes(q, codes, sum16);
    } else {
        for (int i = 0; i < 4; ++i) {
            V::store_i8(q + i * kLanes, codes[i]);
            sum16[i] = V::isum(codes[i]);
        }
    }
}

// Sixteen groups at a time, so that the divisions are those of vectors.
template <class V> static void quantize_row(const float* x, int64_t n, int8_t* q, float* scale, int32_t* sum32, int32_t* sum16) {
    static_assert(kQuantGroup == 2 * kLanes);
    const auto magnitude = V::iset(0x7fffffff);
    for (int64_t left = n / kQuantGroup; left > 0; left -= kLanes, scale += kLanes, sum32 += kLanes, sum16 += 2 * kLanes) {
        const int64_t groups = left < kLanes ? left : kLanes;
        alignas(64) int32_t tops[kLanes] = {};
        alignas(64) float factors[kLanes];
        // As integers the magnitudes are ordered like the floats, and their maximum is exact in any order.
        for (int64_t g = 0; g < groups; ++g) {
            const float* at = x + g * kQuantGroup;
            tops[g] = V::itop(V::imax(V::iand(V::bits(V::load(at)), magnitude), V::iand(V::bits(V::load(at + kLanes)), magnitude)));
        }
        const auto amax = V::from_bits(V::iload(tops)), most = V::set(127.0f);
        const auto zero = V::lt(amax, V::set(0x1p-64f));
        V::store_part(scale, groups, V::zero_where(zero, V::div(amax, most)));
        V::store(factors, V::zero_where(zero, V::div(most, amax)));
        int64_t g = 0;
        for (; g + 2 <= groups; g += 2, x += 2 * kQuantGroup, q += 2 * kQuantGroup)
            two_groups<V>(x, factors + g, q, sum16 + 2 * g);
        if (g < groups) {
            for (int i = 0; i < 2; ++i, x += kLanes, q += kLanes) {
                const auto codes = V::to_int(V::rint(V::mul(V::load(x), V::set(factors[g]))));
                V::store_i8(q, codes);
                sum16[2 * g + i] = V::isum(codes);
            }
        }
        for (g = 0; g < groups; ++g)
            sum32[g] = static_cast<int32_t>(static_cast<uint32_t>(sum16[2 * g]) + static_cast<uint32_t>(sum16[2 * g + 1]));
    }
}

} // namespace quaff::kernels
