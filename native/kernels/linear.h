// out = x * w^T: NUMERICS 13 (integer weights, int8 activations) and 14 (float activations). Lanes are output rows, so an element is one chain
// over k whatever the number of rows, the tile or the instruction set. V is a Vec, D a Dot (isa/dot_*.h) with its Vec.
#pragma once
#include "../isa/vec_common.h"
#include "../numerics.h"
#include "table.h"
#include <bit>

namespace quaff::linear {

inline constexpr int64_t kMaxTokens = 8, kMaxPanels = 4, kMaxFloatPanels = 2; // no tile is larger
inline constexpr int64_t kPreparedBytes = 448 << 10;                          // a part of the second-level cache
inline constexpr int64_t kPackedBytes = 128 << 10;                            // packed panels that several tiles pass over together
static_assert(kQuantGroup == 32 && kLanes == 16);

// Where a tile finds codes and scales: in the weight itself, or prepared for many tokens.
enum class Source {
    kPacked,      // planes and scale blocks, expanded in registers
    kBook,        // the same, codes through a codebook
    kSteps,       // prepared: one code a byte, f32 scales times each mantissa that an activation scale may have, f32 minimums
    kPackedSteps, // the same scales, codes in the weight itself: the tile unpacks them with units that idle beside those of products
};
constexpr bool is_prepared(Source source) { return source == Source::kSteps || source == Source::kPackedSteps; }
// Whether integer sums become f32 as parts of larger numbers (struct Cell).
constexpr bool shifted(Source source) { return source != Source::kPacked; }

// Panels side by side, from the first one of a call on.
struct Panels {
    // Chunks as they are.
    Panels(const Weight& w, int64_t panel)
        : data(w.data + panel * w.panel_bytes), panel_stride(w.panel_bytes), chunk_stride(chunk_bytes(w, kChunk)),
          codes_at(chunk_codes_at(w, kChunk)), last_codes_at(chunk_codes_at(w, w.groups % kChunk)) {}
    // Prepared codes only, 512 bytes per group of 32.
    Panels(const Weight& w, const uint8_t* codes) : data(codes), panel_stride(w.cols * kLanes), chunk_stride(kChunk * w.group / 32 * 512) {}
    const uint8_t* data;
    int64_t panel_stride, chunk_stride, codes_at = 0, last_codes_at = 0; // codes of a chunk of 16 groups, of a shorter last one
    const float* scales = nullptr; // prepared: [panels of a tile][scale * mantissa, then min if any][group][panel][row]
};

// Significant bits of a stored code as an operand: what fits an int16 pair of products depends on it (isa/dot_avx2.h).
constexpr int operand_bits(Codes codes, bool book) {
    return codes == Codes::kByte || book ? 8 : codes == Codes::kNibbleBit ? 5 : codes == Codes::kNibblePair ? 6 : 4;
}

// What a tile needs to know of one token's activations, 16 weight groups at a time: all of it lies at constant distances from one pointer.
//
// An integer sum that starts at the bits of 1.5 * 2^(23+e) is, read as an f32, that number plus dot * 2^e while |dot| < 2^22. So taking it away again
// makes dot * 2^e, exact, for what a conversion to f32 costs: the activation scale 2^e * mantissa needs no product of its own where the
// weights' scales times each mantissa were prepared.
// For few tokens there is a product of whole scales, which gives the same bits as long as it is no denormal number: only weights of codebooks may have
// scales so small.
struct Cell {
    int32_t start[16]; // -offset * sum(q) of the weight group; where shifted plus the bits of 1.5 * 2^(23+e)
    int32_t step[16];  // prepared: where scales times the mantissa are, in floats; else its bits; where not shifted the scale's
    float other[16];   // with minimums: scale of the enclosing 32 * float(sum(q)); without, where shifted: 1.5 * 2^(23+e)
};
// Weights with minimums have no offset: the tile needs a start only where it is the 1.5 * 2^(23+e).
constexpr bool can_have_min(Codes codes, bool book) {
    return !book && (codes == Codes::kNibble || codes == Codes::kNibbleBit || codes == Codes::kPair);
}
constexpr int kScaleShift = std::countr_zero(unsigned(kScaleFraction) + 1);
static_assert(sizeof(Cell) == 192 && kOutlierBlock % (16 * kQuantGroup) == 0);

QUAFF_INLINE int64_t cell_bytes(const Weight& w) { return (w.groups / 16 + 1) * kMaxTokens * int64_t(sizeof(Cell)); }
// Columns of a panel that are prepared together: of long ones a part, so that several panels fit, and f32 sums wait in memory between the parts of
// so many tokens at the most.
constexpr int64_t kPartCols = 2048, kPartTokens = 512;
static_assert(kPartCols % kOutlierBlock == 0);
QUAFF_INLINE bool in_parts(const Weight& w) { return w.cols >= 4 * kPartCols; }
QUAFF_INLINE int64_t part_groups(const Weight& w) { return in_parts(w) ? kPartCols / w.group : w.groups; }
// Of a panel or its part, prepared; and its sums.
QUAFF_INLINE int64_t code_bytes(const Weight& w) { return w.codes == Codes::kByte ? 0 : part_groups(w) * w.group * kLanes; }
QUAFF_INLINE int64_t scale_floats(const Weight& w, int64_t groups) { return groups * kLanes * (kScaleSteps + w.has_min); }
QUAFF_INLINE int64_t sum_floats(const Weight& w) { return in_parts(w) ? kPartTokens * kLanes : 0; }
int64_t packed_at_once(const Weight& w); // panels of kPackedBytes

// Panels that will most likely be claimed next: of this weight from `panel` on, or the first ones of the weight that follows. They are fetched
// into L2 while tokens pass over those before them, a few lines for every group: many at once would hold up the tile until memory has answered.
struct Ahead {
    Ahead() = default;
    Ahead(const LinearArgs& a, int64_t panel, int64_t (*at_once)(const Weight&)) {
        const Weight* w = a.w;
        if (panel == panel_count(*w) && a.next)
            w = a.next, panel = 0;
        const int64_t panels = panel_count(*w), count = at_once(*w), past = panel + count < panels ? panel + count : panels;
        at = w->data + panel * w->panel_bytes;
        end = w->data + past * w->panel_bytes;
    }
    // `count` ranges of so many bytes, `stride` apart.
    Ahead(const uint8_t* first, int64_t bytes, int64_t range_stride, int64_t count)
        : at(first), end(first + bytes), stride(range_stride), skip(range_stride - bytes), left(count - 1) {}
    QUAFF_INLINE void fetch() {
        if (at < end) {
            for (int i = 0; i < kLines; i++)
                __builtin_prefetch(at + 64 * i, 0, 2);
            at += 64 * kLines;
        } else if (left) {
            left--, at = end + skip, end += stride;
        }
    }
    static constexpr int kLines = 4;
    const uint8_t *at = nullptr, *end = nullptr;
    int64_t stride = 0, skip = 0, left = 0;
};

// Codes of tokens that pass over packed panels of this size have left L1 when they are wanted again, pushed out by the panel. They are fetched so
// many bytes ahead: more is too early, half of it too late.
constexpr int64_t kPassesL1 = 8 << 10, kTokenBytesAhead = 128;

struct Tokens {
    const int8_t* q;
    int64_t q_stride;
    const Outlier* outliers;
    int64_t o_stride;
    Cell* cells; // [ceil(groups / 16)][token]
    int64_t groups;
    Ahead ahead;
    float* sums = nullptr; // where columns come in parts: [panel][kPartTokens][16], of the tokens from `token0` and panels from `panel0` on
    int64_t token0 = 0, panel0 = 0;
    bool first = true, last = true; // part
};

// Scales and minimums of the first `count` groups of a chunk as f32, [group][row]. Products are exact.
template <class V>
[[gnu::noinline]] static void expand_scales(const Weight& w, const uint8_t* block, int64_t count, float* scale, float* min) {
    switch (w.scales) {
    case Scales::kHalf:
        for (int64_t g = 0; g < count; g++, block += sizeof(HalfScales))
            V::store(scale + g * kLanes, V::load_f16(reinterpret_cast<const HalfScales*>(block)->scale));
        break;
    case Scales::kHalfMin:
        for (int64_t g = 0; g < count; g++, block += sizeof(HalfMinScales)) {
            V::store(scale + g * kLanes, V::load_f16(reinterpret_cast<const HalfMinScales*>(block)->scale));
            V::store(min + g * kLanes, V::load_f16(reinterpret_cast<const HalfMinScales*>(block)->min));
        }
        break;
    case Scales::kSuper: { // 8 or 16 groups a block, laid out alike
        const int64_t groups = 256 / w.group;
        for (int64_t g = 0; g < count; block += sizeof(uint16_t[16]) + sizeof(int8_t[16]) * groups) {
            const auto* b = reinterpret_cast<const SuperScales<16>*>(block);
            const typename V::F d = V::mul(V::load_f16(b->d), V::set(w.unit));
            for (int64_t i = 0; i < groups; i++, g++)
                V::store(scale + g * kLanes, V::mul(d, V::to_float(V::load_i8(b->scale[i]))));
        }
        break;
    }
    case Scales::kSuperMin:
        for (int64_t g = 0; g < count; block += sizeof(SuperMinScales)) {
            const auto* b = reinterpret_cast<const SuperMinScales*>(block);
            const typename V::F d = V::load_f16(b->d), dmin = V::neg(V::load_f16(b->dmin));
            for (int64_t i = 0; i < 8; i++, g++) {
                V::store(scale + g * kLanes, V::mul(d, V::to_float(V::load_i8(b->scale[i]))));
                V::store(min + g * kLanes, V::mul(dmin, V::to_float(V::load_i8(b->min[i]))));
            }
        }
        break;
    case Scales::kSuperPair:
        for (int64_t g = 0; g < count; block += sizeof(SuperPairScales)) {
            const auto* b = reinterpret_cast<const SuperPairScales*>(block);
            const typename V::F d = V::load_f16(b->d), dmin = V::neg(V::load_f16(b->dmin));
            for (int64_t i = 0; i < 16; i++, g++) {
                const typename V::I both = V::load_u8(b->both[i]);
                V::store(scale + g * kLanes, V::mul(d, V::to_float(V::iand(both, V::iset(15)))));
                V::store(min + g * kLanes, V::mul(dmin, V::to_float(V::template shru<4>(both))));
            }
        }
        break;
    case Scales::
        kExponent: // 2^(e-128) = 2^(e+2-127) * 2^-3: exponent e+2 is a normal number for every e below 252, the product may be denormal
        for (int64_t g = 0; g < count; g++, block += sizeof(ExponentScales)) {
            const typename V::I e = V::iadd(V::load_u8(reinterpret_cast<const ExponentScales*>(block)->e), V::iset(2));
            V::store(scale + g * kLanes, V::mul(V::from_bits(V::template shl<23>(e)), V::set(0x1p-3f)));
        }
        break;
    case Scales::kSmallFloat: // as an f32's exponent and first bits of the fraction the number is 2^120 too small; half of it is meant
        for (int64_t g = 0; g < count; block += sizeof(SmallFloatScales))
            for (int64_t i = 0; i < 4; i++, g++) {
                const typename V::I bits = V::iand(V::load_u8(reinterpret_cast<const SmallFloatScales*>(block)->scale[i]), V::iset(127));
                V::store(scale + g * kLanes, V::mul(V::from_bits(V::template shl<20>(bits)), V::set(0x1p119f)));
            }
        break;
    case Scales::kOne:
        for (int64_t g = 0; g < count; block += sizeof(OneScale)) {
            const typename V::F d = V::load_f16(reinterpret_cast<const OneScale*>(block)->d);
            for (const int64_t end = g + 256 / w.group; g < end; g++)
                V::store(scale + g * kLanes, d);
        }
        break;
    case Scales::kNone:
        break;
    }
}

// Four k (k4 in 0..7) of 16 rows out of a group's planes.
template <class D, Codes codes> QUAFF_INLINE typename D::Bytes load_codes(const uint8_t* group, int k4) {
    constexpr int low = planes(codes).low, high = planes(codes).high;
    const typename D::Bytes x = D::field(D::load(group + k4 % low * 64), k4 / low * low, low);
    if constexpr (high == 0)
        return x;
    else
        return D::merge(x, D::load(group + low * 64 + k4 % high * 64), k4 / high * high, high, low);
}

// Adds bias, then the residual, and stores a tile's values [panel][token][16], where there is a bias or a panel overhangs the last row.
template <class V>
[[gnu::noinline]] static void store_tile(const LinearArgs& a, int64_t panel, int panels, int64_t token, int tokens, const float* values) {
    for (int64_t row = panel * kLanes; panels; panels--, row += kLanes)
        for (int t = 0; t < tokens; t++, values += kLanes) {
            typename V::F value = V::load(values);
            const int64_t count = a.w->rows - row;
            float* out = a.out + (a.row_map ? a.row_map[token + t] : token + t) * a.out_stride + row;
            if (count >= kLanes) {
                if (a.bias)
                    value = V::add(value, V::load(a.bias + row));
                V::store(out, a.accumulate ? V::add(V::load(out), value) : value);
            } else {
                if (a.bias)
                    value = V::add(value, V::load_part(a.bias + row, count, 0.0f));
                V::store_part(out, count, a.accumulate ? V::add(V::load_part(out, count, 0.0f), value) : value);
            }
        }
}

template <class D, Codes codes, bool book>
QUAFF_INLINE typename D::Bytes load_values(typename D::Table table, const uint8_t* group, int k4) {
    const typename D::Bytes bytes = load_codes<D, codes>(group, k4);
    if constexpr (book)
        return D::lookup(table, bytes);
    else
        return bytes;
}

// Stored codes of 16 rows at column k of a group of 32, one a lane. A codebook's are true codes plus 128, as everywhere.
template <class D, Codes codes, bool book> QUAFF_INLINE typename D::V::I codes_at(typename D::Table table, const uint8_t* group, int k) {
    using V = typename D::V;
    constexpr int low = planes(codes).low, high = planes(codes).high;
    const auto plane = [&](const uint8_t* line, int bits) { // every row has a word there
        const int shift = k % 4 * 8 + k / 4 / bits * bits;
        return V::iand(V::shru(V::iload(reinterpret_cast<const int32_t*>(line + k / 4 % bits * 64)), shift), V::iset((1 << bits) - 1));
    };
    typename V::I code = plane(group, low);
    if constexpr (high != 0)
        code = V::ior(code, V::template shl<low>(plane(group + low * 64, high)));
    if constexpr (book) {
        alignas(64) int32_t lanes[kLanes];
        auto* bytes = reinterpret_cast<uint8_t*>(lanes);
        V::istore(lanes, code);
        D::store(bytes, D::lookup(table, D::load(bytes)));
        code = V::iand(V::iload(lanes), V::iset(255));
    }
    return code;
}

// How far apart scales are, in floats: of panels side by side, of groups; minimums from their scales.
struct Strides {
    int64_t panel, group, min;
};

template <class D, Source source, int G> QUAFF_INLINE constexpr Strides strides(int64_t groups) {
    constexpr int64_t block = kOutlierBlock / G * kLanes;
    if (!is_prepared(source))
        return {2 * block, kLanes, block};                                            // of a block, in the tile itself
    return {kLanes, D::kPanels * kLanes, kScaleSteps * D::kPanels * kLanes * groups}; // a tile's panels lie side by side
}

// One outlier of each token times its dequantised weights of R panels. Scales and minimums are those of the block.
template <class D, Codes codes, int G, bool book, bool has_min, int R, int T>
QUAFF_INLINE void add_outliers(typename D::V::F (&acc)[R][T], typename D::Table table, int32_t offset, const Panels& p, const Tokens& x,
                               int64_t block, const float* scales, Strides stride) {
    using V = typename D::V;
    constexpr uint32_t chunk_cols = kChunk * G;
    const typename V::I less = V::iset(offset);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        const Outlier& outlier = x.outliers[t * x.o_stride + block];
        const uint32_t column = outlier.column;
        const int64_t chunk = block * (kOutlierBlock / chunk_cols) + column / chunk_cols;
        const uint8_t* group = p.data + chunk * p.chunk_stride + (chunk < x.groups / kChunk ? p.codes_at : p.last_codes_at) +
                               column % chunk_cols / 32 * uint32_t(code_group_bytes(codes));
        const typename V::F value = V::set(outlier.value);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const uint8_t* from = group + r * p.panel_stride;
            const typename V::F code = V::to_float(V::isub(codes_at<D, codes, book>(table, from, int(column % 32)), less));
            const float* at = scales + r * stride.panel + column / G * stride.group;
            const typename V::F scale = V::load(at);
            acc[r][t] = V::fma(has_min ? V::fma(scale, code, V::load(at + stride.min)) : V::mul(scale, code), value, acc[r][t]);
        }
    }
}

