// NUMERICS 17: the gated delta rule of one head, and what its inputs go through.
#pragma once
#include "functions.h"
#include "table.h"

namespace quaff::kernels {

// x * (1/sqrt(S + eps)) * scale in place; returns S, whose non-finite value poisons the row.
template <class V> static float unit_norm(float* x, float eps, float scale, int64_t n) {
    using F = typename V::F;
    const float s = V::sum(fold<V>(x, n, 0.0f, [](F lanes, F v) { return V::fma(v, v, lanes); }));
    const F r = V::set(1.0f / __builtin_sqrtf(s + eps)), factor = V::set(scale);
    map<V>(x, x, n, [r, factor](F v) { return V::mul(V::mul(v, r), factor); });
    return s;
}

// x = E(a * softplus(x + dt)), of `n` heads: a is negative, so it is a share that is kept.
template <class V> static void decay_row(float* x, const float* a, const float* dt, int64_t n) {
    using F = typename V::F;
    map<V>(x, dt, x, n, [](F v, F bias) { return softplus<V>(V::add(v, bias)); });
    map<V>(x, a, x, n, [](F v, F rate) { return exponential<V>(V::mul(rate, v)); });
}

// `vectors` times 16 columns of the state. Columns do not meet, so a block stays in the first cache for all rows.
template <class V, int vectors, bool each> QUAFF_INLINE void delta_columns(const DeltaArgs& a, int64_t column) {
    using F = typename V::F;
    for (int64_t row = 0; row < a.rows; ++row) {
        const float *q = a.q + row * a.qk_stride, *k = a.k + row * a.qk_stride, *v = a.v + row * a.v_stride + column;
        const float* keep = a.decay + row * a.decay_stride;
        const F beta = V::set(a.beta[row * a.beta_stride]), one = V::set(keep[0]);
        F sum[vectors], step[vectors];
        for (int c = 0; c < vectors; ++c)
            sum[c] = V::zero();
        const float* s = a.state + column;
        for (int64_t i = 0; i < a.dk; ++i, s += a.dv) {
            const F key = V::set(k[i]), decay = each ? V::set(keep[i]) : one;
            for (int c = 0; c < vectors; ++c)
                sum[c] = V::fma(V::mul(V::load(s + c * kLanes), decay), key, sum[c]);
        }
        for (int c = 0; c < vectors; ++c) {
            step[c] = V::mul(beta, V::sub(V::load(v + c * kLanes), sum[c]));
            sum[c] = V::zero();
        }
        float* t = a.state + column;
        for (int64_t i = 0; i < a.dk; ++i, t += a.dv) {
            const F key = V::set(k[i]), query = V::set(q[i]), decay = each ? V::set(keep[i]) : one;
            for (int c = 0; c < vectors; ++c) {
                const F next = V::fma(key, step[c], V::mul(V::load(t + c * kLanes), decay));
                V::store(t + c * kLanes, next);
                sum[c] = V::fma(next, query, sum[c]);
            }
        }
        for (int c = 0; c < vectors; ++c)
            V::store(a.out + row * a.v_stride + column + c * kLanes, sum[c]);
    }
}

template <class V, bool each> QUAFF_INLINE void delta_blocks(const DeltaArgs& a, int64_t column, int64_t end) {
    for (; column + kDeltaColumns <= end; column += kDeltaColumns)
        delta_columns<V, kDeltaColumns / kLanes, each>(a, column);
    for (; column < end; column += kLanes)
        delta_columns<V, 1, each>(a, column);
}

template <class V> static void delta(const DeltaArgs* args, int64_t column, int64_t end) {
    if (args->decay_each)
        delta_blocks<V, true>(*args, column, end);
    else
        delta_blocks<V, false>(*args, column, end);
}

} // namespace quaff::kernels
