#include "step.h"
#include "dispatch.h"
#include "pack/memory.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

namespace quaff {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("step: " + what); }

using Clock = std::chrono::steady_clock;

constexpr size_t kAlign = 64;
size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Row strides of int8 buffers end with one spare line: a stride that is a multiple of 4096 would put the rows of a tile in one cache set.
int64_t q_stride(int64_t width) { return width + 64; }
int64_t s_stride(int64_t width) { return width / kQuantGroup; }

size_t buffer_bytes(const Buffer& b, int64_t rows) {
    const auto n = static_cast<size_t>(rows);
    if (!b.quantized)
        return aligned(n * static_cast<size_t>(b.width) * 4);
    const auto scales = static_cast<size_t>(s_stride(b.width));
    return aligned(n * static_cast<size_t>(q_stride(b.width))) + aligned(n * scales * 4) * 2 + aligned(n * scales * 8);
}

// Few enough that a small cell still feeds every worker, many enough that claiming costs nothing.
constexpr int64_t kRowsPerUnit = 4;
// Rows that make it worth every worker's while to unpack all weights for its own rows: what one core writes is then read by the same core.
// Blocks begin at whole units and whole tiles of 2, 3, 4 or 6 rows.
constexpr int64_t kRowsPerBlock = 120, kRowsPerTiles = 12;
// Bytes of weights a worker claims at once when a cell has few rows: claiming costs about 50 ns, reading this much about 2 us.
constexpr int64_t kBytesPerUnit = 64 << 10;
constexpr int64_t kFewRows = 4, kFewRowsPanels = 4;
// The height of a tile in panels, and so the least that a worker claims of a layer with many rows.
constexpr int64_t kLeastPanels = 2;
// Fewer attention tiles than this for each thread leave threads idle: then the pages of a tile are shared out, so many at once.
constexpr int64_t kFewTiles = 4;
constexpr int32_t kPagesPerUnit = 4;

} // namespace

uint8_t* Arena::reserve(size_t bytes) {
    if (bytes > bytes_) {
        memory_.reset();
        bytes_ = 0;
        memory_ = slab_memory(bytes);
        bytes_ = bytes;
    }
    return memory_.get();
}

Runtime::Runtime(int threads) : pool_(threads) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads must be 1 to 1024, not " + std::to_string(threads));
}

size_t Runtime::scratch_bytes() const { return residual_.bytes() + buffers_.bytes() + workers_.bytes() + parts_.bytes(); }

// One step: the checked input, the memory of its buffers and the ops of its cells.
class StepRun {
public:
    StepRun(Runtime& runtime, Model& model, const std::vector<const PagePool*>& pools, const StepInput& input, Control& control)
        : rt_(runtime), model_(model), pools_(pools), in_(input), control_(control), k_(kernels()),
          rows_(static_cast<int64_t>(input.tokens.size())) {
        check_rows();
        check_cells();
        model_.check_pools(pools_);
        resolve_pages();
        for (const auto& rope : model_.ropes)
            rope->ensure(max_position_ + 1);
        reserve();
        if (in_.profile) {
            size_t ops = 0;
            for (const Stage& stage : model_.stages) {
                first_op_.push_back(ops);
                ops += stage.program->ops.size();
            }
            result_.op_seconds.assign(ops, 0.0);
        }
    }

