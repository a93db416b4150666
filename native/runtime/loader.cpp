#include "loader.h"
#include "file.h"
#include "threads.h"

#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

namespace quaff {

namespace {

// How soon a waiting step notices that it was cancelled.
constexpr auto kPoll = std::chrono::milliseconds(20);

} // namespace

Loader::Loader(int threads, size_t buffer_bytes) : buffer_bytes_(buffer_bytes) {
    try {
        for (int i = 0; i < threads; ++i)
            threads_.start([this] { loop(); });
    } catch (const std::system_error&) {
        stop();
        throw std::runtime_error("the system refuses the threads that read weights");
    }
}

Loader::~Loader() { stop(); }

void Loader::stop() {
    if (!here())
        return;
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    threads_.join();
    done_.notify_all();
}

std::shared_ptr<Load> Loader::start(size_t count, std::function<int64_t(size_t, uint8_t*)> task, bool urgent) {
    auto load = std::make_shared<Load>();
    load->count = count;
    load->task = std::move(task);
    {
        const std::lock_guard lock(mutex_);
        (urgent ? urgent_ : queue_).push_back(load);
    }
    work_.notify_all();
    return load;
}

bool Loader::done(const Load& load) {
    const std::lock_guard lock(mutex_);
    return load.done();
}

bool Loader::failed(const Load& load) {
    const std::lock_guard lock(mutex_);
    return load.done() && load.failed;
}

int64_t Loader::wait(Load& load, const std::atomic<bool>& cancelled) {
    std::unique_lock lock(mutex_);
    while (!load.done()) {
        if (stop_)
            throw SourceError("the model is closed");
        if (cancelled.load(std::memory_order_relaxed))
            throw Cancelled();
        done_.wait_for(lock, kPoll);
    }
    if (load.failed)
        throw SourceError(load.error);
    return std::exchange(load.bytes, 0);
}

void Loader::abandon(Load& load) {
    std::unique_lock lock(mutex_);
    load.next = load.count;
    done_.wait(lock, [&] { return load.active == 0; });
}

std::shared_ptr<Load> Loader::claim() {
    for (auto* queue : {&urgent_, &queue_})
        while (!queue->empty()) {
            if (queue->front()->next < queue->front()->count)
                return queue->front();
            queue->pop_front();
        }
    return nullptr;
}

void Loader::loop() {
    FloatEnvironment environment; // embedding rows are multiplied here
    std::shared_ptr<uint8_t> buffer;
    std::unique_lock lock(mutex_);
    while (true) {
        std::shared_ptr<Load> load;
        work_.wait(lock, [&] { return stop_ || (load = claim()); });
        if (stop_)
            return;
        const size_t task = load->next++;
        ++load->active;
        lock.unlock();
        int64_t bytes = 0;
        std::string error;
        try {
            if (!buffer)
                buffer = sector_memory(buffer_bytes_);
            bytes = load->task(task, buffer.get());
        } catch (const std::bad_alloc&) {
            error = "the system has no memory left to read weights";
        } catch (const std::exception& e) {
            error = e.what();
        }
        lock.lock();
        load->bytes += bytes;
        if (!error.empty() && !load->failed) {
            load->failed = true;
            load->error = std::move(error);
            load->next = load->count;
        }
        if (--load->active == 0)
            done_.notify_all();
    }
}

} // namespace quaff