// R panels x T tokens over all groups. Tiles are inlined into the loop over panels: g++ keeps an array in registers only when the loops over it
// are inner ones, unrolled before it decides.
template <class D, Source source, Codes form, int G, bool has_min, bool several, int R, int T>
QUAFF_INLINE void int_tile(const LinearArgs& a, const Panels& p, Tokens& x, int64_t panel, int64_t token) {
    using V = typename D::V;
    constexpr bool prepared = is_prepared(source), book = source == Source::kBook;
    constexpr int bits = operand_bits(form, book);
    constexpr Codes read = prepared && source != Source::kPackedSteps ? Codes::kByte : form;
    constexpr int64_t group_bytes = code_group_bytes(read);
    constexpr int steps = G / 4, fields = 8 / planes(read).low;
    constexpr int run = steps < D::template kSteps<bits> ? steps : D::template kSteps<bits>; // dots between two looks at the int32 sums
    const int64_t groups = x.groups;
    constexpr int64_t block = kOutlierBlock / G; // groups
    constexpr bool starts = shifted(source) || !has_min;
    const Strides stride = strides<D, source, G>(groups);
    const Cell* cells = x.cells;
    typename D::Table table{};
    if constexpr (book)
        table = D::table(a.w->codebook);
    alignas(64) float unpacked[prepared ? 1 : R * 2 * block * kLanes]; // scales and minimums of a block

    if constexpr (prepared) // what is stored last comes from far: stores wait in order, and the next tile behind them
        for (int t = 0; t < T; t++) {
            const float* out = a.out + (a.row_map ? a.row_map[token + t] : token + t) * a.out_stride + panel * kLanes;
            for (int r = 0; r < R; r++)
                __builtin_prefetch(out + r * kLanes, 1, 3);
        }
    const bool passes_l1 = !prepared && read != Codes::kByte && p.panel_stride >= kPassesL1; // with bytes memory is slow enough
    const int64_t ahead = read == Codes::kByte ? a.ahead_bytes / 2 : a.ahead_bytes;          // bytes are multiplied twice as fast
    typename V::F acc[R][T];
    float* sums = prepared && x.sums ? x.sums + ((panel - x.panel0) * kPartTokens + (token - x.token0) * R) * kLanes : nullptr;
    if (prepared && !x.first) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                acc[r][t] = V::load(sums + (r * T + t) * kLanes);
    } else {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                acc[r][t] = V::zero();
    }
    for (int64_t g0 = 0; g0 < groups; g0 += kChunk, cells += T) {
        const int64_t count = groups - g0 < kChunk ? groups - g0 : kChunk;
        const uint8_t* codes = p.data + g0 / kChunk * p.chunk_stride;
        const float* scales = prepared ? p.scales + g0 * stride.group : unpacked + g0 % block * kLanes;
        if constexpr (!prepared)
            for (int r = 0; r < R; r++) {
                float* to = unpacked + r * stride.panel + g0 % block * kLanes;
                expand_scales<V>(*a.w, codes + r * p.panel_stride, count, to, to + stride.min);
            }
        codes += count == kChunk ? p.codes_at : p.last_codes_at;
        const int8_t* chunk_q = x.q + g0 * G;
        const int64_t q_stride = x.q_stride;
        for (int64_t i0 = 0; i0 < count; i0 += 32 / G) {
            const int64_t b = i0 * G / 32;
            const int8_t*
                thirds[(T + 2) / 3]; // a token's codes are two strides at most from one of these: so far an address can say by itself
#pragma GCC unroll 4
            for (int t = 0; t < T; t += 3)
                thirds[t / 3] = chunk_q + b * 32 + t * q_stride;
            if constexpr (several)
                x.ahead.fetch();
            if (passes_l1 && b % 2 == 0)
                for (int t = 0; t < T; t++)
                    __builtin_prefetch(chunk_q + t * q_stride + b * 32 + kTokenBytesAhead, 0, 3);
            if constexpr (!several && !prepared)
                if (ahead) {
                    const uint8_t* from = codes + b * group_bytes + ahead;
#pragma GCC unroll 8
                    for (int line = 0; line < int(group_bytes / 64); line++)
                        __builtin_prefetch(from + 64 * line, 0, 3);
                    if (b % 2 == 0) // scales are about as many more
                        __builtin_prefetch(from + group_bytes, 0, 3);
                }
            if constexpr (!prepared && read == Codes::kNibblePair) // in order: the last lines are read beside the first
                for (int line = 0; line < planes(read).low; line++)
                    __builtin_prefetch(codes + b * group_bytes + 64 * line, 0, 3);
#pragma GCC unroll 2
            for (int half = 0; half < 32 / G; half++) {
                const int64_t i = i0 + half;
                typename V::I sum[R][T];
#pragma GCC unroll 8
                for (int first = 0; first < steps; first += run) {
                    typename D::template Part<bits> part[R][T];
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) {
                        const auto begin = D::template begin<bits>(starts && !first ? cells[t].start[i] : 0);
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++)
                            part[r][t] = begin;
                    }
#pragma GCC unroll 8
                    for (int step = first; step < first + run; step++) {
                        // All fields of a loaded line follow each other where the group is whole.
                        const int k4 = G == 32 ? step / fields + step % fields * (8 / fields) : half * 4 + step;
                        typename D::template Operand<bits> w[R];
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) {
                            const uint8_t* group = codes + r * p.panel_stride + b * group_bytes;
                            w[r] = D::template operand<bits>(load_values<D, read, book>(table, group, k4));
                        }
#pragma GCC unroll 8
                        for (int t = 0; t < T; t++) {
                            const int8_t* q = thirds[t / 3] + t % 3 * q_stride + k4 * 4;
#pragma GCC unroll 4
                            for (int r = 0; r < R; r++)
                                D::template dot<bits>(part[r][t], w[r], q);
                        }
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) {
                            const auto dot = D::template finish<bits>(part[r][t], starts && !first ? cells[t].start[i] : 0);
                            sum[r][t] = first ? V::iadd(sum[r][t], dot) : dot;
                        }
                }
                const Cell* after = cells;
                if constexpr (shifted(source))
                    asm("" : "+r"(after)); // or the starts of all tokens, which are bases too, would stay in registers
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const float* at = scales + i * stride.group + r * stride.panel;
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) {
                        const int32_t step = after[t].step[i];
                        const typename V::F base = has_min ? V::from_bits(V::iset(after[t].start[i])) : V::set(after[t].other[i]);
                        const typename V::F dot = shifted(source) ? V::sub(V::from_bits(sum[r][t]), base) : V::to_float(sum[r][t]);
                        const typename V::F scale = prepared ? V::load(at + step) : V::mul(V::load(at), V::from_bits(V::iset(step)));
                        acc[r][t] = V::fma(dot, scale, acc[r][t]);
                    }
                    if constexpr (has_min) {
                        const typename V::F min = V::load(at + stride.min);
#pragma GCC unroll 8
                        for (int t = 0; t < T; t++)
                            acc[r][t] = V::fma(min, V::set(after[t].other[i]), acc[r][t]);
                    }
                }
            }
        }
        if (g0 % block + kChunk == block || g0 + kChunk >= groups) {
            const int32_t offset = bits == 8 ? 128 : a.w->offset;
            const float* of_block = prepared ? p.scales + g0 / block * block * stride.group : unpacked;
            add_outliers<D, read, G, book, has_min>(acc, table, offset, p, x, g0 / block, of_block, stride);
        }
    }
    if (prepared && !x.last) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                V::store(sums + (r * T + t) * kLanes, acc[r][t]);
        return;
    }
    if (!a.bias && (panel + R) * kLanes <= a.w->rows) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            float* out = a.out + (a.row_map ? a.row_map[token + t] : token + t) * a.out_stride + panel * kLanes;
            if (a.accumulate)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    acc[r][t] = V::add(V::load(out + r * kLanes), acc[r][t]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                V::store(out + r * kLanes, acc[r][t]);
        }
        return;
    }
    alignas(64) float values[R * T * kLanes];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            V::store(values + (r * T + t) * kLanes, acc[r][t]);
    store_tile<V>(a, panel, R, token, T, values);
}

