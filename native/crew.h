// Threads that work for one owner, who ends and joins them.
#pragma once
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace quaff {

class Crew {
public:
    template <typename F> void start(F&& f) { threads_.emplace_back(std::forward<F>(f)); } // throws std::system_error
    size_t size() const { return threads_.size(); }
    // False in a forked process: it has the memory of its parent, but none of these threads, so nobody there will do what they were to do.
    bool here() const { return getpid() == process_; }
    void join() {
        if (!here()) {
            new std::vector<std::thread>(std::move(threads_)); // never freed: they can be neither joined nor destroyed
            return;
        }
        for (std::thread& t : threads_)
            t.join();
        threads_.clear();
    }

private:
    const pid_t process_ = getpid();
    std::vector<std::thread> threads_;
};

} // namespace quaff
