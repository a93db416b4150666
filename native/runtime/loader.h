// Threads that read while others compute: loads are queued, their tasks are claimed in order, who needs a load waits for it.
#pragma once
#include "crew.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace quaff {

// Thrown out of a wait when the step was cancelled meanwhile.
struct Cancelled {};

// Tasks that are done together. Only the loader looks inside.
struct Load {
    size_t count = 0, next = 0, active = 0; // all guarded by the loader's lock
    std::function<int64_t(size_t task, uint8_t* buffer)> task;
    int64_t bytes = 0;
    bool failed = false;
    std::string error;
    bool done() const { return next == count && active == 0; }
};

class Loader {
public:
    Loader(int threads, size_t buffer_bytes); // throws std::runtime_error when the system refuses a thread, std::bad_alloc
    ~Loader();
    Loader(const Loader&) = delete;
    Loader& operator=(const Loader&) = delete;

    size_t buffer_bytes() const { return buffer_bytes_; }
    // Queues `count` tasks; each gets a buffer of its thread's, at a multiple of 4096, and returns the bytes it read. What is urgent comes first.
    std::shared_ptr<Load> start(size_t count, std::function<int64_t(size_t, uint8_t*)> task, bool urgent);
    bool done(const Load& load);
    bool failed(const Load& load);
    // Returns once all tasks are done: the bytes read, to the first who asks. Throws SourceError with what failed, Cancelled (the load goes on).
    int64_t wait(Load& load, const std::atomic<bool>& cancelled);
    void abandon(Load& load);                     // starts none of its tasks any more and waits for those that run
    void stop();                                  // ends the threads; loads that are left never finish
    bool here() const { return threads_.here(); } // else only to be leaked: what counts who waits in it counts threads that are not there

private:
    void loop();
    std::shared_ptr<Load> claim(); // a load with a task left; under the lock

    const size_t buffer_bytes_;
    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<std::shared_ptr<Load>> urgent_, queue_;
    bool stop_ = false;
    Crew threads_;
};

} // namespace quaff
