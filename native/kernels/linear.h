// out = x * w^T: NUMERICS 13 (integer weights, int8 activations) and 14 (float activations). Lanes are output rows, so an element is one chain
// over k whatever the number of rows, the tile or the instruction set. V is a Vec, D a Dot (isa/dot_*.h) with its Vec.
#pragma once
#include "../isa/vec_common.h"
#include "../numerics.h"
#include "table.h"

namespace quaff::linear {

inline constexpr int64_t kMaxTokens = 8, kMaxPanels = 4, kMaxFloatPanels = 2; // no tile is larger
static_assert(kQuantGroup == 32 && kLanes == 16);

// What tiles read: where codes lie and in which form.
enum class Source {
    kWide,   // code + 128, 512 bytes per group
    kNarrow, // bare nibbles, one a byte, 512 bytes per group (only in scratch)
    kNibble, // the compact form, 256 bytes per group
    kBook,   // the compact form through a codebook
};

struct Panels {
    const uint8_t* codes;
    int64_t code_stride;        // bytes from panel to panel
    const uint8_t *scale, *min; // f16 or f32, [panel][group][row]
    bool half;
    const int8_t* codebook;
};

// What a tile needs to know of one token's activations, 16 weight groups at a time: all of it lies at constant distances from one pointer.
struct Cell {
    int32_t start[16]; // -offset * sum(q) of the weight group
    float scale[16];   // of the enclosing 32
    float sum[16];     // scale * float(sum(q))
};
static_assert(sizeof(Cell) == 192);

QUAFF_INLINE int64_t cell_bytes(const Weight& w) { return (w.groups / 16 + 1) * kMaxTokens * int64_t(sizeof(Cell)); }

struct Tokens {
    const int8_t* q;
    int64_t q_stride;
    Cell* cells; // [ceil(groups / 16)][token]
    int64_t groups;
};

template <class V> QUAFF_INLINE typename V::F load_scale(const uint8_t* base, int64_t at, bool half) {
    return half ? V::load_f16(reinterpret_cast<const uint16_t*>(base) + at) : V::load(reinterpret_cast<const float*>(base) + at);
}

// Adds bias, then the residual, and stores a tile's values [panel][token][16]. A panel that overhangs the last row takes the slow path.
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

// R panels x T tokens over all groups. Tiles are inlined into the loop over panels: g++ keeps an array in registers only when the loops over it
// are inner ones, unrolled before it decides.
template <class D, Source source, int G, int R, int T>
QUAFF_INLINE void int_tile(const LinearArgs& a, const Panels& p, const Tokens& x, int64_t panel, int64_t token) {
    using V = typename D::V;
    constexpr bool wide = source == Source::kWide || source == Source::kBook;
    constexpr bool compact = source == Source::kNibble || source == Source::kBook;
    static_assert(G == 32 || !compact);
    constexpr int64_t bytes = compact ? 256 : 512, steps = G / 4;
    const int64_t groups = x.groups;
    const Cell* cells = x.cells;
    typename D::Table table{};
    if constexpr (source == Source::kBook)
        table = D::table(p.codebook);

    typename V::F acc[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            acc[r][t] = V::zero();
    for (int64_t g0 = 0; g0 < groups; g0 += 16, cells += T) {
        const int64_t count = groups - g0 < 16 ? groups - g0 : 16;
        for (int64_t i0 = 0; i0 < count; i0 += 32 / G) {
            const int64_t b = (g0 + i0) * G / 32;
#pragma GCC unroll 2
            for (int half = 0; half < 32 / G; half++) {
                const int64_t i = i0 + half, g = g0 + i;
                typename D::template Part<wide> part[R][T];
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) {
                    const auto begin = D::template begin<wide>(cells[t].start[i]);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
                        part[r][t] = begin;
                }
#pragma GCC unroll 8
                for (int step = 0; step < steps; step++) {
                    // Compact bytes hold k4 and k4 + 4: both are used while the bytes are in a register.
                    const int64_t k4 = compact ? step / 2 + step % 2 * 4 : half * 4 + step;
                    typename D::template Operand<wide> w[R];
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        typename D::Bytes codes = D::load(p.codes + r * p.code_stride + b * bytes + (compact ? step / 2 : k4) * 64);
                        if constexpr (compact)
                            codes = step % 2 ? D::high(codes) : D::low(codes);
                        if constexpr (source == Source::kBook)
                            codes = D::lookup(table, codes);
                        w[r] = D::template operand<wide>(codes);
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) {
                        const int8_t* q = x.q + t * x.q_stride + b * 32 + k4 * 4;
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++)
                            D::template dot<wide>(part[r][t], w[r], q);
                    }
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const int64_t at = (r * groups + g) * kLanes;
                    const typename V::F scale = load_scale<V>(p.scale, at, p.half);
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) {
                        const auto dot = V::to_float(D::template finish<wide>(part[r][t], cells[t].start[i]));
                        acc[r][t] = V::fma(dot, V::mul(scale, V::set(cells[t].scale[i])), acc[r][t]);
                    }
                    if (p.min) {
                        const typename V::F min = load_scale<V>(p.min, at, p.half);
#pragma GCC unroll 8
                        for (int t = 0; t < T; t++)
                            acc[r][t] = V::fma(min, V::set(cells[t].sum[i]), acc[r][t]);
                    }
                }
            }
        }
    }
    alignas(64) float values[R * T * kLanes];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
            V::store(values + (r * T + t) * kLanes, acc[r][t]);
    store_tile<V>(a, panel, R, token, T, values);
}

