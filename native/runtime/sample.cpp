#include "sample.h"
#include "numerics.h"
#include "threads.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

namespace quaff {

namespace {

// log of a normal z > 0 with + - * / only: z = 2^e * f, f in [sqrt(1/2), sqrt(2)), log f = 2 atanh(s), s = (f-1)/(f+1), |s| < 0.172.
// The series' first dropped term is below 2^-60 of the result.
double natural_log(double z) {
    const auto word = std::bit_cast<uint64_t>(z);
    auto e = static_cast<int64_t>(word >> 52) - 1023;
    double f = std::bit_cast<double>((word & 0x000fffffffffffffu) | 0x3ff0000000000000u);
    if (f >= 0x1.6a09e667f3bcdp+0) {
        f = f * 0.5;
        ++e;
    }
    const double s = (f - 1) / (f + 1), square = s * s;
    double tail = 0;
    for (int k = 23; k >= 3; k -= 2)
        tail = (tail + 1.0 / k) * square;
    const auto n = static_cast<double>(e);
    // ln 2 in two parts: n * the first is exact.
    return n * 0x1.62e42feep-1 + (2 * (s + s * tail) + n * 0x1.a39ef35793c76p-33);
}

struct Top {
    float value; // NaN when the row cannot be used
    int64_t at;  // the lowest of those that are equal
};

// The largest logit, in blocks, which stay in the nearest cache: it is read twice there, and a third time where the largest was.
Top top_of(const KernelTable& k, const float* x, int64_t n) {
    constexpr int64_t kBlock = 2048;
    Top top{-INFINITY, 0};
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t count = std::min(kBlock, n - at);
        int32_t bad = 0; // counted, for compilers turn that into vectors
        for (int64_t i = at; i < at + count; ++i)
            bad += !(x[i] < INFINITY);
        if (bad)
            return {NAN, 0};
        const float m = k.row_max(x + at, count);
        if (m > top.value)
            top = {m, at};
    }
    if (!(top.value > -INFINITY))
        return {NAN, 0};
    return {top.value, std::find(x + top.at, x + n, top.value) - x};
}

// A candidate: the order of its logit, turned so that ascending words are descending logits, above its id.
uint64_t candidate(float x, int64_t id) {
    const auto bits = std::bit_cast<uint32_t>(x + 0.0f); // -0 + 0 = +0
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t{~ascending} << 32 | static_cast<uint64_t>(id);
}
int32_t id_of(uint64_t c) { return static_cast<int32_t>(c & 0xffffffffu); }

// Stable, by the high word; ids come in ascending. Three counting passes: a comparison sort of 262,144 logits costs as much as a decoded token.
void sort_candidates(std::vector<uint64_t>& list) {
    std::vector<uint64_t> other(list.size());
    for (const int shift : {32, 43, 54}) {
        std::array<uint32_t, 2048> start{};
        for (const uint64_t c : list)
            ++start[(c >> shift) & 2047];
        uint32_t sum = 0;
        for (uint32_t& s : start)
            sum += std::exchange(s, sum);
        for (const uint64_t c : list)
            other[start[(c >> shift) & 2047]++] = c;
        list.swap(other);
    }
}

} // namespace

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, uint64_t key) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
        c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1,
             static_cast<uint32_t>(a)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

int64_t sample_token(const KernelTable& k, const float* logits, int64_t vocab, const SampleOptions& o, const int32_t* history,
                     int64_t history_size) {
    const FloatEnvironment environment;
    if (vocab < 1 || vocab > INT32_MAX || !(o.temperature >= 0) || !(o.temperature < INFINITY) || o.top_k < 0 || !(o.top_p > 0) ||
        !(o.min_p >= 0) || !(o.repetition_penalty > 0) || !(o.repetition_penalty < INFINITY))
        return kBadArgument;
    const float* x = logits;
    std::vector<float> penalized;
    if (o.repetition_penalty != 1.0f) {
        penalized.assign(logits, logits + vocab);
        x = penalized.data();
        std::vector<bool> seen(static_cast<size_t>(vocab));
        for (int64_t i = 0; i < history_size; ++i) {
            if (history[i] < 0 || history[i] >= vocab)
                return kBadArgument;
            const auto id = static_cast<size_t>(history[i]);
            if (!seen[id])
                penalized[id] = x[id] > 0 ? x[id] / o.repetition_penalty : x[id] * o.repetition_penalty;
            seen[id] = true;
        }
    }
    const auto [m, likeliest] = top_of(k, x, vocab);
    if (std::isnan(m))
        return kNotFinite;
    if (o.temperature == 0)
        return likeliest;

    std::vector<float> p(static_cast<size_t>(vocab));
    for (int64_t i = 0; i < vocab; ++i)
        p[static_cast<size_t>(i)] = (x[i] - m) / o.temperature;
    k.probabilities(p.data(), 0.0f, p.data(), vocab);
    std::vector<uint64_t> list;
    for (int64_t i = 0; i < vocab; ++i)
        if (p[static_cast<size_t>(i)] > 0) // the others change no sum and are never chosen
            list.push_back(candidate(x[i], i));
    sort_candidates(list);

    const auto weight = [&](size_t i) { return static_cast<double>(p[static_cast<size_t>(id_of(list[i]))]); };
    const auto sum = [&] {
        double z = 0;
        for (size_t i = 0; i < list.size(); ++i)
            z = z + weight(i);
        return z;
    };
    if (o.top_k > 0 && static_cast<size_t>(o.top_k) < list.size())
        list.resize(static_cast<size_t>(o.top_k));
    if (o.top_p < 1) {
        const double enough = o.top_p * sum();
        double c = weight(0);
        size_t keep = 1;
        while (c < enough && keep < list.size())
            c = c + weight(keep++);
        list.resize(keep);
    }
    if (o.min_p > 0) {
        const double least = o.min_p * weight(0);
        size_t keep = 1;
        while (keep < list.size() && weight(keep) >= least)
            ++keep;
        list.resize(keep);
    }
    const double u = static_cast<double>(philox({o.position, o.choice, 0, 0}, o.seed)[0] >> 8) * 0x1p-24, bar = u * sum();
    double c = 0;
    for (size_t i = 0; i < list.size(); ++i) {
        c = c + weight(i);
        if (c > bar)
            return id_of(list[i]);
    }
    return id_of(list.back()); // not reached: u < 1
}

int64_t log_probabilities(const KernelTable& k, const float* logits, int64_t vocab, const int32_t* ids, int64_t count, double* out) {
    const FloatEnvironment environment;
    if (vocab < 1)
        return kBadArgument;
    const float m = top_of(k, logits, vocab).value;
    if (std::isnan(m))
        return kNotFinite;
    double z = 0;
    for (int64_t at = 0; at < vocab; at += kLogprobBlock) {
        std::array<float, kLogprobBlock> p;
        const int64_t n = std::min<int64_t>(kLogprobBlock, vocab - at);
        k.probabilities(logits + at, m, p.data(), n);
        z = z + static_cast<double>(k.sum16(p.data(), n));
    }
    const double log_z = natural_log(z);
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= vocab)
            return kBadArgument;
        out[i] = (static_cast<double>(logits[ids[i]]) - static_cast<double>(m)) - log_z;
    }
    return 0;
}

} // namespace quaff
