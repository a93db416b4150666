#include "threads.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quaff {

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Long enough to bridge the gap between two ops of a step, short enough that an idle engine costs nothing.
constexpr auto kSpin = std::chrono::microseconds(100);

// Cache lines fetched between two looks for work: a look that comes late costs more than they are worth.
constexpr int kLines = 4;

// Spins until ready() or the bound has passed; the clock is read rarely, since reading it costs more than a pause.
template <typename Ready, typename Idle> bool spin(Ready&& ready, Idle&& idle) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready())
                return true;
            idle();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

} // namespace

ThreadPool::ThreadPool(int threads)
    : threads_(threads > 1 ? threads : 1), stretches_(std::make_unique<Stretch[]>(static_cast<size_t>(threads_))),
      workers_done_(std::make_unique<Done[]>(static_cast<size_t>(threads_))),
      expected_(std::make_unique<Expected[]>(static_cast<size_t>(threads_))) {
    try {
        for (int i = 1; i < threads; ++i)
            workers_.start([this, i] { loop(i); });
    } catch (const std::system_error&) {
        const size_t started = workers_.size();
        end();
        throw std::runtime_error("the system refuses a thread after " + std::to_string(started + 1) + " of " + std::to_string(threads) +
                                 "; ask for fewer threads");
    }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    workers_.join();
}

namespace {

bool some_left(uint64_t state) { return (state & 0xffffffffu) < (state >> 32); }

} // namespace

bool ThreadPool::work(int worker) {
    bool any = false;
    std::atomic<int64_t>& done = workers_done_[static_cast<size_t>(worker)].units;
    for (int i = 0; i < size(); ++i) {
        const auto stretch = static_cast<size_t>((worker + i) % size());
        std::atomic<uint64_t>& state = stretches_[stretch].state;
        uint64_t s = state.load(std::memory_order_acquire);
        while (some_left(s)) {
            // One's own units in order, another's from the end: what follows the unit that he runs is on its way into his cache.
            const uint64_t rest = i ? s - (uint64_t{1} << 32) : s + 1;
            if (!state.compare_exchange_weak(s, rest, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            call_(context_, static_cast<int64_t>(i ? rest >> 32 : s & 0xffffffffu), worker);
            const bool chain = links_.size() > 1; // read while the job cannot end
            if (chain)
                unit_ended(stretch);
            done.store(done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
            any = true;
            if (chain && i)
                return true; // one's own stretch may have gone on
            s = state.load(std::memory_order_acquire);
        }
    }
    return any;
}

void ThreadPool::expect(int worker, const Span (&spans)[kSpans]) {
    Expected& e = expected_[static_cast<size_t>(worker)];
    for (int i = 0; i < kSpans; ++i) {
        e.begin[i].store(reinterpret_cast<uintptr_t>(spans[i].begin), std::memory_order_relaxed);
        e.bytes[i].store(spans[i].bytes, std::memory_order_relaxed);
    }
    e.version.store(e.version.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void ThreadPool::idle(int worker, Fetched& done) const {
    const Expected& e = expected_[static_cast<size_t>(worker)];
    if (const uint32_t version = e.version.load(std::memory_order_acquire); version != done.version)
        done = {version, 0, 0};
    while (done.span < kSpans && done.bytes >= e.bytes[done.span].load(std::memory_order_relaxed))
        done = {done.version, done.span + 1, 0};
    if (done.span == kSpans)
        return pause();
    const uintptr_t at = e.begin[done.span].load(std::memory_order_relaxed) + static_cast<uintptr_t>(done.bytes);
    for (int line = 0; line < kLines; ++line)
        __builtin_prefetch(reinterpret_cast<const void*>(at + 64 * static_cast<uintptr_t>(line)), 0, 2);
    done.bytes += 64 * kLines;
}

int64_t ThreadPool::done() const {
    int64_t units = 0;
    for (int i = 0; i < threads_; ++i)
        units += workers_done_[static_cast<size_t>(i)].units.load(std::memory_order_acquire);
    return units;
}

bool ThreadPool::pending() const {
    for (int i = 0; i < threads_; ++i)
        if (some_left(stretches_[static_cast<size_t>(i)].state.load(std::memory_order_acquire)))
            return true;
    return stop_.load(std::memory_order_relaxed);
}

void ThreadPool::next_link(size_t stretch) {
    Stretch& s = stretches_[stretch];
    while (s.link < links_.size()) {
        const std::vector<int64_t>& bounds = *links_[s.link++];
        const int64_t begin = s.past + bounds[stretch], end = s.past + bounds[stretch + 1];
        s.past += bounds.back();
        if (begin == end)
            continue;
        s.left.store(end - begin, std::memory_order_relaxed);
        return s.state.store(static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(begin), std::memory_order_release);
    }
}

void ThreadPool::unit_ended(size_t stretch) {
    if (stretches_[stretch].left.fetch_sub(1, std::memory_order_acq_rel) > 1)
        return;
    next_link(stretch);
    epoch_.fetch_add(1); // for who went to sleep meanwhile
    if (sleepers_.load() > 0)
        epoch_.notify_all();
}

void ThreadPool::run(const std::vector<Link>& chain) {
    links_.clear();
    for (const Link& link : chain)
        links_.push_back(&link.bounds);
    start(
        [](void* context, int64_t unit, int worker) {
            const Link* link = static_cast<const std::vector<Link>*>(context)->data();
            for (; unit >= link->bounds.back(); ++link)
                unit -= link->bounds.back();
            link->f(unit, worker);
        },
        const_cast<std::vector<Link>*>(&chain)); // read only
}

void ThreadPool::start(Call call, void* context) {
    call_ = call;
    context_ = context;
    for (int i = 0; i < threads_; ++i)
        workers_done_[static_cast<size_t>(i)].units.store(0, std::memory_order_relaxed);
    int64_t units = 0;
    for (const std::vector<int64_t>* bounds : links_)
        units += bounds->back();
    // Stretches appear one by one. A worker that claims from the first already sees the whole job: call and context were set before.
    for (size_t i = 0; i < static_cast<size_t>(threads_); ++i) {
        stretches_[i].link = 0, stretches_[i].past = 0;
        next_link(i);
    }
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0)
        epoch_.notify_all();
    const auto ended = [&] { return done() == units; };
    // A worker may still hold a unit, and then its stretch may go on. It is running, not sleeping, unless the system took its core: then yield ours.
    do {
        while (work(0)) {
        }
        if (!spin([&] { return ended() || (links_.size() > 1 && pending()); }, [&] { idle(0, caller_fetched_); }))
            std::this_thread::yield();
    } while (!ended());
}

void ThreadPool::loop(int worker) {
    FloatEnvironment environment;
    Fetched fetched;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (work(worker) || spin([this] { return pending(); }, [&] { idle(worker, fetched); }))
            continue;
        // Order matters: the epoch is read before the last look, so work published after it changes the epoch and wait() returns.
        sleepers_.fetch_add(1);
        const uint32_t seen = epoch_.load();
        if (!pending())
            epoch_.wait(seen);
        sleepers_.fetch_sub(1);
    }
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const uint64_t zero = 0;
    asm volatile("msr fpcr, %0" ::"r"(zero));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() {}
#endif

} // namespace quaff
