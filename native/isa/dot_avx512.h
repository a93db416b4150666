// Integer dots of 16 rows in one zmm register: vpdpbusd takes the stored codes (unsigned) and four activations (signed), and never saturates here.
// A Dot is a struct of static functions. `bits` is how many a stored code has: 8 (code + 128), or 6, 5, 4 for codes below 64, 32 or 16.
#pragma once
#include "vec_avx512.h"

namespace quaff::isa {

struct DotAvx512 {
    using V = VecAvx512;
    using Bytes = __m512i; // 16 rows x 4 k of stored codes
    using Table = __m512i;
    template <int bits> using Operand = __m512i;
    template <int bits> using Part = __m512i;
    template <int bits> static constexpr int kSteps = 8; // dots that a Part takes before it is finished
    // What 8-bit codes still exceed the true ones by inside a dot: the accumulator starts at -kWideOffset * sum(q).
    static constexpr int32_t kWideOffset = 128;
    // 2 panels x 6 tokens = 12 dots and 12 f32 chains, 2 registers of codes and a broadcast: 27 of 32.
    static constexpr int kTokens = 6, kPanels = 2;
    static constexpr bool kUnpacksNibbles = true;       // in tiles of many tokens: 5 and 6 bits take longer than they save
    static constexpr int64_t kManyTokens[2] = {36, 18}; // worth prepared panels: groups of 16, of 32
    static constexpr int kFloatTokens = 6, kFloatPanels = 2;

    QUAFF_INLINE static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    QUAFF_INLINE static void store(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }
    // `bits` of every byte from `shift` on.
    QUAFF_INLINE static Bytes field(Bytes b, int shift, int bits) {
        const Bytes moved = shift ? _mm512_srli_epi16(b, static_cast<unsigned>(shift)) : b;
        return bits == 8 ? moved : _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>((1 << bits) - 1)));
    }
    // low | field(b, shift, bits) << at
    QUAFF_INLINE static Bytes merge(Bytes low, Bytes b, int shift, int bits, int at) {
        const Bytes moved = shift > at   ? _mm512_srli_epi16(b, static_cast<unsigned>(shift - at))
                            : shift < at ? _mm512_slli_epi16(b, static_cast<unsigned>(at - shift))
                                         : b;
        return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << at)), 0xf8); // a | (b & c)
    }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives 8-bit codes
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook));
        return _mm512_broadcast_i32x4(_mm_xor_si128(values, _mm_set1_epi8(-128)));
    }
    QUAFF_INLINE static Bytes lookup(Table t, Bytes nibbles) { return _mm512_shuffle_epi8(t, nibbles); }

    template <int bits> QUAFF_INLINE static Operand<bits> operand(Bytes b) { return b; }
    template <int bits> QUAFF_INLINE static Part<bits> begin(int32_t start) { return _mm512_set1_epi32(start); }
    template <int bits> QUAFF_INLINE static void dot(Part<bits>& part, Operand<bits> w, const int8_t* q) {
        int32_t four;
        __builtin_memcpy(&four, q, 4);
        part = _mm512_dpbusd_epi32(part, w, _mm512_set1_epi32(four));
    }
    template <int bits> QUAFF_INLINE static V::I finish(Part<bits> part, int32_t) { return part; }
};

} // namespace quaff::isa
