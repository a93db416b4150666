// NUMERICS 12: int8 activations with one scale per 32. Rounding to nearest even of x * (127/amax) never exceeds 127, which integer dots rely on.
#pragma once
#include "functions.h"

namespace quaff::kernels {

template <class V> static void quantize_row(const float* x, int64_t n, int8_t* q, float* scale, int32_t* sum32, int32_t* sum16) {
    static_assert(kQuantGroup == 2 * kLanes);
    const auto magnitude = V::iset(0x7fffffff);
    for (int64_t g = 0; g < n / kQuantGroup; ++g, x += kQuantGroup, q += kQuantGroup) {
        const auto a = V::load(x), b = V::load(x + kLanes);
        // As integers the magnitudes are ordered like the floats, and their maximum is exact in any order.
        const int32_t top = V::itop(V::imax(V::iand(V::bits(a), magnitude), V::iand(V::bits(b), magnitude)));
        const float amax = __builtin_bit_cast(float, top);
        const bool zero = amax < 0x1p-64f;
        scale[g] = zero ? 0.0f : amax / 127.0f;
        const auto factor = V::set(zero ? 0.0f : 127.0f / amax);
        const auto low = V::to_int(V::rint(V::mul(a, factor))), high = V::to_int(V::rint(V::mul(b, factor)));
        V::store_i8(q, low);
        V::store_i8(q + kLanes, high);
        sum16[2 * g] = V::isum(low);
        sum16[2 * g + 1] = V::isum(high);
        sum32[g] = sum16[2 * g] + sum16[2 * g + 1];
    }
}

} // namespace quaff::kernels
