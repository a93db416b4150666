// The whole kernel surface: one table per instruction set, filled once (isa/*.cpp), chosen once (runtime/dispatch.cpp).
// Kernels trust their arguments: sizes, alignment and types are checked where a program or a weight is built.
#pragma once
#include "../numerics.h"

#include <cstddef>
#include <cstdint>

namespace quaff {

// How the codes of a packed weight lie in memory: bit planes. A panel is 16 output rows; within it groups of 32 k ascend, a group is its low
// plane, then its high plane. A plane of b bits is b lines of 64 bytes [row][j in 0..3]; bits b*f.. of a byte in line i belong to
// k = 4*(i + b*f) + j, so one load and one shift give four k of every row.
enum class Codes : int32_t {
    kByte = 0,       // 8 bits: code + 128
    kNibble = 1,     // 4 bits
    kNibbleBit = 2,  // 4 + 1 bits
    kNibblePair = 3, // 4 + 2 bits
    kPair = 4,       // 2 bits
    kPairBit = 5,    // 2 + 1 bits
    kF16 = 6,        // float weights: [k][row] f16
    kBF16 = 7,       // float weights: [k][row] bf16
    kF32 = 8,        // float weights: [k][row] f32
};
struct Planes {
    int low, high; // bits
};
[[gnu::always_inline]] constexpr inline Planes planes(Codes codes) {
    constexpr Planes bits[] = {{8, 0}, {4, 0}, {4, 1}, {4, 2}, {2, 0}, {2, 1}};
    return bits[static_cast<int>(codes)];
}
[[gnu::always_inline]] constexpr inline bool is_integer(Codes codes) { return codes < Codes::kF16; }
[[gnu::always_inline]] constexpr inline int64_t code_group_bytes(Codes codes) {
    return 64 * (planes(codes).low + planes(codes).high);
} // 16 rows x 32 k

// How scales and minimums are kept: a sequence of these blocks. f16 as bits; a weight is scale*code (+ min).
enum class Scales : int32_t { kNone, kHalf, kHalfMin, kSuper, kSuperMin, kSuperPair, kExponent, kSmallFloat, kOne };
struct HalfScales { // one group
    uint16_t scale[16];
};
struct HalfMinScales { // one group
    uint16_t scale[16], min[16];
};
template <int groups> struct SuperScales { // 256 k: scale = f32(d) * unit * f32(scale)
    uint16_t d[16];
    int8_t scale[groups][16];
};
struct SuperMinScales { // 256 k in groups of 32: min = -(f32(dmin) * f32(min))
    uint16_t d[16], dmin[16];
    int8_t scale[8][16], min[8][16];
};
struct SuperPairScales { // 256 k in groups of 16: the same, scale in the low and min in the high nibble
    uint16_t d[16], dmin[16];
    uint8_t both[16][16];
};
struct ExponentScales { // one group: scale = 2^(e - 128)
    uint8_t e[16];
};
struct SmallFloatScales { // 64 k in groups of 16: half of an unsigned e4m3 number
    uint8_t scale[4][16];
};
struct OneScale { // 256 k: one scale for all groups
    uint16_t d[16];
};
static_assert(sizeof(HalfScales) == 32 && sizeof(HalfMinScales) == 64 && sizeof(ExponentScales) == 16);
static_assert(sizeof(SmallFloatScales) == 64 && sizeof(OneScale) == 32);
static_assert(sizeof(SuperScales<8>) == 160 && sizeof(SuperScales<16>) == 288);
static_assert(sizeof(SuperMinScales) == 320 && sizeof(SuperPairScales) == 320);

struct ScaleBlock {
    int64_t k, bytes;
};
[[gnu::always_inline]] constexpr inline ScaleBlock scale_block(Scales scales, int64_t group) {
    switch (scales) {
    case Scales::kHalf:
        return {group, sizeof(HalfScales)};
    case Scales::kHalfMin:
        return {group, sizeof(HalfMinScales)};
    case Scales::kSuper:
        return {256, 32 + 16 * (256 / group)};
    case Scales::kSuperMin:
        return {256, sizeof(SuperMinScales)};
    case Scales::kSuperPair:
        return {256, sizeof(SuperPairScales)};
    case Scales::kExponent:
        return {group, sizeof(ExponentScales)};
    case Scales::kSmallFloat:
        return {64, sizeof(SmallFloatScales)};
    case Scales::kOne:
        return {256, sizeof(OneScale)};
    case Scales::kNone:
        break;
    }
    return {1, 0};
}

struct Weight {
    Codes codes;
    Scales scales;
    bool has_min;
    int32_t group;          // weights that share one scale: 16 or 32 (integer codes only)
    int32_t offset;         // stored code minus true code: 128 for kByte. Unused with a codebook
    const int8_t* codebook; // 16 signed values that stored codes stand for (of 3 bits: the first 8), or null
    float unit;             // kSuper: a power of two that every d is multiplied by
    int64_t rows, cols;  // true shape; panels = ceil(rows/16), cols is a multiple of 32 for integer codes. Pad rows are zero with scale 0
    const uint8_t* data; // panels, 64-byte aligned
    int64_t panel_bytes; // from panel to panel; a multiple of 64 for integer codes
    int64_t groups;      // cols / group
};

// Integer panels are chunks of 16 weight groups (the last one may be shorter): scale blocks, then codes, 32-byte aligned. One chunk after the
// other is one stream of addresses, which is what the processor's prefetcher follows.
inline constexpr int64_t kChunk = 16;
[[gnu::always_inline]] constexpr inline int64_t chunk_codes_at(const Weight& w, int64_t groups) {
    const ScaleBlock form = scale_block(w.scales, w.group);
    return (groups * w.group / form.k * form.bytes + 31) / 32 * 32;
}
[[gnu::always_inline]] constexpr inline int64_t chunk_bytes(const Weight& w, int64_t groups) {
    return chunk_codes_at(w, groups) + groups * w.group / 32 * code_group_bytes(w.codes);
}

// The activation of largest magnitude of a block of kOutlierBlock columns; its code is 0.
struct Outlier {
    uint32_t column; // of the block
    float value;
};
[[gnu::always_inline]] constexpr inline int64_t outlier_count(int64_t cols) { return (cols + kOutlierBlock - 1) / kOutlierBlock; }

// Quantised activations of `rows` rows: int8 codes, one f32 scale per 32, code sums per 16 and per 32, an outlier per block.
struct QuantRows {
    int8_t* q;        // [rows][q_stride]
    float* scale;     // [rows][s_stride], a multiple of 16, >= cols/32
    int32_t* sum32;   // [rows][s_stride]
    int32_t* sum16;   // [rows][2*s_stride]
    Outlier* outlier; // [rows][o_stride], >= outlier_count(cols)
    int64_t q_stride, s_stride, o_stride;
};

struct LinearArgs {
    const Weight* w;
    int64_t rows;       // activation rows
    const QuantRows* x; // integer weights with int8 activations
    const float* xf;    // float activations [rows][xf_stride] (float weights, or activations="float32")
    int64_t xf_stride;
    const float* bias; // [w->rows] or null
    float* out;        // out[row_map ? row_map[t] : t][n], row length out_stride
    int64_t out_stride;
    const int32_t* row_map;
    bool accumulate;    // out = out + acc (residual) instead of out = acc
    const Weight* next; // whose panels are wanted after those of w, or null
    // How long before its use a tile that passes over panels alone asks for them; 0 where the processor's own prefetcher does it better.
    int64_t ahead_bytes;
};

inline constexpr int64_t kMaxHeadDim = 1024; // of keys and of values: latent attention has 576 and 512

// Of a call of attend: its rows are so many tiles of registers.
inline constexpr int kTilesTogether = 2;

// Scratch of one of them: a page of scores, their codes, the running o and q, and one row of q before it is encoded.
[[gnu::always_inline]] constexpr inline int64_t attend_tile_floats(int32_t dim, int32_t value_dim, int rows) {
    return int64_t{rows} * (dim + value_dim + 2 * kPage) + dim;
}

struct AttendArgs {
    int count;                    // query vectors, <= KernelTable::attend_tile; all of one sequence and KV head
    const float* const* q;        // [count] -> [dim], after RoPE, unscaled
    float* const* out;            // [count] -> [value_dim]
    const int32_t* position;      // [count] absolute positions
    const uint16_t* const* pages; // page p of this sequence, layer and head: kernels::HeadPage
    int32_t past_page;            // pages from here on are not there
    int64_t head_offset;          // added (in u16 units) to every page pointer
    int32_t dim, value_dim;       // multiples of 16, <= kMaxHeadDim
    int32_t window;               // 0: none. Visible: j <= i and, with a window, j > i - window
    float scale;                  // q is multiplied by it once
    float cap;                    // 0: none. cap * tanh(s * (1/cap))
    const float* sink;            // [count] scores of what no position holds, merged last, or null
    float* scratch;               // attend_scratch_floats(dim, value_dim) floats, 64-byte aligned
};

// One row of a causal convolution of `channels` channels: taps[t] of a channel times row t of its values, oldest first.
struct ConvArgs {
    const float* const* rows;    // [taps] -> [channels], null: before the sequence began
    const float* const* factors; // [taps] -> [channels] that row t is multiplied by first, or null
    const float* w;              // panels of 16 channels: [tap][16]
    const float* bias;           // [channels] or null
    const float* gate;           // [channels]: y = gate * sum; null: y = silu(sum)
    float* y;
    int64_t channels, taps;
};

// The gated delta rule of one head over consecutive rows. State [dk][dv]; columns may be shared out among workers.
struct DeltaArgs {
    const float *q, *k; // [dk] of the first row, then every qk_stride
    const float* v;     // [dv], v_stride; out likewise
    const float* decay; // one a row, or [dk] a row
    const float* beta;  // one a row
    float *state, *out;
    int64_t rows, dk, dv, qk_stride, v_stride, decay_stride, beta_stride;
    bool decay_each;
};
inline constexpr int64_t kDeltaColumns = 64; // four chains of 16 lanes hide the latency of fma

struct KernelTable {
    const char* isa;

