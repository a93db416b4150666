#include "pack.h"
#include "../numerics.h"
#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
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
    bool has_min;
    int32_t group, offset;
    const int8_t* codebook;
    void (*unpack)(const uint8_t*, Unpacked&);
};

template <class Block>
constexpr Type quantised(int32_t id, const char* name, int32_t block, Codes codes, Scales scales, bool has_min, int32_t group,
                         int32_t offset = 0, const int8_t* codebook = nullptr) {
    return {id,
            name,
            block,
            int32_t(sizeof(Block)),
            codes,
            scales,
            has_min,
            group,
            codes == Codes::kByte ? 128 : offset,
            codebook,
            blocks::unpack_block<Block>};
}

constexpr Type kTypes[] = {
    {0, "F32", 1, 4, Codes::kF32, Scales::kNone, false, 0, 0, nullptr, nullptr},
    {1, "F16", 1, 2, Codes::kF16, Scales::kNone, false, 0, 0, nullptr, nullptr},
    {30, "BF16", 1, 2, Codes::kBF16, Scales::kNone, false, 0, 0, nullptr, nullptr},
    quantised<blocks::Q4_0>(2, "Q4_0", 32, Codes::kNibble, Scales::kF16, false, 32, 8),
    quantised<blocks::Q4_1>(3, "Q4_1", 32, Codes::kNibble, Scales::kF16, true, 32),
    quantised<blocks::Q5_0>(6, "Q5_0", 32, Codes::kByte, Scales::kF16, false, 32),
    quantised<blocks::Q5_1>(7, "Q5_1", 32, Codes::kByte, Scales::kF16, true, 32),
    quantised<blocks::Q8_0>(8, "Q8_0", 32, Codes::kByte, Scales::kF16, false, 32),
    quantised<blocks::Q2_K>(10, "Q2_K", 256, Codes::kByte, Scales::kF32, true, 16),
    quantised<blocks::Q3_K>(11, "Q3_K", 256, Codes::kByte, Scales::kF32, false, 16),
    quantised<blocks::Q4_K>(12, "Q4_K", 256, Codes::kNibble, Scales::kF32, true, 32),
    quantised<blocks::Q5_K>(13, "Q5_K", 256, Codes::kByte, Scales::kF32, true, 32),
    quantised<blocks::Q6_K>(14, "Q6_K", 256, Codes::kByte, Scales::kF32, false, 16),
    quantised<blocks::Q4_0>(20, "IQ4_NL", 32, Codes::kNibble, Scales::kF16, false, 32, 0, blocks::kIQ4), // laid out as Q4_0
    quantised<blocks::IQ4_XS>(23, "IQ4_XS", 256, Codes::kNibble, Scales::kF32, false, 32, 0, blocks::kIQ4),
    quantised<blocks::MXFP4>(39, "MXFP4", 32, Codes::kNibble, Scales::kF32, false, 32, 0, blocks::kFP4),
};

const Type* find(int32_t id) {
    for (const Type& type : kTypes)
        if (type.id == id)
            return &type;
    return nullptr;
}

bool is_float(Codes codes) { return codes >= Codes::kF16; }
int64_t code_bytes_per_group32(Codes codes) { return codes == Codes::kNibble ? 256 : 512; }

// The codes of 32 k of one row into its places in a panel's group.
void write_group(Codes codes, const uint8_t* code, uint8_t* group, int row) {
    if (codes == Codes::kByte) {
        for (int k4 = 0; k4 < 8; k4++)
            std::memcpy(group + 64 * k4 + 4 * row, code + 4 * k4, 4);
    } else {
        for (int k4 = 0; k4 < 4; k4++)
            for (int j = 0; j < 4; j++)
                group[64 * k4 + 4 * row + j] = uint8_t(code[4 * k4 + j] | code[16 + 4 * k4 + j] << 4);
    }
}

void write_scale(Scales kind, uint8_t* base, int64_t at, float value) {
    if (kind == Scales::kF32) {
        std::memcpy(base + 4 * at, &value, 4);
    } else {
        const uint16_t half = blocks::f16_of_f32_exact(value);
        std::memcpy(base + 2 * at, &half, 2);
    }
}

float read_scale(Scales kind, const void* base, int64_t at) {
    return kind == Scales::kF32 ? static_cast<const float*>(base)[at] : blocks::f32_of_f16(static_cast<const uint16_t*>(base)[at]);
}

