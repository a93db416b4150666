// 16 lanes in four q registers. max and min are compare and select: vmaxq_f32 differs on NaN and signed zero (NUMERICS 5).
#pragma once
#include "vec_common.h"

#include <arm_neon.h>

namespace quaff::isa {

struct VecNeon {
    struct F {
        float32x4_t a, b, c, d;
    };
    struct I {
        int32x4_t a, b, c, d;
    };
    using M = I; // all ones or all zeros a lane
    // Attention: 6 rows x 1 block of 4 registers = 24 accumulators, 4 registers of K or V and a broadcast: 29 of 32.
    static constexpr int kAttendRows = 6, kAttendBlocks = 1;

    QUAFF_INLINE static F zero() { return set(0.0f); }
    QUAFF_INLINE static F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
    QUAFF_INLINE static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
    QUAFF_INLINE static void store(float* p, F v) {
        vst1q_f32(p, v.a);
        vst1q_f32(p + 4, v.b);
        vst1q_f32(p + 8, v.c);
        vst1q_f32(p + 12, v.d);
    }
    QUAFF_INLINE static F load_part(const float* p, int64_t n, float pad) { return isa::load_part<VecNeon>(p, n, pad); }
    QUAFF_INLINE static void store_part(float* p, int64_t n, F v) { isa::store_part<VecNeon>(p, n, v); }

