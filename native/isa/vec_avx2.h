// 16 lanes in two ymm registers, a = lanes 0..7. max(a, b) is a > b ? a : b by definition of vmaxps (NUMERICS 5).
#pragma once
#include "vec_common.h"

#include <immintrin.h>

namespace quaff::isa {

struct VecAvx2 {
    struct F {
        __m256 a, b;
    };
    struct I {
        __m256i a, b;
    };
    using M = F; // all ones or all zeros a lane
    // Attention: 6 rows x 1 block of 2 registers = 12 accumulators, 2 registers of K or V, a broadcast and a product: 16 of 16.
    static constexpr int kAttendRows = 6, kAttendBlocks = 1;

    QUAFF_INLINE static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    QUAFF_INLINE static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    QUAFF_INLINE static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    QUAFF_INLINE static void store(float* p, F v) {
        _mm256_storeu_ps(p, v.a);
        _mm256_storeu_ps(p + 8, v.b);
    }
    QUAFF_INLINE static F load_part(const float* p, int64_t n, float pad) { return isa::load_part<VecAvx2>(p, n, pad); }
    QUAFF_INLINE static void store_part(float* p, int64_t n, F v) { isa::store_part<VecAvx2>(p, n, v); }

    QUAFF_INLINE static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    QUAFF_INLINE static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    QUAFF_INLINE static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    QUAFF_INLINE static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    QUAFF_INLINE static F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
    QUAFF_INLINE static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
    QUAFF_INLINE static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
    QUAFF_INLINE static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
    QUAFF_INLINE static F rint(F x) {
        constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
    }
    QUAFF_INLINE static F abs(F x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
    }
    QUAFF_INLINE static F neg(F x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_xor_ps(sign, x.a), _mm256_xor_ps(sign, x.b)};
    }
    QUAFF_INLINE static F copysign(F size, F from) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_or_ps(_mm256_andnot_ps(sign, size.a), _mm256_and_ps(sign, from.a)),
                _mm256_or_ps(_mm256_andnot_ps(sign, size.b), _mm256_and_ps(sign, from.b))};
    }
    QUAFF_INLINE static M gt(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
    QUAFF_INLINE static M lt(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
    QUAFF_INLINE static M both(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
    QUAFF_INLINE static F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
    QUAFF_INLINE static F zero_where(M m, F v) { return {_mm256_andnot_ps(m.a, v.a), _mm256_andnot_ps(m.b, v.b)}; } // m ? +0 : v
    // p * 2^n for integral n and a normal result: 2^n is built from its exponent bits.
    QUAFF_INLINE static F ldexp(F p, F n) { return mul(p, from_bits(shl<23>(iadd(round(n), iset(127))))); }

    QUAFF_INLINE static I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    QUAFF_INLINE static I iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
    QUAFF_INLINE static I iload(const int32_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
    }
    QUAFF_INLINE static void istore(int32_t* p, I v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), v.b);
    }
    QUAFF_INLINE static I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    QUAFF_INLINE static I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
    QUAFF_INLINE static I imul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
    QUAFF_INLINE static I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
    QUAFF_INLINE static I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
    QUAFF_INLINE static I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
    QUAFF_INLINE static I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
    QUAFF_INLINE static M igt(I x, I y) {
        return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b))};
    }
    template <int n> QUAFF_INLINE static I shl(I x) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
    template <int n> QUAFF_INLINE static I shr(I x) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }  // arithmetic
    template <int n> QUAFF_INLINE static I shru(I x) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; } // logical
    QUAFF_INLINE static I shru(I x, int n) {
        const __m128i by = _mm_cvtsi32_si128(n);
        return {_mm256_srl_epi32(x.a, by), _mm256_srl_epi32(x.b, by)};
    }
    // First of 32 lanes that is x; one of them is.
    QUAFF_INLINE static int ifind(I a, I b, int32_t x) {
        const uint32_t low = equal(a.a, x) | equal(a.b, x) << 8, high = equal(b.a, x) | equal(b.b, x) << 8;
        return __builtin_ctz(low | high << 16);
    }
    QUAFF_INLINE static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    QUAFF_INLINE static I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; } // nearest even, |x| < 2^31
    QUAFF_INLINE static I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
    QUAFF_INLINE static F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

    QUAFF_INLINE static F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
    QUAFF_INLINE static F load_bf16(const uint16_t* p) {
        return from_bits(shl<16>(I{_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 8))}));
    }
    QUAFF_INLINE static I load_i8(const int8_t* p) {
        const __m128i v = load128(p);
        return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
    }
    QUAFF_INLINE static I load_u8(const uint8_t* p) {
        const __m128i v = load128(p);
        return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
    }
    QUAFF_INLINE static void store_i8(int8_t* p, I v) { // values in [-128, 127]
        const __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(v.a), _mm256_extracti128_si256(v.a, 1));
        const __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(v.b), _mm256_extracti128_si256(v.b, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
    }
    QUAFF_INLINE static void store_i16(int16_t* p, I v) { // values of 16 bits
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8));
    }
    // 16 pairs of 16-bit codes; to sums, integers held as bits, products of pairs are added.
    using Pairs = I;
    QUAFF_INLINE static Pairs load_pairs(const int16_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
    }
    QUAFF_INLINE static __m256i set_pair(const int16_t* p) {
        int32_t both;
        __builtin_memcpy(&both, p, 4);
        return _mm256_set1_epi32(both);
    }
    QUAFF_INLINE static F dot_pairs(F sum, Pairs x, __m256i pair) { // as in VecAvx512
        __m256i product;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.a), "=&x"(product) : "x"(x.a), "x"(pair));
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.b), "=&x"(product) : "x"(x.b), "x"(pair));
        return sum;
    }

    // Folds of NUMERICS 6: lanes j and j + w for w = 8, 4, 2, 1.
    QUAFF_INLINE static float sum(F v) {
        const __m256 x = _mm256_add_ps(v.a, v.b);
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    QUAFF_INLINE static float top(F v) {
        const __m256 x = _mm256_max_ps(v.a, v.b);
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    QUAFF_INLINE static int32_t isum(I v) {
        const __m256i x = _mm256_add_epi32(v.a, v.b);
        __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
    }
    QUAFF_INLINE static int32_t itop(I v) {
        const __m256i x = _mm256_max_epi32(v.a, v.b);
        __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
    }

    // 32 floats as 16 pairs: first and second of each, and back.
    QUAFF_INLINE static void unzip(const float* p, F& first, F& second) {
        const F x = load(p), y = load(p + 16);
        first = {part<0x88>(x), part<0x88>(y)};
        second = {part<0xdd>(x), part<0xdd>(y)};
    }
    QUAFF_INLINE static void zip(float* p, F first, F second) {
        store(p, woven(first.a, second.a));
        store(p + 16, woven(first.b, second.b));
    }

private:
    QUAFF_INLINE static uint32_t equal(__m256i v, int32_t x) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(x)))));
    }
    QUAFF_INLINE static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    template <int pick> QUAFF_INLINE static __m256 part(F x) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(x.a, x.b, pick)), 0xd8));
    }
    QUAFF_INLINE static F woven(__m256 x, __m256 y) {
        const __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
        return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    }
};

// A type of its own, so that templates compiled with -mavxvnni never share a symbol with the plain AVX2 ones.
struct VecAvxVnni : VecAvx2 {
#ifdef __AVXVNNI__
    QUAFF_INLINE static F dot_pairs(F sum, Pairs x, __m256i pair) { // as in VecAvx512; without {vex} it would be an AVX-512 instruction
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.a) : "x"(x.a), "x"(pair));
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.b) : "x"(x.b), "x"(pair));
        return sum;
    }
#endif
};

} // namespace quaff::isa
