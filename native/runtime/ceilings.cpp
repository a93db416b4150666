#include "ceilings.h"
#include "../pack/memory.h"
#include "dispatch.h"
#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

namespace quaff {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Units per second of all threads together: `once` does some work on a thread's own data and returns how much it was.
template <typename Once> double sum_of_rates(int threads, double seconds, Once&& once) {
    ThreadPool pool(threads);
    std::vector<double> rate(static_cast<size_t>(threads), 0.0);
    // One unit a thread. Each is timed on its own, so a thread that wakes late, or runs two units, does not dilute the sum.
    pool.run(threads, [&](int64_t unit, int) {
        once(unit);
        const auto begin = Clock::now();
        int64_t done = 0;
        do
            done += once(unit);
        while (seconds_since(begin) < seconds);
        rate[static_cast<size_t>(unit)] = static_cast<double>(done) / seconds_since(begin);
    });
    double sum = 0;
    for (double r : rate)
        sum += r;
    return sum;
}

constexpr int64_t kBlock = int64_t{1} << 20;

} // namespace

double measure_int8(int threads, double seconds) {
    return sum_of_rates(threads, seconds, [spin = kernels().spin_int8](int64_t) { return spin(4096); });
}

double measure_int16(int threads, double seconds) {
    return sum_of_rates(threads, seconds, [spin = kernels().spin_int16](int64_t) { return spin(4096); });
}

double measure_fma(int threads, double seconds) {
    return sum_of_rates(threads, seconds, [spin = kernels().spin_fma](int64_t) { return spin(4096); });
}

double measure_bandwidth(int threads, int64_t megabytes) {
    const std::shared_ptr<uint8_t> buffer =
        slab_memory(static_cast<size_t>(megabytes * kBlock)); // pages of the same size as those of weights
    const auto read = kernels().read;
    ThreadPool pool(threads);
    pool.run(megabytes, [&](int64_t u, int) { std::memset(buffer.get() + u * kBlock, 1, kBlock); });
    double best = 0;
    for (int pass = 0; pass < 3; ++pass) {
        const auto begin = Clock::now();
        pool.run(megabytes, [&](int64_t u, int) { read(buffer.get() + u * kBlock, kBlock); });
        best = std::max(best, static_cast<double>(megabytes * kBlock) / seconds_since(begin));
    }
    return best;
}

double measure_cache(int threads, int64_t kilobytes, double seconds) {
    const int64_t bytes = kilobytes << 10, spread = bytes + 4096; // of each thread; not at equal distances of a power of two
    const std::shared_ptr<uint8_t> buffer = slab_memory(static_cast<size_t>(spread * threads));
    std::memset(buffer.get(), 1, static_cast<size_t>(spread * threads));
    // At least 256 KiB between two looks at the clock.
    return sum_of_rates(threads, seconds, [&, read = kernels().read, times = std::max<int64_t>(1, (kBlock / 4) / bytes)](int64_t unit) {
        for (int64_t i = 0; i < times; ++i)
            read(buffer.get() + unit * spread, bytes);
        return times * bytes;
    });
}

} // namespace quaff