struct Panels {
    const Type& type;
    const uint8_t* src;
    int64_t row_bytes;
    const Weight& w;
    uint8_t *data, *scale, *min;

    // Returns whether every scale (float types: every weight) is finite.
    bool write_row(int64_t row) const {
        switch (w.codes) {
        case Codes::kF32:
            return write_float_row<uint32_t>(row, 0x7f800000);
        case Codes::kF16:
            return write_float_row<uint16_t>(row, 0x7c00);
        case Codes::kBF16:
            return write_float_row<uint16_t>(row, 0x7f80);
        default:
            return write_quantised_row(row);
        }
    }

    template <class Bits> bool write_float_row(int64_t row, Bits exponent) const {
        const uint8_t* from = src + row * row_bytes;
        Bits* to = reinterpret_cast<Bits*>(data + row / kLanes * w.panel_bytes) + row % kLanes;
        bool finite = true;
        for (int64_t k = 0; k < w.cols; k++) {
            Bits bits;
            std::memcpy(&bits, from + k * int64_t(sizeof bits), sizeof bits);
            to[k * kLanes] = bits;
            finite &= (bits & exponent) != exponent;
        }
        return finite;
    }

    bool write_quantised_row(int64_t row) const {
        const bool pad = row >= w.rows;
        Unpacked u{};
        if (pad)
            std::fill(std::begin(u.code), std::end(u.code), uint8_t(w.offset));
        const int64_t panel = row / kLanes, lane = row % kLanes, groups_per_block = type.block / w.group;
        bool finite = true;
        for (int64_t block = 0; block < w.cols / type.block; block++) {
            if (!pad)
                type.unpack(src + row * row_bytes + block * type.bytes, u);
            for (int64_t i = 0; i < type.block / 32; i++) {
                uint8_t* group = data + panel * w.panel_bytes + (block * (type.block / 32) + i) * code_bytes_per_group32(w.codes);
                write_group(w.codes, u.code + 32 * i, group, int(lane));
            }
            for (int64_t i = 0; i < groups_per_block; i++) {
                const int64_t at = (panel * w.groups + block * groups_per_block + i) * kLanes + lane;
                if (!std::isfinite(u.scale[i]) || !std::isfinite(u.min[i]))
                    return false;
                write_scale(w.scales, scale, at, u.scale[i]);
                if (w.has_min)
                    write_scale(w.scales, min, at, u.min[i]);
            }
        }
        return finite;
    }
};

// Packs all panels; returns the first row that is not finite, or -1.
int64_t write_panels(const Panels& panels, int threads) {
    const int64_t count = panel_count(panels.w);
    std::atomic<int64_t> next{0}, bad{std::numeric_limits<int64_t>::max()};
    auto work = [&] {
        for (int64_t p; (p = next.fetch_add(1)) < count;)
            for (int64_t row = p * kLanes; row < (p + 1) * kLanes; row++) {
                if (is_float(panels.w.codes) && row >= panels.w.rows)
                    break;
                if (panels.write_row(row))
                    continue;
                for (int64_t seen = bad; row < seen && !bad.compare_exchange_weak(seen, row);) {
                }
            }
    };
    std::vector<std::thread> helpers;
    try {
        for (int64_t t = 1; t < std::min<int64_t>(threads, count); t++)
            helpers.emplace_back(work);
    } catch (const std::system_error&) { // no more threads to be had: the ones there are do it all
    }
    work();
    for (std::thread& helper : helpers)
        helper.join();
    return bad == std::numeric_limits<int64_t>::max() ? -1 : bad.load();
}

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

void delete_aligned(void* p) { ::operator delete (p, std::align_val_t{64}); }

