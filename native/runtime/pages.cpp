#include "pages.h"
#include "kernels/table.h"

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
    frames_ = Frames(page_bytes());
}

int32_t PagePool::take(bool zeroed) {
    const int32_t id = frames_.take();
    if (zeroed)
        std::memset(data(id), 0, static_cast<size_t>(page_bytes()));
    return id;
}

int32_t PagePool::copy(int32_t page) {
    const int32_t id = take(false);
    std::memcpy(data(id), data(page), static_cast<size_t>(page_bytes()));
    return id;
}

} // namespace quaff
