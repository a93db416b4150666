// A file that weights are read from: past the page cache where the file system allows it, so that what is read once takes no memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace quaff {

// Weights cannot be had: the message says which, where, and why.
struct SourceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Direct reads begin and end at multiples of this, in the file and in memory.
inline constexpr int64_t kSector = 4096;
inline constexpr int64_t sector_begin(int64_t at) { return at / kSector * kSector; }
inline constexpr int64_t sector_end(int64_t at) { return (at + kSector - 1) / kSector * kSector; }

std::shared_ptr<uint8_t> sector_memory(size_t bytes); // at a multiple of kSector, not initialised; throws std::bad_alloc

double now_seconds(); // of a clock that never goes back

// Seconds in which at least one of several threads was busy.
class BusyClock {
public:
    void start();
    void stop();
    double seconds() const;

private:
    mutable std::mutex mutex_;
    int active_ = 0;
    double since_ = 0, sum_ = 0;
};

class WeightFile {
public:
    WeightFile(std::string path, int64_t bytes, int64_t mtime_ns); // what it was when its header was read; throws SourceError
    ~WeightFile();
    WeightFile(const WeightFile&) = delete;
    WeightFile& operator=(const WeightFile&) = delete;

    const std::string& path() const { return path_; }
    int64_t bytes() const { return bytes_; }
    // Puts the file from sector_begin(offset) on to `to`, at least to offset + bytes and at most to the end of that sector; `to` lies at a
    // multiple of kSector. Returns the bytes read. Throws SourceError, also when the file is no longer what it was. Any thread may call.
    int64_t read(int64_t offset, int64_t bytes, uint8_t* to, BusyClock& clock);
    void check() const; // throws SourceError when the file is no longer what it was

private:
    int64_t read_all(int fd, int64_t begin, int64_t end, int64_t most, uint8_t* to);

    const std::string path_;
    const int64_t bytes_, mtime_ns_;
    int plain_ = -1, direct_ = -1;
    std::atomic<bool> reads_directly_{false};
};

} // namespace quaff
