// Softmax over the vocabulary in three passes, each with the width-16 fold (NUMERICS 6, 9, 20).
#pragma once
#include "functions.h"

namespace quaff::kernels {

template <class V> static float row_max(const float* x, int64_t n) {
    using F = typename V::F;
    return V::top(fold<V>(x, n, -__builtin_inff(), [](F lanes, F v) { return V::max(lanes, v); }));
}

template <class V> static float sum16(const float* x, int64_t n) {
    using F = typename V::F;
    return V::sum(fold<V>(x, n, 0.0f, [](F lanes, F v) { return V::add(lanes, v); }));
}

template <class V> static void probabilities(const float* x, float m, float* p, int64_t n) {
    using F = typename V::F;
    const F top = V::set(m);
    map<V>(x, p, n, [top](F v) { return probability<V>(V::sub(v, top)); });
}

} // namespace quaff::kernels
