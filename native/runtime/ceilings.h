// What this machine can do at most, measured: the denominators of every share we quote.
#pragma once
#include <cstdint>

namespace quaff {

double measure_int8(int threads, double seconds);         // multiply-accumulates per second, registers only, all threads
double measure_int16(int threads, double seconds);        // the same for pairs of 16 bits
double measure_fma(int threads, double seconds);          // the same for f32 fma
double measure_bandwidth(int threads, int64_t megabytes); // bytes per second read from one buffer of that size, best of three passes
double measure_cache(int threads, int64_t kilobytes, double seconds); // the same when every thread reads its own buffer over and over

} // namespace quaff
