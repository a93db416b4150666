// The ggml block types as they lie in a file, and one small function per type: block -> codes and scales, no value changed.
#pragma once
#include "grids.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace quaff::blocks {

inline float f32_of_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31)
        return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent)
        return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(fraction) * 0x1p-24f));
}

// One block taken apart, k ascending: codes as they are stored (true code + offset), scales as they lie in the file.
struct Unpacked {
    uint8_t code[256];
    uint16_t d, dmin;           // f16; dmin is the minimum itself where scales have one level
    uint8_t scale[16], min[16]; // of two-level scales (signed ones as int8); of MXFP4 the exponent, of NVFP4 four e4m3 numbers
};

inline int nibble(const uint8_t* q, int at, int high) { return q[at] >> 4 * high & 15; }

// Of `bytes` bytes, eight at a time: bits [from, from + count) of each, moved to bit `to`; with `add` beside what is there.
template <int from, int count, int to = 0, bool add = false> void take_bits(const uint8_t* source, int bytes, uint8_t* target) {
    constexpr uint64_t each = 0x0101010101010101, mask = each * ((1 << count) - 1);
    for (int i = 0; i < bytes; i += 8) {
        uint64_t w, old = 0;
        std::memcpy(&w, source + i, 8);
        if (add)
            std::memcpy(&old, target + i, 8);
        w = (w >> from & mask) << to | old;
        std::memcpy(target + i, &w, 8);
    }
}

inline uint64_t word8(const uint8_t* p) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    return w;
}

// The bits of a byte as eight bytes, 0 or 1.
inline uint64_t spread(uint8_t bits) {
    const uint64_t each = 0x0101010101010101, one = bits * each & 0x8040201008040201;
    return (one + 0x7f * each) >> 7 & each;
}

struct Q4_0 {
    uint16_t d;
    uint8_t qs[16];
};
struct Q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};
struct Q5_0 {
    uint16_t d;
    uint8_t qh[4], qs[16];
};
struct Q5_1 {
    uint16_t d, m;
    uint8_t qh[4], qs[16];
};
struct Q8_0 {
    uint16_t d;
    int8_t qs[32];
};
struct Q2_K {
    uint8_t scales[16], qs[64];
    uint16_t d, dmin;
};
struct Q3_K {
    uint8_t hmask[32], qs[64], scales[12];
    uint16_t d;
};
struct Q4_K {
    uint16_t d, dmin;
    uint8_t scales[12], qs[128];
};
struct Q5_K {
    uint16_t d, dmin;
    uint8_t scales[12], qh[32], qs[128];
};
struct Q6_K {
    uint8_t ql[128], qh[64];
    int8_t scales[16];
    uint16_t d;
};
struct IQ4_XS {
    uint16_t d, scales_h;
    uint8_t scales_l[4], qs[128];
};
struct MXFP4 {
    uint8_t e, qs[16];
};
struct NVFP4 {
    uint8_t scales[4], qs[32];
};
struct IQ1_S {
    uint16_t d;
    uint8_t qs[32];
    uint16_t qh[8];
};
struct IQ1_M {
    uint8_t qs[32], qh[16];
    uint16_t scales[4];
};
struct IQ2_XXS {
    uint16_t d;
    uint8_t qs[64];
};
struct IQ2_XS {
    uint16_t d, qs[32];
    uint8_t scales[8];
};
struct IQ2_S {
    uint16_t d;
    uint8_t qs[32], signs[32], qh[8], scales[8];
};
struct IQ3_XXS {
    uint16_t d;
    uint8_t qs[64], signs[32];
};
struct IQ3_S {
    uint16_t d;
    uint8_t qs[64], qh[8], signs[32], scales[4];
};
struct TQ1_0 {
    uint8_t qs[48], qh[4];
    uint16_t d;
};
struct TQ2_0 {
    uint8_t qs[64];
    uint16_t d;
};
static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q8_0) == 34);
static_assert(sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);
static_assert(sizeof(IQ4_XS) == 136 && sizeof(MXFP4) == 17 && sizeof(NVFP4) == 36 && sizeof(TQ1_0) == 54 && sizeof(TQ2_0) == 66);
static_assert(sizeof(IQ1_S) == 50 && sizeof(IQ1_M) == 56 && sizeof(IQ2_XXS) == 66 && sizeof(IQ2_XS) == 74 && sizeof(IQ2_S) == 82);
static_assert(sizeof(IQ3_XXS) == 98 && sizeof(IQ3_S) == 110);

