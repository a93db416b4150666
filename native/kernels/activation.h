// NUMERICS 10: gated activations, and the plain row operations.
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
