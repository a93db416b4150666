// Worker threads that claim units of work one by one from an atomic word: a slow or preempted worker delays only the unit it holds.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quaff {

class ThreadPool {
public:
    explicit ThreadPool(int threads); // the caller of run() is one of them; throws std::runtime_error when the system refuses one
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls f(unit, worker) for every unit in [0, units), worker < size(); returns when all are done. f must not throw. units < 2^32.
    template <typename F> void run(int64_t units, F&& f) {
        if (units <= 0)
            return;
        if (units == 1 || workers_.empty()) {
            for (int64_t u = 0; u < units; ++u)
                f(u, 0);
            return;
        }
        start([](void* context, int64_t unit, int worker) { (*static_cast<F*>(context))(unit, worker); }, &f, units);
    }

private:
    using Call = void (*)(void* context, int64_t unit, int worker);
    void start(Call call, void* context, int64_t units);
    bool work(int worker); // runs units until none is left; true when it ran one
    void loop(int worker);
    void end();

    // Units in the high half, next unit in the low half: one compare-and-swap claims a unit of the job that is current at that moment.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    Call call_ = nullptr;
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};

// NUMERICS 3: round to nearest, no flush to zero, all exceptions masked, for the life of the object.
class FloatEnvironment {
public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

private:
    uint64_t saved_;
};

} // namespace quaff