void load_codes(const Weight& w, int64_t row, int8_t* code) {
    const uint8_t* panel = w.data + row / kLanes * w.panel_bytes + row % kLanes * 4;
    for (int64_t k = 0; k < w.cols; k++) {
        if (w.codes == Codes::kByte) {
            code[k] = int8_t(panel[k / 4 * 64 + k % 4] - w.offset);
        } else {
            const int stored = panel[k / 32 * 256 + k % 16 / 4 * 64 + k % 4] >> k % 32 / 16 * 4 & 15;
            code[k] = w.codebook ? w.codebook[stored] : int8_t(stored - w.offset);
        }
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

PackedWeight pack_weight(int32_t ggml_type, const uint8_t* data, int64_t size, int64_t rows, int64_t cols, int threads) {
    const Type* type = find(ggml_type);
    if (!type) {
        std::string known;
        for (const Type& t : kTypes)
            known += std::string(known.empty() ? "" : ", ") + t.name;
        throw std::invalid_argument("ggml type " + std::to_string(ggml_type) + " is not supported; supported: " + known);
    }
    const std::string shape = std::string(type->name) + " weight of " + std::to_string(rows) + " x " + std::to_string(cols);
    const int64_t row_bytes = ggml_row_bytes(ggml_type, cols);
    if (rows <= 0 || row_bytes < 0)
        throw std::invalid_argument(shape + ": needs at least one row and columns that are a multiple of " + std::to_string(type->block));
    if (size / row_bytes != rows || size % row_bytes)
        throw std::invalid_argument(shape + ": needs rows of " + std::to_string(row_bytes) + " bytes but has " + std::to_string(size) +
                                    " bytes in all");

    PackedWeight packed;
    Weight& w = packed.w;
    w = {type->codes, type->scales, type->has_min, type->group, type->offset, type->codebook, rows, cols, nullptr, nullptr, nullptr, 0, 0};
    w.groups = w.group ? cols / w.group : 0;
    w.panel_bytes = is_float(w.codes) ? cols * kLanes * type->bytes : cols / 32 * code_bytes_per_group32(w.codes);
    const int64_t panels = panel_count(w), code_bytes = panels * w.panel_bytes;
    const int64_t scale_bytes = panels * w.groups * kLanes * (w.scales == Scales::kF32 ? 4 : 2), min_bytes = w.has_min ? scale_bytes : 0;
    const int64_t scale_at = align64(code_bytes), min_at = scale_at + align64(scale_bytes);
    auto* base = static_cast<uint8_t*>(::operator new (size_t(min_at + align64(min_bytes)), std::align_val_t{64}));
    packed.storage = {base, delete_aligned};
    packed.bytes = code_bytes + scale_bytes + min_bytes;
    packed.ggml_type = ggml_type;
    w.data = base;
    if (w.scales != Scales::kNone)
        w.scale = base + scale_at;
    if (w.has_min)
        w.min = base + min_at;
    if (is_float(w.codes))
        std::memset(base + (panels - 1) * w.panel_bytes, 0, size_t(w.panel_bytes)); // pad rows

    const int64_t bad = write_panels({*type, data, row_bytes, w, base, base + scale_at, base + min_at}, threads);
    if (bad >= 0)
        throw std::invalid_argument(shape + ": row " + std::to_string(bad) + " holds a " + (is_float(w.codes) ? "weight" : "scale") +
                                    " that is not finite or out of range");
    return packed;
}

void unpack_rows(const Weight& w, int64_t row0, int64_t count, int8_t* codes, float* scale, float* min) {
    for (int64_t row = row0; row < row0 + count; row++) {
        load_codes(w, row, codes + (row - row0) * w.cols);
        for (int64_t g = 0; g < w.groups; g++) {
            const int64_t from = (row / kLanes * w.groups + g) * kLanes + row % kLanes, to = (row - row0) * w.groups + g;
            scale[to] = read_scale(w.scales, w.scale, from);
            if (w.has_min)
                min[to] = read_scale(w.scales, w.min, from);
        }
    }
}

// scale*code is exact for every type (at most 24 bits), so two roundings, one rounding and dequantize's own order agree.
void dequantize_rows(const Weight& w, int64_t row0, int64_t count, float* out) {
    if (is_float(w.codes)) {
        for (int64_t row = row0; row < row0 + count; row++)
            for (int64_t k = 0; k < w.cols; k++)
                out[(row - row0) * w.cols + k] = load_float(w, row, k);
        return;
    }
    std::vector<int8_t> code(size_t(w.cols));
    std::vector<float> scale(size_t(w.groups)), min(size_t(w.groups));
    for (int64_t row = row0; row < row0 + count; row++, out += w.cols) {
        unpack_rows(w, row, 1, code.data(), scale.data(), min.data());
        for (int64_t k = 0; k < w.cols; k++) {
            const float product = scale[size_t(k / w.group)] * float(code[size_t(k)]);
            out[k] = w.has_min ? product + min[size_t(k / w.group)] : product;
        }
    }
}

} // namespace quaff