// `count` panels from `panel` on times T tokens. Where `several` tiles pass over them as many panels at once as the tile holds, the rest one by one. A
// tile alone is bound by memory and reads one by one: a panel is one stream of addresses, and the groups in flight hide the latency of the chains.
template <class D, Source source, Codes codes, int G, bool has_min, bool several, int T>
[[gnu::noinline]] static void int_panels(const LinearArgs& a, Panels p, Tokens& x, int64_t panel, int64_t count, int64_t token) {
    constexpr int R = several ? D::kPanels : 1;
    const int64_t tile_floats = R * scale_floats(*a.w, x.groups), panel_floats = strides<D, source, G>(x.groups).panel;
    static_assert(R <= kMaxPanels && T <= kMaxTokens);
    const auto next = [&](int64_t panels, int64_t floats) {
        count -= panels, panel += panels, p.data += panels * p.panel_stride;
        if constexpr (is_prepared(source))
            p.scales += floats;
    };
    for (; count >= R; next(R, tile_floats))
        int_tile<D, source, codes, G, has_min, several, R, T>(a, p, x, panel, token);
    if constexpr (R > 1)
        for (; count; next(1, panel_floats))
            int_tile<D, source, codes, G, has_min, several, 1, T>(a, p, x, panel, token);
}

// `least`: no call has fewer tokens.
template <class D, Source source, Codes codes, int G, bool has_min, bool several, int least, int T = D::kTokens>
static void int_tokens(const LinearArgs& a, const Panels& p, Tokens& x, int64_t panel, int64_t count, int64_t token, int64_t tokens) {
    if (tokens == T)
        return int_panels<D, source, codes, G, has_min, several, T>(a, p, x, panel, count, token);
    if constexpr (T > least)
        int_tokens<D, source, codes, G, has_min, several, least, T - 1>(a, p, x, panel, count, token, tokens);
}

