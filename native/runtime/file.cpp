#include "file.h"
#include "pack/memory.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace quaff {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) { throw SourceError(path + ": " + what); }

int open_direct(const char* path) {
#if defined(O_DIRECT)
    return open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
#else
    (void)path;
    return -1;
#endif
}

} // namespace

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::shared_ptr<uint8_t> sector_memory(size_t bytes) {
    const auto whole = slab_memory(bytes + kSector);
    const auto at = reinterpret_cast<uintptr_t>(whole.get()) % kSector;
    return {whole, whole.get() + (at ? kSector - at : 0)};
}

void BusyClock::start() {
    const std::lock_guard lock(mutex_);
    if (active_++ == 0)
        since_ = now_seconds();
}

void BusyClock::stop() {
    const std::lock_guard lock(mutex_);
    if (--active_ == 0)
        sum_ += now_seconds() - since_;
}

double BusyClock::seconds() const {
    const std::lock_guard lock(mutex_);
    return sum_ + (active_ ? now_seconds() - since_ : 0);
}

WeightFile::WeightFile(std::string path, int64_t bytes, int64_t mtime_ns) : path_(std::move(path)), bytes_(bytes), mtime_ns_(mtime_ns) {
    plain_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (plain_ < 0)
        fail(path_, std::string("cannot be opened: ") + std::strerror(errno));
    try {
        check();
    } catch (...) {
        close(plain_);
        throw;
    }
    direct_ = open_direct(path_.c_str());
    struct stat a, b;
    // The path may name another file by now.
    reads_directly_ = direct_ >= 0 && !fstat(plain_, &a) && !fstat(direct_, &b) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

WeightFile::~WeightFile() {
    close(plain_);
    if (direct_ >= 0)
        close(direct_);
}

void WeightFile::check() const {
    struct stat status;
    if (fstat(plain_, &status))
        fail(path_, std::string("cannot be read: ") + std::strerror(errno));
#if defined(__APPLE__)
    const auto& time = status.st_mtimespec;
#else
    const auto& time = status.st_mtim;
#endif
    if (status.st_size != bytes_)
        fail(path_, "the file has " + std::to_string(status.st_size) + " bytes, but had " + std::to_string(bytes_) +
                        " when it was opened; load the model again");
    if (int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec != mtime_ns_)
        fail(path_, "the file was written to since it was opened; load the model again");
}

int64_t WeightFile::read(int64_t offset, int64_t bytes, uint8_t* to, BusyClock& clock) {
    const int64_t begin = sector_begin(offset), end = offset + bytes;
    struct Running {
        BusyClock& clock;
        explicit Running(BusyClock& c) : clock(c) { clock.start(); }
        ~Running() { clock.stop(); }
    } running(clock);
    int64_t done = -1;
    if (reads_directly_) {
        done = read_all(direct_, begin, end, sector_end(end), to);
        if (done < 0 && errno == EINVAL)
            reads_directly_ = false; // a file system that opens files so but does not read them
        else if (done < 0)
            fail(path_, "reading " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " failed: " + std::strerror(errno));
    }
    if (done < 0) {
        done = read_all(plain_, begin, end, end, to);
        if (done < 0)
            fail(path_, "reading " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " failed: " + std::strerror(errno));
#if defined(POSIX_FADV_DONTNEED)
        posix_fadvise(plain_, begin, done, POSIX_FADV_DONTNEED);
#endif
    }
    check();
    if (begin + done < end)
        fail(path_, "the file ends before byte " + std::to_string(end) + "; load the model again");
    return done;
}

// Bytes [begin, most) or fewer, but [begin, end) unless the file is shorter; -1 with errno.
int64_t WeightFile::read_all(int fd, int64_t begin, int64_t end, int64_t most, uint8_t* to) {
    int64_t done = 0;
    while (begin + done < end) {
        const ssize_t n = pread(fd, to + done, static_cast<size_t>(most - begin - done), begin + done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        done += n;
    }
    return done;
}

} // namespace quaff
