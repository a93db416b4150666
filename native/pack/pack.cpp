#include "pack.h"
#include "../numerics.h"
#include "blocks.h"
#include "memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

namespace quaff {
namespace {

using blocks::Unpacked;

struct Type {
    int32_t id;
    const char* name;
    int32_t block, bytes;
    Codes codes;
    Scales scales;
    int32_t group, offset;
    const int8_t* codebook;
    float unit;
    // The blocks of one row in a chunk of `groups` weight groups, into its scales and codes. False when a scale is not finite.
    bool (*write)(const uint8_t* blocks, int64_t groups, uint8_t* scales, uint8_t* codes, int row);
};

// A plane of one row's 32 codes: four codes are one word, and k4 lies in line k4 % bits, shifted by k4 / bits * bits.
template <int from, int bits> void write_plane(const uint8_t* code, uint8_t* plane, int row) {
    constexpr uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t pairs[4]; // of words
    std::memcpy(pairs, code, 32);
    uint32_t lines[bits];
    if constexpr (bits == 1) {
        uint64_t both = 0; // even words below, odd ones above
        for (int i = 0; i < 4; i++)
            both |= (pairs[i] >> from & mask) << 2 * i;
        lines[0] = uint32_t(both) | uint32_t(both >> 32) << 1;
    } else {
        uint64_t joined[bits / 2] = {};
        for (int i = 0; i < 4; i++)
            joined[i % (bits / 2)] |= (pairs[i] >> from & mask) << (i / (bits / 2) * bits);
        std::memcpy(lines, joined, sizeof lines);
    }
    for (int i = 0; i < bits; i++)
        std::memcpy(plane + 64 * i + 4 * row, lines + i, 4);
}

void read_plane(const uint8_t* plane, int row, int bits, uint32_t* words, int to) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    for (int k4 = 0; k4 < 8; k4++) {
        uint32_t word;
        std::memcpy(&word, plane + 64 * (k4 % bits) + 4 * row, 4);
        words[k4] |= (word >> (k4 / bits * bits) & mask) << to;
    }
}

template <Codes codes> void write_group(const uint8_t* code, uint8_t* group, int row) {
    constexpr Planes bits = planes(codes);
    write_plane<0, bits.low>(code, group, row);
    if constexpr (bits.high > 0)
        write_plane<bits.low, bits.high>(code, group + 64 * bits.low, row);
}

void read_group(Codes codes, const uint8_t* group, int row, uint8_t* code) {
    const auto [low, high] = planes(codes);
    uint32_t words[8] = {};
    read_plane(group, row, low, words, 0);
    if (high)
        read_plane(group + 64 * low, row, high, words, low);
    std::memcpy(code, words, 32);
}

bool finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// One row's scales of a block of the file into the panel's scale block. False when one is not finite.
template <Scales scales, int group> bool write_scales(const Unpacked& u, uint8_t* block, int row) {
    const auto super = [&](auto* to) { // d, then a byte per group
        to->d[row] = u.d;
        for (size_t g = 0; g < std::size(to->scale); g++)
            to->scale[g][row] = int8_t(u.scale[g]);
        return finite(u.d);
    };
    if constexpr (scales == Scales::kHalf) {
        reinterpret_cast<HalfScales*>(block)->scale[row] = u.d;
        return finite(u.d);
    } else if constexpr (scales == Scales::kHalfMin) {
        reinterpret_cast<HalfMinScales*>(block)->scale[row] = u.d;
        reinterpret_cast<HalfMinScales*>(block)->min[row] = u.dmin;
        return finite(u.d) && finite(u.dmin);
    } else if constexpr (scales == Scales::kSuper) {
        return super(reinterpret_cast<SuperScales<256 / group>*>(block));
    } else if constexpr (scales == Scales::kSuperMin) {
        auto* to = reinterpret_cast<SuperMinScales*>(block);
        to->dmin[row] = u.dmin;
        for (size_t g = 0; g < std::size(to->min); g++)
            to->min[g][row] = int8_t(u.min[g]);
        return super(to) && finite(u.dmin);
    } else if constexpr (scales == Scales::kSuperPair) {
        auto* to = reinterpret_cast<SuperPairScales*>(block);
        to->d[row] = u.d, to->dmin[row] = u.dmin;
        for (size_t g = 0; g < std::size(to->both); g++)
            to->both[g][row] = uint8_t(u.scale[g] | u.min[g] << 4);
        return finite(u.d) && finite(u.dmin);
    } else if constexpr (scales == Scales::kExponent) {
        reinterpret_cast<ExponentScales*>(block)->e[row] = u.scale[0];
        return u.scale[0] < blocks::kExponentEnd;
    } else if constexpr (scales == Scales::kSmallFloat) {
        bool all = true;
        for (int g = 0; g < 4; g++) {
            reinterpret_cast<SmallFloatScales*>(block)->scale[g][row] = u.scale[g];
            all &= blocks::e4m3_finite(u.scale[g]);
        }
        return all;
    } else {
        reinterpret_cast<OneScale*>(block)->d[row] = u.d;
        return finite(u.d);
    }
}

// Blocks whose nibbles lie in the file as in a plane: byte 4*i + j holds k = 4*i + j below k + 16.
template <class Block>
constexpr bool kPlaneOrder =
    std::is_same_v<Block, blocks::Q4_0> || std::is_same_v<Block, blocks::Q4_1> || std::is_same_v<Block, blocks::MXFP4>;

template <class Block, int values, Codes codes, Scales scales, int group>
bool write_blocks(const uint8_t* from, int64_t groups, uint8_t* scale, uint8_t* code, int row) {
    bool all = true;
    for (int64_t left = groups * group / values; left > 0; left--, from += sizeof(Block)) {
        Unpacked u;
        blocks::unpack_block<Block>(from, u);
        if constexpr (kPlaneOrder<Block>)
            for (int i = 0; i < 4; i++)
                std::memcpy(code + 64 * i + 4 * row, from + offsetof(Block, qs) + 4 * i, 4);
        else
            for (int k = 0; k < values; k += 32)
                write_group<codes>(u.code + k, code + k / 32 * code_group_bytes(codes), row);
        code += values / 32 * code_group_bytes(codes);
        all &= write_scales<scales, group>(u, scale, row);
        scale += scale_block(scales, group).bytes;
    }
    return all;
}

template <class Block, int values, Codes codes, Scales scales, int group>
constexpr Type quantised(int32_t id, const char* name, int32_t offset = 0, const int8_t* codebook = nullptr, float unit = 1) {
    return {id,
            name,
            values,
            int32_t(sizeof(Block)),
            codes,
            scales,
            group,
            offset,
            codebook,
            unit,
            write_blocks<Block, values, codes, scales, group>};
}

constexpr Type kTypes[] = {
    {0, "F32", 1, 4, Codes::kF32, Scales::kNone, 0, 0, nullptr, 1, nullptr},
    {1, "F16", 1, 2, Codes::kF16, Scales::kNone, 0, 0, nullptr, 1, nullptr},
    {30, "BF16", 1, 2, Codes::kBF16, Scales::kNone, 0, 0, nullptr, 1, nullptr},
    quantised<blocks::Q4_0, 32, Codes::kNibble, Scales::kHalf, 32>(2, "Q4_0", 8),
    quantised<blocks::Q4_1, 32, Codes::kNibble, Scales::kHalfMin, 32>(3, "Q4_1"),
    quantised<blocks::Q5_0, 32, Codes::kNibbleBit, Scales::kHalf, 32>(6, "Q5_0", 16),
    quantised<blocks::Q5_1, 32, Codes::kNibbleBit, Scales::kHalfMin, 32>(7, "Q5_1"),
    quantised<blocks::Q8_0, 32, Codes::kByte, Scales::kHalf, 32>(8, "Q8_0", 128),
    quantised<blocks::Q2_K, 256, Codes::kPair, Scales::kSuperPair, 16>(10, "Q2_K"),
    quantised<blocks::Q3_K, 256, Codes::kPairBit, Scales::kSuper, 16>(11, "Q3_K", 4),
    quantised<blocks::Q4_K, 256, Codes::kNibble, Scales::kSuperMin, 32>(12, "Q4_K"),
    quantised<blocks::Q5_K, 256, Codes::kNibbleBit, Scales::kSuperMin, 32>(13, "Q5_K"),
    quantised<blocks::Q6_K, 256, Codes::kNibblePair, Scales::kSuper, 16>(14, "Q6_K", 32),
    quantised<blocks::Q4_0, 32, Codes::kNibble, Scales::kHalf, 32>(20, "IQ4_NL", 0, blocks::kIQ4), // laid out as Q4_0
    quantised<blocks::IQ4_XS, 256, Codes::kNibble, Scales::kSuper, 32>(23, "IQ4_XS", 0, blocks::kIQ4),
    quantised<blocks::MXFP4, 32, Codes::kNibble, Scales::kExponent, 32>(39, "MXFP4", 0, blocks::kFP4),
    quantised<blocks::NVFP4, 64, Codes::kNibble, Scales::kSmallFloat, 16>(40, "NVFP4", 0, blocks::kFP4),
    quantised<blocks::IQ1_S, 256, Codes::kPairBit, Scales::kSuper, 32>(19, "IQ1_S", 0, blocks::kIQ1, 0.125f),
    quantised<blocks::IQ1_M, 256, Codes::kPairBit, Scales::kSuper, 16>(29, "IQ1_M", 0, blocks::kIQ1, 0.125f),
    quantised<blocks::IQ2_XXS, 256, Codes::kPairBit, Scales::kSuper, 32>(16, "IQ2_XXS", 0, blocks::kIQ2, 0.125f),
    quantised<blocks::IQ2_XS, 256, Codes::kPairBit, Scales::kSuper, 16>(17, "IQ2_XS", 0, blocks::kIQ2, 0.125f),
    quantised<blocks::IQ2_S, 256, Codes::kPairBit, Scales::kSuper, 16>(22, "IQ2_S", 0, blocks::kIQ2, 0.125f),
    quantised<blocks::IQ3_XXS, 256, Codes::kNibble, Scales::kSuper, 32>(18, "IQ3_XXS", 0, blocks::kIQ3XXS, 0.25f),
    quantised<blocks::IQ3_S, 256, Codes::kNibble, Scales::kSuper, 32>(21, "IQ3_S", 0, blocks::kIQ3S),
    quantised<blocks::TQ1_0, 256, Codes::kPair, Scales::kOne, 32>(34, "TQ1_0", 1),
    quantised<blocks::TQ2_0, 256, Codes::kPair, Scales::kOne, 32>(35, "TQ2_0", 1),
};

const Type* find(int32_t id) {
    for (const Type& type : kTypes)
        if (type.id == id)
            return &type;
    return nullptr;
}

// Weight group g of a panel lies in chunk g / kChunk.
struct Spot {
    const uint8_t *chunk, *codes;
};
Spot chunk_of(const Weight& w, const uint8_t* panel, int64_t g) {
    const int64_t left = w.groups - g / kChunk * kChunk;
    const uint8_t* chunk = panel + g / kChunk * chunk_bytes(w, kChunk);
    return {chunk, chunk + chunk_codes_at(w, std::min(left, kChunk))};
}

// Scale and minimum of weight group g of one row.
void read_scales(const Weight& w, const uint8_t* panel, int64_t g, int64_t row, float& scale, float& min) {
    const ScaleBlock form = scale_block(w.scales, w.group);
    const int64_t k = g % kChunk * w.group, in = k % form.k / w.group;
    const uint8_t* block = chunk_of(w, panel, g).chunk + k / form.k * form.bytes;
    const auto half = [](uint16_t bits) { return blocks::f32_of_f16(bits); };
    switch (w.scales) {
    case Scales::kHalf:
        scale = half(reinterpret_cast<const HalfScales*>(block)->scale[row]);
        break;
    case Scales::kHalfMin:
        scale = half(reinterpret_cast<const HalfMinScales*>(block)->scale[row]);
        min = half(reinterpret_cast<const HalfMinScales*>(block)->min[row]);
        break;
    case Scales::kSuper: { // the same place for 8 and 16 groups
        const auto* b = reinterpret_cast<const SuperScales<16>*>(block);
        scale = half(b->d[row]) * w.unit * float(b->scale[in][row]);
        break;
    }
    case Scales::kSuperMin: {
        const auto* b = reinterpret_cast<const SuperMinScales*>(block);
        scale = half(b->d[row]) * float(b->scale[in][row]);
        min = -(half(b->dmin[row]) * float(b->min[in][row]));
        break;
    }
    case Scales::kSuperPair: {
        const auto* b = reinterpret_cast<const SuperPairScales*>(block);
        scale = half(b->d[row]) * float(b->both[in][row] & 15);
        min = -(half(b->dmin[row]) * float(b->both[in][row] >> 4));
        break;
    }
    case Scales::kExponent:
        scale = blocks::f32_of_exponent(reinterpret_cast<const ExponentScales*>(block)->e[row]);
        break;
    case Scales::kSmallFloat:
        scale = blocks::f32_of_e4m3(reinterpret_cast<const SmallFloatScales*>(block)->scale[in][row]);
        break;
    case Scales::kOne:
        scale = half(reinterpret_cast<const OneScale*>(block)->d[row]);
        break;
    case Scales::kNone:
        break;
    }
}

struct Panels {
    const Type& type;
    const Weight& w;
    uint8_t* data;

