#include "mapping.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace quaff {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPiece = int64_t{8} << 20; // in memory twice for a moment; each is a mapping, of which a process may have some 65,000

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint8_t* up(uint8_t* p, int64_t to) {
    return p + (up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)), to) - static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)));
}

bool has_huge_pages() {
#if defined(__linux__)
    std::string line;
    std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), line);
    return line.find("[always]") != std::string::npos || line.find("[madvise]") != std::string::npos;
#else
    return false;
#endif
}

} // namespace

MappedFile::MappedFile(int fd, int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0)
        throw std::runtime_error("an empty file cannot be mapped");
    region_bytes_ = up(bytes, kHugePage) + kHugePage;
    void* region = mmap(nullptr, static_cast<size_t>(region_bytes_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region == MAP_FAILED)
        throw std::runtime_error(std::string("cannot be mapped: ") + std::strerror(errno));
    region_ = static_cast<uint8_t*>(region);
    base_ = up(region_, kHugePage);
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0 || mmap(base_, static_cast<size_t>(bytes), PROT_READ, MAP_PRIVATE | MAP_FIXED, fd_, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(region_, static_cast<size_t>(region_bytes_));
        if (fd_ >= 0)
            close(fd_);
        throw std::runtime_error(std::string("cannot be mapped: ") + std::strerror(error));
    }
    if (!has_huge_pages())
        return;
    running_ = true;
    try {
        mover_.start([this] { move(); });
    } catch (const std::system_error&) { // without it everything works, slower
        running_ = false;
    }
}

MappedFile::~MappedFile() {
    stop_ = true;
    mover_.join();
    munmap(region_, static_cast<size_t>(region_bytes_));
    close(fd_);
}

void MappedFile::wait() {
    if (!mover_.here())
        return;
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return !running_; });
}

void MappedFile::move() {
    for (int64_t at = 0; at < bytes_ && !stop_; at += kPiece) {
        const int64_t size = std::min(kPiece, bytes_ - at);
        if (!move_piece(at, size))
            break;
        moved_ += size;
    }
    const std::lock_guard lock(mutex_);
    running_ = false;
    ended_.notify_all();
}

// Bytes are read beside the mapping, then take its place in one step: who reads there meanwhile finds the old pages or the new ones.
bool MappedFile::move_piece(int64_t at, int64_t size) {
#if defined(__linux__)
    const int64_t whole = up(size, kHugePage);
    void* memory = mmap(nullptr, static_cast<size_t>(whole + kHugePage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    auto* begin = static_cast<uint8_t*>(memory);
    uint8_t *piece = up(begin, kHugePage), *end = begin + whole + kHugePage;
    madvise(piece, static_cast<size_t>(whole), MADV_HUGEPAGE);
    int64_t done = 0;
    while (done < size && !stop_) {
        const ssize_t n = pread(fd_, piece + done, static_cast<size_t>(std::min(size - done, kHugePage)), at + done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        done += n;
    }
    const bool moved =
        done == size && mprotect(piece, static_cast<size_t>(whole), PROT_READ) == 0 &&
        mremap(piece, static_cast<size_t>(whole), static_cast<size_t>(whole), MREMAP_MAYMOVE | MREMAP_FIXED, base_ + at) != MAP_FAILED;
    if (moved) { // what lay before and after it
        if (piece > begin)
            munmap(begin, static_cast<size_t>(piece - begin));
        if (end > piece + whole)
            munmap(piece + whole, static_cast<size_t>(end - piece - whole));
    } else {
        munmap(begin, static_cast<size_t>(whole + kHugePage));
    }
    return moved;
#else
    (void)at, (void)size;
    return false;
#endif
}

} // namespace quaff
