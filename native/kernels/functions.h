// NUMERICS 9 and 10: the exponential and what is made of it, on 16 lanes. Constants and their derivation: numerics.h.
#pragma once
#include "../isa/vec_common.h"

namespace quaff::kernels {

// E(x). The clamp's operand order lets a NaN through: it must stay visible, not become exp(-87).
template <class V> QUAFF_INLINE typename V::F exponential(typename V::F x) {
    x = V::min(V::set(kExpMax), V::max(V::set(kExpMin), x));
    const auto n = V::rint(V::mul(x, V::set(kLog2e)));
    const auto r = V::fma(n, V::set(-kLn2Lo), V::fma(n, V::set(-kLn2Hi), x));
    auto p = V::fma(V::set(kExpC4), r, V::set(kExpC3));
    p = V::fma(p, r, V::set(kExpC2));
    p = V::fma(p, r, V::set(kExpC1));
    p = V::fma(p, r, V::set(kExpC0));
    return V::ldexp(V::fma(V::mul(p, r), r, V::add(r, V::set(1.0f))), n);
}

// P(x), a probability: +0 below -64.
template <class V> QUAFF_INLINE typename V::F probability(typename V::F x) {
    return V::zero_where(V::lt(x, V::set(kProbMin)), exponential<V>(x));
}

template <class V> QUAFF_INLINE typename V::F sigmoid(typename V::F x) {
    return V::div(V::set(1.0f), V::add(V::set(1.0f), exponential<V>(V::neg(x))));
}

template <class V> QUAFF_INLINE typename V::F silu(typename V::F x) { return V::div(x, V::add(V::set(1.0f), exponential<V>(V::neg(x)))); }

template <class V> QUAFF_INLINE typename V::F tanh(typename V::F x) {
    const auto t = exponential<V>(V::mul(V::set(-2.0f), V::abs(x)));
    return V::copysign(V::div(V::sub(V::set(1.0f), t), V::add(V::set(1.0f), t)), x);
}

template <class V> QUAFF_INLINE typename V::F gelu_tanh(typename V::F x) {
    const auto u = V::mul(V::set(kGeluRoot), V::fma(V::mul(V::mul(V::set(kGeluCube), x), x), x, x));
    return V::div(x, V::add(V::set(1.0f), exponential<V>(V::mul(V::set(-2.0f), u))));
}

// log(1 + t) for 0 <= t <= 1.
template <class V> QUAFF_INLINE typename V::F log1p(typename V::F t) {
    const auto w = V::div(V::mul(V::set(2.0f), t), V::add(V::set(2.0f), t));
    const auto z = V::mul(V::mul(w, w), V::set(0.25f));
    auto p = V::fma(V::set(kLog1pC3), z, V::set(kLog1pC2));
    p = V::fma(p, z, V::set(kLog1pC1));
    p = V::fma(p, z, V::set(kLog1pC0));
    return V::fma(V::mul(w, z), p, w);
}

// log(1 + e^x) without overflow.
template <class V> QUAFF_INLINE typename V::F softplus(typename V::F x) {
    return V::add(V::max(x, V::zero()), log1p<V>(exponential<V>(V::neg(V::abs(x)))));
}

// y[i] = f(x[i]), or f(x[i], z[i]): tails are padded with +0 and stored in part.
template <class V, class Fn> QUAFF_INLINE void map(const float* x, float* y, int64_t n, Fn f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        V::store(y + i, f(V::load(x + i)));
    if (i < n)
        V::store_part(y + i, n - i, f(V::load_part(x + i, n - i, 0.0f)));
}

template <class V, class Fn> QUAFF_INLINE void map(const float* x, const float* z, float* y, int64_t n, Fn f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        V::store(y + i, f(V::load(x + i), V::load(z + i)));
    if (i < n)
        V::store_part(y + i, n - i, f(V::load_part(x + i, n - i, 0.0f), V::load_part(z + i, n - i, 0.0f)));
}

// The width-16 fold before its tree: lane j takes elements j, j+16, ... by step(lane, elements); a short last step is padded.
template <class V, class Fn> QUAFF_INLINE typename V::F fold(const float* x, int64_t n, float start, Fn step) {
    auto lanes = V::set(start);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        lanes = step(lanes, V::load(x + i));
    if (i < n)
        lanes = step(lanes, V::load_part(x + i, n - i, start));
    return lanes;
}

} // namespace quaff::kernels
