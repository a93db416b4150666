// How the executor runs one step: the checked input, the memory of its buffers and the ops of its cells. Linear, attention and recurrent ops and
// experts have files of their own, step_linear.cpp, step_attend.cpp, step_state.cpp and step_experts.cpp.
#pragma once
#include "dispatch.h"
#include "source.h"
#include "step.h"

#include <algorithm>

namespace quaff {

constexpr size_t kAlign = 64;
inline size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Few enough that a small cell still feeds every worker, many enough that claiming costs nothing.
constexpr int64_t kRowsPerUnit = 6;
// Bytes of weights that a worker claims at once, at the least, when a cell has few rows: reading this much takes about 2 us.
constexpr int64_t kBytesPerClaim = 64 << 10;
constexpr int64_t kFewRows = 4;
// Workers are told one by one what to fetch: with more of them that would take longer than it saves.
constexpr int kFewWorkers = 8;
// Words of scratch for each expert while a row is routed: its score, its key, its mark, and what its group is worth.
constexpr size_t kRouteWords = 4;

inline QuantRows rows_from(const QuantRows& q, int64_t row) {
    return {q.q + row * q.q_stride,
            q.scale + row * q.s_stride,
            q.sum32 + row * q.s_stride,
            q.sum16 + row * 2 * q.s_stride,
            q.outlier + row * q.o_stride,
            q.q_stride,
            q.s_stride,
            q.o_stride};
}

// The same rows, part j of those of `cols` columns that they were quantised in.
inline QuantRows part_of(QuantRows q, int64_t j, int64_t cols) {
    q.q += j * cols;
    q.scale += j * cols / kQuantGroup;
    q.sum32 += j * cols / kQuantGroup;
    q.sum16 += j * cols / kLanes;
    q.outlier += j * outlier_count(cols);
    return q;
}

class StepRun {
public:
    StepRun(Runtime& runtime, Model& model, const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states,
            const StepInput& input, Control& control);
    StepResult run();

private:
    // ---- checks ----
    void check_rows();
    void check_cells();
    static bool writes_logits(const Stage& stage);
    void resolve_pages();
    void check_visible(int32_t kind, int32_t window);
    void resolve_states();
    void reserve();

    // ---- one stage ----
    static const ModelWeight& weight(const Stage& stage, int32_t slot) { return *stage.weights[static_cast<size_t>(slot)]; }
    int64_t cell_size() const { return static_cast<int64_t>(cell_rows_.size()); }
    uint8_t* worker_scratch(int worker) const { return scratch_ + scratch_bytes_ * static_cast<size_t>(worker); }
    void run_cells();
    bool draw();
    void run_stage(size_t index);
    void run_op(const Stage& stage, const Op& op, bool tail);

    // Rows of a buffer in the largest cell of the step.
    int64_t capacity(const Program& program, const Buffer& b) const { return b.by_slots ? capacity_ * program.slots : capacity_; }
    // First rows of the blocks that workers own, and the end: one block each when the cell has rows enough, else one for all.
    std::vector<int64_t> row_blocks() const;
    // Units by owner, where every worker has a block of rows; else dealt out evenly. In a chain they run later, and f lives until then.
    template <typename F> void run_owned(std::vector<int64_t> bounds, int64_t units, F f) {
        if (chained_)
            chain_.push_back({std::move(bounds), std::move(f)});
        else if (bounds.size() == static_cast<size_t>(rt_.threads()) + 1)
            rt_.pool_.run(bounds, f);
        else
            rt_.pool_.run(units, f);
    }
    // Whether an op of a cell whose rows have owners needs of each row no more than what ops before made of the same row.
    bool row_by_row(const Op& op) const;
    void run_chain();
    // f(cell row, worker) for every row of the cell.
    template <typename F> void each_row(F f) {
        const int64_t n = cell_size();
        std::vector<int64_t> bounds;
        for (int64_t row : row_blocks())
            bounds.push_back((row + kRowsPerUnit - 1) / kRowsPerUnit);
        run_owned(std::move(bounds), (n + kRowsPerUnit - 1) / kRowsPerUnit, in_units(n, std::move(f)));
    }
    // f(i, worker) for every row of a buffer: those of the cell, or its slots.
    template <typename F> void each_of(int32_t buffer, F f) {
        if (!program_->buffer(buffer).by_slots)
            return each_row(std::move(f));
        const int64_t n = cell_size() * program_->slots;
        rt_.pool_.run((n + kRowsPerUnit - 1) / kRowsPerUnit, in_units(n, std::move(f)));
    }
    template <typename F> static auto in_units(int64_t n, F f) {
        return [n, f = std::move(f)](int64_t u, int worker) {
            for (int64_t i = u * kRowsPerUnit; i < std::min(n, (u + 1) * kRowsPerUnit); ++i)
                f(i, worker);
        };
    }

