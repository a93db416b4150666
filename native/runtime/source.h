// Weights that stay in their files and come when a stage needs them. A unit is what is loaded together: the matrices of one stage, a block of
// rows of the head, or some experts that the rows of a cell chose. Slots hold units; while one is used the next ones are read and packed.
#pragma once
#include "file.h"
#include "loader.h"
#include "program.h"

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace quaff {

// Where the matrices of a weight lie: number m from offset + m * matrix_stride, its rows of ggml blocks row_stride bytes from one to the next;
// or, packed, its panels.
struct WeightPlace {
    int32_t file;
    int64_t offset, matrix_stride, row_stride;
    bool packed;
};

// What is held in memory. Stages in `pinned`, experts included, are read at their first use and kept; with `pin_tables` embedding tables too,
// else their rows are read token by token. A head of more rows than `head_rows`, a multiple of 16, is cut into blocks.
struct StreamPlan {
    int32_t slots;
    std::vector<int32_t> pinned;
    bool pin_tables;
    int64_t head_rows;
    int64_t expert_bytes; // of experts that are in memory at once: half of it computes while half is read
};

// Sums since the source was made. A unit's bytes count when it is used first, not when it is read: `read_bytes` counts the latter.
struct StreamCounters {
    int64_t disk_bytes = 0, read_bytes = 0, passes = 0, prefetch_hits = 0, prefetch_misses = 0;
    double wait_seconds = 0, compute_seconds = 0, read_seconds = 0, pack_seconds = 0;
};

class WeightSource {
public:
    WeightSource(std::vector<std::shared_ptr<WeightFile>> files, int readers, int64_t buffer_bytes);
    ~WeightSource();

    // A weight without panels, matrices == 0 for one that is no stack. Throws std::invalid_argument.
    std::shared_ptr<ModelWeight> add(std::string name, int32_t ggml_type, int64_t matrices, int64_t rows, int64_t cols,
                                     const WeightPlace& place);
    // Once, after all weights and stages: lays out units and takes the memory that `memory_bytes` tells from then on. Throws
    // std::invalid_argument, also when a buffer of a reader is too small.
    void bind(const std::vector<Stage>& stages, const StreamPlan& plan);
    int64_t memory_bytes() const { return memory_bytes_; }
    StreamCounters counters() const; // any thread
    void stop();                     // ends the readers: steps fail from then on

    // ---- of a step, one at a time. All but `end` may throw SourceError and Cancelled. ----
    void begin(std::span<const int32_t> cell_stages, const std::atomic<bool>& cancelled);
    void enter(int32_t stage);     // its matrices are there, but for those of the head, experts and tables; the stage before is left
    void end(bool whole) noexcept; // after a whole step what the next pass begins with is read ahead

    // A head that is cut into blocks: rows of it from `first` on.
    struct Block {
        Weight w;
        int64_t first;
    };
    int64_t head_blocks(int32_t stage) const; // 0: `enter` brings all of it
    Block head_block(int32_t stage, int64_t block);

    // The stage's cell has chosen these experts, ascending. Then every op asks, until it gets none, for the next ones that are there.
    bool streams_experts(int32_t stage) const;
    void choose_experts(int32_t stage, const std::vector<int32_t>& chosen);
    const std::vector<int32_t>* next_experts(const Op& op);

    // Rows of an embedding table as f32: (token, where to), tokens ascending and each once.
    bool reads_rows(const ModelWeight& table) const; // false: it is in memory
    void read_rows(const ModelWeight& table, const std::vector<std::pair<int32_t, float*>>& rows);

private:
    // Experts are loaded in groups of about this size, so that the first ones compute while others are read.
    static constexpr int64_t kGroupBytes = int64_t{16} << 20;

    struct Tensor {
        std::string name;
        std::shared_ptr<ModelWeight> weight;
        WeightPlace place;
        int32_t ggml_type;
        int64_t rows, cols, row_bytes, panel_bytes, matrix_bytes; // matrix_bytes: packed
        bool kept = false;                                        // in memory once it was read
        bool table = false;                                       // rows of it are read by token
        int64_t matrices() const { return static_cast<int64_t>(std::max<size_t>(1, weight->experts.size())); }
        PackedWeight& matrix(int64_t m) const { return weight->experts.empty() ? weight->matrix : weight->experts[static_cast<size_t>(m)]; }
    };
    // A range of a file and where it goes in the memory of its load: `rows` rows to pack, or panels as they are (rows == 0).
    struct Piece {
        const Tensor* tensor;
        int64_t offset, bytes, rows, to;
    };
    // One matrix, or a block of its rows, and where it lies in the memory of its unit.
    struct Part {
        const Tensor* tensor;
        int64_t matrix, first_row, rows, at;
    };
    struct Unit {
        std::vector<Part> parts;
        std::vector<Piece> pieces;
        int64_t bytes = 0;
        bool kept = false, used = false;
        uint8_t* home = nullptr;    // of a kept unit
        std::shared_ptr<Load> load; // of a kept unit, once it was asked for
    };
    struct Slot {
        uint8_t* memory = nullptr;
        int32_t unit = -1;
        std::shared_ptr<Load> load;
    };
    // Memory of the experts of one op of a pinned stage: where the first matrix of each weight lies, and which experts are there.
    struct Home {
        std::vector<int64_t> at;
        int64_t bytes = 0;
        uint8_t* memory = nullptr;
        std::vector<bool> loaded;
    };
    struct StageUnits {
        const Stage* stage = nullptr;
        int32_t tables = -1, matrices = -1;
        std::vector<int32_t> head;
        std::vector<const Op*> expert_ops;
        bool experts_kept = false;
        std::vector<Home> homes; // by expert op
    };
    // Experts of one op that are loaded together.
    struct Group {
        const Op* op = nullptr;
        Home* home = nullptr;
        std::vector<int32_t> experts;
        Unit unit;
        uint8_t* memory = nullptr;
        std::shared_ptr<Load> load;
    };

    const Tensor& tensor(const ModelWeight& weight) const { return *by_weight_.at(&weight); }
    // At the end of a reader's buffer, for one row of a table as the panel that it is multiplied from.
    static int64_t panel_room(const Tensor& t) { return t.place.packed ? 0 : (t.panel_bytes + 63) / 64 * 64; }
    void allocate();
    void lay_out(Unit& unit, std::vector<Part> parts, int64_t near) const;
    void cut(Unit& unit, const Part& part) const;
    int32_t add_unit(std::vector<Part> parts, bool kept);
    void bind_stage(int32_t index, const Stage& stage, const StreamPlan& plan);
    void bind_experts(const StreamPlan& plan);
    int64_t expert_bytes(const StageUnits& of, const Op& op) const;
    void lay_out_experts(const StageUnits& of, Group& group) const;

    std::shared_ptr<Load> load(const Unit& unit, uint8_t* memory, bool urgent);
    int64_t read(const Tensor& t, int64_t offset, int64_t bytes, uint8_t* to);
    int64_t fetch(const Piece& piece, uint8_t* memory, uint8_t* buffer);
    int64_t fetch_rows(const Tensor& t, const std::vector<std::pair<int32_t, float*>>& rows, size_t begin, size_t end, uint8_t* buffer);
    void pack(const Tensor& t, const uint8_t* blocks, int64_t rows, uint8_t* panels) const;

    void fill();
    uint8_t* acquire(int32_t unit);
    void wait(Load& load, bool prefetched);
    void use(const Unit& unit, uint8_t* memory) const;
    void forget(const Unit& unit) const;
    void queue_experts();
    void leave_experts();
    void leave_unit();

    std::vector<std::shared_ptr<WeightFile>> files_;
    std::vector<std::unique_ptr<Tensor>> tensors_;
    std::unordered_map<const ModelWeight*, Tensor*> by_weight_;
    std::vector<Stage> stages_;
    std::vector<StageUnits> of_stage_;
    std::vector<Unit> units_;
    std::vector<int32_t> cycle_; // units that share the slots, in the order of a pass
    std::vector<Slot> slots_;
    std::vector<uint8_t*> buffers_; // of experts
    int64_t buffer_bytes_ = 0;
    std::shared_ptr<uint8_t> memory_;
    int64_t memory_bytes_ = 0;
    bool bound_ = false;

    // of the step
    const std::atomic<bool>* cancelled_ = nullptr;
    std::vector<int32_t> sequence_;  // units, in the order in which the step uses them
    size_t cursor_ = 0;              // the one in use, or the next
    int32_t stage_ = -1, unit_ = -1; // in use
    std::vector<Group> groups_;
    size_t group_ = 0, queued_ = 0; // the next to be used, the next to be loaded
    bool group_used_ = false;       // group_ is in use
    double began_ = 0, waited_ = 0;

    mutable std::mutex counters_mutex_;
    StreamCounters counters_;
    BusyClock clock_;
    std::atomic<int64_t> pack_ns_{0}, read_bytes_{0};
    std::unique_ptr<Loader> loader_; // last: its threads end before what they use
};

} // namespace quaff