inline void nibbles32(const uint8_t* qs, uint8_t* code) {
    take_bits<0, 4>(qs, 16, code);
    take_bits<4, 4>(qs, 16, code + 16);
}

inline void unpack(const Q4_0& b, Unpacked& u) {
    u.d = b.d;
    nibbles32(b.qs, u.code);
}

inline void unpack(const Q4_1& b, Unpacked& u) {
    u.d = b.d, u.dmin = b.m;
    nibbles32(b.qs, u.code);
}

inline void fives32(const uint8_t* qs, const uint8_t* qh, uint8_t* code) {
    nibbles32(qs, code);
    for (int i = 0; i < 4; i++) {
        const uint64_t w = word8(code + 8 * i) | spread(qh[i]) << 4;
        std::memcpy(code + 8 * i, &w, 8);
    }
}

inline void unpack(const Q5_0& b, Unpacked& u) {
    u.d = b.d;
    fives32(b.qs, b.qh, u.code);
}

inline void unpack(const Q5_1& b, Unpacked& u) {
    u.d = b.d, u.dmin = b.m;
    fives32(b.qs, b.qh, u.code);
}

inline void unpack(const Q8_0& b, Unpacked& u) {
    u.d = b.d;
    for (int k = 0; k < 32; k += 8) {
        const uint64_t w = word8(reinterpret_cast<const uint8_t*>(b.qs) + k) ^ 0x8080808080808080;
        std::memcpy(u.code + k, &w, 8);
    }
}

// 256 codes, two bits of each: the four of k, k + 32, k + 64 and k + 96 share a byte. Q2_K, TQ2_0, Q3_K low, Q6_K high.
template <int to = 0, bool add = false> void pairs256(const uint8_t* qs, uint8_t* code) {
    for (int half = 0; half < 2; half++, qs += 32, code += 128) {
        take_bits<0, 2, to, add>(qs, 32, code);
        take_bits<2, 2, to, add>(qs, 32, code + 32);
        take_bits<4, 2, to, add>(qs, 32, code + 64);
        take_bits<6, 2, to, add>(qs, 32, code + 96);
    }
}

// One more bit of 256 codes: those of k, k + 32 ... k + 224 share a byte. Q3_K, Q5_K.
template <int to> void bits256(const uint8_t* qh, uint8_t* code) {
    take_bits<0, 1, to, true>(qh, 32, code);
    take_bits<1, 1, to, true>(qh, 32, code + 32);
    take_bits<2, 1, to, true>(qh, 32, code + 64);
    take_bits<3, 1, to, true>(qh, 32, code + 96);
    take_bits<4, 1, to, true>(qh, 32, code + 128);
    take_bits<5, 1, to, true>(qh, 32, code + 160);
    take_bits<6, 1, to, true>(qh, 32, code + 192);
    take_bits<7, 1, to, true>(qh, 32, code + 224);
}

inline void unpack(const Q2_K& b, Unpacked& u) {
    u.d = b.d, u.dmin = b.dmin;
    for (int g = 0; g < 16; g++)
        u.scale[g] = b.scales[g] & 15, u.min[g] = b.scales[g] >> 4;
    pairs256(b.qs, u.code);
}

inline void unpack(const Q3_K& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 16; g++) {
        const int six = nibble(b.scales, g % 8, g / 8) | (b.scales[8 + g % 4] >> g / 4 * 2 & 3) << 4;
        u.scale[g] = uint8_t(six - 32);
    }
    // A set bit of hmask means that nothing is subtracted.
    pairs256(b.qs, u.code);
    bits256<2>(b.hmask, u.code);
}