    // Panel p from its rows, one after the other, up to the last row there is. Returns the first row with a scale (float types: a weight) that
    // is not finite, or -1.
    int64_t write(int64_t p, const uint8_t* from, int64_t row_bytes) const {
        const int rows = int(std::min<int64_t>(w.rows - p * kLanes, kLanes));
        uint8_t* panel = data + p * w.panel_bytes;
        uint32_t bad = 0; // a bit per row
        switch (w.codes) {
        case Codes::kF32:
            bad = write_floats<uint32_t>(panel, from, row_bytes, rows, 0x7f800000);
            break;
        case Codes::kF16:
            bad = write_floats<uint16_t>(panel, from, row_bytes, rows, 0x7c00);
            break;
        case Codes::kBF16:
            bad = write_floats<uint16_t>(panel, from, row_bytes, rows, 0x7f80);
            break;
        default:
            bad = write_chunks(panel, from, row_bytes, rows);
        }
        return bad ? p * kLanes + std::countr_zero(bad) : -1;
    }

    template <class Bits> uint32_t write_floats(uint8_t* panel, const uint8_t* from, int64_t row_bytes, int rows, Bits exponent) const {
        constexpr int64_t kColumns = 128; // of a panel, few enough to stay in the nearest cache until all rows have written theirs
        Bits* to = reinterpret_cast<Bits*>(panel);
        uint32_t bad = 0;
        for (int64_t first = 0; first < w.cols; first += kColumns)
            for (int row = 0; row < rows; row++) {
                bool all = true;
                for (int64_t k = first; k < std::min(w.cols, first + kColumns); k++) {
                    Bits bits;
                    std::memcpy(&bits, from + row * row_bytes + k * int64_t(sizeof bits), sizeof bits);
                    to[k * kLanes + row] = bits;
                    all &= (bits & exponent) != exponent;
                }
                bad |= uint32_t(!all) << row;
            }
        return bad;
    }

