#include "pages.h"
#include "kernels/table.h"
#include "pack/memory.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace quaff {

PagePool::PagePool(int64_t layers, int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t value_bytes)
    : layers_(layers), kv_heads_(kv_heads), dim_(dim), value_dim_(value_dim), words_(value_bytes / 2) {
    if (value_bytes != 2 && value_bytes != 4)
        throw std::invalid_argument("a KV value has 2 or 4 bytes, not " + std::to_string(value_bytes));
    const auto width = [](int64_t n) { return n >= 16 && n <= kMaxHeadDim && n % 16 == 0; };
    if (layers < 1 || layers > 4096 || kv_heads < 1 || kv_heads > 4096 || !width(dim) || !width(value_dim))
        throw std::invalid_argument("no KV page of " + std::to_string(layers) + " layers, " + std::to_string(kv_heads) + " heads and " +
                                    std::to_string(dim) + " + " + std::to_string(value_dim) + " values: a key or a value has 16 to " +
                                    std::to_string(kMaxHeadDim) + ", a multiple of 16");
}

int32_t PagePool::take(bool zeroed) {
    Page page;
    if (!spare_.empty()) {
        page = std::move(spare_.back());
        spare_.pop_back();
    } else {
        const std::shared_ptr<uint8_t> memory = slab_memory(static_cast<size_t>(page_bytes()));
        page = {memory, reinterpret_cast<uint16_t*>(memory.get())};
    }
    if (zeroed)
        std::memset(page.get(), 0, static_cast<size_t>(page_bytes()));
    if (free_.empty()) {
        // Room for every page, so that give() cannot fail.
        free_.reserve(pages_.size() + 1);
        spare_.reserve(pages_.size() + 1);
        free_.push_back(static_cast<int32_t>(pages_.size()));
        pages_.emplace_back();
    }
    const int32_t id = free_.back();
    free_.pop_back();
    pages_[id] = std::move(page);
    ++in_use_;
    return id;
}

int32_t PagePool::copy(int32_t page) {
    const int32_t id = take(false);
    std::memcpy(data(id), data(page), static_cast<size_t>(page_bytes()));
    return id;
}

void PagePool::give(int32_t page) {
    spare_.push_back(std::move(pages_[page]));
    free_.push_back(page);
    if (--in_use_ == 0)
        spare_.clear();
}

} // namespace quaff
