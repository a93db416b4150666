// NUMERICS 17: causal convolution of every channel with its own few taps.
#pragma once
#include "functions.h"
#include "table.h"

namespace quaff::kernels {

// Channels c .. c + n - 1 of one row, n <= 16. A missing row is +0: its link would leave the chain as it is.
template <class V, class Load, class Store> QUAFF_INLINE void conv_lanes(const ConvArgs& a, int64_t c, Load load, Store store) {
    auto acc = V::zero();
    for (int64_t t = 0; t < a.taps; ++t) {
        if (!a.rows[t])
            continue;
        auto x = load(a.rows[t] + c);
        if (a.factors[t])
            x = V::mul(load(a.factors[t] + c), x);
        acc = V::fma(x, V::load(a.w + c * a.taps + t * kLanes), acc);
    }
    if (a.bias)
        acc = V::add(acc, load(a.bias + c));
    store(a.y + c, a.gate ? V::mul(load(a.gate + c), acc) : silu<V>(acc));
}

template <class V> static void conv(const ConvArgs* args) {
    using F = typename V::F;
    const ConvArgs& a = *args;
    int64_t c = 0;
    for (; c + kLanes <= a.channels; c += kLanes)
        conv_lanes<V>(
            a, c, [](const float* p) { return V::load(p); }, [](float* p, F v) { V::store(p, v); });
    if (const int64_t n = a.channels - c; n > 0)
        conv_lanes<V>(
            a, c, [n](const float* p) { return V::load_part(p, n, 0.0f); }, [n](float* p, F v) { V::store_part(p, n, v); });
}

} // namespace quaff::kernels
