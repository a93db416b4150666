// ggml block types -> codes and scales -> panels. Values are never changed: scale*code(+min) equals gguf.quants.dequantize byte for byte.
#pragma once
#include "../kernels/table.h"

#include <memory>
#include <string>

namespace quaff {

// What panels look like in memory and in packed files; raised with any change of a layout in kernels/table.h. A test knows their hashes.
inline constexpr int32_t kPanelVersion = 1;

// A weight that keeps its panels alive.
struct PackedWeight {
    Weight w{};
    std::shared_ptr<const uint8_t> storage;
    int64_t bytes = 0; // codes, scales and minimums: what one pass over the weight reads
    int32_t ggml_type = 0;
};

bool ggml_type_known(int32_t ggml_type);
const char* ggml_type_name(int32_t ggml_type);
int64_t ggml_row_bytes(int32_t ggml_type, int64_t cols);             // -1 when cols does not fit the block size
int64_t packed_bytes(int32_t ggml_type, int64_t rows, int64_t cols); // size of its panels; -1 for what pack_weight refuses

// A weight of this type and shape that has no panels yet. Throws std::invalid_argument when packed_bytes refuses it.
Weight weight_shape(int32_t ggml_type, int64_t rows, int64_t cols);

// Rows of ggml blocks: in memory one after the other, or in a file, `stride` bytes from row to row, read as they are packed.
struct BlockRows {
    const uint8_t* data = nullptr; // null: in the file
    int64_t size = 0;              // bytes at `data`
    int fd = -1;
    int64_t offset = 0, stride = 0;
};

// Throws std::invalid_argument with a plain sentence for an unknown type, a shape that does not fit, or a non-finite scale (NUMERICS 7, rows
// named), std::runtime_error when the file cannot be read or ends early, std::bad_alloc when memory is short. `threads` panels are packed side by side.
PackedWeight pack_weight(int32_t ggml_type, const BlockRows& blocks, int64_t rows, int64_t cols, int threads);

// The same into memory of the caller, packed_bytes bytes; 64-byte aligned when kernels shall read it there.
Weight pack_panels(int32_t ggml_type, const BlockRows& blocks, int64_t rows, int64_t cols, uint8_t* panels, int threads);

// A weight over panels as pack_panels leaves them. Throws std::invalid_argument unless type, shape, size and alignment fit.
PackedWeight view_panels(int32_t ggml_type, std::shared_ptr<const uint8_t> panels, int64_t size, int64_t rows, int64_t cols);

// Rows [row0, row0+count) as f32 (scale*code(+min), one rounding as in dequantize), portable code: tests, embedding, reference.
void dequantize_rows(const Weight& w, int64_t row0, int64_t count, float* out);

// The same rows of an integer weight taken apart: true codes [count][cols], scale and min [count][groups] (min untouched without has_min).
void unpack_rows(const Weight& w, int64_t row0, int64_t count, int8_t* codes, float* scale, float* min);

} // namespace quaff
