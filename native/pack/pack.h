// ggml block types -> codes and scales -> panels. Values are never changed: scale*code(+min) equals gguf.quants.dequantize byte for byte.
#pragma once
#include "../kernels/table.h"

#include <memory>
#include <string>

namespace quaff {

// A weight that owns its panels.
struct PackedWeight {
    Weight w{};
    std::shared_ptr<uint8_t> storage;
    int64_t bytes = 0; // codes, scales and minimums: what one pass over the weight reads
    int32_t ggml_type = 0;
};

bool ggml_type_known(int32_t ggml_type);
const char* ggml_type_name(int32_t ggml_type);
int64_t ggml_row_bytes(int32_t ggml_type, int64_t cols);             // -1 when cols does not fit the block size
int64_t packed_bytes(int32_t ggml_type, int64_t rows, int64_t cols); // what pack_weight will take; -1 for what it refuses

// data: rows * ggml_row_bytes bytes, row-major as in the file. Throws std::invalid_argument with a plain sentence for an unknown type, a shape
// that does not fit, or a non-finite scale (NUMERICS 7, rows named), std::bad_alloc when memory is short. `threads` rows of panels are packed side by side.
PackedWeight pack_weight(int32_t ggml_type, const uint8_t* data, int64_t size, int64_t rows, int64_t cols, int threads);

// Rows [row0, row0+count) as f32 (scale*code(+min), one rounding as in dequantize), portable code: tests, embedding, reference.
void dequantize_rows(const Weight& w, int64_t row0, int64_t count, float* out);

// The same rows of an integer weight taken apart: true codes [count][cols], scale and min [count][groups] (min untouched without has_min).
void unpack_rows(const Weight& w, int64_t row0, int64_t count, int8_t* codes, float* scale, float* min);

} // namespace quaff
