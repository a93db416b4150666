// Stress of the thread pool: every unit of many small and large jobs runs exactly once, also with more threads than cores, after sleeps, and while
// workers fetch what they are told to expect: what is there, what is not, and nothing. In chains every unit runs after those that it needs.
#include "runtime/threads.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <vector>

using quaff::ThreadPool;

// Links of stretches of other sizes, empty ones too. A unit reads what all units of the links before wrote in its stretch: not atomic, so that one
// that is early is a race that a sanitizer sees, and its result is wrong.
const char* check_chain(ThreadPool& pool, int round) {
    const auto threads = static_cast<size_t>(pool.size());
    std::vector<ThreadPool::Link> chain(static_cast<size_t>(1 + round % 6));
    std::vector<std::vector<int>> ran(chain.size()); // [link][unit]
    std::atomic<int> early{0};
    for (size_t l = 0; l < chain.size(); ++l) {
        std::vector<int64_t>& bounds = chain[l].bounds;
        bounds.push_back(0);
        for (size_t w = 0; w < threads; ++w)
            bounds.push_back(bounds.back() + (round * 31 + static_cast<int>(l * 7 + w * 3)) % 6);
        ran[l].resize(static_cast<size_t>(bounds.back()));
        chain[l].f = [&, l](int64_t unit, int) {
            size_t w = 0;
            while (unit >= chain[l].bounds[w + 1])
                ++w;
            for (size_t before = 0; before < l; ++before)
                for (int64_t u = chain[before].bounds[w]; u < chain[before].bounds[w + 1]; ++u)
                    early += ran[before][static_cast<size_t>(u)] != 1;
            if (round % 64 == 0 && unit % 3 == 0)
                std::this_thread::sleep_for(std::chrono::microseconds(150)); // longer than the spin: who waits sleeps, and others take over
            ++ran[l][static_cast<size_t>(unit)];
        };
    }
    pool.run(chain);
    for (const std::vector<int>& link : ran)
        for (const int n : link)
            if (n != 1)
                return "a unit of a chain did not run once";
    return early ? "a unit of a chain ran before one that it needs" : nullptr;
}

int main() {
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
            if (threads > 1 && round % 4 == 0)
                if (const char* wrong = check_chain(pool, round / 4))
                    return std::printf("%s, %d threads, round %d\n", wrong, threads, round), 1;
            if (round % 5000 == 0)
                std::this_thread::sleep_for(std::chrono::milliseconds(2)); // longer than the spin: workers sleep
            ++jobs;
        }
    }
    std::printf("thread pool: %lld jobs, every unit once\n", jobs);
}