    QUAFF_INLINE static F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)}; }
    QUAFF_INLINE static F sub(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)}; }
    QUAFF_INLINE static F mul(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)}; }
    QUAFF_INLINE static F div(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)}; }
    QUAFF_INLINE static F sqrt(F x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b), vsqrtq_f32(x.c), vsqrtq_f32(x.d)}; }
    QUAFF_INLINE static F fma(F x, F y, F z) {
        return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
    }
    QUAFF_INLINE static F max(F x, F y) { return select(gt(x, y), x, y); }
    QUAFF_INLINE static F min(F x, F y) { return select(lt(x, y), x, y); }
    QUAFF_INLINE static F rint(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }
    QUAFF_INLINE static F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
    QUAFF_INLINE static F neg(F x) { return {vnegq_f32(x.a), vnegq_f32(x.b), vnegq_f32(x.c), vnegq_f32(x.d)}; }
    QUAFF_INLINE static F copysign(F size, F sign) { return select(iset(0x7fffffff), size, sign); }
    QUAFF_INLINE static M gt(F x, F y) {
        return {mask(vcgtq_f32(x.a, y.a)), mask(vcgtq_f32(x.b, y.b)), mask(vcgtq_f32(x.c, y.c)), mask(vcgtq_f32(x.d, y.d))};
    }
    QUAFF_INLINE static M lt(F x, F y) { return gt(y, x); }
    QUAFF_INLINE static M both(M x, M y) { return iand(x, y); }
    QUAFF_INLINE static F select(M m, F yes, F no) {
        return {vbslq_f32(uint(m.a), yes.a, no.a), vbslq_f32(uint(m.b), yes.b, no.b), vbslq_f32(uint(m.c), yes.c, no.c),
                vbslq_f32(uint(m.d), yes.d, no.d)};
    }
    QUAFF_INLINE static F zero_where(M m, F v) { return select(m, zero(), v); } // m ? +0 : v
    // p * 2^n for integral n and a normal result: 2^n is built from its exponent bits.
    QUAFF_INLINE static F ldexp(F p, F n) { return mul(p, from_bits(shl<23>(iadd(round(n), iset(127))))); }

    QUAFF_INLINE static I iset(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
    QUAFF_INLINE static I iota() {
        alignas(16) static constexpr int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return iload(lanes);
    }
    QUAFF_INLINE static I iload(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
    QUAFF_INLINE static void istore(int32_t* p, I v) {
        vst1q_s32(p, v.a);
        vst1q_s32(p + 4, v.b);
        vst1q_s32(p + 8, v.c);
        vst1q_s32(p + 12, v.d);
    }
    QUAFF_INLINE static I iadd(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I isub(I x, I y) { return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b), vsubq_s32(x.c, y.c), vsubq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I imul(I x, I y) { return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b), vmulq_s32(x.c, y.c), vmulq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I imax(I x, I y) { return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b), vmaxq_s32(x.c, y.c), vmaxq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I iand(I x, I y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b), vandq_s32(x.c, y.c), vandq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I ior(I x, I y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b), vorrq_s32(x.c, y.c), vorrq_s32(x.d, y.d)}; }
    QUAFF_INLINE static I ixor(I x, I y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b), veorq_s32(x.c, y.c), veorq_s32(x.d, y.d)}; }
    QUAFF_INLINE static M igt(I x, I y) {
        return {mask(vcgtq_s32(x.a, y.a)), mask(vcgtq_s32(x.b, y.b)), mask(vcgtq_s32(x.c, y.c)), mask(vcgtq_s32(x.d, y.d))};
    }
    template <int n> QUAFF_INLINE static I shl(I x) {
        return {vshlq_n_s32(x.a, n), vshlq_n_s32(x.b, n), vshlq_n_s32(x.c, n), vshlq_n_s32(x.d, n)};
    }
    template <int n> QUAFF_INLINE static I shr(I x) {
        return {vshrq_n_s32(x.a, n), vshrq_n_s32(x.b, n), vshrq_n_s32(x.c, n), vshrq_n_s32(x.d, n)};
    }                                                  // arithmetic
    template <int n> QUAFF_INLINE static I shru(I x) { // logical
        return {mask(vshrq_n_u32(uint(x.a), n)), mask(vshrq_n_u32(uint(x.b), n)), mask(vshrq_n_u32(uint(x.c), n)),
                mask(vshrq_n_u32(uint(x.d), n))};
    }
    QUAFF_INLINE static I shru(I x, int n) {
        const int32x4_t by = vdupq_n_s32(-n); // a shift to the left by a negative count is one to the right
        return {mask(vshlq_u32(uint(x.a), by)), mask(vshlq_u32(uint(x.b), by)), mask(vshlq_u32(uint(x.c), by)),
                mask(vshlq_u32(uint(x.d), by))};
    }
    QUAFF_INLINE static int ifind(I a, I b, int32_t x) { return isa::ifind<VecNeon>(a, b, x); }
    QUAFF_INLINE static F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
    QUAFF_INLINE static I round(F x) { // nearest even, |x| < 2^31
        return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)};
    }
    QUAFF_INLINE static I bits(F x) {
        return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b), vreinterpretq_s32_f32(x.c), vreinterpretq_s32_f32(x.d)};
    }
    QUAFF_INLINE static F from_bits(I x) {
        return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b), vreinterpretq_f32_s32(x.c), vreinterpretq_f32_s32(x.d)};
    }

    QUAFF_INLINE static F load_f16(const uint16_t* p) {
        const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(p)), y = vreinterpretq_f16_u16(vld1q_u16(p + 8));
        return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)), vcvt_high_f32_f16(y)};
    }
    QUAFF_INLINE static F load_bf16(const uint16_t* p) {
        const uint16x8_t x = vld1q_u16(p), y = vld1q_u16(p + 8);
        return from_bits({mask(vshll_n_u16(vget_low_u16(x), 16)), mask(vshll_high_n_u16(x, 16)), mask(vshll_n_u16(vget_low_u16(y), 16)),
                          mask(vshll_high_n_u16(y, 16))});
    }
    QUAFF_INLINE static I load_i8(const int8_t* p) {
        const int8x16_t v = vld1q_s8(p);
        const int16x8_t x = vmovl_s8(vget_low_s8(v)), y = vmovl_high_s8(v);
        return {vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x), vmovl_s16(vget_low_s16(y)), vmovl_high_s16(y)};
    }
    QUAFF_INLINE static I load_u8(const uint8_t* p) {
        const uint8x16_t v = vld1q_u8(p);
        const uint16x8_t x = vmovl_u8(vget_low_u8(v)), y = vmovl_high_u8(v);
        return {mask(vmovl_u16(vget_low_u16(x))), mask(vmovl_high_u16(x)), mask(vmovl_u16(vget_low_u16(y))), mask(vmovl_high_u16(y))};
    }
    QUAFF_INLINE static void store_i8(int8_t* p, I v) { // values in [-128, 127]
        const int16x8_t x = vmovn_high_s32(vmovn_s32(v.a), v.b), y = vmovn_high_s32(vmovn_s32(v.c), v.d);
        vst1q_s8(p, vmovn_high_s16(vmovn_s16(x), y));
    }
    QUAFF_INLINE static void store_i16(int16_t* p, I v) { // values of 16 bits
        vst1q_s16(p, vmovn_high_s32(vmovn_s32(v.a), v.b));
        vst1q_s16(p + 8, vmovn_high_s32(vmovn_s32(v.c), v.d));
    }
    // 16 pairs of 16-bit codes, first and second ones apart; to sums, integers held as bits, products of pairs are added.
    struct Pairs {
        int16x8x2_t a, b;
    };
    QUAFF_INLINE static Pairs load_pairs(const int16_t* p) { return {vld2q_s16(p), vld2q_s16(p + 16)}; }
    QUAFF_INLINE static int16x4_t set_pair(const int16_t* p) {
        int32_t both;
        __builtin_memcpy(&both, p, 4);
        return vreinterpret_s16_s32(vdup_n_s32(both));
    }
    QUAFF_INLINE static F dot_pairs(F bits_of_sum, Pairs x, int16x4_t pair) {
        I sum = bits(bits_of_sum);
        sum = {vmlal_lane_s16(sum.a, vget_low_s16(x.a.val[0]), pair, 0), vmlal_high_lane_s16(sum.b, x.a.val[0], pair, 0),
               vmlal_lane_s16(sum.c, vget_low_s16(x.b.val[0]), pair, 0), vmlal_high_lane_s16(sum.d, x.b.val[0], pair, 0)};
        sum = {vmlal_lane_s16(sum.a, vget_low_s16(x.a.val[1]), pair, 1), vmlal_high_lane_s16(sum.b, x.a.val[1], pair, 1),
               vmlal_lane_s16(sum.c, vget_low_s16(x.b.val[1]), pair, 1), vmlal_high_lane_s16(sum.d, x.b.val[1], pair, 1)};
        return from_bits(sum);
    }

    // Folds of NUMERICS 6: lanes j and j + w for w = 8, 4, 2, 1.
    QUAFF_INLINE static float sum(F v) {
        const float32x4_t y = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
        const float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));
        return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
    }
    QUAFF_INLINE static float top(F v) {
        const float32x4_t y = larger(larger(v.a, v.c), larger(v.b, v.d));
        const float even = larger(vgetq_lane_f32(y, 0), vgetq_lane_f32(y, 2)), odd = larger(vgetq_lane_f32(y, 1), vgetq_lane_f32(y, 3));
        return larger(even, odd);
    }
    QUAFF_INLINE static int32_t isum(I v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.a, v.b), vaddq_s32(v.c, v.d))); }
    QUAFF_INLINE static int32_t itop(I v) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.a, v.b), vmaxq_s32(v.c, v.d))); }

    // 32 floats as 16 pairs: first and second of each, and back.
    QUAFF_INLINE static void unzip(const float* p, F& first, F& second) {
        const float32x4x2_t a = vld2q_f32(p), b = vld2q_f32(p + 8), c = vld2q_f32(p + 16), d = vld2q_f32(p + 24);
        first = {a.val[0], b.val[0], c.val[0], d.val[0]};
        second = {a.val[1], b.val[1], c.val[1], d.val[1]};
    }
    QUAFF_INLINE static void zip(float* p, F first, F second) {
        vst2q_f32(p, (float32x4x2_t{{first.a, second.a}}));
        vst2q_f32(p + 8, (float32x4x2_t{{first.b, second.b}}));
        vst2q_f32(p + 16, (float32x4x2_t{{first.c, second.c}}));
        vst2q_f32(p + 24, (float32x4x2_t{{first.d, second.d}}));
    }

private:
    QUAFF_INLINE static int32x4_t mask(uint32x4_t m) { return vreinterpretq_s32_u32(m); }
    QUAFF_INLINE static uint32x4_t uint(int32x4_t m) { return vreinterpretq_u32_s32(m); }
    QUAFF_INLINE static float larger(float x, float y) { return x > y ? x : y; }
    QUAFF_INLINE static float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
};

} // namespace quaff::isa
