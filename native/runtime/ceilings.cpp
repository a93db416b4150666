#include "ceilings.h"
#include "dispatch.h"
#include "threads.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace quaff {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

double measure_spin(int64_t (*spin)(int64_t), int threads, double seconds) {
    ThreadPool pool(threads);
    std::vector<double> rate(static_cast<size_t>(threads), 0.0);
    // One unit a thread. Each is timed on its own, so a thread that wakes late, or runs two units, does not dilute the sum.
    pool.run(threads, [&](int64_t unit, int) {
        const auto begin = Clock::now();
        int64_t macs = 0;
        do
            macs += spin(4096);
        while (seconds_since(begin) < seconds);
        rate[static_cast<size_t>(unit)] = static_cast<double>(macs) / seconds_since(begin);
    });
    double sum = 0;
    for (double r : rate)
        sum += r;
    return sum;
}

uint64_t read_all(const uint64_t* p, int64_t n) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (int64_t i = 0; i + 8 <= n; i += 8) {
        a ^= p[i] ^ p[i + 1];
        b ^= p[i + 2] ^ p[i + 3];
        c ^= p[i + 4] ^ p[i + 5];
        d ^= p[i + 6] ^ p[i + 7];
    }
    return a ^ b ^ c ^ d;
}

} // namespace

double measure_int8(int threads, double seconds) { return measure_spin(kernels().spin_int8, threads, seconds); }
double measure_fma(int threads, double seconds) { return measure_spin(kernels().spin_fma, threads, seconds); }

double measure_bandwidth(int threads, int64_t megabytes) {
    const int64_t block = 1 << 17, words = std::max<int64_t>(1, megabytes) << 17;
    std::vector<uint64_t> buffer(static_cast<size_t>(words), 1);
    ThreadPool pool(threads);
    double best = 0;
    volatile uint64_t sink = 0;
    for (int pass = 0; pass < 4; ++pass) {
        std::vector<uint64_t> sums(static_cast<size_t>(threads), 0);
        const auto begin = Clock::now();
        pool.run(words / block,
                 [&](int64_t u, int worker) { sums[static_cast<size_t>(worker)] ^= read_all(buffer.data() + u * block, block); });
        if (pass > 0)
            best = std::max(best, static_cast<double>(words) * 8 / seconds_since(begin)); // the first pass warms
        for (uint64_t s : sums)
            sink = sink ^ s;
    }
    return best;
}

} // namespace quaff
