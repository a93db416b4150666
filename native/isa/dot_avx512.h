// Integer dots of 16 rows in one zmm register: vpdpbusd takes the stored codes (unsigned) and four activations (signed), and never saturates here.
// A Dot is a struct of static functions. "Wide" codes are stored as code + 128, the others as bare nibbles 0..15.
#pragma once
#include "vec_avx512.h"

namespace quaff::isa {

struct DotAvx512 {
    using V = VecAvx512;
    using Bytes = __m512i; // 16 rows x 4 k of stored codes
    using Table = __m512i;
    template <bool wide> using Operand = __m512i;
    template <bool wide> using Part = __m512i;
    // Sum of the wide codes' excess that the dots still contain: the accumulator starts at -kWideOffset * sum(q).
    static constexpr int32_t kWideOffset = 128;
    // 2 panels x 6 tokens = 12 dots and 12 f32 chains, 2 registers of codes and a broadcast: 27 of 32. Up to 3 tokens are bound by memory:
    // one panel at a time is one stream of addresses, and the groups in flight hide the latency of the chain.
    static constexpr int kTokens = 6;
    static constexpr int panels(int tokens) { return tokens <= 3 ? 1 : 2; }
    static constexpr int kFloatTokens = 6, kFloatPanels = 2;

    QUAFF_INLINE static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    QUAFF_INLINE static void store(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }
    QUAFF_INLINE static Bytes low(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
    QUAFF_INLINE static Bytes high(Bytes b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives wide codes
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook));
        return _mm512_broadcast_i32x4(_mm_xor_si128(values, _mm_set1_epi8(-128)));
    }
    QUAFF_INLINE static Bytes lookup(Table t, Bytes nibbles) { return _mm512_shuffle_epi8(t, nibbles); }

    template <bool wide> QUAFF_INLINE static Operand<wide> operand(Bytes b) { return b; }
    template <bool wide> QUAFF_INLINE static Part<wide> begin(int32_t start) { return _mm512_set1_epi32(start); }
    template <bool wide> QUAFF_INLINE static void dot(Part<wide>& part, Operand<wide> w, const int8_t* q) {
        int32_t four;
        __builtin_memcpy(&four, q, 4);
        part = _mm512_dpbusd_epi32(part, w, _mm512_set1_epi32(four));
    }
    template <bool wide> QUAFF_INLINE static V::I finish(Part<wide> part, int32_t) { return part; }
};

} // namespace quaff::isa
