// Ceilings of one core, measured by the operations the kernels live on: registers only, enough independent chains to hide latency; and reads.
#pragma once
#include "../isa/vec_common.h"

namespace quaff::kernels {

// A value the compiler must believe may have changed, so that nothing is hoisted out of a loop or computed in closed form.
template <class T> QUAFF_INLINE void touch(T* p) { asm volatile("" : : "r"(p) : "memory"); }

// f32 fma over as many chains as the attention tile keeps. Returns multiply-accumulates.
template <class V> static int64_t spin_fma(int64_t iterations) {
    constexpr int kChains = V::kAttendRows * V::kAttendBlocks;
    alignas(64) float memory[kLanes] = {};
    typename V::F chain[kChains];
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) {
        touch(memory);
        chain[i] = V::load(memory);
    }
    touch(memory);
    const auto x = V::load(memory);
    for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 32
        for (int i = 0; i < kChains; ++i)
            chain[i] = V::fma(chain[i], x, x);
    auto sum = V::zero();
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i)
        sum = V::add(sum, chain[i]);
    V::store(memory, sum);
    touch(memory);
    return iterations * kChains * kLanes;
}

// Pairs of 16-bit codes, over chains in the same way. Written out: with the step as a function object g++ 12 keeps the chains of AVX2 in memory (24
// instead of 117 GMAC/s of fma).
template <class V> static int64_t spin_int16(int64_t iterations) {
    constexpr int kChains = V::kAttendRows * V::kAttendBlocks;
    alignas(64) float memory[kLanes] = {};
    alignas(64) int16_t codes[2 * kLanes] = {};
    typename V::F chain[kChains];
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) {
        touch(memory);
        chain[i] = V::load(memory);
    }
    touch(codes);
    const auto x = V::load_pairs(codes);
    for (int64_t n = 0; n < iterations; ++n) {
        touch(codes);
        const auto y = V::set_pair(codes);
#pragma GCC unroll 32
        for (int i = 0; i < kChains; ++i)
            chain[i] = V::dot_pairs(chain[i], x, y);
    }
    auto sum = V::iset(0);
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i)
        sum = V::iadd(sum, V::bits(chain[i]));
    V::store(memory, V::from_bits(sum));
    touch(memory);
    return iterations * kChains * 2 * kLanes;
}

// Bytes of codes times activations, 16 rows x 4 k an instruction, in the shape of the linear tile: kTokens broadcasts, each used by all panels.
template <class D> static int64_t spin_int8(int64_t iterations) {
    constexpr int T = D::kTokens, R = D::kPanels;
    alignas(64) uint8_t codes[64] = {};
    alignas(64) int8_t q[4 * T] = {};
    touch(codes);
    typename D::template Operand<4> w[R];
    typename D::template Part<4> part[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        touch(codes);
        w[r] = D::template operand<4>(D::load(codes));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            int32_t start = 0;
            touch(&start);
            part[r][t] = D::template begin<4>(start);
        }
    }
    for (int64_t n = 0; n < iterations; ++n) {
        touch(q);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                D::template dot<4>(part[r][t], w[r], q + 4 * t);
    }
    auto sum = D::V::iset(0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            sum = D::V::iadd(sum, D::template finish<4>(part[r][t], 0));
    alignas(64) int32_t sink[kLanes];
    D::V::istore(sink, sum);
    touch(sink);
    return iterations * R * T * 4 * kLanes;
}

// Loads as wide as the set has them, eight chains: bound by what the caches or the memory deliver.
template <class V> static void read(const uint8_t* p, int64_t bytes) {
    alignas(64) int32_t sink[kLanes] = {};
    typename V::I chain[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        chain[i] = V::iset(0);
    for (const uint8_t* end = p + bytes; p < end; p += 512)
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            chain[i] = V::ixor(chain[i], V::iload(reinterpret_cast<const int32_t*>(p + 64 * i)));
    for (int i = 1; i < 8; ++i)
        chain[0] = V::ixor(chain[0], chain[i]);
    V::istore(sink, chain[0]);
    touch(sink);
}

} // namespace quaff::kernels