// Calls f.template operator()<Codes, G, book>() for the form of w: those that some type has.
template <class F> QUAFF_INLINE void with_form(const Weight& w, F&& f) {
    switch (w.codes) {
    case Codes::kByte:
        return f.template operator()<Codes::kByte, 32, false>();
    case Codes::kNibble:
        if (!w.codebook)
            return f.template operator()<Codes::kNibble, 32, false>();
        return w.group == 32 ? f.template operator()<Codes::kNibble, 32, true>() : f.template operator()<Codes::kNibble, 16, true>();
    case Codes::kNibbleBit:
        return f.template operator()<Codes::kNibbleBit, 32, false>();
    case Codes::kNibblePair:
        return f.template operator()<Codes::kNibblePair, 16, false>();
    case Codes::kPair:
        return w.group == 32 ? f.template operator()<Codes::kPair, 32, false>() : f.template operator()<Codes::kPair, 16, false>();
    case Codes::kPairBit:
        if (!w.codebook)
            return f.template operator()<Codes::kPairBit, 16, false>();
        return w.group == 32 ? f.template operator()<Codes::kPairBit, 32, true>() : f.template operator()<Codes::kPairBit, 16, true>();
    default: // float weights
        return;
    }
}

// Calls f.template operator()<has_min>().
template <Codes codes, bool book, class F> QUAFF_INLINE void with_min(const Weight& w, F&& f) {
    if constexpr (can_have_min(codes, book))
        if (w.has_min)
            return f.template operator()<true>();
    f.template operator()<false>();
}