    // y = (x * r) * w with r = 1/sqrt(S/float(n) + eps); returns S (non-finite poisons the row). y may be x. n >= 1, any.
    float (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* y);
    // NUMERICS 12. n is a multiple of 32.
    void (*quantize_row)(const float* x, int64_t n, int8_t* q, float* scale, int32_t* sum32, int32_t* sum16, Outlier* outlier);
    // In place on one row of `heads` heads of `dim`: the first 2*half values of each head turn. cs = [cos half][sin half].
    // interleaved: pairs (2i, 2i+1); otherwise pairs (i, i+half).
    void (*rope)(float* x, const float* cs, int64_t heads, int64_t dim, int64_t half, bool interleaved);
    void (*swiglu)(const float* gate, const float* up, float* y, int64_t n);       // silu(g) * u
    void (*geglu_tanh)(const float* gate, const float* up, float* y, int64_t n);   // gelu_tanh(g) * u
    void (*sigmoid_gate)(const float* gate, const float* up, float* y, int64_t n); // sigmoid(g) * u
    void (*conv)(const ConvArgs*);
    float (*unit_norm)(float* x, float eps, float scale, int64_t n);     // x * (1/sqrt(S + eps)) * scale in place; returns S
    void (*decay)(float* x, const float* a, const float* dt, int64_t n); // x = E(a * softplus(x + dt)) in place
    void (*delta)(const DeltaArgs*, int64_t column, int64_t end);        // columns in whole 16s
    // silu with slope alpha of the gate, clamped from above, times 1 + up, clamped from both sides: NUMERICS 10.
    void (*swiglu_clamped)(const float* gate, const float* up, float* y, int64_t n, float alpha, float limit);
    void (*add)(float* y, const float* x, int64_t n);                 // y = y + x
    void (*add_scaled)(float* y, const float* x, float s, int64_t n); // y = y + x * s, rounded once
    void (*scale)(float* y, float s, int64_t n);                      // y = y * s
    void (*soft_cap)(float* y, float cap, int64_t n);                 // y = cap * tanh(y * (1/cap))
    float (*dot16)(const float* x, const float* w, int64_t n);        // width-16 fold of fma(x, w, lane)
    // One row of a mixture: y, or y = y + it, with it = fma(weight[j], row[j], it) from +0 over j ascending.
    void (*combine)(const float* const* row, const float* weight, int64_t count, float* y, int64_t n, bool accumulate);
    // Clamp to +-65504, encode, store position `slot` of one head's part of a page.
    void (*kv_write)(const float* k, const float* v, uint16_t* page, int64_t dim, int64_t value_dim, int64_t slot);
    void (*attend)(const AttendArgs*);
    // Both over pages of f32, for checking against other implementations: the clamp stays, the codes go.
    void (*kv_write_f32)(const float* k, const float* v, float* page, int64_t dim, int64_t value_dim, int64_t slot);
    void (*attend_f32)(const AttendArgs*);
    // The same in two steps, for few rows over many pages: what is found in pages [first, past) goes to parts, `stride` >= 48 + count * value_dim
    // floats a page, in any order and by any worker; then one call merges all pages that the tile sees, ascending.
    void (*attend_parts)(const AttendArgs*, int32_t first, int32_t past, float* parts, int64_t stride);
    void (*attend_merge)(const AttendArgs*, int32_t first, int32_t past, float* parts, int64_t stride);
    int attend_tile;

