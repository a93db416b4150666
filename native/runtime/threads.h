// Worker threads that claim units of work one by one from atomic words: a slow or preempted worker delays only the unit it holds.
// Units are dealt out in one stretch for each worker; who has finished his own takes from the others. So a worker mostly meets the rows it
// wrote itself in its own cache, which matters where cores do not share one. In a chain of jobs a stretch goes on to the next job when its own units
// have ended, whatever others do.
#pragma once
#include "crew.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

namespace quaff {

class ThreadPool {
public:
    explicit ThreadPool(int threads); // the caller of run() is one of them; throws std::runtime_error when the system refuses one
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return threads_; }

    // What a worker will read in a later job, in that order: he fetches it into his cache while he has nothing to do. The caller of run() says so
    // between two jobs; only speed depends on it, and what is said may be gone by then: fetching from where nothing is does nothing.
    struct Span {
        const uint8_t* begin = nullptr;
        int64_t bytes = 0;
    };
    static constexpr int kSpans = 4;
    void expect(int worker, const Span (&spans)[kSpans]);

    // Another value whenever a unit has ended; any thread may ask.
    uint64_t pulse() const { return uint64_t{epoch_} << 32 | static_cast<uint32_t>(done()); }

    // Calls f(unit, worker) for every unit in [0, units), worker < size(); returns when all are done. f must not throw. units < 2^32.
    template <typename F> void run(int64_t units, F&& f) { run(even(units), f); }

    // Bounds of stretches that differ by a unit at most.
    std::vector<int64_t> even(int64_t units) const {
        std::vector<int64_t> bounds(static_cast<size_t>(size()) + 1);
        for (int64_t w = 0; w <= size(); ++w)
            bounds[static_cast<size_t>(w)] = units * w / size();
        return bounds;
    }

    // The same with worker w's own stretch [bounds[w], bounds[w + 1]); size() + 1 bounds, ascending from 0.
    template <typename F> void run(const std::vector<int64_t>& bounds, F&& f) {
        const int64_t units = bounds.back();
        if (units <= 1 || threads_ == 1) {
            for (int64_t u = 0; u < units; ++u) {
                f(u, 0);
                if (units > 1)
                    workers_done_[0].units.store(u + 1, std::memory_order_relaxed);
            }
            return;
        }
        using Function = std::remove_cvref_t<F>;
        links_.assign(1, &bounds);
        start([](void* context, int64_t unit, int worker) { (*static_cast<const Function*>(context))(unit, worker); },
              const_cast<Function*>(&f)); // called as const only
    }

    // A job of a chain, as of run(bounds, f).
    struct Link {
        std::vector<int64_t> bounds;
        std::function<void(int64_t unit, int worker)> f;
    };
    // All of them, in one job: a unit runs when all units of the links before that lie in the same worker's stretch have ended.
    void run(const std::vector<Link>& chain);

private:
    using Call = void (*)(void* context, int64_t unit, int worker);
    void start(Call call, void* context);
    bool work(int worker); // runs units until none is left; true when it ran one
    void loop(int worker);
    void end();

    bool pending() const;
    void next_link(size_t stretch); // makes its units claimable
    void unit_ended(size_t stretch);
    int64_t done() const; // units of this job that have ended

    // A stretch: its end in the high half, its next unit in the low half. One compare-and-swap claims a unit of the job that is current then. Units
    // of a chain are numbered through, link after link.
    struct alignas(64) Stretch {
        std::atomic<uint64_t> state{0};
        std::atomic<int64_t> left{0}; // units of a chain's link that have not ended; who ends the last one goes on to the next link
        size_t link = 0;              // the next one
        int64_t past = 0;             // units of the links before that
    };
    // Written by its worker only: a count that all share would travel from core to core with every unit.
    struct alignas(64) Done {
        std::atomic<int64_t> units{0};
    };
    // Spans, and a number that changes with them. A worker that reads old and new ones mixed fetches the wrong bytes, which harms nobody.
    struct alignas(64) Expected {
        std::atomic<uint32_t> version{0};
        std::atomic<uintptr_t> begin[kSpans]{};
        std::atomic<int64_t> bytes[kSpans]{};
    };
    struct Fetched {
        uint32_t version = 0;
        int span = 0;
        int64_t bytes = 0; // of that span
    };
    void idle(int worker, Fetched& done) const; // fetches some of what is expected, or pauses where all of it was

    const int threads_;
    std::unique_ptr<Stretch[]> stretches_;
    std::unique_ptr<Done[]> workers_done_;
    std::unique_ptr<Expected[]> expected_;
    Fetched caller_fetched_;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<const std::vector<int64_t>*> links_; // bounds of each
    Call call_ = nullptr;
    void* context_ = nullptr;
    Crew workers_;
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
