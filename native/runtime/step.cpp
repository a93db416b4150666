#include "step.h"
#include "cpu.h"
#include "pack/memory.h"
#include "step_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quaff {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("step: " + what); }

using Clock = std::chrono::steady_clock;

// Row strides of int8 buffers end with one spare line: a stride that is a multiple of 4096 would put the rows of a tile in one cache set.
int64_t q_stride(int64_t width) { return width + 64; }
int64_t s_stride(int64_t width) { return (width / kQuantGroup + 15) / 16 * 16; }

// Scales or sums: kernels take them by sixteen, from the first one of a head of the last row too.
size_t scale_bytes(size_t count) { return aligned(count * 4) + 64; }

size_t buffer_bytes(const Buffer& b, int64_t rows) {
    const auto n = static_cast<size_t>(rows);
    if (!b.quantized)
        return aligned(n * static_cast<size_t>(b.width) * 4);
    const auto scales = static_cast<size_t>(s_stride(b.width));
    return aligned(n * static_cast<size_t>(q_stride(b.width))) + scale_bytes(n * scales) * 2 + scale_bytes(2 * n * scales) +
           aligned(n * static_cast<size_t>(b.outliers) * sizeof(Outlier));
}

// Rows that make it worth every worker's while to unpack all weights for its own rows: what one core writes is then read by the same core.
// Blocks begin at whole units and whole tiles of 2, 3 or 6 rows.
constexpr int64_t kRowsPerBlock = 120, kRowsPerTiles = 6;
static_assert(kRowsPerTiles % kRowsPerUnit == 0); // the same rows are a worker's own in every op

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

Runtime::Runtime(int threads) : pool_(threads), ahead_bytes_(fetch_ahead_bytes()) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads must be 1 to 1024, not " + std::to_string(threads));
}

size_t Runtime::scratch_bytes() const { return residual_.bytes() + buffers_.bytes() + workers_.bytes() + parts_.bytes(); }

StepRun::StepRun(Runtime& runtime, Model& model, const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states,
                 const StepInput& input, Control& control)
    : rt_(runtime), model_(model), pools_(pools), state_pools_(states), in_(input), control_(control), k_(kernels()),
      rows_(static_cast<int64_t>(input.tokens.size())) {
    if (!model_.in_memory && !model_.source)
        refuse("the model has weights that are not in memory, and no source of them");
    check_rows();
    check_cells();
    model_.check_pools(pools_, state_pools_);
    resolve_pages();
    resolve_states();
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

namespace {

// A step's use of a weight source, which ends with it.
class Pass {
public:
    Pass(WeightSource& source, std::span<const int32_t> cell_stages, const std::atomic<bool>& cancelled)
        : source_(source), before_(source.counters().disk_bytes) {
        source_.begin(cell_stages, cancelled);
    }
    ~Pass() { source_.end(whole_); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

    void done() { whole_ = true; }
    int64_t bytes() const { return source_.counters().disk_bytes - before_; }

private:
    WeightSource& source_;
    const int64_t before_;
    bool whole_ = false;
};

} // namespace

StepResult StepRun::run() {
    FloatEnvironment environment;
    if (model_.source) {
        Pass pass(*model_.source, in_.cell_stage, control_.cancelled);
        try {
            run_cells();
            if (result_.cells_done == static_cast<int64_t>(in_.cell_stage.size()))
                pass.done();
        } catch (const Cancelled&) { // in the middle of a cell, which does not count
        }
        result_.counters.weight_bytes_loaded = pass.bytes();
    } else {
        run_cells();
    }
    result_.poisoned.assign(poisoned_.begin(), poisoned_.end());
    return std::move(result_);
}

void StepRun::run_cells() {
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
        if (in_.draw && static_cast<size_t>(in_.cell_stage[c]) + 1 == model_.stages.size() && !draw())
            break;
    }
}

// The tokens after the cell's rows; false where one has none, or nothing is to follow it.
bool StepRun::draw() {
    bool more = true;
    for (size_t s = 0; s < cell_rows_.size(); ++s) {
        const int32_t row = cell_rows_[s];
        auto [options, ends] = in_.draw->segments[s];
        options.position = static_cast<uint32_t>(in_.positions[row] + 1);
        const int64_t token = sample_token(k_, logits_row(static_cast<int64_t>(s)), model_.outputs, options, nullptr, 0);
        if (token < 0 || token >= model_.vocab) {
            more = false;
            continue;
        }
        result_.drawn[s].push_back(static_cast<int32_t>(token));
        if (row + 1 < rows_ && segment_of(static_cast<int64_t>(s)) == in_.segment_of_row[row + 1])
            in_.draw->tokens[row + 1] = static_cast<int32_t>(token);
        more = more && std::find(ends.begin(), ends.end(), token) == ends.end();
    }
    return more;
}

void StepRun::check_rows() {
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
        if (in_.segment_of_row[r] != before)
            segment_begin_.push_back(r);
        max_position_ = std::max<int64_t>(max_position_, in_.positions[r]);
    }
    segments_ = in_.segment_of_row[rows_ - 1] + 1;
    poisoned_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(segments_));
    logits_index_.assign(static_cast<size_t>(rows_), -1);
    for (size_t i = 0; i < in_.logits_rows.size(); ++i) {
        const int32_t row = in_.logits_rows[i];
        if (row < 0 || row >= rows_ || (i && row <= in_.logits_rows[i - 1]))
            refuse("logits_rows must be rows of the batch, ascending");
        logits_index_[static_cast<size_t>(row)] = in_.draw ? in_.segment_of_row[row] : static_cast<int32_t>(i);
    }
    if (!in_.draw)
        return;
    result_.drawn.resize(static_cast<size_t>(segments_));
    bool alike = static_cast<int64_t>(in_.draw->segments.size()) == segments_ && static_cast<int64_t>(in_.logits_rows.size()) == rows_;
    for (size_t s = 0; s < segment_begin_.size(); ++s)
        alike = alike && segment_begin_[s] * segments_ == rows_ * static_cast<int64_t>(s);
    if (!alike)
        refuse("tokens are drawn for segments of as many rows each, from the logits of every row");
}