// Eight 6-bit scales and minima in 12 bytes, shared by Q4_K and Q5_K.
inline void k_scales(uint16_t d, uint16_t dmin, const uint8_t* s, Unpacked& u) {
    u.d = d, u.dmin = dmin;
    for (int g = 0; g < 8; g++) {
        u.scale[g] = uint8_t(g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
        u.min[g] = uint8_t(g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4);
    }
}

// 256 codes, four bits of each: those of k and k + `apart` share a byte.
template <int apart> void nibbles256(const uint8_t* qs, uint8_t* code) {
    for (int k = 0; k < 256; k += 2 * apart, qs += apart) {
        take_bits<0, 4>(qs, apart, code + k);
        take_bits<4, 4>(qs, apart, code + k + apart);
    }
}

inline void unpack(const Q4_K& b, Unpacked& u) {
    k_scales(b.d, b.dmin, b.scales, u);
    nibbles256<32>(b.qs, u.code);
}

inline void unpack(const Q5_K& b, Unpacked& u) {
    k_scales(b.d, b.dmin, b.scales, u);
    nibbles256<32>(b.qs, u.code);
    bits256<4>(b.qh, u.code);
}

inline void unpack(const Q6_K& b, Unpacked& u) {
    u.d = b.d;
    std::memcpy(u.scale, b.scales, 16);
    nibbles256<64>(b.ql, u.code);
    pairs256<4, true>(b.qh, u.code);
}

inline void unpack(const IQ4_XS& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 8; g++) {
        u.scale[g] = uint8_t((nibble(b.scales_l, g / 2, g % 2) | (b.scales_h >> 2 * g & 3) << 4) - 32);
        nibbles32(b.qs + 16 * g, u.code + 32 * g);
    }
}

inline void unpack(const MXFP4& b, Unpacked& u) {
    u.scale[0] = b.e;
    nibbles32(b.qs, u.code);
}

inline void unpack(const NVFP4& b, Unpacked& u) {
    std::memcpy(u.scale, b.scales, 4);
    for (int k = 0; k < 64; k++)
        u.code[k] = uint8_t(nibble(b.qs, k / 16 * 8 + k % 8, k / 8 % 2));
}

// The codes of a point of eight values: two bits each, spread to bytes in three steps, and above them a bit for a negative one.
inline void write_point8(uint16_t point, uint32_t signs, uint8_t* code) {
    uint64_t x = point;
    x = (x | x << 24) & 0x000000ff000000ff;
    x = (x | x << 12) & 0x000f000f000f000f;
    x = (x | x << 6) & 0x0303030303030303;
    x |= spread(uint8_t(signs)) << 2;
    std::memcpy(code, &x, 8);
}

// Two points of four values, four bits each.
inline void write_points4(uint16_t first, uint16_t second, uint32_t signs, uint8_t* code) {
    uint64_t x = first | uint64_t(second) << 32;
    x = (x | x << 8) & 0x00ff00ff00ff00ff;
    x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
    x |= spread(uint8_t(signs)) << 3;
    std::memcpy(code, &x, 8);
}

// Seven signs are written; the eighth makes the number of negative ones even.
inline uint32_t eight_signs(uint32_t seven) {
    uint32_t parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    return seven | ((parity ^ parity >> 1) & 1) << 7;
}

inline uint8_t odd(uint32_t n) { return uint8_t(2 * n + 1); } // sub-scales of the IQ types below IQ4

inline uint32_t word(const uint8_t* p) {
    uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}

inline void unpack(const IQ1_S& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 8; g++) {
        u.scale[g] = odd(b.qh[g] >> 12 & 7);
        for (int i = 0; i < 4; i++)
            write_point8(kGrid1[b.qs[4 * g + i] | (b.qh[g] >> 3 * i & 7) << 8], b.qh[g] >> 15 ? 255 : 0, u.code + 32 * g + 8 * i);
    }
}

inline void unpack(const IQ1_M& b, Unpacked& u) {
    u.d = uint16_t(b.scales[0] >> 12 | (b.scales[1] >> 12) << 4 | (b.scales[2] >> 12) << 8 | (b.scales[3] >> 12) << 12);
    for (int g = 0; g < 16; g++)
        u.scale[g] = odd(b.scales[g / 4] >> g % 4 * 3 & 7);
    for (int i = 0; i < 32; i++) {
        const int high = nibble(b.qh, i / 2, i % 2);
        write_point8(kGrid1[b.qs[i] | (high & 7) << 8], high & 8 ? 255 : 0, u.code + 8 * i);
    }
}

