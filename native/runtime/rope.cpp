#include "rope.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace quaff {

namespace {

// The steps and constants of graph/rope_table.py and elementary.py, one by one. frexp, ldexp and the rounding trick below are exact everywhere.
constexpr double kSqrtHalf = 0x1.6a09e667f3bcdp-1, kLog2e64 = 0x1.71547652b82fep+0;
constexpr double kLn2Hi64 = 0x1.62e42feep-1, kLn2Lo64 = 0x1.a39ef35793c76p-33;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kPio2a = 0x1.921fb544p+0, kPio2b = 0x1.0b4611a6p-34, kPio2c = 0x1.3198a2e037073p-69;

constexpr double inverse_factorial(int k) {
    double f = 1;
    for (int i = 2; i <= k; ++i)
        f *= i; // exact up to 18!
    return 1.0 / f;
}

// Adding and taking away 1.5 * 2^52 rounds |x| < 2^51 to the nearest integer, ties to even.
double round_even(double x) {
    constexpr double kMagic = 0x1.8p52;
    volatile double shifted = x + kMagic;
    return shifted - kMagic;
}

double log64(double x) {
    int e;
    double m = std::frexp(x, &e);
    if (m < kSqrtHalf) {
        m = m * 2.0;
        --e;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 23.0;
    for (int k = 21; k > 0; k -= 2)
        p = p * z + 1.0 / k;
    return e * kLn2Hi64 + (e * kLn2Lo64 + (2.0 * s) * p);
}

double exp64(double y) {
    const double n = round_even(y * kLog2e64), r = (y - n * kLn2Hi64) - n * kLn2Lo64;
    double p = inverse_factorial(13);
    for (int k = 12; k >= 0; --k)
        p = p * r + inverse_factorial(k);
    return std::ldexp(p, static_cast<int>(n));
}

void sin_cos64(double angle, double* sin, double* cos) {
    const double n = round_even(angle * kTwoOverPi), r = ((angle - n * kPio2a) - n * kPio2b) - n * kPio2c, z = r * r;
    double p = inverse_factorial(17);
    for (int k = 15; k > 1; k -= 2)
        p = p * z + (k % 4 == 1 ? inverse_factorial(k) : -inverse_factorial(k));
    const double s = r + (r * z) * p;
    p = inverse_factorial(16);
    for (int k = 14; k > 2; k -= 2)
        p = p * z + (k % 4 == 0 ? inverse_factorial(k) : -inverse_factorial(k));
    const double c = (1.0 - 0.5 * z) + (z * z) * p;
    switch (static_cast<int64_t>(n) & 3) {
    case 0:
        *sin = s, *cos = c;
        break;
    case 1:
        *sin = c, *cos = -s;
        break;
    case 2:
        *sin = -s, *cos = -c;
        break;
    default:
        *sin = -c, *cos = s;
        break;
    }
}

} // namespace

RopeTable::RopeTable(double theta, int64_t rotary_dim, const std::vector<double>& factors, double scale, double temperature,
                     int64_t temperature_length)
    : scale_(scale), temperature_(temperature), temperature_length_(temperature_length) {
    const auto in = [](double x, double least, double most) { return x >= least && x <= most; };
    bool ok = in(theta, 1.0, 1e30) && theta > 1 && rotary_dim >= 2 && rotary_dim <= 4096 && rotary_dim % 2 == 0 && in(scale, 1e-6, 1e6) &&
              in(temperature, 0.0, 1e6) && (temperature == 0 || temperature_length >= 1);
    ok = ok && (factors.empty() || static_cast<int64_t>(factors.size()) == rotary_dim / 2);
    for (const double factor : factors)
        ok = ok && in(factor, 1e-12, 1e38);
    if (!ok)
        throw std::invalid_argument("no RoPE table with theta " + std::to_string(theta) + ", " + std::to_string(rotary_dim) +
                                    " rotary values, " + std::to_string(factors.size()) + " factors and scale " + std::to_string(scale));
    const double log_theta = log64(theta), dim = static_cast<double>(rotary_dim);
    for (int64_t i = 0; i < rotary_dim / 2; ++i) {
        const double factor = factors.empty() ? 1.0 : factors[static_cast<size_t>(i)];
        inv_freq_.push_back(exp64(-((2.0 * static_cast<double>(i)) / dim) * log_theta) / factor);
    }
}

double RopeTable::size(int64_t position) const {
    return temperature_ == 0 ? scale_ : scale_ * (1.0 + temperature_ * log64(1.0 + static_cast<double>(position / temperature_length_)));
}

void RopeTable::ensure(int64_t positions) {
    const int64_t dim = rotary_dim(), half = dim / 2, have = static_cast<int64_t>(rows_.size()) / dim;
    if (positions <= have)
        return;
    const int64_t want = (positions + 1023) / 1024 * 1024; // a decode step adds one position: grow in blocks
    rows_.resize(static_cast<size_t>(want * dim));
    for (int64_t position = have; position < want; ++position) {
        const double by = size(position);
        for (int64_t i = 0; i < half; ++i) {
            double sin, cos;
            sin_cos64(static_cast<double>(position) * inv_freq_[static_cast<size_t>(i)], &sin, &cos);
            rows_[static_cast<size_t>(position * dim + i)] = static_cast<float>(cos * by);
            rows_[static_cast<size_t>(position * dim + half + i)] = static_cast<float>(sin * by);
        }
    }
}

} // namespace quaff
