// Runs every kernel of an instruction set on inputs made by an integer generator and hashes what it wrote. A hash of 0 is a failed check.
//   bits            all sets of this machine: prints `kernel hash` once for all, exit status 1 where two sets differ or a control is not seen
//   bits ISA        one set
//   bits --broken   all sets, the last with a fold in another order: must exit with status 1
#include "isa/vec_scalar.h"
#include "numerics.h"
#include "runtime/dispatch.h"
#include "runtime/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <utility>
#include <vector>

using namespace quaff;

namespace {

// xorshift64*: integers only, so that inputs are the same everywhere.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    uint32_t bits() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Du) >> 32);
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
    // Either sign, size 2^low to 2^high; now and then a zero, a denormal or a power of two.
    float number(int low, int high) {
        const uint32_t r = bits();
        if (r % 64 == 0)
            return std::bit_cast<float>(bits() & 0x80000000u);
        if (r % 64 == 1)
            return std::bit_cast<float>(bits() & 0x807fffffu);
        const auto exponent = static_cast<uint32_t>(127 + low + below(high - low));
        return std::bit_cast<float>((r & 0x80000000u) | exponent << 23 | (r % 64 == 2 ? 0 : bits() & 0x7fffff));
    }

private:
    uint64_t state_;
};

template <class T> struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class U> Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
    bool operator==(const Aligned&) const { return true; }
};
template <class T> using Buffer = std::vector<T, Aligned<T>>;

Buffer<float> numbers(Random& random, int64_t n, int low, int high) {
    Buffer<float> out(static_cast<size_t>(n));
    for (float& x : out)
        x = random.number(low, high);
    return out;
}

