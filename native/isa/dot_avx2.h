// Integer dots without VNNI: vpmaddubsw adds two products in int16, safe only while its unsigned side is small (NUMERICS, integer traps).
// Codes of 4 bits go in bare and eight results fit an int16, of 5 bits four, of 6 bits two; 8-bit codes go in as |w| with the sign moved to q.
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
    QUAFF_INLINE static Bytes field(Bytes x, int shift, int bits) {
        const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << bits) - 1));
        return {_mm256_and_si256(right(x.a, shift), mask), _mm256_and_si256(right(x.b, shift), mask)};
    }
    QUAFF_INLINE static Bytes merge(Bytes low, Bytes x, int shift, int bits, int at) {
        const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << at));
        return {_mm256_or_si256(low.a, _mm256_and_si256(right(x.a, shift - at), mask)),
                _mm256_or_si256(low.b, _mm256_and_si256(right(x.b, shift - at), mask))};
    }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives 8-bit codes
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
    QUAFF_INLINE static __m256i right(__m256i x, int shift) {
        return shift > 0 ? _mm256_srli_epi16(x, shift) : shift < 0 ? _mm256_slli_epi16(x, -shift) : x;
    }
};

struct DotAvx2 : BytesAvx2 {
    struct Signed {
        Bytes size, code;
    };
    template <int bits> struct OperandOf { using Type = Bytes; };
    template <int bits> using Operand = typename OperandOf<bits>::Type;
    template <int bits> using Part = V::I; // 8 bits: int32 sums; fewer: int16 pairs
    template <int bits> static constexpr int kSteps = bits == 5 ? 4 : bits == 6 ? 2 : 8;
    static constexpr int32_t kWideOffset = 0;
    // 16 registers: 4 tokens' sums in 8, 2 of codes, a broadcast, products; the f32 chains wait in L1 between groups.
    static constexpr int kTokens = 4, kPanels = 1;
    static constexpr bool kUnpacksNibbles = false;
    static constexpr int64_t kManyTokens[2] = {32, kNever}; // worth prepared panels: groups of 16, of 32
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    template <int bits> QUAFF_INLINE static Operand<bits> operand(Bytes x) {
        if constexpr (bits == 8) {
            const __m256i flip = _mm256_set1_epi8(-128), a = _mm256_xor_si256(x.a, flip), b = _mm256_xor_si256(x.b, flip);
            return {{_mm256_abs_epi8(a), _mm256_abs_epi8(b)}, {a, b}};
        } else {
            return x;
        }
    }
    template <int bits> QUAFF_INLINE static Part<bits> begin(int32_t start) { return V::iset(bits == 8 ? start : 0); }
    template <int bits> QUAFF_INLINE static void dot(Part<bits>& part, const Operand<bits>& w, const int8_t* q) {
        const __m256i x = four(q);
        if constexpr (bits == 8) {
            part.a = _mm256_add_epi32(part.a, pairs(_mm256_maddubs_epi16(w.size.a, _mm256_sign_epi8(x, w.code.a))));
            part.b = _mm256_add_epi32(part.b, pairs(_mm256_maddubs_epi16(w.size.b, _mm256_sign_epi8(x, w.code.b))));
        } else {
            part.a = _mm256_add_epi16(part.a, _mm256_maddubs_epi16(w.a, x));
            part.b = _mm256_add_epi16(part.b, _mm256_maddubs_epi16(w.b, x));
        }
    }
    template <int bits> QUAFF_INLINE static V::I finish(Part<bits> part, int32_t start) {
        if constexpr (bits == 8)
            return part;
        else
            return V::iadd({pairs(part.a), pairs(part.b)}, V::iset(start));
    }

private:
    QUAFF_INLINE static __m256i pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
};

template <> struct DotAvx2::OperandOf<8> { using Type = Signed; };

} // namespace quaff::isa
