// NUMERICS 15: RMS norm of one row.
#pragma once
#include "functions.h"

namespace quaff::kernels {

template <class V> static float rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
    using F = typename V::F;
    const float s = V::sum(fold<V>(x, n, 0.0f, [](F lanes, F v) { return V::fma(v, v, lanes); }));
    const F r = V::set(1.0f / __builtin_sqrtf(s / static_cast<float>(n) + eps));
    map<V>(x, w, y, n, [r](F v, F weight) { return V::mul(V::mul(v, r), weight); });
    return s;
}

} // namespace quaff::kernels
