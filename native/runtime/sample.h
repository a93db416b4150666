// Choosing a token and pricing tokens (NUMERICS 20): functions of their arguments alone, by bits, on every instruction set.
#pragma once
#include "kernels/table.h"

#include <array>
#include <cstdint>

namespace quaff {

// The filters act in this order, each on what the one before left:
//   1. repetition penalty: every distinct id of `history` once, x > 0 ? x/penalty : x*penalty
//   2. temperature: p = P((x - max x) / temperature); 0 (or a temperature that rounds to it) takes the largest x, the lower id among equals
//   3. candidates in order: x descending, then id ascending; -0 counts as +0
//   4. top_k > 0: the first top_k
//   5. top_p < 1: the shortest beginning whose p add up to at least top_p times the sum of what step 4 left
//   6. min_p > 0: the leading ones with p >= min_p times the p of the first
//   7. the first candidate whose cumulative sum exceeds u*Z, Z over what is left; all sums in f64 in candidate order
struct SampleOptions {
    float temperature = 0;
    int64_t top_k = 0;
    double top_p = 1, min_p = 0;
    float repetition_penalty = 1;
    uint64_t seed = 0;
    uint32_t position = 0, choice = 0; // which token of which completion: the counter of the random numbers
};

inline constexpr int64_t kNotFinite = -1;   // a logit is NaN or +inf, or all are -inf (one -inf only forbids its id)
inline constexpr int64_t kBadArgument = -2; // an option or an id out of range

// The chosen id, or one of the codes above. logits: [vocab], vocab < 2^31.
int64_t sample_token(const KernelTable& k, const float* logits, int64_t vocab, const SampleOptions& options, const int32_t* history,
                     int64_t history_size);

// out[i] = natural logarithm of the probability of ids[i]: (x - max x) - log Z, Z added up in blocks of 4096 ids. 0 or one of the codes above.
int64_t log_probabilities(const KernelTable& k, const float* logits, int64_t vocab, const int32_t* ids, int64_t count, double* out);

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011).
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t key);

} // namespace quaff
