// The ggml block types as they lie in a file, and one small function per type: block -> codes and scales, no value changed.
#pragma once
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
    uint8_t scale[16], min[16]; // of two-level scales (signed ones as int8); scale[0] of MXFP4 is the exponent
};

inline int nibble(const uint8_t* q, int at, int high) { return q[at] >> 4 * high & 15; }

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
static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 && sizeof(Q8_0) == 34);
static_assert(sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);
static_assert(sizeof(IQ4_XS) == 136 && sizeof(MXFP4) == 17);

inline void nibbles32(const uint8_t* qs, uint8_t* code) {
    for (int l = 0; l < 16; l++)
        code[l] = qs[l] & 15, code[16 + l] = qs[l] >> 4;
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
    for (int k = 0; k < 32; k++)
        code[k] = uint8_t(nibble(qs, k % 16, k / 16) | (qh[k / 8] >> k % 8 & 1) << 4);
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
    for (int k = 0; k < 32; k++)
        u.code[k] = uint8_t(b.qs[k] + 128);
}

inline int pair_of_bits(const uint8_t* qs, int k) { return qs[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3; } // Q2_K, Q3_K low, Q6_K high

inline void unpack(const Q2_K& b, Unpacked& u) {
    u.d = b.d, u.dmin = b.dmin;
    for (int g = 0; g < 16; g++)
        u.scale[g] = b.scales[g] & 15, u.min[g] = b.scales[g] >> 4;
    for (int k = 0; k < 256; k++)
        u.code[k] = uint8_t(pair_of_bits(b.qs, k));
}

inline void unpack(const Q3_K& b, Unpacked& u) {
    u.d = b.d;
    for (int g = 0; g < 16; g++) {
        const int six = nibble(b.scales, g % 8, g / 8) | (b.scales[8 + g % 4] >> g / 4 * 2 & 3) << 4;
        u.scale[g] = uint8_t(six - 32);
    }
    // A set bit of hmask means that nothing is subtracted.
    for (int k = 0; k < 256; k++)
        u.code[k] = uint8_t(pair_of_bits(b.qs, k) + (b.hmask[k % 32] >> k / 32 & 1) * 4);
}

// Eight 6-bit scales and minima in 12 bytes, shared by Q4_K and Q5_K.
inline void k_scales(uint16_t d, uint16_t dmin, const uint8_t* s, Unpacked& u) {
    u.d = d, u.dmin = dmin;
    for (int g = 0; g < 8; g++) {
        u.scale[g] = uint8_t(g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
        u.min[g] = uint8_t(g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4);
    }
}

inline void unpack(const Q4_K& b, Unpacked& u) {
    k_scales(b.d, b.dmin, b.scales, u);
    for (int k = 0; k < 256; k++)
        u.code[k] = uint8_t(nibble(b.qs, k / 64 * 32 + k % 32, k / 32 % 2));
}

inline void unpack(const Q5_K& b, Unpacked& u) {
    k_scales(b.d, b.dmin, b.scales, u);
    for (int k = 0; k < 256; k++)
        u.code[k] = uint8_t(nibble(b.qs, k / 64 * 32 + k % 32, k / 32 % 2) | (b.qh[k % 32] >> k / 32 & 1) << 4);
}

inline void unpack(const Q6_K& b, Unpacked& u) {
    u.d = b.d;
    std::memcpy(u.scale, b.scales, 16);
    for (int k = 0; k < 256; k++)
        u.code[k] = uint8_t(nibble(b.ql, k / 128 * 64 + k % 64, k / 64 % 2) | pair_of_bits(b.qh, k) << 4);
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

// 2^(e-128), denormal below e = 2. Codes reach 12, so e >= kExponentEnd would leave room for no activation scale: refused on load.
inline constexpr int kExponentEnd = 252;
inline float f32_of_exponent(uint8_t e) { return std::bit_cast<float>(uint32_t(e + 2) << 23) * 0x1p-3f; }

inline constexpr int8_t kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; // twice the e2m1 values

template <class Block> void unpack_block(const uint8_t* bytes, Unpacked& u) {
    Block b;
    std::memcpy(&b, bytes, sizeof b);
    unpack(b, u);
}

} // namespace quaff::blocks
