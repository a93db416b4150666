// The numerics contract in code. docs/numerics.md states the same in words; a change here that alters a bit raises kNumericsVersion.
#pragma once
#include <bit>
#include <cfloat>
#include <cstdint>

static_assert(FLT_EVAL_METHOD == 0, "quaff needs f32 arithmetic that rounds to f32");

namespace quaff {

inline constexpr int kNumericsVersion = 4;
inline constexpr int kLanes = 16;                     // width of every fold, rows of a weight panel
inline constexpr int kQuantGroup = 32;                // activations share one scale per 32 values
inline constexpr int kOutlierBlock = 1024;            // activations of which the largest one stays f32
inline constexpr int kScaleSteps = 8;                 // mantissas of their scales: 1, 1.125, 1.25 and so on
inline constexpr int kFloatBlock = 128;               // float linear: one fma chain per 128 of k
inline constexpr int kPage = 64;                      // positions of a KV page
inline constexpr int kDotDims = 128;                  // of q and K: sums of kKvCode * kKvCode over so many fit 31 bits
inline constexpr float kKvCode = 4095, kPCode = 8191; // largest codes of q, K and V, and of p; kPCode * kKvCode * kPage fits too
inline constexpr int kLogprobBlock = 4096;            // ids whose probabilities share one f32 fold
inline constexpr int32_t kScaleFraction = (1 << 23) / kScaleSteps - 1; // bits of an f32 that such a scale does not have

// E(x): 2^n * exp(r), n = rint(x * kLog2e), r = x - n * ln 2 in two fma steps (kLn2Hi has 11 trailing zero bits, so n * kLn2Hi is exact).
inline constexpr float kExpMin = -87.0f, kExpMax = 88.0f, kProbMin = -64.0f;
inline constexpr float kLog2e = 0x1.715476p+0f;
inline constexpr float kLn2Hi = 0x1.62e4p-1f, kLn2Lo = 0x1.7f7d1cp-20f;
// exp(r) = fma(p*r, r, r+1), p of degree 4: Chebyshev interpolation of (exp(r)-1-r)/r^2 on |r| <= 0.35, rounded to f32; 0.14 * 2^-24 relative.
inline constexpr float kExpC4 = 0x1.6d1610p-10f, kExpC3 = 0x1.121076p-7f, kExpC2 = 0x1.555516p-5f, kExpC1 = 0x1.5554d8p-3f, kExpC0 = 0.5f;
// 2^r = 1 + r*p, p of degree 4: Chebyshev interpolation of (2^r - 1)/r on |r| <= 0.5, rounded to f32; 4.4 * 2^-24 relative.
inline constexpr float kPowerMin = -92.0f;
inline constexpr float kPowerC5 = 0x1.5ec866p-10f, kPowerC4 = 0x1.3cbf6p-7f, kPowerC3 = 0x1.c6afeep-5f, kPowerC2 = 0x1.ebfa4cp-3f,
                       kPowerC1 = 0x1.62e43p-1f;
// log1p(t) = w * (1 + z*p), w = 2t/(2+t), z = w*w/4, for 0 <= t <= 1: Chebyshev interpolation of (atanh(s)/s - 1)/z, s*s = z, on [0, 1/9].
inline constexpr float kLog1pC3 = 0x1.12f598p-3f, kLog1pC2 = 0x1.21249ap-3f, kLog1pC1 = 0x1.99ad6cp-3f, kLog1pC0 = 0x1.55554cp-2f;
inline constexpr float kTiny = 0x1p-64f; // what is smaller than this has scale 0
inline constexpr int32_t kTinyBits = std::bit_cast<int32_t>(kTiny);
inline constexpr float kF16Max = 65504.0f;
inline constexpr float kGeluRoot = 0.7978845608f, kGeluCube = 0.044715f;

} // namespace quaff
