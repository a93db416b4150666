// Rotary tables by position, grown on demand. NUMERICS 11; the same steps stand in graph/rope_table.py.
#pragma once
#include <cstdint>
#include <vector>

namespace quaff {

class RopeTable {
public:
    // inv_freq_i = theta^(-2i/rotary_dim) / linear_factor for i < rotary_dim/2. Throws std::invalid_argument for values no model has.
    RopeTable(double theta, int64_t rotary_dim, double linear_factor);

    int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inv_freq_.size()); }
    void ensure(int64_t positions);                                                             // rows [0, positions) exist afterwards
    const float* row(int64_t position) const { return rows_.data() + position * rotary_dim(); } // cos half, then sin half

private:
    std::vector<double> inv_freq_;
    std::vector<float> rows_;
};

} // namespace quaff
