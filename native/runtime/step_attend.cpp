// Attention ops of the executor: keys and values into pages, and tiles of query vectors over them.
#include "step_run.h"

#include <algorithm>

namespace quaff {

namespace {

// Fewer attention tiles than this for each thread leave threads idle: then the pages of a tile are shared out, so many at once.
constexpr int64_t kFewTiles = 4;
constexpr int32_t kPagesPerUnit = 4;

} // namespace

// A unit is one head's part of one page: keys lie transposed, so neighbouring rows share cache lines and must not be split among workers.
void StepRun::kv_write(const Op& op) {
    const PagePool& pool = *pools_[static_cast<size_t>(op.ints[0])];
    const int64_t heads = op.ints[2], dim = op.ints[3], value_dim = op.ints[4], offset = op.ints[1] * heads * pool.head_elements();
    std::vector<int64_t> begins; // cell rows at which a segment or a page begins
    for (int64_t i = 0; i < cell_size(); ++i)
        if (i == 0 || segment_of(i) != segment_of(i - 1) || position_of(i) / kPage != position_of(i - 1) / kPage)
            begins.push_back(i);
    const auto blocks = static_cast<int64_t>(begins.size());
    begins.push_back(cell_size());
    rt_.pool_.run(cell_size() > 1 ? blocks * heads : 1, [&](int64_t u, int) {
        const int64_t head0 = cell_size() > 1 ? u % heads : 0, head1 = cell_size() > 1 ? head0 + 1 : heads, block = u / heads;
        const int64_t begin = begins[static_cast<size_t>(block)], end = begins[static_cast<size_t>(block + 1)];
        uint16_t* page = pages_[static_cast<size_t>(op.ints[0])][static_cast<size_t>(segment_of(begin))]
                               [static_cast<size_t>(position_of(begin) / kPage)];
        for (int64_t h = head0; h < head1; ++h) {
            uint16_t* k = page + offset + h * pool.head_elements();
            for (int64_t i = begin; i < end; ++i) {
                const float *new_k = buffer_row(op.inputs[0], i) + h * dim, *new_v = buffer_row(op.inputs[1], i) + h * value_dim;
                if (pool.words() == 1)
                    k_.kv_write(new_k, new_v, k, dim, value_dim, position_of(i) % kPage);
                else
                    k_.kv_write_f32(new_k, new_v, reinterpret_cast<float*>(k), dim, value_dim, position_of(i) % kPage);
            }
        }
    });
    result_.counters.kv_bytes_written += cell_size() * heads * pool.head_elements() / kPage * 2;
}

template <typename Kernel>
void StepRun::attend_each(const Stage& stage, const Op& op, const std::vector<AttendWork>& works, const std::vector<int64_t>& bounds,
                          Kernel&& kernel) {
    const PagePool& pool = *pools_[static_cast<size_t>(op.ints[0])];
    const int64_t kv_heads = op.ints[3], dim = op.ints[4], value_dim = op.ints[6], group = op.ints[2] / kv_heads;
    const float* sinks = op.weights[0] == kNone ? nullptr : weight(stage, op.weights[0]).vector.data();
    const auto one = [&](int64_t u, int worker) {
        const AttendWork& w = works[static_cast<size_t>(u)];
        constexpr int kMaxTile = 64;
        float sink[kMaxTile];
        const float* q[kMaxTile];
        float* out[kMaxTile];
        int32_t position[kMaxTile];
        AttendArgs a{};
        for (int64_t v = w.tile * k_.attend_tile; v < std::min((w.tile + 1) * k_.attend_tile, w.rows * group); ++v, ++a.count) {
            const int64_t i = w.begin + v / group, head = w.head * group + v % group;
            sink[a.count] = sinks ? sinks[head] : 0.0f;
            q[a.count] = buffer_row(op.inputs[0], i) + head * dim;
            out[a.count] = buffer_row(op.outputs[0], i) + head * value_dim;
            position[a.count] = position_of(i);
        }
        a.q = q;
        a.out = out;
        a.position = position;
        a.pages = pages_[static_cast<size_t>(op.ints[0])][static_cast<size_t>(segment_of(w.begin))].data();
        a.past_page = position_of(w.begin + w.rows - 1) / kPage + 1;
        a.head_offset = (op.ints[1] * kv_heads + w.head) * pool.head_elements();
        a.dim = static_cast<int32_t>(dim);
        a.value_dim = static_cast<int32_t>(value_dim);
        a.window = op.ints[5];
        a.scale = op.floats[0];
        a.cap = op.floats[1];
        a.sink = sinks ? sink : nullptr;
        a.scratch = reinterpret_cast<float*>(worker_scratch(worker));
        kernel(a, w);
    };
    run_owned(bounds, static_cast<int64_t>(works.size()), one);
}

void StepRun::attend(const Stage& stage, const Op& op) {
    const int64_t heads = op.ints[2], kv_heads = op.ints[3], window = op.ints[5], group = heads / kv_heads;
    const int64_t macs = heads * (op.ints[4] + op.ints[6]); // of one row and one position it sees
    const auto seen_from = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };
    std::vector<AttendWork> runs, tiles; // a run: the rows of one segment, `tile` counts its tiles
    int64_t pages = 0;
    for (int64_t begin = 0, end; begin < cell_size(); begin = end) {
        for (end = begin; end < cell_size() && segment_of(end) == segment_of(begin); ++end)
            result_.counters.attention_macs += (position_of(end) + 1 - seen_from(position_of(end))) * macs;
        const int64_t rows = end - begin, count = (rows * group + k_.attend_tile - 1) / k_.attend_tile;
        const auto first_page = static_cast<int32_t>(seen_from(position_of(begin)) / kPage);
        runs.push_back({begin, rows, 0, count, first_page, position_of(end - 1) / kPage + 1, nullptr});
        pages += count * kv_heads * (runs.back().past_page - first_page);
    }
    // By owner of a tile's first row. The last tiles see most positions and are claimed first: the short ones fill the end.
    const std::vector<int64_t> blocks = row_blocks();
    std::vector<int64_t> bounds{0};
    for (size_t b = 0; b + 1 < blocks.size(); ++b, bounds.push_back(static_cast<int64_t>(tiles.size())))
        for (const AttendWork& run : runs)
            for (int64_t head = 0; head < kv_heads; ++head)
                for (int64_t tile = run.tile; tile-- > 0;)
                    if (const int64_t row = run.begin + tile * k_.attend_tile / group; row >= blocks[b] && row < blocks[b + 1])
                        tiles.push_back({run.begin, run.rows, head, tile, run.first_page, run.past_page, nullptr});
    const auto n = static_cast<int64_t>(tiles.size());
    if (pools_[static_cast<size_t>(op.ints[0])]->words() == 2)
        attend_each(stage, op, tiles, bounds, [&](const AttendArgs& a, const AttendWork&) { k_.attend_f32(&a); });
    else if (rt_.threads() == 1 || n >= kFewTiles * rt_.threads() || pages < 2 * kPagesPerUnit)
        attend_each(stage, op, tiles, bounds, [&](const AttendArgs& a, const AttendWork&) { k_.attend(&a); });
    else
        attend_shared(stage, op, tiles, pages);
}

