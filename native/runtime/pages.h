// Memory of KV pages of one kind: [layer][kv_head], each a kernels::HeadPage of codes (or of f32, for checking), zeroed when taken unless every
// byte of it is about to be written.
#pragma once
#include "numerics.h"
#include "runtime/frames.h"

#include <cstdint>
#include <memory>

namespace quaff {

class PagePool {
public:
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;
    // Throws std::invalid_argument for a shape no kernel takes. value_bytes: 2 or 4.
    PagePool(int64_t layers, int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t value_bytes = 2);

    int64_t layers() const { return layers_; }
    int64_t kv_heads() const { return kv_heads_; }
    int64_t dim() const { return dim_; }
    int64_t value_dim() const { return value_dim_; }
    int64_t words() const { return words_; } // of 16 bits, in a value
    // 16-bit words of one head's part of a page. A position has two scales where values are codes.
    int64_t head_elements() const { return kPage * ((dim_ + value_dim_) * words_ + (words_ == 1 ? 2 : 0)); }
    int64_t page_elements() const { return layers_ * kv_heads_ * head_elements(); }
    int64_t page_bytes() const { return page_elements() * 2; }
    int64_t in_use() const { return frames_.in_use(); }
    int64_t spare() const { return frames_.spare(); }

    int32_t take(bool zeroed = true); // throws std::bad_alloc
    int32_t copy(int32_t page);
    void give(int32_t page) { frames_.give(page); }
    bool holds(int32_t page) const { return frames_.holds(page); }
    uint16_t* data(int32_t page) const { return reinterpret_cast<uint16_t*>(frames_.data(page)); }
    std::shared_ptr<uint16_t> memory(int32_t page) const { return {frames_.memory(page), data(page)}; }

private:
    int64_t layers_, kv_heads_, dim_, value_dim_, words_;
    Frames frames_;
};

} // namespace quaff
