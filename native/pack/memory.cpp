#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace quaff {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kSlab = 64; // every weight alone, so that a read past its end is seen
#else
constexpr size_t kSlab = size_t{64} << 20; // address space: what is never touched takes no memory
#endif

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Slab {
    uint8_t* base;
    size_t size, used = 0;
    explicit Slab(size_t bytes) : size(bytes) {
        const size_t alignment = bytes < kHugePage ? 64 : kHugePage;
        base = static_cast<uint8_t*>(std::aligned_alloc(alignment, up(bytes, alignment)));
        if (!base)
            throw std::bad_alloc();
#if defined(__linux__)
        if (bytes >= kHugePage)
            madvise(base, up(bytes, alignment), MADV_HUGEPAGE); // a wish: without it everything works, slower
#endif
    }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab() { std::free(base); }
};

} // namespace

std::shared_ptr<uint8_t> slab_memory(size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Slab> open; // the slab that is being filled, while something in it lives
    bytes = up(bytes ? bytes : 1, 64);
    if (bytes >= kSlab / 2) {
        const auto own = std::make_shared<Slab>(up(bytes, kSlab < kHugePage ? 64 : kHugePage));
        return {own, own->base};
    }
    const std::lock_guard lock(mutex);
    std::shared_ptr<Slab> slab = open.lock();
    if (!slab || slab->size - slab->used < bytes) {
        slab = std::make_shared<Slab>(kSlab);
        open = slab;
    }
    uint8_t* at = slab->base + slab->used;
    slab->used += bytes;
    // Scratch that grew and buffers that are done leave nothing behind beside the weights, which keep the slab.
    return {at, [slab, bytes](uint8_t* p) { release_memory(p, bytes); }};
}

bool release_memory([[maybe_unused]] uint8_t* at, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(at);
    const uintptr_t first = up(begin, page), last = (begin + bytes) / page * page; // neighbours share the pages at both ends
    return first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) == 0;
#else
    return false;
#endif
}

} // namespace quaff
