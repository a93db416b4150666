// Memory of weights and KV pages: many share slabs of huge pages. With pages of 4 KiB a pass over a model is bound by address translation.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace quaff {

// `bytes` bytes, 64-byte aligned, not initialised. A slab lives as long as anything in it, but the memory of what is let go is released at
// once. Any thread may call; throws std::bad_alloc.
std::shared_ptr<uint8_t> slab_memory(size_t bytes);

// The system gets the memory at `at` back and gives zeros when it is used again; false where systems do not do that, and nothing has changed.
bool release_memory(uint8_t* at, size_t bytes);

} // namespace quaff
