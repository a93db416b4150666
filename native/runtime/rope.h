// Rotary tables by position, grown on demand. NUMERICS 11; the same steps stand in graph/rope_table.py.
#pragma once
#include <cstdint>
#include <vector>

namespace quaff {

class RopeTable {
public:
    // inv_freq_i = theta^(-2i/rotary_dim) / factors[i] for i < rotary_dim/2 (no factors: 1). Sine and cosine are multiplied by
    // scale * (1 + temperature * ln(1 + position / temperature_length)). Throws std::invalid_argument for values no model has.
    RopeTable(double theta, int64_t rotary_dim, const std::vector<double>& factors, double scale, double temperature,
              int64_t temperature_length);

    int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inv_freq_.size()); }
    void ensure(int64_t positions);                                                             // rows [0, positions) exist afterwards
    const float* row(int64_t position) const { return rows_.data() + position * rotary_dim(); } // cos half, then sin half

private:
    double size(int64_t position) const;

    std::vector<double> inv_freq_;
    double scale_, temperature_;
    int64_t temperature_length_;
    std::vector<float> rows_;
};

} // namespace quaff