// `count` panels from `panel` on times T tokens: as many panels at once as the tile holds, the rest one by one.
template <class D, Source source, int G, int T>
[[gnu::noinline]] static void int_panels(const LinearArgs& a, Panels p, const Tokens& x, int64_t panel, int64_t count, int64_t token) {
    constexpr int R = D::panels(T);
    static_assert(R <= kMaxPanels && T <= kMaxTokens);
    const int64_t scales = x.groups * kLanes * (p.half ? 2 : 4);
    auto step = [&](int64_t panels) {
        panel += panels, count -= panels, p.codes += panels * p.code_stride, p.scale += panels * scales;
        if (p.min)
            p.min += panels * scales;
    };
    for (; count >= R; step(R))
        int_tile<D, source, G, R, T>(a, p, x, panel, token);
    if constexpr (R > 1)
        for (; count; step(1))
            int_tile<D, source, G, 1, T>(a, p, x, panel, token);
}

template <class D, Source source, int G, int T = D::kTokens>
static void int_tokens(const LinearArgs& a, const Panels& p, const Tokens& x, int64_t panel, int64_t count, int64_t token, int64_t tokens) {
    if (tokens == T)
        return int_panels<D, source, G, T>(a, p, x, panel, count, token);
    if constexpr (T > 1)
        int_tokens<D, source, G, T - 1>(a, p, x, panel, count, token, tokens);
}

template <int G> QUAFF_INLINE void fill_cell(Cell& cell, const int32_t* sums, const float* scales, int32_t offset, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        cell.start[i] = -offset * sums[i];
    for (int64_t i = 0; i < count; i++)
        cell.scale[i] = scales[i / (32 / G)];
    for (int64_t i = 0; i < count; i++)
        cell.sum[i] = cell.scale[i] * float(sums[i]);
}

// Cells of `tokens` rows from `token` on. Full cells have a loop count that the compiler knows.
template <int G> static void prepare_tokens(const LinearArgs& a, int32_t offset, int64_t token, int64_t tokens, Tokens& x) {
    const QuantRows& rows = *a.x;
    for (int64_t t = 0; t < tokens; t++) {
        const int32_t* sums = (G == 32 ? rows.sum32 : rows.sum16) + (token + t) * rows.s_stride * (32 / G);
        const float* scales = rows.scale + (token + t) * rows.s_stride;
        Cell* cell = x.cells + t;
        int64_t left = x.groups;
        for (; left >= 16; left -= 16, cell += tokens, sums += 16, scales += G / 2)
            fill_cell<G>(*cell, sums, scales, offset, 16);
        fill_cell<G>(*cell, sums, scales, offset, left);
    }
    x.q = rows.q + token * rows.q_stride, x.q_stride = rows.q_stride;
}

// One panel's nibbles as bytes; through a codebook they become wide codes.
template <class D> static void unpack_nibbles(const Weight& w, const uint8_t* from, uint8_t* to) {
    typename D::Table table{};
    if (w.codebook)
        table = D::table(w.codebook);
    for (int64_t b = 0; b < w.cols / 32; b++, from += 256, to += 512)
        for (int i = 0; i < 4; i++) {
            const typename D::Bytes codes = D::load(from + 64 * i), low = D::low(codes), high = D::high(codes);
            D::store(to + 64 * i, w.codebook ? D::lookup(table, low) : low);
            D::store(to + 64 * (i + 4), w.codebook ? D::lookup(table, high) : high);
        }
}