// Cells of `tokens` rows from `token` on: whole cells, since the strides are whole ones; what lies past the last group is never used.
template <class D, Source source, int G>
[[gnu::noinline]] static void prepare_tokens(const LinearArgs& a, int32_t offset, int64_t token, int64_t tokens, Tokens& x,
                                             int64_t group0 = 0) {
    using V = typename D::V;
    const QuantRows& rows = *a.x;
    const typename V::I less = V::iset(-offset), exponent = V::iset(0x7f800000), up = V::iset((23 << 23) + (1 << 22)),
                        one = V::iset(127 << 23);
    const typename V::I step_floats = V::iset(int32_t(D::kPanels * kLanes * x.groups));
    for (int64_t t = 0; t < tokens; t++) {
        const int32_t* sums = (G == 32 ? rows.sum32 : rows.sum16) + (token + t) * rows.s_stride * (32 / G) + group0;
        const float* scales = rows.scale + (token + t) * rows.s_stride + group0 * G / 32;
        Cell* cell = x.cells + t;
        for (int64_t left = x.groups; left > 0; left -= 16, cell += tokens, sums += 16, scales += G / 2) {
            const typename V::I sum = V::iload(sums);
            typename V::F scale = G == 16 ? V::load_part(scales, kLanes / 2, 0.0f) : V::load(scales);
            if constexpr (G == 16) { // each is that of two groups
                alignas(64) float twice[2 * kLanes];
                V::zip(twice, scale, scale);
                scale = V::load(twice);
            }
            const typename V::I bits = V::bits(scale), start = V::imul(sum, less);
            if constexpr (shifted(source)) {
                const typename V::I base = V::iadd(V::iand(bits, exponent), up), fraction = V::iand(bits, V::iset((1 << 23) - 1));
                V::istore(cell->start, V::iadd(start, base));
                if (!a.w->has_min)
                    V::store(cell->other, V::from_bits(base));
                V::istore(cell->step,
                          is_prepared(source) ? V::imul(V::template shru<kScaleShift>(fraction), step_floats) : V::ior(fraction, one));
            } else {
                V::istore(cell->start, start);
                V::istore(cell->step, bits);
            }
            if (a.w->has_min)
                V::store(cell->other, V::mul(scale, V::to_float(sum)));
        }
    }
    x.q = rows.q + token * rows.q_stride + group0 * G, x.q_stride = rows.q_stride;
    x.outliers = rows.outlier + token * rows.o_stride + group0 * G / kOutlierBlock, x.o_stride = rows.o_stride;
}

