// Plain C++: 16 lanes as four vectors of the compiler's own generic kind, which it lowers to whatever the baseline has (SSE2 on x86-64).
#pragma once
#include "vec_common.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quaff::isa {

struct VecScalar {
    typedef float F4 __attribute__((vector_size(16)));
    typedef int32_t I4 __attribute__((vector_size(16)));
    typedef uint32_t U4 __attribute__((vector_size(16)));
    struct F {
        F4 a, b, c, d;
    };
    struct I {
        I4 a, b, c, d;
    };
    using M = I; // all ones or all zeros a lane
    // Attention: 2 rows x 1 block of 4 registers = 8 accumulators, 4 registers of K or V and a broadcast: 13 of the 16 that SSE2 has.
    static constexpr int kAttendRows = 2, kAttendBlocks = 1;

    QUAFF_INLINE static F zero() { return set(0.0f); }
    QUAFF_INLINE static F set(float x) {
        const F4 v = {x, x, x, x};
        return {v, v, v, v};
    }
    QUAFF_INLINE static F load(const float* p) { return get<F>(p); }
    QUAFF_INLINE static void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
    QUAFF_INLINE static F load_part(const float* p, int64_t n, float pad) { return isa::load_part<VecScalar>(p, n, pad); }
    QUAFF_INLINE static void store_part(float* p, int64_t n, F v) { isa::store_part<VecScalar>(p, n, v); }