class Hash { // FNV-1a
public:
    void bytes(const void* p, size_t n) {
        for (const auto* b = static_cast<const unsigned char*>(p); n; --n, ++b)
            value_ = (value_ ^ *b) * 0x100000001b3u;
    }
    template <class T> void values(const T& list) { bytes(list.data(), list.size() * sizeof(list[0])); }
    void one(float x) { bytes(&x, sizeof x); }
    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

struct Line {
    std::string kernel;
    uint64_t hash;
    bool operator==(const Line&) const = default;
};
using Lines = std::vector<Line>;

// The scalar set's fma against the C library's, which rounds once: random and special bits, and sums built to end at or near half-way.
void fma_rounds_once(Lines& lines) {
    using V = isa::VecScalar;
    constexpr uint32_t kSpecial[] = {0,          1,          0x007fffff, 0x00800000, 0x00800001, 0x33800000, 0x34000000,
                                     0x3f7fffff, 0x3f800000, 0x3f800001, 0x1f800000, 0x20000000, 0x7f7fffff};
    Random random(1);
    const auto finite = [&](int kind) {
        const uint32_t r = random.bits(), sign = r & 0x80000000u;
        if (kind == 0)
            return std::bit_cast<float>(sign | kSpecial[r % std::size(kSpecial)]);
        if (kind == 1)
            return std::bit_cast<float>(r & 0x80ffffffu); // denormal or the smallest normal
        if (kind == 2)
            return static_cast<float>(static_cast<int32_t>(r % 4097) - 2048);
        return std::bit_cast<float>(sign | (r & 0x7fffffffu) % 0x7f800000u);
    };
    Hash hash;
    bool wrong = false;
    for (int n = 0; n < 100'000; ++n) {
        float x[kLanes], y[kLanes], z[kLanes], r[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            x[i] = finite(random.below(4));
            y[i] = finite(random.below(4));
            z[i] = finite(random.below(4));
            const float p = x[i] * y[i];
            const int form = random.below(4);
            if (form > 1 && std::fabs(p) < INFINITY) // the product itself, its neighbours, or the product 2^-31 to 2^31 times
                z[i] = form == 2 ? std::bit_cast<float>(std::bit_cast<uint32_t>(p) ^ (random.bits() & 0x80000003u))
                                 : std::ldexp(p, random.below(63) - 31);
            if (!(std::fabs(z[i]) < INFINITY))
                z[i] = 1;
        }
        V::store(r, V::fma(V::load(x), V::load(y), V::load(z)));
        for (int i = 0; i < kLanes; ++i) {
            const auto want = std::bit_cast<uint32_t>(std::fma(x[i], y[i], z[i]));
            wrong |= want != std::bit_cast<uint32_t>(r[i]) || want != std::bit_cast<uint32_t>(V::fma_lane(x[i], y[i], z[i]));
        }
        hash.bytes(r, sizeof r);
    }
    if (wrong)
        std::fprintf(stderr, "the scalar fma rounds otherwise than the C library's\n");
    lines.push_back({"scalar_fma", wrong ? 0 : hash.value()});
}

constexpr int64_t kLengths[] = {1, 2, 15, 16, 17, 31, 33, 64, 100, 576, 1001};

void row_kernels(const KernelTable& k, Lines& lines) {
    Hash norm, silu, gelu, clamped, add, scaled, scale, dot, combined, cap, top, prob, sum, exp, sigmoid, tanh;
    for (const int64_t n : kLengths) {
        Random random(static_cast<uint64_t>(n));
        const auto x = numbers(random, n, -8, 6), w = numbers(random, n, -4, 3), wide = numbers(random, n, -30, 8);
        Buffer<float> y(static_cast<size_t>(n));
        norm.one(k.rms_norm(x.data(), w.data(), 0x1p-17f, n, y.data()));
        norm.values(y);
        k.swiglu(x.data(), w.data(), y.data(), n);
        silu.values(y);
        k.geglu_tanh(x.data(), w.data(), y.data(), n);
        gelu.values(y);
        k.swiglu_clamped(w.data(), x.data(), y.data(), n, 1.702f, 7.0f);
        clamped.values(y);
        const float *rows[] = {x.data(), w.data(), wide.data()}, shares[] = {0x1.2p-2f, 0x1.aaaaaap-1f, -0x1.8p-3f};
        k.combine(rows, shares, 3, y.data(), n, true);
        combined.values(y);
        k.combine(rows, shares, 2, y.data(), n, false);
        combined.values(y);
        dot.one(k.dot16(x.data(), wide.data(), n));
        k.add(y.data(), wide.data(), n);
        add.values(y);
        k.scale(y.data(), 0x1.b6db6ep+3f, n);
        scale.values(y);
        k.add_scaled(y.data(), x.data(), 0x1.c28f5cp-3f, n);
        scaled.values(y);
        k.soft_cap(y.data(), 30.0f, n);
        cap.values(y);
        const float m = k.row_max(wide.data(), n);
        top.one(m);
        k.probabilities(wide.data(), m, y.data(), n);
        prob.values(y);
        sum.one(k.sum16(wide.data(), n));
        k.exp_row(wide.data(), y.data(), n);
        exp.values(y);
        k.sigmoid_row(wide.data(), y.data(), n);
        sigmoid.values(y);
        k.tanh_row(wide.data(), y.data(), n);
        tanh.values(y);
    }
    const std::pair<const char*, const Hash*> all[] = {{"rms_norm", &norm},      {"swiglu", &silu},
                                                       {"geglu_tanh", &gelu},    {"add", &add},
                                                       {"add_scaled", &scaled},  {"soft_cap", &cap},
                                                       {"scale", &scale},        {"row_max", &top},
                                                       {"probabilities", &prob}, {"sum16", &sum},
                                                       {"exp_row", &exp},        {"sigmoid_row", &sigmoid},
                                                       {"tanh_row", &tanh},      {"swiglu_clamped", &clamped},
                                                       {"dot16", &dot},          {"combine", &combined}};
    for (const auto& [name, hash] : all)
        lines.push_back({name, hash->value()});
}

void rope(const KernelTable& k, Lines& lines) {
    Hash hash;
    for (const int64_t half : {1, 5, 8, 16, 20, 32, 48, 64, 128})
        for (const bool interleaved : {false, true}) {
            Random random(static_cast<uint64_t>(half));
            const int64_t heads = 3, dim = 2 * half + (half % 3 ? 16 : 0);
            auto x = numbers(random, heads * dim, -6, 4);
            const auto cs = numbers(random, 2 * half, -5, 0);
            k.rope(x.data(), cs.data(), heads, dim, half, interleaved);
            hash.values(x);
        }
    lines.push_back({"rope", hash.value()});
}

// Taps that reach before the sequence, bare and multiplied rows, with and without bias, both ends; the last channels are no whole vector.
void convolution(const KernelTable& k, Lines& lines) {
    Hash hash;
    for (const int64_t taps : {2, 3, 4, 16})
        for (const int64_t channels : {1, 15, 16, 40, 64})
            for (int form = 0; form < 8; ++form) {
                Random random(static_cast<uint64_t>(taps * 100 + channels));
                const auto x = numbers(random, taps * channels, -6, 4), b = numbers(random, taps * channels, -6, 4);
                const auto w = numbers(random, (channels + 15) / 16 * 16 * taps, -4, 1), ends = numbers(random, 2 * channels, -3, 3);
                std::vector<const float*> rows, factors;
                for (int64_t t = 0; t < taps; ++t) {
                    rows.push_back(t == 0 && form & 1 ? nullptr : x.data() + t * channels);
                    factors.push_back(form & 2 && t ? b.data() + t * channels : nullptr);
                }
                Buffer<float> y(static_cast<size_t>(channels));
                const ConvArgs a{
                    rows.data(), factors.data(), w.data(), form & 4 ? ends.data() : nullptr, form & 2 ? ends.data() + channels : nullptr,
                    y.data(),    channels,       taps};
                k.conv(&a);
                hash.values(y);
            }
    lines.push_back({"conv", hash.value()});
}

// States of several widths, rows that follow one another, and the functions that gates and keys go through.
void delta_rule(const KernelTable& k, Lines& lines) {
    Hash hash, unit, gates;
    for (const int64_t n : {1, 15, 16, 24, 128}) {
        Random random(static_cast<uint64_t>(n));
        auto x = numbers(random, n, -6, 4);
        unit.one(k.unit_norm(x.data(), 0x1p-20f, 0x1.6a09e6p-4f, n));
        unit.values(x);
        auto a = numbers(random, n, -4, 5);
        const auto rate = numbers(random, n, -3, 3), dt = numbers(random, n, -3, 3);
        k.decay(a.data(), rate.data(), dt.data(), n);
        gates.values(a);
        k.sigmoid_gate(x.data(), rate.data(), a.data(), n);
        gates.values(a);
    }
    for (const auto& [dk, dv] : {std::pair<int64_t, int64_t>{1, 16}, {24, 80}, {32, 64}, {17, 160}}) {
        Random random(static_cast<uint64_t>(dk * 1000 + dv));
        constexpr int64_t rows = 5, heads = 3;
        const auto q = numbers(random, rows * heads * dk, -6, 0), key = numbers(random, rows * heads * dk, -6, 0);
        const auto v = numbers(random, rows * heads * dv, -4, 2), gate = numbers(random, rows * heads * (dk + 1), -4, 0);
        auto state = numbers(random, dk * dv, -6, 2);
        Buffer<float> out(static_cast<size_t>(rows * heads * dv));
        for (const bool each : {false, true}) {
            const DeltaArgs a{q.data(), key.data(), v.data(),   gate.data() + rows * heads, gate.data(), state.data(), out.data(), rows, dk,
                              dv,       heads * dk, heads * dv, each ? heads * dk : heads,  heads,       each};
            k.delta(&a, 0, dv - 16);
            k.delta(&a, dv - 16, dv);
            hash.values(out);
            hash.values(state);
        }
    }
    lines.push_back({"unit_norm", unit.value()});
    lines.push_back({"delta_gates", gates.value()});
    lines.push_back({"delta", hash.value()});
}

struct Quantised {
    Buffer<int8_t> q;
    Buffer<float> scale;
    Buffer<int32_t> sum32, sum16;
    Buffer<Outlier> outlier;
    QuantRows rows;
    Quantised(const KernelTable& k, const Buffer<float>& x, int64_t count, int64_t n) {
        const int64_t stride = (n / kQuantGroup + 15) / 16 * 16;
        q.resize(static_cast<size_t>(count * (n + 64)));
        scale.resize(static_cast<size_t>(count * stride));
        sum32.resize(scale.size());
        sum16.resize(2 * scale.size());
        const int64_t outliers = outlier_count(n);
        outlier.resize(static_cast<size_t>(count * outliers));
        rows = {q.data(), scale.data(), sum32.data(), sum16.data(), outlier.data(), n + 64, stride, outliers};
        for (int64_t t = 0; t < count; ++t)
            k.quantize_row(x.data() + t * n, n, q.data() + t * rows.q_stride, scale.data() + t * stride, sum32.data() + t * stride,
                           sum16.data() + 2 * t * stride, outlier.data() + t * outliers);
    }
};

void quantize(const KernelTable& k, Lines& lines) {
    Hash hash;
    for (const int64_t n : {32, 64, 96, 576, 1024, 1120, 2592}) {
        Random random(static_cast<uint64_t>(n));
        auto x = numbers(random, 4 * n, -20, 5);
        std::fill_n(x.begin(), 32, 0x1p-65f); // below the least amax that has a scale
        std::fill_n(x.begin() + n, 32, 0x1p-64f);
        x[static_cast<size_t>(2 * n + 17)] = -100.0f; // the first of two outliers as large
        x[static_cast<size_t>(3 * n - 1)] = 100.0f;
        const Quantised q(k, x, 4, n);
        hash.values(q.q);
        hash.values(q.scale);
        hash.values(q.sum32);
        hash.values(q.sum16);
        hash.values(q.outlier);
    }
    lines.push_back({"quantize_row", hash.value()});
}

// NUMERICS 9 and 16 in plain loops for one row, reading visible positions only.
namespace plain {

float exponential(float x) {
    x = std::min(std::max(x, kExpMin), kExpMax);
    const float n = std::nearbyint(x * kLog2e), r = std::fma(n, -kLn2Lo, std::fma(n, -kLn2Hi, x));
    float p = kExpC4;
    for (const float c : {kExpC3, kExpC2, kExpC1, kExpC0})
        p = std::fma(p, r, c);
    return std::ldexp(std::fma(p * r, r, r + 1.0f), static_cast<int>(n));
}
float power(float x) {
    if (x < kPowerMin)
        return 0.0f;
    const float n = std::nearbyint(x), r = x - n;
    float p = kPowerC5;
    for (const float c : {kPowerC4, kPowerC3, kPowerC2, kPowerC1, 1.0f})
        p = std::fma(p, r, c);
    return std::ldexp(p, static_cast<int>(n));
}
float capped(float s, float cap) {
    const float x = s * (1.0f / cap), t = exponential(-2.0f * std::fabs(x));
    return cap * kLog2e * std::copysign((1.0f - t) / (1.0f + t), x);
}

// Codes of a row, and their scale.
struct Coded {
    std::vector<int64_t> codes;
    float scale = 0;
    explicit Coded(const std::vector<float>& x) : codes(x.size()) {
        float largest = 0;
        for (const float v : x)
            largest = std::max(largest, std::fabs(v));
        if (largest < 0x1p-64f)
            return;
        int exponent = 0;
        const float fraction = std::frexp(largest / 4095.0f, &exponent);
        scale = std::ldexp(std::ceil(std::ldexp(fraction, 8)), exponent - 8); // up to eight bits
        for (size_t i = 0; i < x.size(); ++i)
            codes[i] = std::llrint(x[i] * (1.0f / scale));
    }
};

// A page of one head, of codes or of f32.
struct Page {
    const uint16_t* at;
    int64_t dim, value_dim;
    const float* wide() const { return reinterpret_cast<const float*>(at); }
    const int16_t* codes() const { return reinterpret_cast<const int16_t*>(at); }
    float scale(int64_t i) const { // of K, then of V
        const uint32_t bits = uint32_t{at[kPage * (dim + value_dim) + i]} << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    int64_t k(int64_t d, int64_t j) const { return codes()[d / 2 * 2 * kPage + 2 * j + d % 2]; }
    int64_t v(int64_t j, int64_t d) const { return codes()[kPage * dim + j / 2 * 2 * value_dim + 2 * d + j % 2]; }
};

std::vector<float> attend(const AttendArgs& a, int row, bool codes) {
    const int64_t dim = a.dim, value_dim = a.value_dim, at = a.position[row],
                  first = a.window ? std::max<int64_t>(0, at - a.window + 1) : 0;
    std::vector<float> o(static_cast<size_t>(value_dim)), page_o(o.size()), q(a.q[row], a.q[row] + dim);
    for (float& x : q)
        x = x * (a.cap != 0 ? a.scale : a.scale * kLog2e);
    const Coded coded(q);
    float m = 0, l = 0;
    for (int64_t p = first / kPage; p <= at / kPage; ++p) {
        const Page page{a.pages[p], dim, value_dim};
        const int64_t from = std::max<int64_t>(first - p * kPage, 0), to = std::min<int64_t>(at - p * kPage + 1, kPage);
        float s[kPage], lanes[kLanes] = {}, page_m = -INFINITY, largest = 0;
        int64_t weights[kPage];
        for (int64_t j = from; j < to; ++j) {
            s[j] = 0;
            if (codes) {
                for (int64_t begin = 0; begin < dim; begin += 128) {
                    int64_t sum = 0;
                    for (int64_t d = begin; d < std::min(dim, begin + 128); ++d)
                        sum += coded.codes[static_cast<size_t>(d)] * page.k(d, j);
                    s[j] += static_cast<float>(sum);
                }
                s[j] = s[j] * page.scale(j) * coded.scale;
            } else {
                for (int64_t d = 0; d < dim; ++d)
                    s[j] = std::fma(q[static_cast<size_t>(d)], page.wide()[d * kPage + j], s[j]);
            }
            s[j] = a.cap != 0 ? capped(s[j], a.cap) : s[j];
            page_m = std::max(page_m, s[j]);
        }
        for (int64_t j = from; j < to; ++j) {
            lanes[j % kLanes] += s[j] = power(s[j] - page_m);
            if (codes)
                largest = std::max(largest, s[j] = s[j] * page.scale(kPage + j));
        }
        for (int w = kLanes / 2; w; w /= 2)
            for (int j = 0; j < w; ++j)
                lanes[j] += lanes[j + w];
        const bool tiny = largest < 0x1p-64f;
        for (int64_t j = from; j < to && codes; ++j)
            weights[j] = tiny ? 0 : std::llrint(s[j] * (8191.0f / largest));
        for (int64_t d = 0; d < value_dim; ++d) {
            float sum = 0;
            int64_t exact = 0;
            for (int64_t j = from; j < to; ++j)
                if (codes)
                    exact += weights[j] * page.v(j, d);
                else
                    sum = std::fma(s[j], page.wide()[kPage * dim + j * value_dim + d], sum);
            page_o[static_cast<size_t>(d)] = codes ? static_cast<float>(exact) : sum + 0.0f;
        }
        const float worth = !codes ? 1.0f : tiny ? 0.0f : largest / 8191.0f;
        if (p == first / kPage) {
            m = page_m, l = lanes[0];
            for (size_t d = 0; d < o.size(); ++d)
                o[d] = page_o[d] * worth;
            continue;
        }
        const float top = std::max(m, page_m), x = power(m - top), y = power(page_m - top);
        m = top;
        l = std::fma(l, x, lanes[0] * y);
        for (size_t d = 0; d < o.size(); ++d)
            o[d] = std::fma(o[d], x, page_o[d] * (y * worth));
    }
    if (a.sink) {
        const float sink = a.sink[row] * kLog2e, top = std::max(m, sink), x = power(m - top);
        l = std::fma(l, x, power(sink - top));
        for (float& value : o)
            value = value * x;
    }
    for (float& x : o)
        x = x * (1.0f / l);
    return o;
}

} // namespace plain

// Pages filled by kv_write, hidden positions too; then rows at mixed positions in tiles of every size the set allows, over codes, with the pages
// shared out, and over f32.
void attention(const KernelTable& k, Lines& lines) {
    Hash pages_hash, wide_hash, hash;
    bool wrong = false;
    constexpr std::pair<int32_t, int32_t> kDims[] = {{16, 16},   {48, 48}, {64, 64},  {80, 80},  {128, 128},
                                                     {256, 256}, {80, 64}, {32, 112}, {576, 512}};
    for (const auto& [dim, value_dim] : kDims) {
        Random random(static_cast<uint64_t>(dim * 1024 + value_dim));
        constexpr int kPages = 4, kRows = 29, kEnd = kPages * kPage;
        const auto page_size = static_cast<size_t>(kPage * (dim + value_dim + 2)),
                   wide_size = static_cast<size_t>(kPage * (dim + value_dim));
        Buffer<uint16_t> memory(kPages * page_size);
        Buffer<float> wide(kPages * wide_size);
        const uint16_t *pages[kPages], *wide_pages[kPages];
        for (int position = 0; position < kEnd; ++position) {
            // Now and then clamped values, or such that have no scale; a page of equal ones, whose codes and sums are as large as can be.
            auto kv = numbers(random, dim + value_dim, -18, position % 37 ? 2 : 18);
            if (position % 41 == 0 || position / kPage == 2)
                std::fill(kv.begin(), kv.end(), position / kPage == 2 ? 1.0f : 0x1p-70f);
            uint16_t* page = memory.data() + static_cast<size_t>(position / kPage) * page_size;
            pages[position / kPage] = page;
            k.kv_write(kv.data(), kv.data() + dim, page, dim, value_dim, position % kPage);
            float* wide_page = wide.data() + static_cast<size_t>(position / kPage) * wide_size;
            wide_pages[position / kPage] = reinterpret_cast<const uint16_t*>(wide_page);
            k.kv_write_f32(kv.data(), kv.data() + dim, wide_page, dim, value_dim, position % kPage);
            std::vector<float> clamped(kv.begin(), kv.end());
            for (float& x : clamped)
                x = std::clamp(x, -65504.0f, 65504.0f);
            const plain::Coded key({clamped.begin(), clamped.begin() + dim}), value({clamped.begin() + dim, clamped.end()});
            const plain::Page written{page, dim, value_dim};
            const int64_t slot = position % kPage;
            wrong = wrong || written.scale(slot) != key.scale || written.scale(kPage + slot) != value.scale;
            for (int64_t d = 0; d < dim; ++d)
                wrong = wrong || wide_page[d * kPage + slot] != clamped[static_cast<size_t>(d)] ||
                        written.k(d, slot) != key.codes[static_cast<size_t>(d)];
            for (int64_t d = 0; d < value_dim; ++d)
                wrong = wrong || wide_page[kPage * dim + slot * value_dim + d] != clamped[static_cast<size_t>(dim + d)] ||
                        written.v(slot, d) != value.codes[static_cast<size_t>(d)];
        }
        pages_hash.values(memory);
        wide_hash.values(wide);
        auto q = numbers(random, kRows * dim, -6, 2);
        for (const auto& [row, value] : {std::pair{26, 1.0f}, {27, 0.0f}, {28, 0x1p-80f}}) // the largest sums, equal scores, no scale
            std::fill_n(q.begin() + row * dim, dim, value);
        Buffer<float> out(static_cast<size_t>(kRows * value_dim)), shared(out.size()), wide_out(out.size()),
            scratch(attend_scratch_floats(dim, value_dim, k.attend_tile));
        Buffer<float> parts(static_cast<size_t>(kPages * (96 + k.attend_tile * value_dim)));
        for (const int32_t window : {0, 1, 7, 64, 100})
            for (const float cap : {0.0f, 3.0f})
                for (int order = 0; order < 3; ++order) { // ascending, scattered, all at the last position
                    for (int begin = 0, size = 1; begin < kRows; begin += size, size = size % k.attend_tile + 1) {
                        const float* queries[64];
                        float *results[64], *shared_results[64], sinks[64];
                        int32_t positions[64];
                        AttendArgs a{};
                        for (; a.count < size && begin + a.count < kRows; ++a.count) {
                            const int row = begin + a.count;
                            queries[a.count] = q.data() + row * dim;
                            results[a.count] = out.data() + row * value_dim;
                            sinks[a.count] = q[static_cast<size_t>(row)] * 3.0f;
                            positions[a.count] = order == 0 ? 50 + row : order == 1 ? row * 89 % kEnd : kEnd - 1;
                        }
                        a.q = queries;
                        a.out = results;
                        a.position = positions;
                        a.pages = pages;
                        a.past_page = kPages;
                        a.dim = dim;
                        a.value_dim = value_dim;
                        a.window = window;
                        a.scale = 0x1.6a09e6p-3f;
                        a.cap = cap;
                        a.sink = order == 1 ? sinks : nullptr;
                        a.scratch = scratch.data();
                        k.attend(&a);
                        // The same with its pages shared out: parts in another order, by blocks, then merged.
                        for (int t = 0; t < a.count; ++t)
                            shared_results[t] = shared.data() + (results[t] - out.data());
                        const int64_t stride = 96 + k.attend_tile * value_dim;
                        a.out = shared_results;
                        k.attend_parts(&a, 3, kPages, parts.data() + 3 * stride, stride);
                        k.attend_parts(&a, 0, 3, parts.data(), stride);
                        k.attend_merge(&a, 0, kPages, parts.data(), stride);
                        for (int t = 0; t < a.count; ++t)
                            shared_results[t] = wide_out.data() + (results[t] - out.data());
                        a.pages = wide_pages;
                        k.attend_f32(&a);
                        for (const bool codes : {false, true}) {
                            a.pages = codes ? pages : wide_pages;
                            for (int t = begin % 3; t < a.count; t += 3) { // a third of the rows: the plain loops are slow
                                const std::vector<float> want = plain::attend(a, t, codes);
                                const float* got = codes ? results[t] : shared_results[t];
                                wrong = wrong || std::memcmp(want.data(), got, want.size() * sizeof(float)) != 0;
                            }
                        }
                    }
                    wrong = wrong || std::memcmp(out.data(), shared.data(), out.size() * sizeof(float)) != 0;
                    hash.values(out);
                    wide_hash.values(wide_out);
                }
    }
    if (wrong)
        std::fprintf(stderr, "%s: attend differs from plain loops, or from itself with its pages shared out\n", k.isa);
    lines.push_back({"kv_write", pages_hash.value()});
    lines.push_back({"attend", wrong ? 0 : hash.value()});
    lines.push_back({"attend_f32", wide_hash.value()});
}

struct Form {
    const char* name;
    Codes codes;
    Scales scales;
    bool has_min;
    int32_t group, offset;
    bool codebook;
    float unit = 1;
};
constexpr Form kForms[] = {
    {"nibble_offset", Codes::kNibble, Scales::kHalf, false, 32, 8, false},
    {"nibble_min", Codes::kNibble, Scales::kHalfMin, true, 32, 0, false},
    {"nibble_codebook", Codes::kNibble, Scales::kHalf, false, 32, 0, true},
    {"nibble_super_min", Codes::kNibble, Scales::kSuperMin, true, 32, 0, false},
    {"nibble_codebook_super", Codes::kNibble, Scales::kSuper, false, 32, 0, true},
    {"nibble_codebook_exponent", Codes::kNibble, Scales::kExponent, false, 32, 0, true},
    {"nibble_bit", Codes::kNibbleBit, Scales::kHalf, false, 32, 16, false},
    {"nibble_bit_min", Codes::kNibbleBit, Scales::kHalfMin, true, 32, 0, false},
    {"nibble_bit_super_min", Codes::kNibbleBit, Scales::kSuperMin, true, 32, 0, false},
    {"nibble_pair_super", Codes::kNibblePair, Scales::kSuper, false, 16, 32, false},
    {"pair_super_pair", Codes::kPair, Scales::kSuperPair, true, 16, 0, false},
    {"pair_bit_super", Codes::kPairBit, Scales::kSuper, false, 16, 4, false},
    {"nibble_codebook_small_float", Codes::kNibble, Scales::kSmallFloat, false, 16, 0, true},
    {"pair_one", Codes::kPair, Scales::kOne, false, 32, 1, false},
    {"pair_bit_codebook_super", Codes::kPairBit, Scales::kSuper, false, 32, 0, true, 0.125f},
    {"pair_bit_codebook_super_16", Codes::kPairBit, Scales::kSuper, false, 16, 0, true, 0.25f},
    {"byte", Codes::kByte, Scales::kHalf, false, 32, 128, false},
    {"f16", Codes::kF16, Scales::kNone, false, 0, 0, false},
    {"bf16", Codes::kBF16, Scales::kNone, false, 0, 0, false},
    {"f32", Codes::kF32, Scales::kNone, false, 0, 0, false},
};
alignas(16) constexpr int8_t kBook[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

uint16_t half_bits(Random& random) {
    const uint32_t exponent = static_cast<uint32_t>(4 + random.below(6));
    return static_cast<uint16_t>((random.bits() & 0x83ffu) | exponent << 10);
}

struct RandomWeight {
    Buffer<uint8_t> data;
    Weight w{};
    RandomWeight(const Form& form, int64_t rows, int64_t cols) {
        Random random(static_cast<uint64_t>(rows * 4096 + cols));
        w = {form.codes, form.scales, form.has_min, form.group, form.offset, form.codebook ? kBook : nullptr,
             form.unit,  rows,        cols,         nullptr,    0,           0};
        if (is_integer(form.codes)) {
            w.groups = cols / form.group;
            const int64_t rest = w.groups % kChunk;
            w.panel_bytes = w.groups / kChunk * chunk_bytes(w, kChunk) + (rest ? chunk_bytes(w, rest) : 0);
            w.panel_bytes = (w.panel_bytes + 63) / 64 * 64;
            data.resize(static_cast<size_t>(panel_count(w) * w.panel_bytes));
            integers(random);
        } else {
            w.panel_bytes = cols * kLanes * (form.codes == Codes::kF32 ? 4 : 2);
            data.resize(static_cast<size_t>(panel_count(w) * w.panel_bytes));
            for (int64_t i = 0; i < panel_count(w) * w.panel_bytes; ++i) // drawn first for every form
                random.bits();
            floats(random);
        }
        w.data = data.data();
    }

private:
    template <class T> static void put(uint8_t* at, T value) { std::memcpy(at, &value, sizeof value); }

    void floats(Random& random) {
        for (size_t i = 0; i < data.size(); i += w.codes == Codes::kF32 ? 4 : 2)
            if (w.codes == Codes::kF32)
                put(&data[i], random.number(-9, -2));
            else if (w.codes == Codes::kF16)
                put(&data[i], half_bits(random));
            else
                put(&data[i], static_cast<uint16_t>(std::bit_cast<uint32_t>(random.number(-9, -2)) >> 16));
    }

    // All codes first, then every f16 scale, every f16 minimum, and the bytes of sub-scales or exponents.
    void integers(Random& random) {
        const int64_t block = scale_block(w.scales, w.group).bytes;
        const bool exponents = w.scales == Scales::kExponent;
        const int64_t halves = exponents || w.scales == Scales::kSmallFloat ? 0 : w.has_min ? 2 : 1;
        each_chunk([&](uint8_t* chunk, int64_t groups) {
            for (int64_t at = chunk_codes_at(w, groups); at < chunk_bytes(w, groups); ++at)
                put(chunk + at, static_cast<uint8_t>(random.bits()));
        });
        for (int64_t half = 0; half < halves; ++half)
            each_block([&](uint8_t* scales) {
                for (int64_t lane = 0; lane < kLanes; ++lane)
                    put(scales + 2 * (half * kLanes + lane), half_bits(random));
            });
        each_block([&](uint8_t* scales) {
            for (int64_t at = 2 * halves * kLanes; at < block; ++at)
                put(scales + at, static_cast<uint8_t>(exponents ? 116 + random.below(9) : static_cast<int>(random.bits() & 255)));
        });
    }

    template <class F> void each_chunk(F&& f) {
        for (int64_t panel = 0; panel < panel_count(w); ++panel)
            for (int64_t g = 0; g < w.groups; g += kChunk)
                f(&data[static_cast<size_t>(panel * w.panel_bytes + g / kChunk * chunk_bytes(w, kChunk))], std::min(kChunk, w.groups - g));
    }
    template <class F> void each_block(F&& f) {
        const ScaleBlock form = scale_block(w.scales, w.group);
        each_chunk([&](uint8_t* chunk, int64_t groups) {
            for (int64_t i = 0; i < groups * w.group / form.k; ++i)
                f(chunk + i * form.bytes);
        });
    }
};

void linear(const KernelTable& k, Lines& lines) {
    for (const Form& form : kForms) {
        Hash integer, floats;
        for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 32}, {16, 64}, {17, 96}, {47, 160}, {95, 576}, {128, 256}}) {
            const int64_t multiple = is_integer(form.codes) ? scale_block(form.scales, form.group).k : 1;
            cols = (cols + multiple - 1) / multiple * multiple;
            const RandomWeight weight(form, rows, cols);
            Buffer<uint8_t> scratch(linear_scratch_bytes(weight.w) + 64);
            for (const int64_t tokens : {1, 2, 5, 6, 13}) {
                Random random(static_cast<uint64_t>(tokens));
                const auto x = numbers(random, tokens * cols, -8, 3), bias = numbers(random, rows, -6, 2);
                const Quantised quantised(k, x, tokens, cols);
                std::vector<int32_t> reversed;
                for (int64_t t = tokens; t-- > 0;)
                    reversed.push_back(static_cast<int32_t>(t));
                for (int mode = 0; mode < 4; ++mode) { // with a bias, into a residual through a row map
                    const bool whole = is_integer(form.codes);
                    for (const bool use_int : {true, false}) {
                        if (use_int && !whole)
                            continue;
                        auto out = numbers(random, tokens * (rows + 5), -3, 3);
                        LinearArgs a{};
                        a.w = &weight.w;
                        a.rows = tokens;
                        a.x = &quantised.rows;
                        a.xf = x.data();
                        a.xf_stride = cols;
                        a.bias = mode & 1 ? bias.data() : nullptr;
                        a.out = out.data();
                        a.out_stride = rows + 5;
                        a.accumulate = (mode & 2) != 0;
                        a.row_map = mode & 2 ? reversed.data() : nullptr;
                        const int64_t panels = panel_count(weight.w);
                        for (int64_t p = 0; p < panels; p += panels_at_once(weight.w))
                            (use_int ? k.linear_int : k.linear_float)(&a, p, std::min<int64_t>(p + panels_at_once(weight.w), panels),
                                                                      scratch.data());
                        (use_int ? integer : floats).values(out);
                    }
                }
            }
        }
        if (is_integer(form.codes))
            lines.push_back({std::string("linear_int_") + form.name, integer.value()});
        lines.push_back({std::string("linear_float_") + form.name, floats.value()});
    }
}