// Calls f(chunk, its first group, groups) for every chunk of `groups` groups of a panel.
template <class F> QUAFF_INLINE void each_chunk(const Weight& w, const uint8_t* chunk, int64_t groups, F&& f) {
    const int64_t stride = chunk_bytes(w, kChunk);
    for (int64_t g = 0; g < groups; g += kChunk, chunk += stride)
        f(chunk, g, groups - g < kChunk ? groups - g : kChunk);
}

// One prepared panel: scales times each mantissa, and minimums; codes as bytes, 512 per group of 32 (byte codes stay where they are).
template <class D, Source source, Codes codes, int G, bool book>
[[gnu::noinline]] static void prepare_panel(const Weight& w, const uint8_t* panel, int64_t count, float* scales, uint8_t* to) {
    using V = typename D::V;
    const Strides stride = strides<D, source, G>(count);
    typename D::Table table{};
    if constexpr (book)
        table = D::table(w.codebook);
    each_chunk(w, panel, count, [&](const uint8_t* chunk, int64_t g, int64_t groups) {
        float* at = scales + g * stride.group;
        alignas(64) float scale[kChunk * kLanes], min[kChunk * kLanes];
        expand_scales<V>(w, chunk, groups, scale, min);
        for (int64_t i = 0; i < groups; i++, at += stride.group) {
            const typename V::F one = V::load(scale + i * kLanes);
            for (int m = 0; m < kScaleSteps; m++)
                V::store(at + m * stride.group * count, V::mul(one, V::set(1.0f + float(m) / kScaleSteps)));
            if (w.has_min)
                V::store(at + stride.min, V::load(min + i * kLanes));
        }
        if constexpr (codes != Codes::kByte && source != Source::kPackedSteps) {
            const uint8_t* from = chunk + chunk_codes_at(w, groups);
            for (int64_t b = 0; b < groups * w.group / 32; b++, from += code_group_bytes(codes), to += 512)
#pragma GCC unroll 8
                for (int k4 = 0; k4 < 8; k4++)
                    D::store(to + 64 * k4, load_values<D, codes, book>(table, from, k4));
        }
    });
}