    QUAFF_INLINE static F add(F x, F y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
    QUAFF_INLINE static F sub(F x, F y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
    QUAFF_INLINE static F mul(F x, F y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
    QUAFF_INLINE static F div(F x, F y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
    QUAFF_INLINE static F sqrt(F x) { return {root(x.a), root(x.b), root(x.c), root(x.d)}; }
    QUAFF_INLINE static F max(F x, F y) { return select(gt(x, y), x, y); }
    QUAFF_INLINE static F min(F x, F y) { return select(lt(x, y), x, y); }
    // Nearest even: adding 2^23 leaves no fraction bits. From 2^23 on every value is integral.
    QUAFF_INLINE static F rint(F x) {
        const F size = abs(x), big = set(0x1p23f);
        return copysign(select(lt(size, big), sub(add(size, big), big), size), x);
    }
    QUAFF_INLINE static F abs(F x) { return from_bits(iand(bits(x), iset(0x7fffffff))); }
    QUAFF_INLINE static F neg(F x) { return {-x.a, -x.b, -x.c, -x.d}; }
    QUAFF_INLINE static F copysign(F size, F sign) {
        return from_bits(ior(iand(bits(size), iset(0x7fffffff)), iand(bits(sign), iset(INT32_MIN))));
    }
    QUAFF_INLINE static M gt(F x, F y) { return {x.a > y.a, x.b > y.b, x.c > y.c, x.d > y.d}; }
    QUAFF_INLINE static M lt(F x, F y) { return {x.a < y.a, x.b < y.b, x.c < y.c, x.d < y.d}; }
    QUAFF_INLINE static M both(M x, M y) { return iand(x, y); }
    QUAFF_INLINE static F select(M m, F yes, F no) { return from_bits(pick(m, bits(yes), bits(no))); }
    QUAFF_INLINE static F zero_where(M m, F v) { // m ? +0 : v
        return from_bits({~m.a & (I4)v.a, ~m.b & (I4)v.b, ~m.c & (I4)v.c, ~m.d & (I4)v.d});
    }
    // p * 2^n for integral n and a normal result: 2^n is built from its exponent bits.
    QUAFF_INLINE static F ldexp(F p, F n) { return mul(p, from_bits(shl<23>(iadd(to_int(n), iset(127))))); }

    // One rounding (NUMERICS 4). With SSE2 only: s = p + c in f64 rounds to the right f32 unless s is exactly half-way between two f32
    // or the result is denormal; the few such lanes take the rule as written.
    QUAFF_INLINE static F fma(F x, F y, F z) {
#if defined(__FMA__) || defined(__aarch64__)
        return {fused(x.a, y.a, z.a), fused(x.b, y.b, z.b), fused(x.c, y.c, z.c), fused(x.d, y.d, z.d)};
#elif defined(__SSE2__)
        __m128i doubt = _mm_setzero_si128();
        F r;
        r.a = quick(x.a, y.a, z.a, doubt);
        r.b = quick(x.b, y.b, z.b, doubt);
        r.c = quick(x.c, y.c, z.c, doubt);
        r.d = quick(x.d, y.d, z.d, doubt);
        if (__builtin_expect(_mm_movemask_epi8(doubt) != 0, 0)) {
            slow(x, y, z, r);
        }
        return r;
#else
        F r;
        slow(x, y, z, r);
        return r;
#endif
    }
    // NUMERICS 4: the product is exact in f64, the sum is rounded to odd, so that rounding it to f32 rounds once.
    QUAFF_INLINE static float fma_lane(float x, float y, float z) {
        const double p = static_cast<double>(x) * y, c = z, s = p + c;
        const double t = s - p, e = (p - (s - t)) + (c - t);
        int64_t word;
        __builtin_memcpy(&word, &s, 8);
        if ((e > 0 || e < 0) && (word & 1) == 0) {
            word += (e > 0) == (s > 0) ? 1 : -1;
        }
        double odd;
        __builtin_memcpy(&odd, &word, 8);
        return static_cast<float>(odd);
    }

    QUAFF_INLINE static I iset(int32_t x) {
        const I4 v = {x, x, x, x};
        return {v, v, v, v};
    }
    QUAFF_INLINE static I iota() { return {I4{0, 1, 2, 3}, I4{4, 5, 6, 7}, I4{8, 9, 10, 11}, I4{12, 13, 14, 15}}; }
    QUAFF_INLINE static I iload(const int32_t* p) { return get<I>(p); }
    QUAFF_INLINE static void istore(int32_t* p, I v) { __builtin_memcpy(p, &v, sizeof v); }
    QUAFF_INLINE static I iadd(I x, I y) { // wraps, as everywhere
        return {(I4)((U4)x.a + (U4)y.a), (I4)((U4)x.b + (U4)y.b), (I4)((U4)x.c + (U4)y.c), (I4)((U4)x.d + (U4)y.d)};
    }
    QUAFF_INLINE static I isub(I x, I y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
    QUAFF_INLINE static I imul(I x, I y) {
        return {(I4)((U4)x.a * (U4)y.a), (I4)((U4)x.b * (U4)y.b), (I4)((U4)x.c * (U4)y.c), (I4)((U4)x.d * (U4)y.d)};
    }
    QUAFF_INLINE static I imax(I x, I y) { return pick(igt(x, y), x, y); }
    QUAFF_INLINE static I iand(I x, I y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
    QUAFF_INLINE static I ior(I x, I y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
    QUAFF_INLINE static I ixor(I x, I y) { return {x.a ^ y.a, x.b ^ y.b, x.c ^ y.c, x.d ^ y.d}; }
    QUAFF_INLINE static M igt(I x, I y) { return {x.a > y.a, x.b > y.b, x.c > y.c, x.d > y.d}; }
    template <int n> QUAFF_INLINE static I shl(I x) {
        return {(I4)((U4)x.a << n), (I4)((U4)x.b << n), (I4)((U4)x.c << n), (I4)((U4)x.d << n)};
    }
    template <int n> QUAFF_INLINE static I shr(I x) { return {x.a >> n, x.b >> n, x.c >> n, x.d >> n}; } // arithmetic
    template <int n> QUAFF_INLINE static I shru(I x) {                                                   // logical
        return {(I4)((U4)x.a >> n), (I4)((U4)x.b >> n), (I4)((U4)x.c >> n), (I4)((U4)x.d >> n)};
    }
    QUAFF_INLINE static I shru(I x, int n) { return {(I4)((U4)x.a >> n), (I4)((U4)x.b >> n), (I4)((U4)x.c >> n), (I4)((U4)x.d >> n)}; }
    QUAFF_INLINE static int ifind(I a, I b, int32_t x) { return isa::ifind<VecScalar>(a, b, x); }
    QUAFF_INLINE static F to_float(I x) {
        return {__builtin_convertvector(x.a, F4), __builtin_convertvector(x.b, F4), __builtin_convertvector(x.c, F4),
                __builtin_convertvector(x.d, F4)};
    }
    QUAFF_INLINE static I to_int(F x) { // integral values of |x| < 2^31
        return {__builtin_convertvector(x.a, I4), __builtin_convertvector(x.b, I4), __builtin_convertvector(x.c, I4),
                __builtin_convertvector(x.d, I4)};
    }
    QUAFF_INLINE static I round(F x) { return to_int(rint(x)); } // nearest even, |x| < 2^31
    QUAFF_INLINE static I bits(F x) { return {(I4)x.a, (I4)x.b, (I4)x.c, (I4)x.d}; }
    QUAFF_INLINE static F from_bits(I x) { return {(F4)x.a, (F4)x.b, (F4)x.c, (F4)x.d}; }

    // f16 bits moved to the f32 fields are the value times 2^-112, denormals too; the product is exact. Infinity and NaN get their exponent
    // back.
    QUAFF_INLINE static F load_f16(const uint16_t* p) {
        const I h = wide(p), magnitude = shl<13>(iand(h, iset(0x7fff)));
        const F v = mul(from_bits(magnitude), set(0x1p112f));
        const I special = iand(igt(magnitude, iset(0x0f7fffff)), iset(0x7f800000));
        return from_bits(ior(ior(bits(v), special), shl<16>(iand(h, iset(0x8000)))));
    }
    QUAFF_INLINE static F load_bf16(const uint16_t* p) { return from_bits(shl<16>(wide(p))); }
    QUAFF_INLINE static I load_i8(const int8_t* p) { return wide(p); }
    QUAFF_INLINE static I load_u8(const uint8_t* p) { return wide(p); }
    QUAFF_INLINE static void store_i8(int8_t* p, I v) {
        int32_t lanes[kLanes];
        istore(lanes, v);
        for (int i = 0; i < kLanes; ++i) {
            p[i] = static_cast<int8_t>(lanes[i]);
        }
    }
    QUAFF_INLINE static void store_i16(int16_t* p, I v) {
        int32_t lanes[kLanes];
        istore(lanes, v);
        for (int i = 0; i < kLanes; ++i) {
            p[i] = static_cast<int16_t>(lanes[i]);
        }
    }
    // 16 pairs of 16-bit codes; to sums, integers held as bits, products of pairs are added.
    using Pairs = I;
    QUAFF_INLINE static Pairs load_pairs(const int16_t* p) { return get<I>(p); }
    QUAFF_INLINE static I4 set_pair(const int16_t* p) {
        int32_t both;
        __builtin_memcpy(&both, p, 4);
        return I4{both, both, both, both};
    }
    QUAFF_INLINE static F dot_pairs(F sum, Pairs x, I4 pair) {
        return from_bits(iadd(bits(sum), {products(x.a, pair), products(x.b, pair), products(x.c, pair), products(x.d, pair)}));
    }

    // Folds of NUMERICS 6: lanes j and j + w for w = 8, 4, 2, 1.
    QUAFF_INLINE static float sum(F v) {
        const F4 y = (v.a + v.c) + (v.b + v.d);
        return (y[0] + y[2]) + (y[1] + y[3]);
    }
    QUAFF_INLINE static float top(F v) {
        const F x = max(v, F{v.c, v.d, v.c, v.d});
        const F4 y = x.a > x.b ? x.a : x.b;
        const float even = larger(y[0], y[2]), odd = larger(y[1], y[3]);
        return larger(even, odd);
    }
    QUAFF_INLINE static int32_t isum(I v) {
        const U4 y = (U4)v.a + (U4)v.b + (U4)v.c + (U4)v.d; // wraps: codes of a row that is not finite may be anything
        return static_cast<int32_t>(y[0] + y[1] + y[2] + y[3]);
    }
    QUAFF_INLINE static int32_t itop(I v) {
        const I x = imax(v, I{v.c, v.d, v.c, v.d});
        const I4 y = x.a > x.b ? x.a : x.b;
        const int32_t even = y[0] > y[2] ? y[0] : y[2], odd = y[1] > y[3] ? y[1] : y[3];
        return even > odd ? even : odd;
    }

    // 32 floats as 16 pairs: first and second of each, and back.
    QUAFF_INLINE static void unzip(const float* p, F& first, F& second) {
        const F x = load(p), y = load(p + 16);
        first = {even(x.a, x.b), even(x.c, x.d), even(y.a, y.b), even(y.c, y.d)};
        second = {odd(x.a, x.b), odd(x.c, x.d), odd(y.a, y.b), odd(y.c, y.d)};
    }
    QUAFF_INLINE static void zip(float* p, F first, F second) {
        store(p, {low(first.a, second.a), high(first.a, second.a), low(first.b, second.b), high(first.b, second.b)});
        store(p + 16, {low(first.c, second.c), high(first.c, second.c), low(first.d, second.d), high(first.d, second.d)});
    }

private:
    template <class T> QUAFF_INLINE static T get(const void* p) {
        T v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    template <class T> QUAFF_INLINE static I wide(const T* p) {
        int32_t lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            lanes[i] = p[i];
        }
        return iload(lanes);
    }
    QUAFF_INLINE static I pick(M m, I yes, I no) {
        return {(m.a & yes.a) | (~m.a & no.a), (m.b & yes.b) | (~m.b & no.b), (m.c & yes.c) | (~m.c & no.c), (m.d & yes.d) | (~m.d & no.d)};
    }
    QUAFF_INLINE static I4 products(I4 x, I4 y) {
#if defined(__SSE2__)
        return (I4)_mm_madd_epi16((__m128i)x, (__m128i)y);
#else
        return (I4)((U4)(x << 16 >> 16) * (U4)(y << 16 >> 16) + (U4)(x >> 16) * (U4)(y >> 16));
#endif
    }
    QUAFF_INLINE static float larger(float x, float y) { return x > y ? x : y; }
    QUAFF_INLINE static F4 root(F4 x) {
        return F4{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
    }
    QUAFF_INLINE static F4 even(F4 x, F4 y) { return __builtin_shufflevector(x, y, 0, 2, 4, 6); }
    QUAFF_INLINE static F4 odd(F4 x, F4 y) { return __builtin_shufflevector(x, y, 1, 3, 5, 7); }
    QUAFF_INLINE static F4 low(F4 x, F4 y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); }
    QUAFF_INLINE static F4 high(F4 x, F4 y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); }

#if defined(__FMA__) || defined(__aarch64__)
    QUAFF_INLINE static F4 fused(F4 x, F4 y, F4 z) {
        return F4{__builtin_fmaf(x[0], y[0], z[0]), __builtin_fmaf(x[1], y[1], z[1]), __builtin_fmaf(x[2], y[2], z[2]),
                  __builtin_fmaf(x[3], y[3], z[3])};
    }
#else
    [[gnu::noinline, gnu::cold]] static void slow(const F& x, const F& y, const F& z, F& r) {
        float a[kLanes], b[kLanes], c[kLanes];
        store(a, x);
        store(b, y);
        store(c, z);
        for (int i = 0; i < kLanes; ++i) {
            a[i] = fma_lane(a[i], b[i], c[i]);
        }
        r = load(a);
    }
#endif
#if defined(__SSE2__) && !defined(__FMA__)
    QUAFF_INLINE static F4 quick(F4 x, F4 y, F4 z, __m128i& doubt) {
        const __m128d low = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y)), _mm_cvtps_pd(z));
        const __m128d high =
            _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y))), _mm_cvtps_pd(_mm_movehl_ps(z, z)));
        const __m128 l = _mm_castpd_ps(low), h = _mm_castpd_ps(high);
        const __m128i below = _mm_castps_si128(_mm_shuffle_ps(l, h, 0x88)); // low words of the four doubles
        const __m128i above = _mm_and_si128(_mm_castps_si128(_mm_shuffle_ps(l, h, 0xdd)), _mm_set1_epi32(0x7fffffff));
        const __m128i half = _mm_cmpeq_epi32(_mm_and_si128(below, _mm_set1_epi32(0x1fffffff)), _mm_set1_epi32(0x10000000));
        // 0 < |s| < 2^-126; the high word of a nonzero sum of f32 products is never 0.
        const __m128i tiny = _mm_and_si128(_mm_cmpgt_epi32(_mm_set1_epi32(0x38100000), above), _mm_cmpgt_epi32(above, _mm_setzero_si128()));
        doubt = _mm_or_si128(doubt, _mm_or_si128(half, tiny));
        return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
    }
#endif
};

} // namespace quaff::isa