void sampling(const KernelTable& k, Lines& lines) {
    Hash chosen, prices;
    for (const int64_t vocab : {1, 17, 300, 9001}) {
        Random random(static_cast<uint64_t>(vocab));
        const auto x = numbers(random, vocab, -4, 4);
        std::vector<int32_t> ids(20);
        for (int32_t& id : ids)
            id = random.below(static_cast<int>(vocab));
        std::vector<double> out(ids.size());
        log_probabilities(k, x.data(), vocab, ids.data(), 20, out.data());
        prices.values(out);
        const SampleOptions all[] = {{},
                                     {.temperature = 1},
                                     {.temperature = 0.7f, .top_k = 9, .top_p = 0.9},
                                     {.temperature = 2, .min_p = 0.01},
                                     {.temperature = 1, .top_p = 0.5, .repetition_penalty = 1.3f}};
        for (SampleOptions o : all)
            for (o.position = 0; o.position < 25; ++o.position) {
                o.seed = 0x123456789u + o.position % 3;
                o.choice = o.position % 2;
                const int64_t id = sample_token(k, x.data(), vocab, o, ids.data(), 20);
                chosen.bytes(&id, sizeof id);
            }
    }
    lines.push_back({"sample", chosen.value()});
    lines.push_back({"logprobs", prices.value()});
}

