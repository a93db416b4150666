// Integer dots without VNNI: vpmaddubsw adds two products in int16, safe only while its unsigned side is small (NUMERICS, integer traps).
// Nibbles (<= 15) go in bare and eight results fit an int16; wide codes go in as |w| with the sign moved to q, one result at a time.
#pragma once
#include "vec_avx2.h"

namespace quaff::isa {

// What AVX2 and AVX-VNNI share: 64 bytes of codes are two ymm registers, a = rows 0..7.
struct BytesAvx2 {
    using V = VecAvx2;
    struct Bytes {
        __m256i a, b;
    };
    using Table = __m256i;

    QUAFF_INLINE static Bytes load(const uint8_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
    }
    QUAFF_INLINE static void store(uint8_t* p, Bytes x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
    }
    QUAFF_INLINE static Bytes low(Bytes x) { return {low(x.a), low(x.b)}; }
    QUAFF_INLINE static Bytes high(Bytes x) { return {low(_mm256_srli_epi16(x.a, 4)), low(_mm256_srli_epi16(x.b, 4))}; }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives wide codes
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook));
        return _mm256_broadcastsi128_si256(_mm_xor_si128(values, _mm_set1_epi8(-128)));
    }
    QUAFF_INLINE static Bytes lookup(Table t, Bytes nibbles) {
        return {_mm256_shuffle_epi8(t, nibbles.a), _mm256_shuffle_epi8(t, nibbles.b)};
    }
    QUAFF_INLINE static __m256i four(const int8_t* q) {
        int32_t word;
        __builtin_memcpy(&word, q, 4);
        return _mm256_set1_epi32(word);
    }

private:
    QUAFF_INLINE static __m256i low(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
};

struct DotAvx2 : BytesAvx2 {
    struct Signed {
        Bytes size, code;
    };
    template <bool wide> struct OperandOf { using Type = Bytes; };
    template <bool wide> using Operand = typename OperandOf<wide>::Type;
    template <bool wide> using Part = V::I; // wide: int32 sums; nibbles: int16 pairs
    static constexpr int32_t kWideOffset = 0;
    // 16 registers: 4 tokens' sums in 8, 2 of codes, a broadcast, products; the f32 chains wait in L1 between groups.
    static constexpr int kTokens = 4;
    static constexpr int panels(int) { return 1; }
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    template <bool wide> QUAFF_INLINE static Operand<wide> operand(Bytes x) {
        if constexpr (wide) {
            const __m256i flip = _mm256_set1_epi8(-128), a = _mm256_xor_si256(x.a, flip), b = _mm256_xor_si256(x.b, flip);
            return {{_mm256_abs_epi8(a), _mm256_abs_epi8(b)}, {a, b}};
        } else {
            return x;
        }
    }
    template <bool wide> QUAFF_INLINE static Part<wide> begin(int32_t) { return V::iset(0); }
    template <bool wide> QUAFF_INLINE static void dot(Part<wide>& part, const Operand<wide>& w, const int8_t* q) {
        const __m256i x = four(q);
        if constexpr (wide) {
            part.a = _mm256_add_epi32(part.a, pairs(_mm256_maddubs_epi16(w.size.a, _mm256_sign_epi8(x, w.code.a))));
            part.b = _mm256_add_epi32(part.b, pairs(_mm256_maddubs_epi16(w.size.b, _mm256_sign_epi8(x, w.code.b))));
        } else {
            part.a = _mm256_add_epi16(part.a, _mm256_maddubs_epi16(w.a, x));
            part.b = _mm256_add_epi16(part.b, _mm256_maddubs_epi16(w.b, x));
        }
    }
    template <bool wide> QUAFF_INLINE static V::I finish(Part<wide> part, int32_t start) {
        if constexpr (wide)
            return part;
        else
            return V::iadd({pairs(part.a), pairs(part.b)}, V::iset(start));
    }

private:
    QUAFF_INLINE static __m256i pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
};

template <> struct DotAvx2::OperandOf<true> { using Type = Signed; };

} // namespace quaff::isa