void StepRun::check_cells() {
    if (in_.cell_ranges.size() != in_.cell_stage.size() + 1 || in_.cell_ranges.front() != 0 ||
        static_cast<size_t>(in_.cell_ranges.back()) * 2 != in_.ranges.size())
        refuse("cell_ranges does not index the ranges");
    int64_t drawn = 0;
    for (size_t c = 0; c < in_.cell_stage.size(); ++c) {
        if (in_.cell_stage[c] < 0 || static_cast<size_t>(in_.cell_stage[c]) >= model_.stages.size())
            refuse("a cell names a stage that does not exist");
        if (in_.cell_ranges[c] > in_.cell_ranges[c + 1])
            refuse("cell_ranges must ascend");
        const bool head = writes_logits(model_.stages[static_cast<size_t>(in_.cell_stage[c])]);
        int64_t count = 0, last = 0, at = 0;
        bool apart = true;
        for (int32_t r = in_.cell_ranges[c]; r < in_.cell_ranges[c + 1]; ++r) {
            const int32_t begin = in_.ranges[2 * r], end = in_.ranges[2 * r + 1];
            if (begin < last || end < begin || end > rows_)
                refuse("row ranges of a cell must ascend and lie in the batch");
            for (int32_t row = begin; in_.draw && row < end; ++row, ++at)
                apart = apart && at < segments_ && row == segment_begin_[static_cast<size_t>(at)] + drawn;
            count += end - begin;
            last = end;
            if (head)
                for (int32_t row = begin; row < end; ++row)
                    if (logits_index_[static_cast<size_t>(row)] < 0)
                        refuse("the head runs for a row whose logits are not wanted");
        }
        if (in_.draw && (!apart || at != segments_))
            refuse("where tokens are drawn one row of every segment goes up to the head before the next ones");
        drawn += static_cast<size_t>(in_.cell_stage[c]) + 1 == model_.stages.size();
        capacity_ = std::max(capacity_, count);
    }
}

bool StepRun::writes_logits(const Stage& stage) {
    return std::any_of(stage.program->ops.begin(), stage.program->ops.end(), [](const Op& op) {
        return op.kind == OpKind::kLinear && std::find(op.outputs.begin(), op.outputs.end(), kLogits) != op.outputs.end();
    });
}