    float* residual_row(int64_t i) const { return residual_ + cell_rows_[static_cast<size_t>(i)] * model_.dim; }
    float* buffer_row(int32_t id, int64_t i) const {
        return floats_[static_cast<size_t>(id - kFirstScratch)] + i * program_->buffer(id).width;
    }
    float* source_row(int32_t id, int64_t i) const { return id == kResidual ? residual_row(i) : buffer_row(id, i); }
    int64_t source_width(int32_t id) const { return id == kResidual ? model_.dim : program_->buffer(id).width; }
    float* logits_row(int64_t i) const {
        return in_.logits + int64_t{logits_index_[static_cast<size_t>(cell_rows_[static_cast<size_t>(i)])]} * model_.outputs;
    }
    const QuantRows& quant(int32_t id) const { return ints_[static_cast<size_t>(id - kFirstScratch)]; }
    int32_t segment_of(int64_t i) const { return in_.segment_of_row[cell_rows_[static_cast<size_t>(i)]]; }
    int32_t position_of(int64_t i) const { return in_.positions[cell_rows_[static_cast<size_t>(i)]]; }

    // Row i of an int8 buffer, its equal parts one by one.
    void quantize(const float* x, int32_t id, int64_t i, int32_t parts = 1) const {
        const QuantRows row = rows_from(quant(id), i);
        const int64_t cols = program_->buffer(id).width / parts;
        for (int64_t j = 0; j < parts; ++j) {
            const QuantRows part = part_of(row, j, cols);
            k_.quantize_row(x + j * cols, cols, part.q, part.scale, part.sum32, part.sum16, part.outlier);
        }
    }

    // Where an op that may leave only the quantised form puts its f32 row.
    float* result_row(const Op& op, int64_t i, int worker) const {
        return op.outputs[0] != kNone ? buffer_row(op.outputs[0], i) : reinterpret_cast<float*>(worker_scratch(worker));
    }

    void embed(const Stage& stage, const Op& op);
    void read_embeddings(const ModelWeight& table, const Op& op);
    void rms_norm(const Stage& stage, const Op& op);
    void rope(const Op& op);
    void glu(const Op& op);
    void split(const Op& op);
    void add(const Op& op);
    void scale(const Op& op);
    void concat(const Op& op);

    // ---- step_linear.cpp ----
    LinearArgs linear_args(const Weight& w, const Op& op, int64_t first, int64_t rows, const QuantRows* x) const;
    void compute(const LinearArgs& a, int64_t first_panel, int64_t past_panel, int worker) const {
        (a.x ? k_.linear_int : k_.linear_float)(&a, first_panel, past_panel, worker_scratch(worker));
    }
    void linear(const Stage& stage, const Op& op, bool tail);
    // How the panels of weights side by side are claimed, in order, and where each worker's own claims begin.
    struct Claim {
        size_t weight;
        int64_t begin, end; // panels
    };
    struct Claims {
        std::vector<Claim> all;
        std::vector<int64_t> bounds;
    };
    Claims claims(const std::vector<const Weight*>& weights, size_t blocks) const;
    void shrinking_claims(const std::vector<const Weight*>& weights, Claims& c) const;
    const Claims& few_rows_claims(const std::vector<const Weight*>& weights);
    std::pair<const Stage*, const Op*> next_linear(size_t stage, size_t op) const;
    void expect_weights(const Stage& stage, const Op& op);
    struct LinearJob {
        std::vector<QuantRows> x;     // of each block of rows; args point there
        std::vector<LinearArgs> args; // [block][weight]
    };
    void multiply(LinearJob job, size_t weights);
    void head_linear(const Stage& stage, const Op& op, bool tail);

