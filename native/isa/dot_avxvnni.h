// Integer dots of 16 rows in two ymm registers with AVX-VNNI: as AVX-512 VNNI, half as wide.
#pragma once
#include "dot_avx2.h"

namespace quaff::isa {

struct DotAvxVnni : BytesAvx2 {
    using V = VecAvxVnni;
    template <int bits> using Operand = Bytes;
    template <int bits> using Part = V::I;
    template <int bits> static constexpr int kSteps = 8;
    static constexpr int32_t kWideOffset = 128;
    // 16 registers: 4 tokens' sums in 8, 2 of codes, a broadcast; the f32 chains wait in L1 between groups.
    static constexpr int kTokens = 4, kPanels = 1;
    static constexpr bool kUnpacksNibbles = false;
    static constexpr int64_t kManyTokens[2] = {36, 18}; // worth prepared panels: groups of 16, of 32
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    template <int bits> QUAFF_INLINE static Operand<bits> operand(Bytes x) { return x; }
    template <int bits> QUAFF_INLINE static Part<bits> begin(int32_t start) { return V::iset(start); }
    template <int bits> QUAFF_INLINE static void dot(Part<bits>& part, const Operand<bits>& w, const int8_t* q) {
        const __m256i x = four(q);
        part.a = _mm256_dpbusd_avx_epi32(part.a, w.a, x);
        part.b = _mm256_dpbusd_avx_epi32(part.b, w.b, x);
    }
    template <int bits> QUAFF_INLINE static V::I finish(Part<bits> part, int32_t) { return part; }
};

} // namespace quaff::isa