    StepResult run() {
        FloatEnvironment environment;
        const auto cells = static_cast<int64_t>(in_.cell_stage.size());
        for (int64_t c = 0; c < cells; ++c) {
            if (control_.cancelled.load(std::memory_order_relaxed))
                break;
            cell_rows_.clear();
            for (int32_t r = in_.cell_ranges[c]; r < in_.cell_ranges[c + 1]; ++r)
                for (int32_t row = in_.ranges[2 * r]; row < in_.ranges[2 * r + 1]; ++row)
                    cell_rows_.push_back(row);
            if (!cell_rows_.empty())
                run_stage(static_cast<size_t>(in_.cell_stage[c]));
            control_.cells_done.store(c + 1, std::memory_order_relaxed);
            result_.cells_done = c + 1;
        }
        result_.poisoned.assign(poisoned_.begin(), poisoned_.end());
        return std::move(result_);
    }

private:
    // ---- checks -------------------------------------------------------------------------------------------------------------------
    void check_rows() {
        if (rows_ < 1 || rows_ > (int64_t{1} << 30))
            refuse("a batch has 1 to 2^30 rows");
        if (static_cast<int64_t>(in_.positions.size()) != rows_ || static_cast<int64_t>(in_.segment_of_row.size()) != rows_)
            refuse("tokens, positions and segment_of_row differ in length");
        for (int64_t r = 0; r < rows_; ++r) {
            if (in_.tokens[r] < 0 || in_.tokens[r] >= model_.vocab)
                refuse("token " + std::to_string(in_.tokens[r]) + " is not in the vocabulary");
            if (in_.positions[r] < 0 || in_.positions[r] >= (1 << 30))
                refuse("position " + std::to_string(in_.positions[r]) + " is out of range");
            const int32_t before = r ? in_.segment_of_row[r - 1] : -1;
            if (in_.segment_of_row[r] != before && in_.segment_of_row[r] != before + 1)
                refuse("segments must be consecutive");
            if (in_.segment_of_row[r] == before && in_.positions[r] != in_.positions[r - 1] + 1)
                refuse("positions of a segment must ascend by one");
            max_position_ = std::max<int64_t>(max_position_, in_.positions[r]);
        }
        segments_ = in_.segment_of_row[rows_ - 1] + 1;
        poisoned_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(segments_));
        logits_index_.assign(static_cast<size_t>(rows_), -1);
        for (size_t i = 0; i < in_.logits_rows.size(); ++i) {
            const int32_t row = in_.logits_rows[i];
            if (row < 0 || row >= rows_ || (i && row <= in_.logits_rows[i - 1]))
                refuse("logits_rows must be rows of the batch, ascending");
            logits_index_[static_cast<size_t>(row)] = static_cast<int32_t>(i);
        }
    }

    void check_cells() {
        if (in_.cell_ranges.size() != in_.cell_stage.size() + 1 || in_.cell_ranges.front() != 0 ||
            static_cast<size_t>(in_.cell_ranges.back()) * 2 != in_.ranges.size())
            refuse("cell_ranges does not index the ranges");
        for (size_t c = 0; c < in_.cell_stage.size(); ++c) {
            if (in_.cell_stage[c] < 0 || static_cast<size_t>(in_.cell_stage[c]) >= model_.stages.size())
                refuse("a cell names a stage that does not exist");
            if (in_.cell_ranges[c] > in_.cell_ranges[c + 1])
                refuse("cell_ranges must ascend");
            const bool head = writes_logits(model_.stages[static_cast<size_t>(in_.cell_stage[c])]);
            int64_t count = 0, last = 0;
            for (int32_t r = in_.cell_ranges[c]; r < in_.cell_ranges[c + 1]; ++r) {
                const int32_t begin = in_.ranges[2 * r], end = in_.ranges[2 * r + 1];
                if (begin < last || end < begin || end > rows_)
                    refuse("row ranges of a cell must ascend and lie in the batch");
                count += end - begin;
                last = end;
                if (head)
                    for (int32_t row = begin; row < end; ++row)
                        if (logits_index_[static_cast<size_t>(row)] < 0)
                            refuse("the head runs for a row whose logits are not wanted");
            }
            capacity_ = std::max(capacity_, count);
        }
    }

    static bool writes_logits(const Stage& stage) {
        return std::any_of(stage.program->ops.begin(), stage.program->ops.end(), [](const Op& op) {
            return op.kind == OpKind::kLinear && std::find(op.outputs.begin(), op.outputs.end(), kLogits) != op.outputs.end();
        });
    }

    void resolve_pages() {
        if (in_.page_tables.size() != pools_.size())
            refuse("one list of page tables per KV kind is needed");
        pages_.resize(pools_.size());
        for (size_t kind = 0; kind < pools_.size(); ++kind) {
            if (static_cast<int64_t>(in_.page_tables[kind].size()) != segments_)
                refuse("one page table per segment is needed");
            for (const auto& table : in_.page_tables[kind]) {
                std::vector<uint16_t*> pointers;
                pointers.reserve(table.size());
                for (int32_t id : table) {
                    if (id != kNone && !pools_[kind]->holds(id))
                        refuse("page " + std::to_string(id) + " is not in use");
                    pointers.push_back(id == kNone ? nullptr : pools_[kind]->data(id));
                }
                pages_[kind].push_back(std::move(pointers));
            }
        }
        // Every page a row writes or sees must be there. A handful of (kind, window) pairs exist; a vector beats a set.
        std::vector<std::pair<int32_t, int32_t>> checked;
        for (const Stage& stage : model_.stages)
            for (const Op& op : stage.program->ops) {
                if (op.kind != OpKind::kAttend && op.kind != OpKind::kKvWrite)
                    continue;
                const std::pair<int32_t, int32_t> pair{op.ints[0], op.kind == OpKind::kAttend ? op.ints[5] : 1};
                if (std::find(checked.begin(), checked.end(), pair) != checked.end())
                    continue;
                checked.push_back(pair);
                check_visible(pair.first, pair.second);
            }
    }

    void check_visible(int32_t kind, int32_t window) {
        for (int64_t r = 0; r < rows_; ++r) {
            const auto& pages = pages_[static_cast<size_t>(kind)][static_cast<size_t>(in_.segment_of_row[r])];
            const int64_t position = in_.positions[r], last = position / kPage;
            const bool first_row = r == 0 || in_.segment_of_row[r - 1] != in_.segment_of_row[r];
            // The first row sees furthest back; later rows of the segment add only their own page.
            const int64_t from = !first_row ? last : window ? std::max<int64_t>(0, position - window + 1) / kPage : 0;
            for (int64_t p = from; p <= last; ++p)
                if (p >= static_cast<int64_t>(pages.size()) || !pages[static_cast<size_t>(p)])
                    refuse("the page of position " + std::to_string(p * kPage) + " is missing");
        }
    }

    void reserve() {
        residual_ = reinterpret_cast<float*>(rt_.residual_.reserve(static_cast<size_t>(rows_ * model_.dim) * 4));
        size_t buffers = 0, scratch = 0;
        for (const Stage& stage : model_.stages) {
            size_t sum = 0;
            for (const Buffer& b : stage.program->buffers)
                sum += buffer_bytes(b, capacity_);
            buffers = std::max(buffers, sum);
            for (const Op& op : stage.program->ops) {
                if (op.kind == OpKind::kLinear)
                    for (size_t j = 0; j < op.outputs.size(); ++j)
                        scratch = std::max(scratch, linear_scratch_bytes(weight(stage, op.weights[j]).matrix.w));
                if (op.kind == OpKind::kAttend)
                    scratch = std::max(scratch, attend_scratch_floats(op.ints[4], k_.attend_tile) * 4);
                if (op.kind == OpKind::kRmsNorm || op.kind == OpKind::kGlu) {
                    const int32_t out = op.outputs[0] != kNone ? op.outputs[0] : op.outputs[1];
                    scratch = std::max(scratch, static_cast<size_t>(stage.program->buffer(out).width) * 4);
                }
            }
        }
        buffers_ = rt_.buffers_.reserve(buffers);
        scratch_bytes_ = aligned(scratch) + kAlign; // a spare line keeps two workers' ends apart
        scratch_ = rt_.workers_.reserve(scratch_bytes_ * static_cast<size_t>(rt_.threads()));
    }

    // ---- one stage ----------------------------------------------------------------------------------------------------------------
    static const ModelWeight& weight(const Stage& stage, int32_t slot) { return *stage.weights[static_cast<size_t>(slot)]; }
    int64_t cell_size() const { return static_cast<int64_t>(cell_rows_.size()); }
    uint8_t* worker_scratch(int worker) const { return scratch_ + scratch_bytes_ * static_cast<size_t>(worker); }

    void run_stage(size_t index) {
        const Stage& stage = model_.stages[index];
        uint8_t* at = buffers_;
        floats_.clear();
        ints_.clear();
        for (const Buffer& b : stage.program->buffers) {
            float* f = nullptr;
            QuantRows q{};
            if (b.quantized) {
                const auto n = static_cast<size_t>(capacity_), s = static_cast<size_t>(s_stride(b.width));
                uint8_t* p = at;
                q.q = reinterpret_cast<int8_t*>(p);
                p += aligned(n * static_cast<size_t>(q_stride(b.width)));
                q.scale = reinterpret_cast<float*>(p);
                p += aligned(n * s * 4);
                q.sum32 = reinterpret_cast<int32_t*>(p);
                p += aligned(n * s * 4);
                q.sum16 = reinterpret_cast<int32_t*>(p);
                q.q_stride = q_stride(b.width);
                q.s_stride = s_stride(b.width);
            } else {
                f = reinterpret_cast<float*>(at);
            }
            floats_.push_back(f);
            ints_.push_back(q);
            at += buffer_bytes(b, capacity_);
        }
        program_ = stage.program.get();
        const bool tail = index > model_.last_mixer;
        if (writes_logits(stage))
            result_.counters.head_rows += cell_size();
        size_t at_op = in_.profile ? first_op_[index] : 0;
        for (const Op& op : program_->ops) {
            const auto begin = in_.profile ? Clock::now() : Clock::time_point{};
            run_op(stage, op, tail);
            if (in_.profile)
                result_.op_seconds[at_op++] += std::chrono::duration<double>(Clock::now() - begin).count();
            ++result_.counters.launches;
            const Counters& c = result_.counters;
            control_.work_done.store(c.macs + c.attention_macs + c.head_macs, std::memory_order_relaxed);
        }
    }

    void run_op(const Stage& stage, const Op& op, bool tail) {
        switch (op.kind) {
        case OpKind::kEmbed:
            return embed(stage, op);
        case OpKind::kRmsNorm:
            return rms_norm(stage, op);
        case OpKind::kQuantize:
            return each_row([&](int64_t i, int) { quantize(buffer_row(op.inputs[0], i), op.outputs[0], i); });
        case OpKind::kLinear:
            return linear(stage, op, tail);
        case OpKind::kRope:
            return rope(op);
        case OpKind::kKvWrite:
            return kv_write(op);
        case OpKind::kAttend:
            return attend(op);
        case OpKind::kGlu:
            return glu(op);
        case OpKind::kAdd:
            return each_row([&](int64_t i, int) { k_.add(residual_row(i), buffer_row(op.inputs[0], i), model_.dim); });
        case OpKind::kCount:
            break;
        }
    }

    // First rows of the blocks that workers own, and the end: one block each when the cell has rows enough, else one for all.
    std::vector<int64_t> row_blocks() const {
        const int64_t n = cell_size(), threads = rt_.threads(), blocks = n >= kRowsPerBlock * threads ? threads : 1;
        std::vector<int64_t> rows;
        for (int64_t b = 0; b < blocks; ++b)
            rows.push_back(n * b / blocks / kRowsPerTiles * kRowsPerTiles);
        rows.push_back(n);
        return rows;
    }

    // Units by owner, where every worker has a block of rows; else dealt out evenly.
    template <typename F> void run_owned(const std::vector<int64_t>& bounds, int64_t units, F&& f) {
        if (bounds.size() == static_cast<size_t>(rt_.threads()) + 1)
            rt_.pool_.run(bounds, f);
        else
            rt_.pool_.run(units, f);
    }

    // f(cell row, worker) for every row of the cell.
    template <typename F> void each_row(F&& f) {
        const int64_t n = cell_size(), units = (n + kRowsPerUnit - 1) / kRowsPerUnit;
        std::vector<int64_t> bounds;
        for (int64_t row : row_blocks())
            bounds.push_back((row + kRowsPerUnit - 1) / kRowsPerUnit);
        const auto one = [&](int64_t u, int worker) {
            for (int64_t i = u * kRowsPerUnit; i < std::min(n, (u + 1) * kRowsPerUnit); ++i)
                f(i, worker);
        };
        run_owned(bounds, units, one);
    }

    float* residual_row(int64_t i) const { return residual_ + cell_rows_[static_cast<size_t>(i)] * model_.dim; }
    float* buffer_row(int32_t id, int64_t i) const {
        return floats_[static_cast<size_t>(id - kFirstScratch)] + i * program_->buffer(id).width;
    }
    float* source_row(int32_t id, int64_t i) const { return id == kResidual ? residual_row(i) : buffer_row(id, i); }
    const QuantRows& quant(int32_t id) const { return ints_[static_cast<size_t>(id - kFirstScratch)]; }
    int32_t segment_of(int64_t i) const { return in_.segment_of_row[cell_rows_[static_cast<size_t>(i)]]; }
    int32_t position_of(int64_t i) const { return in_.positions[cell_rows_[static_cast<size_t>(i)]]; }

    void quantize(const float* x, int32_t id, int64_t i) const {
        const QuantRows& q = quant(id);
        k_.quantize_row(x, program_->buffer(id).width, q.q + i * q.q_stride, q.scale + i * q.s_stride, q.sum32 + i * q.s_stride,
                        q.sum16 + i * 2 * q.s_stride);
    }

    // Where an op that may leave only the quantised form puts its f32 row.
    float* result_row(const Op& op, int64_t i, int worker) const {
        return op.outputs[0] != kNone ? buffer_row(op.outputs[0], i) : reinterpret_cast<float*>(worker_scratch(worker));
    }

    void embed(const Stage& stage, const Op& op) {
        const ModelWeight& table = weight(stage, op.weights[0]);
        each_row([&](int64_t i, int) {
            float* row = residual_row(i);
            dequantize_rows(table.matrix.w, in_.tokens[cell_rows_[static_cast<size_t>(i)]], 1, row);
            k_.scale(row, op.floats[0], model_.dim);
        });
        result_.counters.embedding_bytes_touched += cell_size() * table.matrix.bytes / table.matrix.w.rows;
    }

    void rms_norm(const Stage& stage, const Op& op) {
        const std::vector<float>& w = weight(stage, op.weights[0]).vector;
        const auto n = static_cast<int64_t>(w.size());
        each_row([&](int64_t i, int worker) {
            const float* x = source_row(op.inputs[0], i);
            float* y = result_row(op, i, worker);
            for (int64_t h = 0; h < op.ints[0]; ++h) {
                const float s = k_.rms_norm(x + h * n, w.data(), op.floats[0], n, y + h * n);
                if (!std::isfinite(s))
                    poisoned_[static_cast<size_t>(segment_of(i))].store(1, std::memory_order_relaxed);
            }
            if (op.outputs[1] != kNone)
                quantize(y, op.outputs[1], i);
        });
    }

    void linear(const Stage& stage, const Op& op, bool tail) {
        const size_t n = op.outputs.size();
        const int64_t rows = cell_size();
        const std::vector<int64_t> block_rows = row_blocks();
        const size_t blocks = block_rows.size() - 1;
        std::vector<LinearArgs> args(n * blocks); // [block][weight]
        std::vector<QuantRows> x(blocks);
        std::vector<int64_t> first(n + 1, 0), panels_per_unit(n);
        for (size_t b = 0; b < blocks && op.inputs[0] != kNone; ++b) {
            const QuantRows& q = quant(op.inputs[0]);
            const int64_t row = block_rows[b];
            x[b] = {q.q + row * q.q_stride,
                    q.scale + row * q.s_stride,
                    q.sum32 + row * q.s_stride,
                    q.sum16 + row * 2 * q.s_stride,
                    q.q_stride,
                    q.s_stride};
        }
        for (size_t j = 0; j < n; ++j) {
            const ModelWeight& mw = weight(stage, op.weights[j]);
            const Weight& w = mw.matrix.w;
            const int32_t out = op.outputs[j];
            LinearArgs a{};
            a.w = &w;
            a.accumulate = op.ints[1] != 0;
            if (op.weights[n + j] != kNone)
                a.bias = weight(stage, op.weights[n + j]).vector.data();
            if (out == kResidual) {
                a.out = residual_;
                a.out_stride = model_.dim;
            } else if (out == kLogits) {
                logits_map_.resize(static_cast<size_t>(rows));
                for (int64_t i = 0; i < rows; ++i)
                    logits_map_[static_cast<size_t>(i)] = logits_index_[static_cast<size_t>(cell_rows_[static_cast<size_t>(i)])];
                a.out = in_.logits;
                a.out_stride = model_.vocab;
            } else {
                a.out = floats_[static_cast<size_t>(out - kFirstScratch)];
                a.out_stride = program_->buffer(out).width;
            }
            for (size_t b = 0; b < blocks; ++b) {
                const int64_t row = block_rows[b];
                LinearArgs& of_block = args[b * n + j] = a;
                of_block.rows = block_rows[b + 1] - row;
                if (op.inputs[0] != kNone && w.scales != Scales::kNone) {
                    of_block.x = &x[b];
                } else {
                    of_block.xf_stride = program_->buffer(op.inputs[1]).width;
                    of_block.xf = floats_[static_cast<size_t>(op.inputs[1] - kFirstScratch)] + row * of_block.xf_stride;
                }
                if (out == kResidual)
                    of_block.row_map = cell_rows_.data() + row;
                else if (out == kLogits)
                    of_block.row_map = logits_map_.data() + row;
                else
                    of_block.out += row * a.out_stride;
            }
            const int64_t panels = panel_count(w);
            // With rows of his own a worker takes whole claims; else claims are small enough that workers end together.
            const int64_t fair = blocks > 1 ? panels : panels / (8 * rt_.threads());
            int64_t per_unit = std::clamp<int64_t>(fair, kLeastPanels, k_.panels_per_unit);
            if (rows <= kFewRows) {
                const int64_t want = std::min(panels / (4 * rt_.threads()), kBytesPerUnit / std::max<int64_t>(1, w.panel_bytes));
                per_unit = std::max(kFewRowsPanels, want / kFewRowsPanels * kFewRowsPanels);
            }
            panels_per_unit[j] = per_unit;
            first[j + 1] = first[j] + (panels + per_unit - 1) / per_unit;
            auto& c = result_.counters;
            (tail ? c.head_bytes_touched : c.weight_bytes_touched) += mw.matrix.bytes;
            (tail ? c.head_macs : c.macs) += rows * w.rows * w.cols;
        }
        const auto one = [&](int64_t u, int worker) {
            const LinearArgs* of_block = args.data() + static_cast<size_t>(u / first[n]) * n;
            u %= first[n];
            size_t j = 0;
            while (u >= first[j + 1])
                ++j;
            const int64_t begin = (u - first[j]) * panels_per_unit[j],
                          end = std::min(begin + panels_per_unit[j], panel_count(*of_block[j].w));
            (of_block[j].x ? k_.linear_int : k_.linear_float)(&of_block[j], begin, end, worker_scratch(worker));
        };
        // With a block for each worker the even stretches are the blocks.
        rt_.pool_.run(first[n] * static_cast<int64_t>(blocks), one);
    }

    void rope(const Op& op) {
        const RopeTable& table = *model_.ropes[static_cast<size_t>(op.ints[0])];
        each_row([&](int64_t i, int) {
            k_.rope(buffer_row(op.inputs[0], i), table.row(position_of(i)), op.ints[1], op.ints[2], table.rotary_dim() / 2,
                    op.ints[3] != 0);
        });
    }

    // A unit is one head's part of one page: keys lie transposed, so neighbouring rows share cache lines and must not be split among workers.
    void kv_write(const Op& op) {
        const PagePool& pool = *pools_[static_cast<size_t>(op.ints[0])];
        const int64_t heads = op.ints[2], dim = op.ints[3], offset = op.ints[1] * heads * pool.head_elements();
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
                for (int64_t i = begin; i < end; ++i)
                    k_.kv_write(buffer_row(op.inputs[0], i) + h * dim, buffer_row(op.inputs[1], i) + h * dim, k, k + kPage * dim, dim,
                                position_of(i) % kPage);
            }
        });
        result_.counters.kv_bytes_written += cell_size() * heads * dim * 4;
    }

    // Attention of one tile over pages [first, past): the vectors of up to attend_tile (row, head) pairs of one segment that share a KV head,
    // row by row. `part` is where a tile whose pages are shared out leaves what it found in them.
    struct AttendWork {
        int64_t begin, rows, head, tile; // rows of the cell that are the segment's; which KV head; which tile of theirs
        int32_t first_page, past_page;
        float* part;
    };

    template <typename Kernel>
    void attend_each(const Op& op, const std::vector<AttendWork>& works, const std::vector<int64_t>& bounds, Kernel&& kernel) {
        const PagePool& pool = *pools_[static_cast<size_t>(op.ints[0])];
        const int64_t kv_heads = op.ints[3], dim = op.ints[4], group = op.ints[2] / kv_heads;
        const auto one = [&](int64_t u, int worker) {
            const AttendWork& w = works[static_cast<size_t>(u)];
            constexpr int kMaxTile = 64;
            const float* q[kMaxTile];
            float* out[kMaxTile];
            int32_t position[kMaxTile];
            AttendArgs a{};
            for (int64_t v = w.tile * k_.attend_tile; v < std::min((w.tile + 1) * k_.attend_tile, w.rows * group); ++v, ++a.count) {
                const int64_t i = w.begin + v / group, at = (w.head * group + v % group) * dim;
                q[a.count] = buffer_row(op.inputs[0], i) + at;
                out[a.count] = buffer_row(op.outputs[0], i) + at;
                position[a.count] = position_of(i);
            }
            a.q = q;
            a.out = out;
            a.position = position;
            a.pages = pages_[static_cast<size_t>(op.ints[0])][static_cast<size_t>(segment_of(w.begin))].data();
            a.head_offset = (op.ints[1] * kv_heads + w.head) * pool.head_elements();
            a.dim = static_cast<int32_t>(dim);
            a.window = op.ints[5];
            a.scale = op.floats[0];
            a.cap = op.floats[1];
            a.scratch = reinterpret_cast<float*>(worker_scratch(worker));
            kernel(a, w);
        };
        run_owned(bounds, static_cast<int64_t>(works.size()), one);
    }

    void attend(const Op& op) {
        const int64_t heads = op.ints[2], kv_heads = op.ints[3], dim = op.ints[4], window = op.ints[5], group = heads / kv_heads;
        const auto seen_from = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };
        std::vector<AttendWork> runs, tiles; // a run: the rows of one segment, `tile` counts its tiles
        int64_t pages = 0;
        for (int64_t begin = 0, end; begin < cell_size(); begin = end) {
            for (end = begin; end < cell_size() && segment_of(end) == segment_of(begin); ++end)
                result_.counters.attention_macs += (position_of(end) + 1 - seen_from(position_of(end))) * 2 * dim * heads;
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
        if (rt_.threads() == 1 || n >= kFewTiles * rt_.threads() || pages < 2 * kPagesPerUnit)
            attend_each(op, tiles, bounds, [&](const AttendArgs& a, const AttendWork&) { k_.attend(&a); });
        else
            attend_shared(op, tiles, pages);
    }

    // Few tiles over many pages, as in decode: workers share the pages of a tile, then merge what they found in order.
    void attend_shared(const Op& op, std::vector<AttendWork>& tiles, int64_t pages) {
        const int64_t stride = 2 * kLanes + k_.attend_tile * op.ints[4];
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
        attend_each(op, works, {},
                    [&](const AttendArgs& a, const AttendWork& w) { k_.attend_parts(&a, w.first_page, w.past_page, w.part, stride); });
        attend_each(op, tiles, {},
                    [&](const AttendArgs& a, const AttendWork& w) { k_.attend_merge(&a, w.first_page, w.past_page, w.part, stride); });
    }

    void glu(const Op& op) {
        const int64_t n = program_->buffer(op.inputs[0]).width;
        const auto act = op.ints[0] == 0 ? k_.swiglu : k_.geglu_tanh;
        each_row([&](int64_t i, int worker) {
            float* y = result_row(op, i, worker);
            act(buffer_row(op.inputs[0], i), buffer_row(op.inputs[1], i), y, n);
            if (op.outputs[1] != kNone)
                quantize(y, op.outputs[1], i);
        });
    }

    Runtime& rt_;
    Model& model_;
    const std::vector<const PagePool*>& pools_;
    const StepInput& in_;
    Control& control_;
    const KernelTable& k_;
    const int64_t rows_;
    int64_t capacity_ = 1, max_position_ = 0;
    int32_t segments_ = 0;
    std::vector<std::atomic<int32_t>> poisoned_;
    std::vector<int32_t> logits_index_, logits_map_, cell_rows_;
    std::vector<std::vector<std::vector<uint16_t*>>> pages_; // [kind][segment][page]
    float* residual_ = nullptr;
    uint8_t *buffers_ = nullptr, *scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
    const Program* program_ = nullptr;
    std::vector<float*> floats_;
    std::vector<QuantRows> ints_;
    std::vector<size_t> first_op_; // of every stage in op_seconds
    StepResult result_;
};

StepResult Runtime::step(Model& model, const std::vector<const PagePool*>& pools, const StepInput& input, Control& control) {
    return StepRun(*this, model, pools, input, control).run();
}

} // namespace quaff
