// NUMERICS 12: int8 activations with one scale per 32, but the largest of every 1,024. Rounding to nearest even of x * (127/amax) never exceeds 127,
// which integer dots rely on.
#pragma once
#include "functions.h"
#include "table.h"

namespace quaff::kernels {

// 64 codes of x, and their sums of 16: where an instruction set has a short way, its Vec has store_codes.
template <class V> QUAFF_INLINE void two_groups(const float* x, const float* factor, int8_t* q, int32_t* sum16) {
    typename V::I codes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        codes[i] = V::round(V::mul(V::load(x + i * kLanes), V::set(factor[i / 2])));
    if constexpr (requires { V::store_codes(q, codes, sum16); }) {
        V::store_codes(q, codes, sum16);
    } else {
        for (int i = 0; i < 4; ++i) {
            V::store_i8(q + i * kLanes, codes[i]);
            sum16[i] = V::isum(codes[i]);
        }
    }
}

// All ones but at 32: a load from 32 - k on clears lane k.
alignas(64) inline constexpr int32_t kAllBut[64] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                    -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,  -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                    -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

// Scales of groups whose largest magnitudes have the bits `tops`, and what their values are multiplied by: top/127 rounded up to one of the eight
// mantissas, 0 where the top is out of range.
template <class V> QUAFF_INLINE typename V::F scales(typename V::I tops, typename V::F& factor) {
    constexpr int32_t low = kTinyBits, high = 0x6f800000; // 2^-64, 2^96
    const auto inside = V::both(V::igt(tops, V::iset(low - 1)), V::igt(V::iset(high), tops));
    const auto exact = V::bits(V::div(V::from_bits(tops), V::set(127.0f)));
    const auto scale = V::from_bits(V::iand(V::iadd(exact, V::iset(kScaleFraction)), V::iset(~kScaleFraction)));
    factor = V::select(inside, V::div(V::set(1.0f), scale), V::zero());
    return V::select(inside, scale, V::zero());
}

// A group once more, without the value of magnitude `top`: the first one is the outlier. Returns its lane.
template <class V> QUAFF_INLINE int without_outlier(const float* x, int32_t top, int8_t* q, float* scale, int32_t* sum16) {
    const auto magnitude = V::iset(0x7fffffff), first = V::bits(V::load(x)), second = V::bits(V::load(x + kLanes));
    const int lane = V::ifind(V::iand(first, magnitude), V::iand(second, magnitude), top);
    const auto low = V::iand(first, V::iload(kAllBut + 32 - lane)), high = V::iand(second, V::iload(kAllBut + 48 - lane));
    typename V::F factor;
    V::store_part(scale, 1, scales<V>(V::iset(V::itop(V::imax(V::iand(low, magnitude), V::iand(high, magnitude)))), factor));
    const typename V::I codes[2] = {V::round(V::mul(V::from_bits(low), factor)), V::round(V::mul(V::from_bits(high), factor))};
    for (int i = 0; i < 2; ++i) {
        V::store_i8(q + i * kLanes, codes[i]);
        sum16[i] = V::isum(codes[i]);
    }
    return lane;
}

// The largest magnitude of each of up to sixteen groups, as bits: magnitudes are ordered like integers, and their maximum is exact in any order.
template <class V> QUAFF_INLINE typename V::I group_tops(const float* x, int64_t groups) {
    const auto magnitude = V::iset(0x7fffffff);
    const auto largest = [&](int64_t g) {
        const float* at = x + g * kQuantGroup;
        return V::imax(V::iand(V::bits(V::load(at)), magnitude), V::iand(V::bits(V::load(at + kLanes)), magnitude));
    };
    if constexpr (requires(typename V::I * v) { V::itops(v); }) {
        if (groups == kLanes) {
            typename V::I all[kLanes];
#pragma GCC unroll 16
            for (int g = 0; g < kLanes; ++g)
                all[g] = largest(g);
            return V::itops(all);
        }
    }
    alignas(64) int32_t tops[kLanes] = {};
    for (int64_t g = 0; g < groups; ++g)
        tops[g] = V::itop(largest(g));
    return V::iload(tops);
}

// Sixteen groups at a time, so that the divisions are those of vectors. The group of a block's outlier is done like the others, and then once
// more without it: so nothing waits until it is found.
template <class V>
static void quantize_row(const float* x, int64_t n, int8_t* q, float* scale, int32_t* sum32, int32_t* sum16, Outlier* outlier) {
    static_assert(kQuantGroup == 2 * kLanes && kOutlierBlock % (kQuantGroup * kLanes) == 0);
    constexpr int64_t block = kOutlierBlock / kQuantGroup; // groups
    const int64_t groups = n / kQuantGroup;
    int64_t at = 0; // the outlier's group
    int32_t top = -1;
    for (int64_t g0 = 0; g0 < groups; g0 += kLanes) {
        const int64_t end = groups - g0 < kLanes ? groups : g0 + kLanes;
        alignas(64) float factors[kLanes];
        const typename V::I tops = group_tops<V>(x + g0 * kQuantGroup, end - g0);
        const int32_t found = V::itop(tops);
        at = found > top ? g0 + V::ifind(tops, tops, found) : at;
        top = found > top ? found : top;
        typename V::F factor;
        V::store_part(scale + g0, end - g0, scales<V>(tops, factor));
        V::store(factors, factor);
        int64_t g = g0;
        for (; g + 2 <= end; g += 2)
            two_groups<V>(x + g * kQuantGroup, factors + (g - g0), q + g * kQuantGroup, sum16 + 2 * g);
        for (int64_t i = 2 * g; i < 2 * end; ++i) {
            const auto codes = V::round(V::mul(V::load(x + i * kLanes), V::set(factors[g - g0])));
            V::store_i8(q + i * kLanes, codes);
            sum16[i] = V::isum(codes);
        }
        if (end % block == 0 || end == groups) {
            const int lane = without_outlier<V>(x + at * kQuantGroup, top, q + at * kQuantGroup, scale + at, sum16 + 2 * at);
            *outlier++ = {static_cast<uint32_t>(at % block * kQuantGroup + lane), x[at * kQuantGroup + lane]};
            top = -1;
        }
    }
    for (int64_t g = 0; g < groups; ++g)
        sum32[g] = static_cast<int32_t>(static_cast<uint32_t>(sum16[2 * g]) + static_cast<uint32_t>(sum16[2 * g + 1]));
}

} // namespace quaff::kernels