// Panels as they are, which every tile expands. Several tiles, all of about as many tokens, pass over some panels together, which come from memory
// once.
template <class D, Codes codes, int G, bool book>
static void packed_tokens(const LinearArgs& a, Tokens& x, int64_t panel0, int64_t panel1) {
    constexpr Source source = book ? Source::kBook : Source::kPacked;
    const Weight& w = *a.w;
    const int64_t tiles = (a.rows + D::kTokens - 1) / D::kTokens, at_once = tiles == 1 ? panel1 - panel0 : packed_at_once(w);
    for (int64_t panel = panel0; panel < panel1; panel += at_once) {
        const int64_t count = panel1 - panel < at_once ? panel1 - panel : at_once;
        const Panels p(w, panel);
        if (tiles > 1)
            x.ahead = Ahead(a, panel + count, packed_at_once);
        for (int64_t tile = 0, token = 0, past; tile < tiles; tile++, token = past) {
            past = a.rows * (tile + 1) / tiles;
            prepare_tokens<D, source, G>(a, operand_bits(codes, book) == 8 ? D::kWideOffset : w.offset, token, past - token, x);
            with_min<codes, book>(w, [&]<bool has_min>() {
                constexpr int half = (D::kTokens + 1) / 2;
                const auto tokens =
                    tiles > 1 ? int_tokens<D, source, codes, G, has_min, true, half> : int_tokens<D, source, codes, G, has_min, false, 1>;
                tokens(a, p, x, panel, count, token, past - token);
            });
        }
    }
}

// Many tokens: some panels are prepared in scratch and stay in L2 while all tokens pass.
template <class D, Codes codes, int G, bool book>
static void prepared_tokens(const LinearArgs& a, Tokens& x, int64_t panel0, int64_t panel1, uint8_t* scratch) {
    constexpr int bits = operand_bits(codes, book);
    constexpr bool packed = D::kUnpacksNibbles && codes == Codes::kNibble && !book;
    constexpr Codes alike = D::template kSteps<bits> == 8 ? Codes::kNibble : codes; // tiles that differ in nothing are one
    constexpr Codes read = packed ? codes : bits == 8 ? Codes::kByte : alike;
    constexpr Source source = packed ? Source::kPackedSteps : Source::kSteps;
    const Weight& w = *a.w;
    auto* scales = reinterpret_cast<float*>(scratch);
    const int64_t at_once = panels_at_once(w), part = part_groups(w), part_floats = scale_floats(w, part);
    auto* codes_at = reinterpret_cast<uint8_t*>(scales + at_once * part_floats);
    auto* sums = reinterpret_cast<float*>(codes_at + at_once * code_bytes(w));
    const int64_t part_bytes = part / kChunk * chunk_bytes(w, kChunk), tokens_at_once = in_parts(w) ? kPartTokens : a.rows;
    for (int64_t panel = panel0; panel < panel1; panel += at_once) {
        const int64_t count = panel1 - panel < at_once ? panel1 - panel : at_once;
        for (int64_t token0 = 0; token0 < a.rows; token0 += tokens_at_once) {
            const int64_t past = a.rows - token0 < tokens_at_once ? a.rows : token0 + tokens_at_once;
            x.token0 = token0, x.panel0 = panel, x.sums = in_parts(w) ? sums : nullptr;
            for (int64_t g = 0; g < w.groups; g += part) {
                const uint8_t* data = w.data + panel * w.panel_bytes + g / part * part_bytes;
                x.groups = w.groups - g < part ? w.groups - g : part;
                x.first = g == 0, x.last = g + x.groups == w.groups;
                const int64_t panel_floats = scale_floats(w, x.groups), stride = strides<D, source, G>(x.groups).panel;
                Panels p = codes == Codes::kByte || packed ? Panels(w, panel) : Panels(w, codes_at);
                if (codes == Codes::kByte || packed)
                    p.data = data;
                else
                    p.panel_stride = part * G * kLanes;
                p.scales = scales;
                for (int64_t i = 0; i < count; i++)
                    prepare_panel<D, source, codes, G, book>(w, data + i * w.panel_bytes, x.groups,
                                                             scales + i / D::kPanels * D::kPanels * panel_floats + i % D::kPanels * stride,
                                                             codes_at + i * code_bytes(w));
                if (!x.last)
                    x.ahead = Ahead(data + part_bytes, part_bytes, w.panel_bytes, count);
                else if (past == a.rows)
                    x.ahead = Ahead(a, panel + count, panels_at_once);
                for (int64_t token = token0; token < past; token += D::kTokens) {
                    const int64_t tokens = past - token < D::kTokens ? past - token : D::kTokens;
                    prepare_tokens<D, source, G>(a, bits == 8 ? D::kWideOffset : w.offset, token, tokens, x, g);
                    with_min<codes, book>(
                        w, [&]<bool has_min>() { int_tokens<D, source, read, G, has_min, true, 1>(a, p, x, panel, count, token, tokens); });
                }
            }
        }
    }
}

template <class D> static void linear_int(const LinearArgs* args, int64_t panel0, int64_t panel1, uint8_t* scratch) {
    const LinearArgs& a = *args;
    Tokens x{};
    x.groups = a.w->groups, x.cells = reinterpret_cast<Cell*>(scratch);
    with_form(*a.w, [&]<Codes codes, int G, bool book>() {
        if (a.rows < D::kManyTokens[G / 32])
            packed_tokens<D, codes, G, book>(a, x, panel0, panel1);
        else if constexpr (D::kManyTokens[G / 32] != isa::kNever)
            prepared_tokens<D, codes, G, book>(a, x, panel0, panel1, scratch + cell_bytes(*a.w));
    });
}

