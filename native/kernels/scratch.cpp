// Sizes of the workspace that kernels ask their caller for: the same for every instruction set.
#include "linear.h"
#include "table.h"

#include <algorithm>

namespace quaff {

int64_t panels_at_once(const Weight& w) {
    if (!is_integer(w.codes))
        return linear::kMaxPanels;
    const int64_t groups = linear::part_groups(w);
    const int64_t fit = linear::kPreparedBytes / (groups * w.group * kLanes + linear::scale_floats(w, groups) * int64_t(sizeof(float)));
    return std::clamp<int64_t>(fit / 2 * 2, 2, std::min<int64_t>(16, (panel_count(w) + 1) / 2 * 2));
}

int64_t linear::packed_at_once(const Weight& w) { return w.panel_bytes * 4 < kPackedBytes ? kPackedBytes / w.panel_bytes / 2 * 2 : 2; }

size_t linear_scratch_bytes(const Weight& w) {
    if (!is_integer(w.codes))
        return 64;
    const int64_t integer =
        linear::cell_bytes(w) +
        panels_at_once(w) *
            (linear::code_bytes(w) + (linear::scale_floats(w, linear::part_groups(w)) + linear::sum_floats(w)) * int64_t(sizeof(float)));
    const int64_t dequantised = linear::kMaxFloatPanels * w.cols * kLanes * 4;
    return size_t(integer > dequantised ? integer : dequantised);
}

size_t attend_scratch_floats(int32_t dim, int32_t value_dim, int tile) {
    return static_cast<size_t>(kTilesTogether * attend_tile_floats(dim, value_dim, tile / kTilesTogether));
}

} // namespace quaff
