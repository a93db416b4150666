// NUMERICS 10: gated activations, and the plain row operations; NUMERICS 18: how the rows of experts are combined.
#pragma once
#include "functions.h"

namespace quaff::kernels {

template <class V> static void swiglu(const float* gate, const float* up, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(gate, up, y, n, [](F g, F u) { return V::mul(silu<V>(g), u); });
}

template <class V> static void geglu_tanh(const float* gate, const float* up, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(gate, up, y, n, [](F g, F u) { return V::mul(gelu_tanh<V>(g), u); });
}

template <class V> static void sigmoid_gate(const float* gate, const float* up, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(gate, up, y, n, [](F g, F u) { return V::mul(sigmoid<V>(g), u); });
}

template <class V> static void swiglu_clamped(const float* gate, const float* up, float* y, int64_t n, float alpha, float limit) {
    using F = typename V::F;
    const F slope = V::set(alpha), high = V::set(limit), low = V::set(-limit), one = V::set(1.0f);
    map<V>(gate, up, y, n, [=](F g, F u) {
        g = V::min(g, high);
        u = V::min(V::max(u, low), high);
        return V::mul(V::div(g, V::add(one, exponential<V>(V::neg(V::mul(slope, g))))), V::add(u, one));
    });
}

template <class V> static float dot16(const float* x, const float* w, int64_t n) {
    auto lanes = V::zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        lanes = V::fma(V::load(x + i), V::load(w + i), lanes);
    if (i < n)
        lanes = V::fma(V::load_part(x + i, n - i, 0.0f), V::load_part(w + i, n - i, 0.0f), lanes);
    return V::sum(lanes);
}

template <class V> static void combine(const float* const* row, const float* weight, int64_t count, float* y, int64_t n, bool accumulate) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        auto sum = V::zero();
        for (int64_t j = 0; j < count; ++j)
            sum = V::fma(V::set(weight[j]), V::load(row[j] + i), sum);
        V::store(y + i, accumulate ? V::add(V::load(y + i), sum) : sum);
    }
    if (i < n) {
        auto sum = V::zero();
        for (int64_t j = 0; j < count; ++j)
            sum = V::fma(V::set(weight[j]), V::load_part(row[j] + i, n - i, 0.0f), sum);
        V::store_part(y + i, n - i, accumulate ? V::add(V::load_part(y + i, n - i, 0.0f), sum) : sum);
    }
}

template <class V> static void add_row(float* y, const float* x, int64_t n) {
    using F = typename V::F;
    map<V>(y, x, y, n, [](F a, F b) { return V::add(a, b); });
}

template <class V> static void add_scaled_row(float* y, const float* x, float s, int64_t n) {
    using F = typename V::F;
    const F factor = V::set(s);
    map<V>(y, x, y, n, [factor](F a, F b) { return V::fma(b, factor, a); });
}

template <class V> static void soft_cap_row(float* y, float cap, int64_t n) {
    using F = typename V::F;
    const F top = V::set(cap), inverse = V::set(1.0f / cap);
    map<V>(y, y, n, [top, inverse](F v) { return V::mul(top, tanh<V>(V::mul(v, inverse))); });
}

template <class V> static void scale_row(float* y, float s, int64_t n) {
    using F = typename V::F;
    const F factor = V::set(s);
    map<V>(y, y, n, [factor](F v) { return V::mul(v, factor); });
}

template <class V> static void exp_row(const float* x, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(x, y, n, [](F v) { return exponential<V>(v); });
}

template <class V> static void sigmoid_row(const float* x, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(x, y, n, [](F v) { return sigmoid<V>(v); });
}

template <class V> static void tanh_row(const float* x, float* y, int64_t n) {
    using F = typename V::F;
    map<V>(x, y, n, [](F v) { return tanh<V>(v); });
}

} // namespace quaff::kernels