template <class D> static void linear_int(const LinearArgs* args, int64_t panel0, int64_t panel1, uint8_t* scratch) {
    const LinearArgs& a = *args;
    const Weight& w = *a.w;
    Tokens x{};
    x.cells = reinterpret_cast<Cell*>(scratch), x.groups = w.groups;
    uint8_t* bytes = scratch + cell_bytes(w);

    // One tile of tokens reads the compact form; more tokens share panels that are unpacked once.
    const bool unpack = w.codes == Codes::kNibble && a.rows > D::kTokens, wide = w.codes == Codes::kByte || w.codebook;
    const int32_t offset = wide ? D::kWideOffset : w.offset;
    auto tile = wide ? int_tokens<D, Source::kWide, 32> : int_tokens<D, Source::kNarrow, 32>;
    if (w.group == 16)
        tile = int_tokens<D, Source::kWide, 16>;
    if (w.codes == Codes::kNibble && !unpack)
        tile = w.codebook ? int_tokens<D, Source::kBook, 32> : int_tokens<D, Source::kNibble, 32>;

    const int64_t panel_scales = w.groups * kLanes * (w.scales == Scales::kF16 ? 2 : 4), panel_bytes = w.cols * kLanes;
    for (int64_t panel = panel0; panel < panel1; panel += kMaxPanels) {
        const int64_t count = panel1 - panel < kMaxPanels ? panel1 - panel : kMaxPanels;
        Panels p{w.data + panel * w.panel_bytes, w.panel_bytes, static_cast<const uint8_t*>(w.scale) + panel * panel_scales, nullptr,
                 w.scales == Scales::kF16,       w.codebook};
        if (w.has_min)
            p.min = static_cast<const uint8_t*>(w.min) + panel * panel_scales;
        if (unpack) {
            for (int64_t i = 0; i < count; i++)
                unpack_nibbles<D>(w, p.codes + i * w.panel_bytes, bytes + i * panel_bytes);
            p.codes = bytes, p.code_stride = panel_bytes;
        }
        for (int64_t token = 0; token < a.rows; token += D::kTokens) {
            const int64_t tokens = a.rows - token < D::kTokens ? a.rows - token : D::kTokens;
            if (a.rows > D::kTokens || panel == panel0)
                w.group == 32 ? prepare_tokens<32>(a, offset, token, tokens, x) : prepare_tokens<16>(a, offset, token, tokens, x);
            tile(a, p, x, panel, count, token, tokens);
        }
    }
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
template <class V> static void dequantize_panel(const Weight& w, int64_t panel, float* to) {
    const int64_t panel_scales = w.groups * kLanes * (w.scales == Scales::kF16 ? 2 : 4);
    const bool half = w.scales == Scales::kF16;
    const uint8_t* codes = w.data + panel * w.panel_bytes;
    const uint8_t *scales = static_cast<const uint8_t*>(w.scale) + panel * panel_scales, *mins = static_cast<const uint8_t*>(w.min);
    if (mins)
        mins += panel * panel_scales;
    for (int64_t k = 0; k < w.cols; k++, to += kLanes) {
        const int64_t b = k / 32, in = k % 32, g = k / w.group * kLanes;
        float code[kLanes];
        for (int row = 0; row < kLanes; row++) {
            if (w.codes == Codes::kByte) {
                code[row] = float(codes[b * 512 + in / 4 * 64 + row * 4 + in % 4] - w.offset);
            } else {
                const int stored = codes[b * 256 + in % 16 / 4 * 64 + row * 4 + in % 4] >> in / 16 * 4 & 15;
                code[row] = float(w.codebook ? w.codebook[stored] : stored - w.offset);
            }
        }
        const typename V::F scale = load_scale<V>(scales, g, half), value = V::load(code);
        V::store(to, mins ? V::fma(scale, value, load_scale<V>(mins, g, half)) : V::mul(scale, value));
    }
}

template <class D> static void linear_float(const LinearArgs* args, int64_t panel0, int64_t panel1, uint8_t* scratch) {
    const LinearArgs& a = *args;
    const Weight& w = *a.w;
    const bool integer = w.codes <= Codes::kByte;
    const int64_t panel_bytes = integer ? w.cols * kLanes * 4 : w.panel_bytes;
    auto tile = w.codes == Codes::kF16    ? float_tokens<D, Codes::kF16>
                : w.codes == Codes::kBF16 ? float_tokens<D, Codes::kBF16>
                                          : float_tokens<D, Codes::kF32>;
    for (int64_t panel = panel0; panel < panel1; panel += D::kFloatPanels) {
        const int64_t count = panel1 - panel < D::kFloatPanels ? panel1 - panel : D::kFloatPanels;
        const uint8_t* data = w.data + panel * w.panel_bytes;
        if (integer) {
            for (int64_t i = 0; i < count; i++)
                dequantize_panel<typename D::V>(w, panel + i, reinterpret_cast<float*>(scratch + i * panel_bytes));
            data = scratch;
        }
        for (int64_t token = 0; token < a.rows; token += D::kFloatTokens) {
            const int64_t tokens = a.rows - token < D::kFloatTokens ? a.rows - token : D::kFloatTokens;
            tile(a, data, panel_bytes, panel, count, token, tokens);
        }
    }
}

} // namespace quaff::linear