// R panels x T tokens of float weights: a chain from +0 per block of 128 k, block sums added in order to a total that starts at +0.
template <class V, Codes codes, int R, int T>
QUAFF_INLINE void float_tile(const LinearArgs& a, const uint8_t* data, int64_t panel_bytes, int64_t panel, int64_t token) {
    constexpr int64_t row_bytes = kLanes * (codes == Codes::kF32 ? 4 : 2);
    const int64_t cols = a.w->cols;
    typename V::F total[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            total[r][t] = V::zero();
    for (int64_t k0 = 0; k0 < cols; k0 += kFloatBlock) {
        const int64_t end = k0 + kFloatBlock < cols ? k0 + kFloatBlock : cols;
        typename V::F acc[R][T];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                acc[r][t] = V::zero();
        for (int64_t k = k0; k < end; k++) {
            typename V::F w[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const uint8_t* at = data + r * panel_bytes + k * row_bytes;
                if constexpr (codes == Codes::kF32)
                    w[r] = V::load(reinterpret_cast<const float*>(at));
                if constexpr (codes == Codes::kF16)
                    w[r] = V::load_f16(reinterpret_cast<const uint16_t*>(at));
                if constexpr (codes == Codes::kBF16)
                    w[r] = V::load_bf16(reinterpret_cast<const uint16_t*>(at));
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const typename V::F x = V::set(a.xf[(token + t) * a.xf_stride + k]);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    acc[r][t] = V::fma(w[r], x, acc[r][t]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                total[r][t] = V::add(total[r][t], acc[r][t]);
    }
    alignas(64) float values[R * T * kLanes];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            V::store(values + (r * T + t) * kLanes, total[r][t]);
    store_tile<V>(a, panel, R, token, T, values);
}

template <class D, Codes codes, int T = D::kFloatTokens>
static void float_tokens(const LinearArgs& a, const uint8_t* data, int64_t panel_bytes, int64_t panel, int64_t count, int64_t token,
                         int64_t tokens) {
    if (tokens == T) {
        using V = typename D::V;
        constexpr int R = D::kFloatPanels;
        static_assert(R <= kMaxFloatPanels);
        for (; count >= R; count -= R, panel += R, data += R * panel_bytes)
            float_tile<V, codes, R, T>(a, data, panel_bytes, panel, token);
        if constexpr (R > 1)
            for (; count; count--, panel++, data += panel_bytes)
                float_tile<V, codes, 1, T>(a, data, panel_bytes, panel, token);
    } else if constexpr (T > 1) {
        float_tokens<D, codes, T - 1>(a, data, panel_bytes, panel, count, token, tokens);
    }
}

// One panel of integer weights as f32 [k][row]: scale*code, plus the minimum.
template <class D> static void dequantize_panel(const Weight& w, const uint8_t* panel, float* to) {
    using V = typename D::V;
    with_form(w, [&]<Codes codes, int G, bool book>() {
        typename D::Table table{};
        if constexpr (book)
            table = D::table(w.codebook);
        const typename V::I offset = V::iset(book ? 128 : w.offset);
        alignas(64) float scales[2][kChunk * kLanes];
        each_chunk(w, panel, w.groups, [&](const uint8_t* chunk, int64_t, int64_t groups) {
            expand_scales<V>(w, chunk, groups, scales[0], scales[1]);
            const uint8_t* from = chunk + chunk_codes_at(w, groups);
            for (int64_t k = 0; k < groups * G; k += 4, to += 4 * kLanes) {
                alignas(64) int32_t words[kLanes]; // four k of a row each, the first one lowest
                D::store(reinterpret_cast<uint8_t*>(words),
                         load_values<D, codes, book>(table, from + k / 32 * code_group_bytes(codes), int(k % 32 / 4)));
                typename V::I word = V::iload(words);
                const typename V::F scale = V::load(scales[0] + k / G * kLanes);
                for (int j = 0; j < 4; j++, word = V::template shru<8>(word)) {
                    const typename V::F value = V::to_float(V::isub(V::iand(word, V::iset(255)), offset));
                    V::store(to + j * kLanes, w.has_min ? V::fma(scale, value, V::load(scales[1] + k / G * kLanes)) : V::mul(scale, value));
                }
            }
        });
    });
}

template <class D> static void linear_float(const LinearArgs* args, int64_t panel0, int64_t panel1, uint8_t* scratch) {
    const LinearArgs& a = *args;
    const Weight& w = *a.w;
    const bool integer = is_integer(w.codes);
    const int64_t panel_bytes = integer ? w.cols * kLanes * 4 : w.panel_bytes;
    auto tile = w.codes == Codes::kF16    ? float_tokens<D, Codes::kF16>
                : w.codes == Codes::kBF16 ? float_tokens<D, Codes::kBF16>
                                          : float_tokens<D, Codes::kF32>;
    for (int64_t panel = panel0; panel < panel1; panel += D::kFloatPanels) {
        const int64_t count = panel1 - panel < D::kFloatPanels ? panel1 - panel : D::kFloatPanels;
        const uint8_t* data = w.data + panel * w.panel_bytes;
        if (integer) {
            for (int64_t i = 0; i < count; i++)
                dequantize_panel<D>(w, data + i * w.panel_bytes, reinterpret_cast<float*>(scratch + i * panel_bytes));
            data = scratch;
        }
        for (int64_t token = 0; token < a.rows; token += D::kFloatTokens) {
            const int64_t tokens = a.rows - token < D::kFloatTokens ? a.rows - token : D::kFloatTokens;
            tile(a, data, panel_bytes, panel, count, token, tokens);
        }
    }
}

} // namespace quaff::linear