Lines run(const KernelTable& k) {
    Lines lines;
    fma_rounds_once(lines);
    row_kernels(k, lines);
    rope(k, lines);
    convolution(k, lines);
    delta_rule(k, lines);
    quantize(k, lines);
    attention(k, lines);
    linear(k, lines);
    sampling(k, lines);
    alignas(64) uint8_t line[512] = {};
    k.read(line, sizeof line);
    if (k.spin_int8(10) <= 0 || k.spin_int16(10) <= 0 || k.spin_fma(10) <= 0) // no output to hash: they must run
        lines.push_back({"spin", 0});
    Hash total;
    for (const Line& line : lines)
        total.bytes(&line.hash, sizeof line.hash);
    lines.push_back({"total", total.value()});
    return lines;
}

// The negative control: right to a few ulp, but added up from left to right.
KernelTable broken(KernelTable k) {
    k.sum16 = [](const float* x, int64_t n) {
        float sum = 0;
        for (int64_t i = 0; i < n; ++i)
            sum += x[i];
        return sum;
    };
    return k;
}

void print(const Lines& lines) {
    for (const Line& line : lines)
        std::printf("%-32s %016llx\n", line.kernel.c_str(), static_cast<unsigned long long>(line.hash));
}

int compare(const Lines& want, const Lines& have, const std::string& first, const std::string& isa) {
    int different = 0;
    for (size_t i = 0; i < want.size(); ++i)
        if (i >= have.size() || !(want[i] == have[i])) {
            std::fprintf(stderr, "%s: %s differs from %s\n", want[i].kernel.c_str(), isa.c_str(), first.c_str());
            ++different;
        }
    return different;
}

