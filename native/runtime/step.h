// The executor: runs the cells of one step in order. Order is the caller's policy; memory safety is checked here.
#pragma once
#include "program.h"
#include "sample.h"
#include "threads.h"

#include <atomic>
#include <optional>
#include <span>

namespace quaff {

// Shared with other threads while a step runs.
struct Control {
    std::atomic<bool> cancelled{false};
    std::atomic<int64_t> cells_done{0};
    std::atomic<int64_t> work_done{0}; // multiply-accumulates finished, layers, attention and head together
};

struct Counters { // batch.Counters says what each one counts; head_... are all stages after the last mixer
    int64_t weight_bytes_touched = 0, embedding_bytes_touched = 0, head_bytes_touched = 0, launches = 0, macs = 0, attention_macs = 0,
            state_macs = 0, head_macs = 0, head_rows = 0, kv_bytes_written = 0, expert_rows = 0, experts_touched = 0,
            expert_bytes_touched = 0, weight_bytes_loaded = 0;
};

// Tokens that a step draws itself: what a row's logits give is the token of the segment's next row. Segments have as many rows each; the first rows of
// all of them pass through all stages together, then the second ones, and so on, and rows of a segment leave their logits in the same place.
// Drawing ends for all when a row cannot be drawn from, or one of its segment's `ends` was drawn: what was drawn last stands in no row.
struct Draw {
    struct Segment {
        SampleOptions options; // of whatever position
        std::span<const int32_t> ends;
    };
    std::vector<Segment> segments;
    std::span<int32_t> tokens; // of the step's rows; all but those of first rows are written
};

struct StepInput {
    std::span<const int32_t> tokens, positions, segment_of_row; // one per row; rows of a segment are consecutive, positions ascend by one
    std::vector<std::vector<std::span<const int32_t>>> page_tables; // [kind][segment]
    // [kind][segment]: the slot before the segment (-1: position 0), then pairs (rows, slot): where the state after so many rows goes. Rows
    // ascend; the last pair is the segment's end, and its slot holds the state in between.
    std::vector<std::vector<std::span<const int32_t>>> states;
    std::span<const int32_t> cell_stage, cell_ranges, ranges; // ranges: pairs of row begin, end
    std::span<const int32_t> logits_rows;
    float* logits = nullptr; // [logits_rows][outputs], with draw [segments][outputs]
    bool profile = false;    // time every op
    std::optional<Draw> draw;
};

struct StepResult {
    int64_t cells_done = 0;
    std::vector<int32_t> poisoned;           // per segment
    std::vector<std::vector<int32_t>> drawn; // with draw, per segment: the tokens after its rows
    Counters counters;
    std::vector<double> op_seconds; // with profile: per op of every stage, stages in order, summed over cells
};

// Growing 64-byte aligned memory whose content is not kept.
class Arena {
public:
    uint8_t* reserve(size_t bytes); // throws std::bad_alloc
    size_t bytes() const { return bytes_; }

private:
    std::shared_ptr<uint8_t> memory_;
    size_t bytes_ = 0;
};

class Runtime {
public:
    explicit Runtime(int threads);
    int threads() const { return pool_.size(); }
    size_t scratch_bytes() const;
    uint64_t pulse() const { return pool_.pulse(); }
    // For tests of what ran: launches so far whose rows each worker owned a block of, those that workers came to without a barrier, those whose
    // tiles' pages were shared out, and how often workers were told which weights come next.
    int64_t owned_launches() const { return owned_; }
    int64_t joined_launches() const { return joined_; }
    int64_t shared_launches() const { return shared_; }
    int64_t expected_launches() const { return expected_; }

    // Throws std::invalid_argument before anything is computed, std::bad_alloc when scratch cannot grow, SourceError when weights cannot be read.
    StepResult step(Model& model, const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states,
                    const StepInput& input, Control& control);

private:
    friend class StepRun;
    ThreadPool pool_;
    const int64_t ahead_bytes_; // of linear ops
    Arena residual_, buffers_, workers_, parts_;
    int64_t owned_ = 0, joined_ = 0, shared_ = 0, expected_ = 0;
};

} // namespace quaff
