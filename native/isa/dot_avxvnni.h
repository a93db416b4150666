// Integer dots of 16 rows in two ymm registers with AVX-VNNI: as AVX-512 VNNI, half as wide.
#pragma once
#include "dot_avx2.h"

namespace quaff::isa {

struct DotAvxVnni : BytesAvx2 {
    template <bool wide> using Operand = Bytes;
    template <bool wide> using Part = V::I;
    static constexpr int32_t kWideOffset = 128;
    // 16 registers: 4 tokens' sums in 8, 2 of codes, a broadcast; the f32 chains wait in L1 between groups.
    static constexpr int kTokens = 4;
    static constexpr int panels(int) { return 1; }
    static constexpr int kFloatTokens = 6, kFloatPanels = 1;

    template <bool wide> QUAFF_INLINE static Operand<wide> operand(Bytes x) { return x; }
    template <bool wide> QUAFF_INLINE static Part<wide> begin(int32_t start) { return V::iset(start); }
    template <bool wide> QUAFF_INLINE static void dot(Part<wide>& part, const Operand<wide>& w, const int8_t* q) {
        const __m256i x = four(q);
        part.a = _mm256_dpbusd_avx_epi32(part.a, w.a, x);
        part.b = _mm256_dpbusd_avx_epi32(part.b, w.b, x);
    }
    template <bool wide> QUAFF_INLINE static V::I finish(Part<wide> part, int32_t) { return part; }
};

} // namespace quaff::isa