int failed(const Lines& lines) {
    return static_cast<int>(std::count_if(lines.begin(), lines.end(), [](const Line& l) { return l.hash == 0; }));
}

const KernelTable& table(const std::string& isa) {
    set_isa(isa);
    return kernels();
}

} // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "all";
    const std::vector<std::string> sets = available_isas();
    if (what != "all" && what != "--broken") {
        if (std::find(sets.begin(), sets.end(), what) == sets.end()) {
            std::fprintf(stderr, "this machine does not run '%s'\n", what.c_str());
            return 2;
        }
        const Lines lines = run(table(what));
        print(lines);
        return failed(lines) != 0;
    }
    const Lines first = run(table(sets[0]));
    int different = failed(first);
    for (size_t i = 1; i < sets.size(); ++i) {
        const KernelTable& k = table(sets[i]);
        different += compare(first, run(what == "--broken" && i + 1 == sets.size() ? broken(k) : k), sets[0], sets[i]);
    }
    print(first);
    if (what == "all" && run(broken(table(sets.back()))) == first) {
        std::fprintf(stderr, "the control, a fold in another order, was not seen\n");
        ++different;
    }
    std::string names;
    for (const std::string& s : sets)
        names += " " + s;
    std::fprintf(stderr, "%zu hashes on%s: %s\n", first.size(), names.c_str(), different ? "DIFFERENT" : "equal");
    return different != 0;
}
