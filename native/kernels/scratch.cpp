// Sizes of the workspace that kernels ask their caller for: the same for every instruction set.
#include "linear.h"
#include "table.h"

namespace quaff {

size_t linear_scratch_bytes(const Weight& w) {
    if (!is_integer(w.codes))
        return 64;
    const int64_t integer = linear::cell_bytes(w) + linear::kMaxPanels * (linear::code_bytes(w) + linear::scale_bytes(w));
    const int64_t dequantised = linear::kMaxFloatPanels * w.cols * kLanes * 4;
    return size_t(integer > dequantised ? integer : dequantised);
}

// Scaled q and the running o of a tile, and one page of its scores.
size_t attend_scratch_floats(int32_t dim, int32_t value_dim, int tile) {
    return static_cast<size_t>(tile) * static_cast<size_t>(dim + value_dim + kPage);
}

} // namespace quaff
