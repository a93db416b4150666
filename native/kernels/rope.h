// NUMERICS 11: rotary positions on one row of heads, in place.
#pragma once
#include "functions.h"

namespace quaff::kernels {

// y0 = x0*c - x1*s, y1 = x1*c + x0*s, each with the roundings of the contract.
template <class V> QUAFF_INLINE void turn(typename V::F& x0, typename V::F& x1, typename V::F c, typename V::F s) {
    const auto y0 = V::fma(x0, c, V::neg(V::mul(x1, s)));
    x1 = V::fma(x1, c, V::mul(x0, s));
    x0 = y0;
}

template <class V> static void rope(float* x, const float* cs, int64_t heads, int64_t dim, int64_t half, bool interleaved) {
    using F = typename V::F;
    const float *cosine = cs, *sine = cs + half;
    for (float* head = x; head < x + heads * dim; head += dim) {
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            F x0, x1;
            if (interleaved) {
                V::unzip(head + 2 * i, x0, x1);
            } else {
                x0 = V::load(head + i);
                x1 = V::load(head + half + i);
            }
            turn<V>(x0, x1, V::load(cosine + i), V::load(sine + i));
            if (interleaved) {
                V::zip(head + 2 * i, x0, x1);
            } else {
                V::store(head + i, x0);
                V::store(head + half + i, x1);
            }
        }
        if (i == half)
            continue;
        // The last pairs of a head whose half is not a multiple of 16 pass through a padded copy.
        const int64_t n = half - i, step = interleaved ? 2 : 1, second = interleaved ? 1 : half;
        float pairs[2][kLanes] = {};
        float* from = head + step * i;
        for (int64_t j = 0; j < n; ++j) {
            pairs[0][j] = from[step * j];
            pairs[1][j] = from[step * j + second];
        }
        F x0 = V::load(pairs[0]), x1 = V::load(pairs[1]);
        turn<V>(x0, x1, V::load_part(cosine + i, n, 0.0f), V::load_part(sine + i, n, 0.0f));
        V::store(pairs[0], x0);
        V::store(pairs[1], x1);
        for (int64_t j = 0; j < n; ++j) {
            from[step * j] = pairs[0][j];
            from[step * j + second] = pairs[1][j];
        }
    }
}

} // namespace quaff::kernels
