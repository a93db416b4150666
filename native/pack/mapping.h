// A packed file in memory: mapped, so that it is there at once, and moved into huge pages by a thread while it is used already. With pages of
// 4 KiB, which is all that files get, decoding takes a fifth longer: it is bound by address translation.
#pragma once
#include "crew.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace quaff {

class MappedFile {
public:
    MappedFile(int fd, int64_t bytes); // the descriptor may be closed afterwards; throws std::runtime_error
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const uint8_t* data() const { return base_; } // at a multiple of 2 MiB, the same bytes and the same place while pages move
    int64_t size() const { return bytes_; }
    int64_t moved_bytes() const { return moved_; }
    void wait(); // until the thread has ended: all bytes have moved, or the system has no huge pages, no memory, or cannot read the file

private:
    void move();
    bool move_piece(int64_t at, int64_t size);

    const int64_t bytes_;
    int fd_ = -1;
    uint8_t *region_ = nullptr, *base_ = nullptr;
    int64_t region_bytes_ = 0;
    std::atomic<bool> stop_{false};
    std::atomic<int64_t> moved_{0};
    std::mutex mutex_;
    std::condition_variable ended_;
    bool running_ = false;
    Crew mover_;
};

} // namespace quaff
