// Stress of the thread pool: every unit of many small and large jobs runs exactly once, also with more threads than cores, after sleeps, and while
// workers fetch what they are told to expect: what is there, what is not, and nothing.
#include "runtime/threads.h"

#include <chrono>
#include <cstdio>
#include <vector>

int main() {
    using quaff::ThreadPool;
    long long jobs = 0;
    const std::vector<uint8_t> memory(1 << 16);
    for (int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        for (int round = 0; round < 20000; ++round) {
            const int64_t units = 1 + (round * 7919) % 37;
            const uint64_t pulse = pool.pulse();
            for (int w = 0; w < threads; ++w)
                pool.expect(w, {{memory.data() + w, round % 3 * 1000},
                                {nullptr, round % 2 * 5000},
                                {reinterpret_cast<const uint8_t*>(uintptr_t{1} << 40), 300},
                                {}});
            std::vector<int> runs(static_cast<size_t>(units), 0); // not atomic: a unit that ran twice or late is a race a sanitizer sees
            pool.run(units, [&](int64_t u, int worker) {
                if (worker < 0 || worker >= threads)
                    std::abort();
                ++runs[static_cast<size_t>(u)];
            });
            if (units > 1 && pool.pulse() == pulse)
                return std::printf("job %lld left no sign of life\n", jobs), 1;
            for (int64_t u = 0; u < units; ++u)
                if (runs[static_cast<size_t>(u)] != 1)
                    return std::printf("unit %lld of job %lld ran %d times\n", (long long)u, jobs, runs[(size_t)u]), 1;
            if (round % 5000 == 0)
                std::this_thread::sleep_for(std::chrono::milliseconds(2)); // longer than the spin: workers sleep
            ++jobs;
        }
    }
    std::printf("thread pool: %lld jobs, every unit once\n", jobs);
}