    // Panels [panel0, panel1) times all rows. scratch: linear_scratch_bytes(w) bytes, 64-byte aligned, one per worker.
    void (*linear_int)(const LinearArgs*, int64_t panel0, int64_t panel1, uint8_t* scratch);
    // Float activations; integer weights are first dequantised to f32 (scale*code+min as one fma, or scale*code). NUMERICS 14.
    void (*linear_float)(const LinearArgs*, int64_t panel0, int64_t panel1, uint8_t* scratch);

    // Vocabulary kernels.
    float (*row_max)(const float* x, int64_t n);                         // width-16 maximum fold from -inf
    void (*probabilities)(const float* x, float m, float* p, int64_t n); // P(x - m)
    float (*sum16)(const float* x, int64_t n);                           // width-16 fold from +0
    void (*exp_row)(const float* x, float* y, int64_t n);                // E(x), for tests
    void (*sigmoid_row)(const float* x, float* y, int64_t n);
    void (*tanh_row)(const float* x, float* y, int64_t n);

    // Ceilings: run about `iterations` independent operations in registers, return multiply-accumulates done.
    int64_t (*spin_int8)(int64_t iterations);
    int64_t (*spin_int16)(int64_t iterations);
    int64_t (*spin_fma)(int64_t iterations);
    void (*read)(const uint8_t* p, int64_t bytes); // load a multiple of 512 bytes, 64-byte aligned, and use them for nothing
};

[[gnu::always_inline]] inline int64_t panel_count(const Weight& w) { return (w.rows + 15) / 16; }
// In kernels/scratch.cpp: panels that many rows pass over together, once they are prepared, and so what a worker should claim at once; workspaces.
int64_t panels_at_once(const Weight& w);
size_t linear_scratch_bytes(const Weight& w);
size_t attend_scratch_floats(int32_t dim, int32_t value_dim, int tile);

// Null when this build lacks the set. The caller has checked that the processor can run it.
const KernelTable* table_scalar();
const KernelTable* table_avx2();
const KernelTable* table_avxvnni();
const KernelTable* table_avx512();
const KernelTable* table_neon();

} // namespace quaff
