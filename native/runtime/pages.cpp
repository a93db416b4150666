#include "pages.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace quaff {

void PagePool::Free::operator()(uint16_t* p) const { std::free(p); }

PagePool::PagePool(int64_t layers, int64_t kv_heads, int64_t dim) : layers_(layers), kv_heads_(kv_heads), dim_(dim) {
    if (layers < 1 || layers > 4096 || kv_heads < 1 || kv_heads > 4096 || dim < 16 || dim > 256 || dim % 16)
        throw std::invalid_argument("no KV page of " + std::to_string(layers) + " layers, " + std::to_string(kv_heads) + " heads and " +
                                    std::to_string(dim) + " values: a head has 16 to 256 values, a multiple of 16");
}

int32_t PagePool::place(Page page) {
    int32_t id;
    if (free_.empty()) {
        id = static_cast<int32_t>(pages_.size());
        pages_.push_back(std::move(page));
        free_.reserve(pages_.size()); // so that give() can not fail
    } else {
        id = free_.back();
        free_.pop_back();
        pages_[id] = std::move(page);
    }
    ++in_use_;
    return id;
}

int32_t PagePool::take() {
    const size_t bytes = (static_cast<size_t>(page_bytes()) + 4095) / 4096 * 4096;
    Page page(static_cast<uint16_t*>(std::aligned_alloc(4096, bytes)));
    if (!page)
        throw std::bad_alloc();
    std::memset(page.get(), 0, bytes);
    return place(std::move(page));
}

int32_t PagePool::copy(int32_t page) {
    const int32_t id = take();
    std::memcpy(data(id), data(page), static_cast<size_t>(page_bytes()));
    return id;
}

void PagePool::give(int32_t page) {
    pages_[page].reset();
    free_.push_back(page);
    --in_use_;
}

} // namespace quaff