    // ---- step_experts.cpp ----
    void route(const Stage& stage, const Op& op);
    void sort_slots(const Op& op);
    std::vector<int32_t> chosen_experts(const Op& op) const;
    void gather(const Op& op);
    void expert_linear(const Stage& stage, const Op& op, bool tail);
    void multiply_experts(const Stage& stage, const Op& op, const std::vector<int32_t>& experts);
    void combine(const Op& op);
    void gate(const Stage& stage, const Op& op);

    // ---- step_attend.cpp ----
    // Attention of one tile over pages [first, past): the vectors of up to attend_tile (row, head) pairs of one segment that share a KV head,
    // row by row. `part` is where a tile whose pages are shared out leaves what it found in them.
    struct AttendWork {
        int64_t begin, rows, head, tile; // rows of the cell that are the segment's; which KV head; which tile of theirs
        int32_t first_page, past_page;
        float* part;
    };
    void kv_write(const Op& op);
    template <typename Kernel>
    void attend_each(const Stage& stage, const Op& op, const std::vector<AttendWork>& works, const std::vector<int64_t>& bounds,
                     Kernel&& kernel);
    void attend(const Stage& stage, const Op& op);
    void attend_shared(const Stage& stage, const Op& op, std::vector<AttendWork>& tiles, int64_t pages);

    // ---- step_state.cpp ----
    // Rows of one sequence in a cell, [begin, end), and the recurrent state of a layer before them: null at position 0.
    struct StateRun {
        int64_t begin, end;
        const float* before;
    };
    // Of one kind and segment: the state before the segment, and where the states after so many of its rows go, the last at its end.
    struct SegmentStates {
        const float* before;
        std::vector<std::pair<int64_t, float*>> saves;
    };
    std::vector<StateRun> state_runs(int32_t kind, int32_t layer) const;
    template <typename Save> void save_states(int32_t kind, int32_t layer, const StateRun& run, Save&& save) const;
    void conv(const Stage& stage, const Op& op);
    void unit_norm(const Op& op);
    void delta_gates(const Stage& stage, const Op& op);
    void delta(const Op& op);

    Runtime& rt_;
    Model& model_;
    const std::vector<const PagePool*>& pools_;
    const std::vector<const StatePool*>& state_pools_;
    const StepInput& in_;
    Control& control_;
    const KernelTable& k_;
    const int64_t rows_;
    int64_t capacity_ = 1, max_position_ = 0;
    int32_t segments_ = 0;
    std::vector<std::atomic<int32_t>> poisoned_;
    std::vector<int32_t> logits_index_, logits_map_, cell_rows_;
    // Slots of the cell after its route: where each expert's begin (and the end), the cell row of each, and the slots of each row.
    std::vector<int32_t> expert_begin_, slot_row_, slots_of_row_;
    std::vector<std::vector<std::vector<uint16_t*>>> pages_; // [kind][segment][page]
    std::vector<std::vector<SegmentStates>> states_;         // [kind][segment]
    std::vector<int64_t> segment_begin_;                     // first row of every segment
    float* residual_ = nullptr;
    uint8_t *buffers_ = nullptr, *scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
    struct FewRows {
        std::vector<const Weight*> weights;
        Claims claims;
    };
    FewRows few_rows_[2]; // of the op that runs, and of the next one
    int32_t stage_ = 0;   // that runs
    const Program* program_ = nullptr;
    std::vector<float*> floats_;
    std::vector<QuantRows> ints_;
    std::vector<ThreadPool::Link> chain_; // ops of this stage that have not run yet
    bool chained_ = false;                // the op that is looked at joins them
    std::vector<size_t> first_op_;        // of every stage in op_seconds
    StepResult result_;
};

} // namespace quaff
