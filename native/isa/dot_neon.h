// Integer dots of 16 rows in four q registers: sdot on signed codes, so 8-bit codes lose their 128 first and shorter ones are used as they are.
#pragma once
#include "vec_neon.h"

namespace quaff::isa {

struct DotNeon {
    using V = VecNeon;
    struct Bytes {
        uint8x16_t a, b, c, d;
    };
    using Table = uint8x16_t;
    template <int bits> using Operand = Bytes;
    template <int bits> using Part = V::I;
    template <int bits> static constexpr int kSteps = 8;
    static constexpr int32_t kWideOffset = 0;
    // 3 tokens: 12 sums, 12 f32 chains, 4 registers of codes and a broadcast: 29 of 32.
    static constexpr int kTokens = 3, kPanels = 1;
    static constexpr bool kUnpacksNibbles = false;
    static constexpr int64_t kManyTokens[2] = {24, 12}; // worth prepared panels: groups of 16, of 32
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    QUAFF_INLINE static Bytes load(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
    QUAFF_INLINE static void store(uint8_t* p, Bytes x) {
        vst1q_u8(p, x.a);
        vst1q_u8(p + 16, x.b);
        vst1q_u8(p + 32, x.c);
        vst1q_u8(p + 48, x.d);
    }
    QUAFF_INLINE static Bytes field(Bytes x, int shift, int bits) {
        const int8x16_t by = vdupq_n_s8(static_cast<int8_t>(-shift)); // a shift to the left by a negative count is one to the right
        const uint8x16_t mask = vdupq_n_u8(static_cast<uint8_t>((1 << bits) - 1));
        return {vandq_u8(vshlq_u8(x.a, by), mask), vandq_u8(vshlq_u8(x.b, by), mask), vandq_u8(vshlq_u8(x.c, by), mask),
                vandq_u8(vshlq_u8(x.d, by), mask)};
    }
    QUAFF_INLINE static Bytes merge(Bytes low, Bytes x, int shift, int bits, int at) {
        const int8x16_t by = vdupq_n_s8(static_cast<int8_t>(at - shift));
        const uint8x16_t mask = vdupq_n_u8(static_cast<uint8_t>(((1 << bits) - 1) << at));
        return {vorrq_u8(low.a, vandq_u8(vshlq_u8(x.a, by), mask)), vorrq_u8(low.b, vandq_u8(vshlq_u8(x.b, by), mask)),
                vorrq_u8(low.c, vandq_u8(vshlq_u8(x.c, by), mask)), vorrq_u8(low.d, vandq_u8(vshlq_u8(x.d, by), mask))};
    }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives 8-bit codes
        return veorq_u8(vreinterpretq_u8_s8(vld1q_s8(codebook)), vdupq_n_u8(128));
    }
    QUAFF_INLINE static Bytes lookup(Table t, Bytes x) {
        return {vqtbl1q_u8(t, x.a), vqtbl1q_u8(t, x.b), vqtbl1q_u8(t, x.c), vqtbl1q_u8(t, x.d)};
    }

    template <int bits> QUAFF_INLINE static Operand<bits> operand(Bytes x) {
        if constexpr (bits != 8)
            return x;
        const uint8x16_t flip = vdupq_n_u8(128);
        return {veorq_u8(x.a, flip), veorq_u8(x.b, flip), veorq_u8(x.c, flip), veorq_u8(x.d, flip)};
    }
    template <int bits> QUAFF_INLINE static Part<bits> begin(int32_t start) { return V::iset(start); }
    template <int bits> QUAFF_INLINE static void dot(Part<bits>& part, const Operand<bits>& w, const int8_t* q) {
        int32_t word;
        __builtin_memcpy(&word, q, 4);
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word));
        part.a = vdotq_s32(part.a, vreinterpretq_s8_u8(w.a), x);
        part.b = vdotq_s32(part.b, vreinterpretq_s8_u8(w.b), x);
        part.c = vdotq_s32(part.c, vreinterpretq_s8_u8(w.c), x);
        part.d = vdotq_s32(part.d, vreinterpretq_s8_u8(w.d), x);
    }
    template <int bits> QUAFF_INLINE static V::I finish(Part<bits> part, int32_t) { return part; }
};

} // namespace quaff::isa
