// 16 lanes in one zmm register. max(a, b) is a > b ? a : b by definition of vmaxps (NUMERICS 5).
#pragma once
#include "vec_common.h"

// g++ 12 calls the header's own "undefined" operands uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace quaff::isa {

struct VecAvx512 {
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;
    // Attention: 6 rows x 4 blocks of lanes = 24 accumulators, 4 registers of K or V and a broadcast: 29 of 32.
    static constexpr int kAttendRows = 6, kAttendBlocks = 4;

    QUAFF_INLINE static F zero() { return _mm512_setzero_ps(); }
    QUAFF_INLINE static F set(float x) { return _mm512_set1_ps(x); }
    QUAFF_INLINE static F load(const float* p) { return _mm512_loadu_ps(p); }
    QUAFF_INLINE static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    QUAFF_INLINE static F load_part(const float* p, int64_t n, float pad) { return _mm512_mask_loadu_ps(set(pad), first(n), p); }
    QUAFF_INLINE static void store_part(float* p, int64_t n, F v) { _mm512_mask_storeu_ps(p, first(n), v); }

    QUAFF_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
    QUAFF_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    QUAFF_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    QUAFF_INLINE static F div(F a, F b) { return _mm512_div_ps(a, b); }
    QUAFF_INLINE static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    QUAFF_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    QUAFF_INLINE static F max(F a, F b) { return _mm512_max_ps(a, b); }
    QUAFF_INLINE static F min(F a, F b) { return _mm512_min_ps(a, b); }
    QUAFF_INLINE static F rint(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    QUAFF_INLINE static F abs(F a) { return _mm512_abs_ps(a); }
    QUAFF_INLINE static F neg(F a) { return _mm512_xor_ps(a, set(-0.0f)); }
    QUAFF_INLINE static F copysign(F size, F sign) {
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits(size), bits(sign), iset(0x7fffffff), 0xe4)); // mask ? size : sign
    }
    QUAFF_INLINE static M gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    QUAFF_INLINE static M lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    QUAFF_INLINE static M both(M a, M b) { return static_cast<M>(a & b); }
    QUAFF_INLINE static F select(M m, F yes, F no) { return _mm512_mask_mov_ps(no, m, yes); }
    QUAFF_INLINE static F zero_where(M m, F v) { return _mm512_maskz_mov_ps(static_cast<M>(~m), v); } // m ? +0 : v
    // p * 2^n for integral n and a normal result.
    QUAFF_INLINE static F ldexp(F p, F n) { return _mm512_scalef_ps(p, n); }

    QUAFF_INLINE static I iset(int32_t x) { return _mm512_set1_epi32(x); }
    QUAFF_INLINE static I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    QUAFF_INLINE static I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
    QUAFF_INLINE static void istore(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
    QUAFF_INLINE static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    QUAFF_INLINE static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
    QUAFF_INLINE static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
    QUAFF_INLINE static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
    QUAFF_INLINE static I iand(I a, I b) { return _mm512_and_si512(a, b); }
    QUAFF_INLINE static I ior(I a, I b) { return _mm512_or_si512(a, b); }
    QUAFF_INLINE static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
    QUAFF_INLINE static M igt(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
    template <int n> QUAFF_INLINE static I shl(I a) { return _mm512_slli_epi32(a, n); }
    template <int n> QUAFF_INLINE static I shr(I a) { return _mm512_srai_epi32(a, n); }  // arithmetic
    template <int n> QUAFF_INLINE static I shru(I a) { return _mm512_srli_epi32(a, n); } // logical
    QUAFF_INLINE static I shru(I a, int n) { return _mm512_srlv_epi32(a, iset(n)); }
    // First of 32 lanes that is x; one of them is.
    QUAFF_INLINE static int ifind(I a, I b, int32_t x) {
        const uint32_t low = _mm512_cmpeq_epi32_mask(a, iset(x)), high = _mm512_cmpeq_epi32_mask(b, iset(x));
        return __builtin_ctz(low | high << 16);
    }
    QUAFF_INLINE static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    QUAFF_INLINE static I round(F a) { return _mm512_cvtps_epi32(a); } // nearest even, |a| < 2^31
    QUAFF_INLINE static I bits(F a) { return _mm512_castps_si512(a); }
    QUAFF_INLINE static F from_bits(I a) { return _mm512_castsi512_ps(a); }

    QUAFF_INLINE static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    QUAFF_INLINE static F load_bf16(const uint16_t* p) {
        return from_bits(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
    }
    QUAFF_INLINE static I load_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    QUAFF_INLINE static I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    QUAFF_INLINE static void store_i8(int8_t* p, I v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
    QUAFF_INLINE static void store_i16(int16_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v)); }
    // 16 pairs of 16-bit codes; to sums, integers held as bits, products of pairs are added.
    using Pairs = I;
    QUAFF_INLINE static Pairs load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
    QUAFF_INLINE static I set_pair(const int16_t* p) {
        int32_t both;
        __builtin_memcpy(&both, p, 4);
        return iset(both);
    }
    // The intrinsic takes integers, and g++ 12 then keeps arrays of sums in memory too.
    QUAFF_INLINE static F dot_pairs(F sum, Pairs x, I pair) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(pair));
        return sum;
    }

    // Folds of NUMERICS 6: lanes j and j + w for w = 8, 4, 2, 1.
    QUAFF_INLINE static float sum(F v) {
        __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
    }
    QUAFF_INLINE static float top(F v) {
        __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
    }
    // Sums wrap: codes of a row that is not finite may be anything.
    QUAFF_INLINE static int32_t isum(I v) {
        const __m256i x = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
        __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
    }
    // The same folds of up to eight vectors together: lane t is that of v[t].
    template <int T> QUAFF_INLINE static F sums(const F (&v)[T]) {
        return folds(v, [](F x, F y) { return add(x, y); });
    }
    template <int T> QUAFF_INLINE static F tops(const F (&v)[T]) {
        return folds(v, [](F x, F y) { return max(x, y); });
    }
    QUAFF_INLINE static int32_t itop(I v) { return _mm512_reduce_max_epi32(v); }
    // The greatest lane of each of 16 vectors: every step halves the lanes of two vectors and joins them.
    QUAFF_INLINE static I itops(const I* v) {
        I a[8], b[4];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            a[i] = imax(_mm512_shuffle_i32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_i32x4(v[i], v[i + 8], 0xee));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            b[i] = imax(_mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd));
        const I c = imax(_mm512_unpacklo_epi64(b[0], b[2]), _mm512_unpackhi_epi64(b[0], b[2]));
        const I d = imax(_mm512_unpacklo_epi64(b[1], b[3]), _mm512_unpackhi_epi64(b[1], b[3]));
        const F even = _mm512_shuffle_ps(from_bits(c), from_bits(d), 0x88), odd = _mm512_shuffle_ps(from_bits(c), from_bits(d), 0xdd);
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15),
                                        imax(bits(even), bits(odd)));
    }
    // Four vectors of codes as bytes, and the sum of each: packing leaves 4 codes of every vector in each quarter of the register, where vpdpbusd adds
    // them, so that adding the quarters gives the four sums in order.
    QUAFF_INLINE static void store_codes(int8_t* q, const I* codes, int32_t* sums) {
        const I packed = _mm512_packs_epi16(_mm512_packs_epi32(codes[0], codes[1]), _mm512_packs_epi32(codes[2], codes[3]));
        const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(q, _mm512_permutexvar_epi32(order, packed));
        const I fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), packed);
        const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(sums),
                         _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
    }

    // 32 floats as 16 pairs: first and second of each, and back.
    QUAFF_INLINE static void unzip(const float* p, F& first, F& second) {
        const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const F a = load(p), b = load(p + 16);
        first = _mm512_permutex2var_ps(a, even, b);
        second = _mm512_permutex2var_ps(a, iadd(even, iset(1)), b);
    }
    QUAFF_INLINE static void zip(float* p, F first, F second) {
        const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        store(p, _mm512_permutex2var_ps(first, low, second));
        store(p + 16, _mm512_permutex2var_ps(first, iadd(low, iset(8)), second));
    }

private:
    // Every step joins the halves of lanes of two vectors, in the order in which a fold of one would have them.
    template <int T, class Join> QUAFF_INLINE static F folds(const F (&v)[T], Join join) {
        static_assert(T <= 8);
        F a[4], b[2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const F x = v[2 * i < T ? 2 * i : 0], y = v[2 * i + 1 < T ? 2 * i + 1 : 0];
            a[i] = join(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
            b[i] = join(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
        const __m512d x = _mm512_castps_pd(b[0]), y = _mm512_castps_pd(b[1]);
        const F c = join(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
        const F d = join(_mm512_shuffle_ps(c, c, 0x88), _mm512_shuffle_ps(c, c, 0xdd));
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), d);
    }
    QUAFF_INLINE static M first(int64_t n) { return static_cast<M>((1u << n) - 1u); } // 0 <= n <= 16
};

} // namespace quaff::isa
