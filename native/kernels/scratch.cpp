// Sizes of the workspace that kernels ask their caller for: the same for every instruction set.
#include "linear.h"
#include "table.h"

namespace quaff {

size_t linear_scratch_bytes(const Weight& w) {
    if (w.codes > Codes::kByte)
        return 64;
    const int64_t tokens = 2 * linear::align64(linear::kMaxTokens * w.groups * 4), unpacked = linear::kMaxPanels * w.cols * kLanes;
    const int64_t dequantised = linear::kMaxFloatPanels * w.cols * kLanes * 4;
    const int64_t integer = tokens + (w.codes == Codes::kNibble ? unpacked : 0);
    return size_t(integer > dequantised ? integer : dequantised);
}

} // namespace quaff
