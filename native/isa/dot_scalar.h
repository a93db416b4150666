// Integer dots in plain C++ on the compiler's generic vectors: stored codes (0..255) and activations are widened to int16 pairs whose
// products are added in int32.
#pragma once
#include "vec_scalar.h"

namespace quaff::isa {

struct DotScalar {
    using V = VecScalar;
    using Bytes = V::I; // a lane holds the 4 codes of one row
    struct Table {
        uint8_t value[16];
    };
    struct Split {
        V::I even, odd; // codes 0 and 2, codes 1 and 3 of each row as two int16
    };
    template <int bits> using Operand = Split;
    template <int bits> using Part = V::I;
    template <int bits> static constexpr int kSteps = 8;
    static constexpr int32_t kWideOffset = 128;
    static constexpr int kTokens = 2, kPanels = 1; // the software fma is most of the work; two tokens share the widening
    static constexpr bool kUnpacksNibbles = false;
    static constexpr int64_t kManyTokens[2] = {24, 12}; // worth prepared panels: groups of 16, of 32
    static constexpr int kFloatTokens = 2, kFloatPanels = 1;

    QUAFF_INLINE static Bytes load(const uint8_t* p) {
        Bytes x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    QUAFF_INLINE static void store(uint8_t* p, Bytes x) { __builtin_memcpy(p, &x, sizeof x); }
    QUAFF_INLINE static Bytes field(Bytes x, int shift, int bits) { return V::iand(right(x, shift), bytes((1 << bits) - 1)); }
    QUAFF_INLINE static Bytes merge(Bytes low, Bytes x, int shift, int bits, int at) {
        return V::ior(low, V::iand(right(x, shift - at), bytes(((1 << bits) - 1) << at)));
    }
    QUAFF_INLINE static Table table(const int8_t* codebook) { // gives 8-bit codes
        Table t;
        for (int i = 0; i < 16; i++)
            t.value[i] = static_cast<uint8_t>(codebook[i] + 128);
        return t;
    }
    QUAFF_INLINE static Bytes lookup(const Table& t, Bytes nibbles) {
        uint8_t bytes[64];
        store(bytes, nibbles);
        for (uint8_t& byte : bytes)
            byte = t.value[byte];
        return load(bytes);
    }

    template <int bits> QUAFF_INLINE static Operand<bits> operand(Bytes x) {
        const V::I mask = V::iset(0x00ff00ff);
        return {V::iand(x, mask), V::iand(V::template shru<8>(x), mask)};
    }
    template <int bits> QUAFF_INLINE static Part<bits> begin(int32_t start) { return V::iset(start); }
    template <int bits> QUAFF_INLINE static void dot(Part<bits>& part, const Operand<bits>& w, const int8_t* q) {
        part = V::iadd(part, V::iadd(pairs(w.even, q[0], q[2]), pairs(w.odd, q[1], q[3])));
    }
    template <int bits> QUAFF_INLINE static V::I finish(Part<bits> part, int32_t) { return part; }

private:
    QUAFF_INLINE static V::I bytes(int value) { return V::iset(static_cast<int32_t>(0x01010101u * static_cast<uint32_t>(value))); }
    QUAFF_INLINE static V::I right(V::I x, int shift) {
        return {right(x.a, shift), right(x.b, shift), right(x.c, shift), right(x.d, shift)};
    }
    QUAFF_INLINE static V::I4 right(V::I4 x, int shift) { return (V::I4)(shift < 0 ? (V::U4)x << -shift : (V::U4)x >> shift); }
    // Both int16 of a lane times x and y, added in int32.
    QUAFF_INLINE static V::I pairs(V::I w, int32_t x, int32_t y) {
        const V::I xy = V::iset(static_cast<int32_t>((static_cast<uint32_t>(y) << 16) | (static_cast<uint32_t>(x) & 0xffff)));
        return {pairs(w.a, xy.a), pairs(w.b, xy.b), pairs(w.c, xy.c), pairs(w.d, xy.d)};
    }
    QUAFF_INLINE static V::I4 pairs(V::I4 w, V::I4 xy) {
#if defined(__SSE2__)
        return (V::I4)_mm_madd_epi16((__m128i)w, (__m128i)xy);
#else
        return (w & 0xffff) * (xy << 16 >> 16) + (w >> 16) * (xy >> 16); // w is never negative
#endif
    }
};

} // namespace quaff::isa