inline void unpack(const IQ2_XXS& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 8; g++) {
        const uint32_t signs = word(b.qs + 8 * g + 4);
        u.scale[g] = odd(signs >> 28);
        for (int i = 0; i < 4; i++)
            write_point8(kGrid2xxs[b.qs[8 * g + i]], eight_signs(signs >> 7 * i & 127), u.code + 32 * g + 8 * i);
    }
}

inline void unpack(const IQ2_XS& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 16; g++)
        u.scale[g] = odd(uint32_t(nibble(b.scales, g / 2, g % 2)));
    for (int i = 0; i < 32; i++)
        write_point8(kGrid2xs[b.qs[i] & 511], eight_signs(b.qs[i] >> 9), u.code + 8 * i);
}

inline void unpack(const IQ2_S& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 16; g++)
        u.scale[g] = odd(uint32_t(nibble(b.scales, g / 2, g % 2)));
    for (int i = 0; i < 32; i++)
        write_point8(kGrid2s[b.qs[i] | (b.qh[i / 4] >> i % 4 * 2 & 3) << 8], b.signs[i], u.code + 8 * i);
}

inline void unpack(const IQ3_XXS& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 8; g++) {
        const uint32_t signs = word(b.signs + 4 * g);
        u.scale[g] = odd(signs >> 28);
        for (int i = 0; i < 4; i++) {
            const uint8_t* q = b.qs + 8 * g + 2 * i;
            write_points4(kGrid3xxs[q[0]], kGrid3xxs[q[1]], eight_signs(signs >> i * 7 & 127), u.code + 32 * g + 8 * i);
        }
    }
}

inline void unpack(const IQ3_S& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 8; g++)
        u.scale[g] = odd(uint32_t(nibble(b.scales, g / 2, g % 2)));
    for (int i = 0; i < 32; i++) {
        const int high = b.qh[i / 4] >> i % 4 * 2;
        write_points4(kGrid3s[b.qs[2 * i] | (high & 1) << 8], kGrid3s[b.qs[2 * i + 1] | (high & 2) << 7], b.signs[i], u.code + 8 * i);
    }
}

// Bytes are fractions in base 3: after t digits are shifted out on the left, what overflows 256 times 3 is the next one.
inline void trits(const uint8_t* qs, int bytes, int digits, uint8_t* code) {
    for (int t = 0, power = 1; t < digits; t++, power *= 3)
        for (int i = 0; i < bytes; i++)
            *code++ = uint8_t(uint8_t(qs[i] * power) * 3 >> 8);
}

inline void unpack(const TQ1_0& b, Unpacked& u) {
    u.d = b.d;
    trits(b.qs, 32, 5, u.code);
    trits(b.qs + 32, 16, 5, u.code + 160);
    trits(b.qh, 4, 4, u.code + 240);
}

inline void unpack(const TQ2_0& b, Unpacked& u) {
    u.d = b.d;
    pairs256(b.qs, u.code);
}

// 2^(e-128), denormal below e = 2. Codes reach 12, so e >= kExponentEnd would leave room for no activation scale: refused on load.
inline constexpr int kExponentEnd = 252;
inline float f32_of_exponent(uint8_t e) { return std::bit_cast<float>(uint32_t(e + 2) << 23) * 0x1p-3f; }

inline constexpr int8_t kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; // twice the e2m1 values
inline constexpr int8_t kIQ1[16] = {-7, 1, 9, 0, -9, -1, 7, 0};                               // eight times -1, 0 or 1, plus or minus 1
inline constexpr int8_t kIQ2[16] = {8, 25, 43, 0, -8, -25, -43, 0};
inline constexpr int8_t kIQ3XXS[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
inline constexpr int8_t kIQ3S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

// Half of the unsigned e4m3 number in the low 7 bits: they are an f32's exponent and first bits of the fraction, 2^120 too small.
inline float f32_of_e4m3(uint8_t e) { return std::bit_cast<float>(uint32_t(e & 127) << 20) * 0x1p119f; }
inline bool e4m3_finite(uint8_t e) { return (e & 127) != 127; }

// Read where it lies: a copy would be loaded again across the stores that made it, which stalls. Blocks with words begin at even addresses.
template <class Block> void unpack_block(const uint8_t* bytes, Unpacked& u) { unpack(*reinterpret_cast<const Block*>(bytes), u); }

} // namespace quaff::blocks
