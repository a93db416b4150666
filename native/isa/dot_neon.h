// Integer dots of 16 rows in four q registers: sdot on signed codes, so wide codes lose their 128 first and nibbles are used as they are.
#pragma once
#include "vec_neon.h"

namespace quaff::isa {

struct DotNeon {
    using V = VecNeon;
    struct Bytes {
        uint8x16_t a, b, c, d;
    };
    using Table = uint8x16_t;
    template <bool wide> using Operand = Bytes;
    template <bool wide> using Part = V::I;
    static constexpr int32_t kWideOffset = 0;
    // 3 tokens: 12 sums, 12 f32 chains, 4 registers of codes and a broadcast: 29 of 32.
    static constexpr int kTokens = 3;
    static constexpr int panels(int) { return 1; }
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    QUAFF_INLINE static Bytes load(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
    QUAFF_INLINE static void store(uint8_t* p, Bytes x) {
        vst1q_u8(p, x.a);
        vst1q_u8(p + 16, x.b);
        vst1q_u8(p + 32, x.c);
        vst1q_u8(p + 48, x.d);
    }
    QUAFF_INLINE static Bytes low(Bytes x) {
        const uint8x16_t mask = vdupq_n_u8(15);
        return {vandq_u8(x.a, mask), vandq_u8(x.b, mask), vandq_u8(x.c, mask), vandq_u8(x.d, mask)};
    }
    QUAFF_INLINE static Bytes high(Bytes x) { return {vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4), vshrq_n_u8(x.c, 4), vshrq_n_u8(x.d, 4)}; }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives wide codes
        return veorq_u8(vreinterpretq_u8_s8(vld1q_s8(codebook)), vdupq_n_u8(128));
    }
    QUAFF_INLINE static Bytes lookup(Table t, Bytes x) {
        return {vqtbl1q_u8(t, x.a), vqtbl1q_u8(t, x.b), vqtbl1q_u8(t, x.c), vqtbl1q_u8(t, x.d)};
    }

    template <bool wide> QUAFF_INLINE static Operand<wide> operand(Bytes x) {
        if constexpr (!wide)
            return x;
        const uint8x16_t flip = vdupq_n_u8(128);
        return {veorq_u8(x.a, flip), veorq_u8(x.b, flip), veorq_u8(x.c, flip), veorq_u8(x.d, flip)};
    }
    template <bool wide> QUAFF_INLINE static Part<wide> begin(int32_t start) { return V::iset(start); }
    template <bool wide> QUAFF_INLINE static void dot(Part<wide>& part, const Operand<wide>& w, const int8_t* q) {
        int32_t word;
        __builtin_memcpy(&word, q, 4);
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word));
        part.a = vdotq_s32(part.a, vreinterpretq_s8_u8(w.a), x);
        part.b = vdotq_s32(part.b, vreinterpretq_s8_u8(w.b), x);
        part.c = vdotq_s32(part.c, vreinterpretq_s8_u8(w.c), x);
        part.d = vdotq_s32(part.d, vreinterpretq_s8_u8(w.d), x);
    }
    template <bool wide> QUAFF_INLINE static V::I finish(Part<wide> part, int32_t) { return part; }
};

} // namespace quaff::isa