// Few tiles over many pages, as in decode: workers share the pages of a tile, then merge what they found in order.
void StepRun::attend_shared(const Stage& stage, const Op& op, std::vector<AttendWork>& tiles, int64_t pages) {
    ++rt_.shared_;
    const int64_t stride = kTilesTogether * 3 * kLanes + k_.attend_tile * op.ints[6];
    auto* part = reinterpret_cast<float*>(rt_.parts_.reserve(static_cast<size_t>(pages * stride) * 4));
    std::vector<AttendWork> works;
    for (AttendWork& tile : tiles) {
        tile.part = part;
        for (int32_t first = tile.first_page; first < tile.past_page; first += kPagesPerUnit) {
            const int32_t past = std::min(first + kPagesPerUnit, tile.past_page);
            works.push_back({tile.begin, tile.rows, tile.head, tile.tile, first, past, part});
            part += (past - first) * stride;
        }
    }
    attend_each(stage, op, works, {0},
                [&](const AttendArgs& a, const AttendWork& w) { k_.attend_parts(&a, w.first_page, w.past_page, w.part, stride); });
    attend_each(stage, op, tiles, {0},
                [&](const AttendArgs& a, const AttendWork& w) { k_.attend_merge(&a, w.first_page, w.past_page, w.part, stride); });
}

} // namespace quaff