    // Chunk by chunk: a chunk stays in the nearest cache until all rows have written theirs.
    uint32_t write_chunks(uint8_t* panel, const uint8_t* from, int64_t row_bytes, int rows) const {
        if (rows < kLanes)
            std::memset(panel, 0, size_t(w.panel_bytes)); // scales of pad rows
        const ScaleBlock form = scale_block(w.scales, w.group);
        uint32_t bad = 0;
        uint8_t* chunk = panel;
        for (int64_t g = 0; g < w.groups; g += kChunk) {
            const int64_t groups = std::min(kChunk, w.groups - g), k = groups * w.group;
            uint8_t *codes = chunk + chunk_codes_at(w, groups), *scales_end = chunk + k / form.k * form.bytes;
            std::memset(scales_end, 0, size_t(codes - scales_end));
            for (int row = 0; row < rows; row++)
                bad |= uint32_t(!type.write(from + row * row_bytes + g * w.group / type.block * type.bytes, groups, chunk, codes, row))
                       << row;
            for (int row = rows; row < kLanes; row++)
                write_pad(codes, k / 32, row);
            chunk += chunk_bytes(w, groups);
        }
        std::memset(chunk, 0, size_t(panel + w.panel_bytes - chunk));
        return bad;
    }

    // Codes of zero in 32-groups of a row that there is not.
    void write_pad(uint8_t* codes, int64_t count, int row) const {
        const Planes bits = planes(w.codes);
        const int stored = w.codebook ? 0 : w.offset;
        const auto line = [&](int from, int n) { // a byte of codes that all have these bits
            int byte = 0;
            for (int at = 0; at < 8; at += n)
                byte |= (stored >> from & ((1 << n) - 1)) << at;
            return byte;
        };
        for (int64_t i = 0; i < count; i++) {
            for (int j = 0; j < bits.low; j++, codes += 64)
                std::memset(codes + 4 * row, line(0, bits.low), 4);
            for (int j = 0; j < bits.high; j++, codes += 64)
                std::memset(codes + 4 * row, line(bits.low, bits.high), 4);
        }
    }
};

// Reads `size` bytes; returns 0, or why not: an errno, or kEnded where the file ends early.
constexpr int kEnded = -1;
int read_all(int fd, int64_t offset, uint8_t* to, int64_t size) {
    while (size > 0) {
        const ssize_t n = ::pread(fd, to, size_t(size), offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : kEnded;
        to += n, offset += n, size -= n;
    }
    return 0;
}

// The rows of one panel at a time.
class PanelRows {
public:
    PanelRows(const BlockRows& blocks, int64_t rows, int64_t row_bytes) : blocks_(blocks), rows_(rows), row_bytes_(row_bytes) {
        if (!blocks.data)
            buffer_.resize(size_t(std::min<int64_t>(rows, kLanes) * row_bytes));
    }

    // Rows of panel p, one after the other, up to the last row there is; null when they cannot be read, for the reason in `error`.
    const uint8_t* of(int64_t p, int& error) {
        if (blocks_.data)
            return blocks_.data + p * kLanes * row_bytes_;
        const int64_t first = p * kLanes, count = std::min<int64_t>(rows_ - first, kLanes), at = blocks_.offset + first * blocks_.stride;
        if (blocks_.stride == row_bytes_)
            error = read_all(blocks_.fd, at, buffer_.data(), count * row_bytes_);
        else
            for (int64_t row = 0; row < count && !error; row++)
                error = read_all(blocks_.fd, at + row * blocks_.stride, buffer_.data() + row * row_bytes_, row_bytes_);
        return error ? nullptr : buffer_.data();
    }

private:
    const BlockRows& blocks_;
    const int64_t rows_, row_bytes_;
    std::vector<uint8_t> buffer_;
};

struct Outcome {
    int64_t bad_row = -1; // the first that is not finite
    int error = 0;        // of reading
};

Outcome write_panels(const Panels& panels, const BlockRows& blocks, int64_t row_bytes, int threads) {
    const int64_t count = panel_count(panels.w), rows = panels.w.rows;
    std::atomic<int64_t> next{0}, bad{std::numeric_limits<int64_t>::max()};
    std::atomic<int> failed{0};
    auto work = [&](PanelRows& source) {
        for (int64_t p; (p = next.fetch_add(1)) < count && !failed;) {
            int error = 0;
            const uint8_t* from = source.of(p, error);
            if (error) {
                failed = error;
                break;
            }
            const int64_t row = panels.write(p, from, row_bytes);
            for (int64_t seen = bad; row >= 0 && row < seen && !bad.compare_exchange_weak(seen, row);) {
            }
        }
    };
    // Buffers are made here: a thread may not throw.
    std::vector<PanelRows> sources(size_t(std::clamp<int64_t>(threads, 1, count)), PanelRows(blocks, rows, row_bytes));
    std::vector<std::thread> helpers;
    try {
        for (size_t t = 1; t < sources.size(); t++)
            helpers.emplace_back([&, t] { work(sources[t]); });
    } catch (const std::system_error&) { // no more threads to be had: the ones there are do it all
    }
    work(sources[0]);
    for (std::thread& helper : helpers)
        helper.join();
    return {bad == std::numeric_limits<int64_t>::max() ? -1 : bad.load(), failed};
}

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

void load_codes(const Weight& w, int64_t row, int8_t* code) {
    const uint8_t* panel = w.data + row / kLanes * w.panel_bytes;
    for (int64_t k = 0; k < w.cols; k += 32) {
        uint8_t stored[32];
        const uint8_t* codes = chunk_of(w, panel, k / w.group).codes;
        read_group(w.codes, codes + k % (kChunk * w.group) / 32 * code_group_bytes(w.codes), int(row % kLanes), stored);
        for (int i = 0; i < 32; i++)
            code[k + i] = w.codebook ? w.codebook[stored[i]] : int8_t(stored[i] - w.offset);
    }
}

float load_float(const Weight& w, int64_t row, int64_t k) {
    const uint8_t* panel = w.data + row / kLanes * w.panel_bytes;
    const int64_t at = k * kLanes + row % kLanes;
    if (w.codes == Codes::kF32)
        return reinterpret_cast<const float*>(panel)[at];
    const uint16_t half = reinterpret_cast<const uint16_t*>(panel)[at];
    return w.codes == Codes::kF16 ? blocks::f32_of_f16(half) : std::bit_cast<float>(uint32_t(half) << 16);
}

// A weight without its panels: `cols` fit the type.
Weight shape_of(const Type& type, int64_t rows, int64_t cols) {
    const bool has_min = type.scales == Scales::kHalfMin || type.scales == Scales::kSuperMin || type.scales == Scales::kSuperPair;
    Weight w{type.codes, type.scales, has_min, type.group, type.offset, type.codebook, type.unit, rows, cols, nullptr, 0, 0};
    if (is_integer(w.codes)) {
        w.groups = cols / w.group;
        const int64_t rest = w.groups % kChunk;
        w.panel_bytes = align64(w.groups / kChunk * chunk_bytes(w, kChunk) + (rest ? chunk_bytes(w, rest) : 0));
    } else {
        w.panel_bytes = cols * kLanes * type.bytes;
    }
    return w;
}

constexpr int64_t kMostSide = int64_t{1} << 32; // rows or columns: no size of a panel overflows

const Type& known(int32_t ggml_type) {
    const Type* type = find(ggml_type);
    if (type)
        return *type;
    std::string names;
    for (const Type& t : kTypes)
        names += std::string(names.empty() ? "" : ", ") + t.name;
    throw std::invalid_argument("ggml type " + std::to_string(ggml_type) + " is not supported; supported: " + names);
}

std::string describe(const Type& type, int64_t rows, int64_t cols) {
    return std::string(type.name) + " weight of " + std::to_string(rows) + " x " + std::to_string(cols);
}

// So that 32 bits count the bytes of a panel of integer codes.
constexpr int64_t kMaxCols = int64_t{1} << 27;

// The shape of a weight that can be packed.
Weight checked(const Type& type, int64_t rows, int64_t cols) {
    if (packed_bytes(type.id, rows, cols) < 0)
        throw std::invalid_argument(describe(type, rows, cols) + ": needs at least one row and columns that are a multiple of " +
                                    std::to_string(type.block));
    if (cols > kMaxCols)
        throw std::invalid_argument(describe(type, rows, cols) + ": rows may have " + std::to_string(kMaxCols) + " values at most");
    return shape_of(type, rows, cols);
}

Weight checked(const Type& type, const BlockRows& blocks, int64_t rows, int64_t cols) {
    const Weight w = checked(type, rows, cols);
    const int64_t row_bytes = ggml_row_bytes(type.id, cols);
    if (blocks.data && (blocks.size / row_bytes != rows || blocks.size % row_bytes))
        throw std::invalid_argument(describe(type, rows, cols) + ": needs rows of " + std::to_string(row_bytes) + " bytes but has " +
                                    std::to_string(blocks.size) + " bytes in all");
    if (!blocks.data && (blocks.offset < 0 || blocks.stride < row_bytes))
        throw std::invalid_argument(describe(type, rows, cols) + ": rows of " + std::to_string(row_bytes) + " bytes cannot lie " +
                                    std::to_string(blocks.stride) + " bytes apart");
    return w;
}

} // namespace

bool ggml_type_known(int32_t ggml_type) { return find(ggml_type) != nullptr; }

const char* ggml_type_name(int32_t ggml_type) {
    const Type* type = find(ggml_type);
    return type ? type->name : "unknown";
}

int64_t ggml_row_bytes(int32_t ggml_type, int64_t cols) {
    const Type* type = find(ggml_type);
    if (!type || cols <= 0 || cols % type->block || cols / type->block > std::numeric_limits<int64_t>::max() / type->bytes)
        return -1;
    return cols / type->block * type->bytes;
}

int64_t packed_bytes(int32_t ggml_type, int64_t rows, int64_t cols) {
    int64_t bytes;
    if (rows <= 0 || rows > kMostSide || cols > kMostSide || ggml_row_bytes(ggml_type, cols) < 0)
        return -1;
    const Weight w = shape_of(*find(ggml_type), rows, cols);
    return __builtin_mul_overflow(panel_count(w), w.panel_bytes, &bytes) ? -1 : bytes;
}

Weight weight_shape(int32_t ggml_type, int64_t rows, int64_t cols) { return checked(known(ggml_type), rows, cols); }

Weight pack_panels(int32_t ggml_type, const BlockRows& blocks, int64_t rows, int64_t cols, uint8_t* panels, int threads) {
    const Type& type = known(ggml_type);
    Weight w = checked(type, blocks, rows, cols);
    w.data = panels;
    if (!is_integer(w.codes))
        std::memset(panels + (panel_count(w) - 1) * w.panel_bytes, 0, size_t(w.panel_bytes)); // pad rows

    const Outcome outcome = write_panels({type, w, panels}, blocks, ggml_row_bytes(ggml_type, cols), threads);
    if (outcome.error)
        throw std::runtime_error(outcome.error == kEnded ? "the file became shorter while it was read"
                                                         : "cannot be read: " + std::generic_category().message(outcome.error));
    if (outcome.bad_row >= 0)
        throw std::invalid_argument(describe(type, rows, cols) + ": row " + std::to_string(outcome.bad_row) + " holds a " +
                                    (is_integer(w.codes) ? "scale" : "weight") + " that is not finite or out of range");
    return w;
}

PackedWeight pack_weight(int32_t ggml_type, const BlockRows& blocks, int64_t rows, int64_t cols, int threads) {
    const Weight shape = checked(known(ggml_type), blocks, rows, cols);
    const int64_t bytes = panel_count(shape) * shape.panel_bytes;
    const std::shared_ptr<uint8_t> memory = slab_memory(size_t(bytes));
    return {pack_panels(ggml_type, blocks, rows, cols, memory.get(), threads), memory, bytes, ggml_type};
}

PackedWeight view_panels(int32_t ggml_type, std::shared_ptr<const uint8_t> panels, int64_t size, int64_t rows, int64_t cols) {
    const Type& type = known(ggml_type);
    Weight w = checked(type, rows, cols);
    if (const int64_t bytes = panel_count(w) * w.panel_bytes; size != bytes)
        throw std::invalid_argument(describe(type, rows, cols) + ": has panels of " + std::to_string(bytes) + " bytes, not " +
                                    std::to_string(size));
    if (reinterpret_cast<uintptr_t>(panels.get()) % 64)
        throw std::invalid_argument(describe(type, rows, cols) + ": panels begin at a multiple of 64 bytes");
    w.data = panels.get();
    return {w, std::move(panels), size, ggml_type};
}

void unpack_rows(const Weight& w, int64_t row0, int64_t count, int8_t* codes, float* scale, float* min) {
    for (int64_t row = row0; row < row0 + count; row++) {
        load_codes(w, row, codes + (row - row0) * w.cols);
        const uint8_t* panel = w.data + row / kLanes * w.panel_bytes;
        for (int64_t g = 0; g < w.groups; g++) {
            float low = 0;
            const int64_t to = (row - row0) * w.groups + g;
            read_scales(w, panel, g, row % kLanes, scale[to], low);
            if (w.has_min)
                min[to] = low;
        }
    }
}

// scale*code is exact for every type (at most 24 bits), so two roundings, one rounding and dequantize's own order agree.
void dequantize_rows(const Weight& w, int64_t row0, int64_t count, float* out) {
    if (!is_integer(w.codes)) {
        for (int64_t row = row0; row < row0 + count; row++)
            for (int64_t k = 0; k < w.cols; k++)
                out[(row - row0) * w.cols + k] = load_float(w, row, k);
        return;
    }
    std::vector<int8_t> code(size_t(w.cols));
    std::vector<float> scale(size_t(w.groups)), min(size_t(w.groups));
    for (int64_t row = row0; row < row0 + count; row++) {
        unpack_rows(w, row, 1, code.data(), scale.data(), min.data());
        const int8_t* c = code.data();
        for (int64_t g = 0; g < w.groups; g++, c += w.group, out += w.group)
            for (int64_t k = 0; k < w.group; k++) {
                const float product = scale[size_t(g)] * float(c[k]);
                out[k] = w.has_min ? product + min[size_t(g)] : product;
            }
    }
}

} // namespace quaff