void StepRun::resolve_pages() {
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

void StepRun::check_visible(int32_t kind, int32_t window) {
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

void StepRun::reserve() {
    residual_ = reinterpret_cast<float*>(rt_.residual_.reserve(static_cast<size_t>(rows_ * model_.dim) * 4));
    size_t buffers = 0, scratch = 0;
    for (const Stage& stage : model_.stages) {
        size_t sum = 0;
        for (const Buffer& b : stage.program->buffers)
            sum += buffer_bytes(b, capacity(*stage.program, b));
        buffers = std::max(buffers, sum);
        for (const Op& op : stage.program->ops) {
            if (op.kind == OpKind::kLinear)
                for (size_t j = 0; j < op.outputs.size(); ++j)
                    scratch = std::max(scratch, linear_scratch_bytes(weight(stage, op.weights[j]).matrix.w));
            if (op.kind == OpKind::kHeadLinear)
                scratch = std::max(scratch, linear_scratch_bytes(weight(stage, op.weights[0]).shape()));
            if (op.kind == OpKind::kExpertLinear)
                for (size_t j = 0; j < op.outputs.size(); ++j)
                    scratch = std::max(scratch, linear_scratch_bytes(weight(stage, op.weights[j]).shape()));
            if (op.kind == OpKind::kRoute)
                scratch = std::max(scratch, static_cast<size_t>(op.ints[0]) * kRouteWords * 4);
            if (op.kind == OpKind::kAttend)
                scratch = std::max(scratch, attend_scratch_floats(op.ints[4], op.ints[6], k_.attend_tile) * 4);
            if (op.kind == OpKind::kRmsNorm || op.kind == OpKind::kGlu || op.kind == OpKind::kConv) {
                const int32_t out = op.outputs[0] != kNone ? op.outputs[0] : op.outputs[1];
                scratch = std::max(scratch, static_cast<size_t>(stage.program->buffer(out).width) * 4);
            }
        }
    }
    buffers_ = rt_.buffers_.reserve(buffers);
    scratch_bytes_ = aligned(scratch) + kAlign; // a spare line keeps two workers' ends apart
    scratch_ = rt_.workers_.reserve(scratch_bytes_ * static_cast<size_t>(rt_.threads()));
}

void StepRun::run_stage(size_t index) {
    const Stage& stage = model_.stages[index];
    stage_ = static_cast<int32_t>(index);
    if (model_.source)
        model_.source->enter(stage_);
    uint8_t* at = buffers_;
    floats_.clear();
    ints_.clear();
    for (const Buffer& b : stage.program->buffers) {
        float* f = nullptr;
        QuantRows q{};
        const int64_t rows = capacity(*stage.program, b);
        if (b.quantized) {
            const auto n = static_cast<size_t>(rows), s = static_cast<size_t>(s_stride(b.width));
            uint8_t* p = at;
            q.q = reinterpret_cast<int8_t*>(p);
            p += aligned(n * static_cast<size_t>(q_stride(b.width)));
            q.scale = reinterpret_cast<float*>(p);
            p += scale_bytes(n * s);
            q.sum32 = reinterpret_cast<int32_t*>(p);
            p += scale_bytes(n * s);
            q.sum16 = reinterpret_cast<int32_t*>(p);
            p += scale_bytes(2 * n * s);
            q.outlier = reinterpret_cast<Outlier*>(p);
            q.q_stride = q_stride(b.width);
            q.s_stride = s_stride(b.width);
            q.o_stride = b.outliers;
        } else {
            f = reinterpret_cast<float*>(at);
        }
        floats_.push_back(f);
        ints_.push_back(q);
        at += buffer_bytes(b, rows);
    }
    program_ = stage.program.get();
    const bool tail = index > model_.last_mixer;
    if (writes_logits(stage))
        result_.counters.head_rows += cell_size();
    size_t at_op = in_.profile ? first_op_[index] : 0;
    const bool expects = model_.in_memory && cell_size() <= kFewRows && rt_.threads() > 1 && rt_.threads() <= kFewWorkers;
    const bool owned = row_blocks().size() > 2 && !in_.profile; // a profile has the time of each op alone
    const auto tell = [&] {
        const Counters& c = result_.counters;
        control_.work_done.store(c.macs + c.attention_macs + c.state_macs + c.head_macs, std::memory_order_relaxed);
    };
    for (const Op& op : program_->ops) {
        chained_ = owned && row_by_row(op);
        if (!chained_)
            run_chain();
        if (expects && op.kind == OpKind::kLinear)
            if (const auto [next_stage, next] = next_linear(index, static_cast<size_t>(&op - program_->ops.data()) + 1); next)
                expect_weights(*next_stage, *next);
        const auto begin = in_.profile ? Clock::now() : Clock::time_point{};
        run_op(stage, op, tail);
        if (in_.profile)
            result_.op_seconds[at_op++] += std::chrono::duration<double>(Clock::now() - begin).count();
        ++result_.counters.launches;
        if (!chained_)
            tell();
    }
    run_chain();
    tell();
}

bool StepRun::row_by_row(const Op& op) const {
    switch (op.kind) {
    case OpKind::kRmsNorm:
    case OpKind::kRope:
    case OpKind::kAdd:
    case OpKind::kSplit:
    case OpKind::kConcat:
    case OpKind::kHeadLinear:
        return true;
    case OpKind::kQuantize:
    case OpKind::kGlu:
        return !program_->buffer(op.inputs[0]).by_slots;
    case OpKind::kLinear:
        return std::find(op.outputs.begin(), op.outputs.end(), kLogits) == op.outputs.end();
    default:
        return false;
    }
}

// What lies between two barriers: a worker goes on to the next op with his own rows while others are still at the one before.
void StepRun::run_chain() {
    if (chain_.empty())
        return;
    rt_.joined_ += static_cast<int64_t>(chain_.size()) - 1;
    rt_.pool_.run(chain_);
    chain_.clear();
}

void StepRun::run_op(const Stage& stage, const Op& op, bool tail) {
    switch (op.kind) {
    case OpKind::kEmbed:
        return embed(stage, op);
    case OpKind::kRmsNorm:
        return rms_norm(stage, op);
    case OpKind::kQuantize:
        return each_of(op.inputs[0], [this, &op](int64_t i, int) { quantize(buffer_row(op.inputs[0], i), op.outputs[0], i, op.ints[0]); });
    case OpKind::kLinear:
        return linear(stage, op, tail);
    case OpKind::kRope:
        return rope(op);
    case OpKind::kKvWrite:
        return kv_write(op);
    case OpKind::kAttend:
        return attend(stage, op);
    case OpKind::kGlu:
        return glu(op);
    case OpKind::kAdd:
        return add(op);
    case OpKind::kConv:
        return conv(stage, op);
    case OpKind::kSplit:
        return split(op);
    case OpKind::kUnitNorm:
        return unit_norm(op);
    case OpKind::kDeltaGates:
        return delta_gates(stage, op);
    case OpKind::kDelta:
        return delta(op);
    case OpKind::kScale:
        return scale(op);
    case OpKind::kConcat:
        return concat(op);
    case OpKind::kHeadLinear:
        return head_linear(stage, op, tail);
    case OpKind::kRoute:
        return route(stage, op);
    case OpKind::kGather:
        return gather(op);
    case OpKind::kExpertLinear:
        return expert_linear(stage, op, tail);
    case OpKind::kCombine:
        return combine(op);
    case OpKind::kGate:
        return gate(stage, op);
    case OpKind::kCount:
        break;
    }
}

std::vector<int64_t> StepRun::row_blocks() const {
    const int64_t n = cell_size(), threads = rt_.threads(), blocks = n >= kRowsPerBlock * threads ? threads : 1;
    std::vector<int64_t> rows;
    for (int64_t b = 0; b < blocks; ++b)
        rows.push_back((n * b / blocks + kRowsPerTiles / 2) / kRowsPerTiles * kRowsPerTiles);
    rows.push_back(n);
    return rows;
}

void StepRun::embed(const Stage& stage, const Op& op) {
    const ModelWeight& table = weight(stage, op.weights[0]);
    const bool read = model_.source && model_.source->reads_rows(table);
    if (read)
        read_embeddings(table, op);
    each_row([&](int64_t i, int) {
        float* row = source_row(op.outputs[0], i);
        if (!read)
            dequantize_rows(table.matrix.w, in_.tokens[cell_rows_[static_cast<size_t>(i)]], 1, row);
        k_.scale(row, op.floats[0], source_width(op.outputs[0]));
    });
    result_.counters.embedding_bytes_touched += cell_size() * table.matrix.bytes / table.matrix.w.rows;
}

// Every token's row once from the file; rows of the same token are copies.
void StepRun::read_embeddings(const ModelWeight& table, const Op& op) {
    std::vector<std::pair<int32_t, int32_t>> sorted; // token, row of the cell
    for (size_t i = 0; i < cell_rows_.size(); ++i)
        sorted.push_back({in_.tokens[cell_rows_[i]], static_cast<int32_t>(i)});
    std::sort(sorted.begin(), sorted.end());
    std::vector<std::pair<int32_t, float*>> first;
    for (const auto& [token, i] : sorted)
        if (first.empty() || first.back().first != token)
            first.push_back({token, source_row(op.outputs[0], i)});
    model_.source->read_rows(table, first);
    auto of_token = first.begin();
    for (const auto& [token, i] : sorted) {
        of_token += of_token->first != token;
        if (float* row = source_row(op.outputs[0], i); row != of_token->second)
            std::copy_n(of_token->second, source_width(op.outputs[0]), row);
    }
}

void StepRun::rms_norm(const Stage& stage, const Op& op) {
    const std::vector<float>& w = weight(stage, op.weights[0]).vector;
    const auto n = static_cast<int64_t>(w.size());
    each_row([this, &op, &w, n](int64_t i, int worker) {
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

void StepRun::rope(const Op& op) {
    const RopeTable& table = *model_.ropes[static_cast<size_t>(op.ints[0])];
    each_row([this, &op, &table](int64_t i, int) {
        k_.rope(buffer_row(op.inputs[0], i), table.row(position_of(i)), op.ints[1], op.ints[2], table.rotary_dim() / 2, op.ints[3] != 0);
    });
}

void StepRun::glu(const Op& op) {
    const int64_t n = program_->buffer(op.inputs[0]).width;
    const auto act = op.ints[0] == 0 ? k_.swiglu : op.ints[0] == 1 ? k_.geglu_tanh : k_.sigmoid_gate;
    each_of(op.inputs[0], [this, &op, n, act](int64_t i, int worker) {
        float* y = result_row(op, i, worker);
        const float *gate = buffer_row(op.inputs[0], i), *up = buffer_row(op.inputs[1], i);
        if (op.ints[0] == 3)
            k_.swiglu_clamped(gate, up, y, n, op.floats[0], op.floats[1]);
        else
            act(gate, up, y, n);
        if (op.outputs[1] != kNone)
            quantize(y, op.outputs[1], i);
    });
}

void StepRun::split(const Op& op) {
    each_row([this, &op](int64_t i, int) {
        const float* x = buffer_row(op.inputs[0], i);
        for (int64_t head = 0; head < op.ints[0]; ++head)
            for (size_t part = 0; part < op.outputs.size(); ++part) {
                const int64_t n = op.ints[part + 1];
                std::memcpy(buffer_row(op.outputs[part], i) + head * n, x, static_cast<size_t>(n) * 4);
                x += n;
            }
    });
}

void StepRun::add(const Op& op) {
    const float by = op.floats[0];
    each_row([this, &op, by](int64_t i, int) {
        if (by == 1.0f)
            k_.add(source_row(op.outputs[0], i), buffer_row(op.inputs[0], i), source_width(op.outputs[0]));
        else
            k_.add_scaled(source_row(op.outputs[0], i), buffer_row(op.inputs[0], i), by, source_width(op.outputs[0]));
    });
}

// A row of logits is wide and a step may want one alone: parts of rows are shared out.
void StepRun::scale(const Op& op) {
    constexpr int64_t kPart = 4096;
    const int32_t in = op.inputs[0], out = op.outputs[0];
    const int64_t width = in == kLogits ? model_.outputs : source_width(in);
    const int64_t parts = (width + kPart - 1) / kPart;
    const float factor = op.floats[0], cap = op.floats[1];
    rt_.pool_.run(cell_size() * parts, [&](int64_t u, int) {
        const int64_t i = u / parts, begin = u % parts * kPart, n = std::min(kPart, width - begin);
        const float* x = (in == kLogits ? logits_row(i) : source_row(in, i)) + begin;
        float* y = (out == kLogits ? logits_row(i) : source_row(out, i)) + begin;
        if (y != x)
            std::memcpy(y, x, static_cast<size_t>(n) * sizeof(float));
        if (factor != 1.0f)
            k_.scale(y, factor, n);
        if (cap > 0)
            k_.soft_cap(y, cap, n);
    });
}

void StepRun::concat(const Op& op) {
    const int64_t heads = op.ints[0], n = program_->buffer(op.inputs[0]).width / heads, m = program_->buffer(op.inputs[1]).width / heads;
    each_row([this, &op, heads, n, m](int64_t i, int) {
        const float *a = buffer_row(op.inputs[0], i), *b = buffer_row(op.inputs[1], i);
        float* y = buffer_row(op.outputs[0], i);
        for (int64_t h = 0; h < heads; ++h)
            y = std::copy_n(b + h * m, m, std::copy_n(a + h * n, n, y));
    });
}

StepResult Runtime::step(Model& model, const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states,
                         const StepInput& input, Control& control) {
    return StepRun(*this, model, pools, states, input, control).run();
}

} // namespace quaff
