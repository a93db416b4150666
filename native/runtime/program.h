// Ops of one stage kind, and a model as a list of stages. The meaning of every op stands in src/quaff/graph/program.py.
#pragma once
#include "pack/pack.h"
#include "pages.h"
#include "rope.h"
#include "states.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace quaff {

enum class OpKind : int32_t {
    kEmbed = 0,
    kRmsNorm,
    kQuantize,
    kLinear,
    kRope,
    kKvWrite,
    kAttend,
    kGlu,
    kAdd,
    kConv,
    kSplit,
    kUnitNorm,
    kDeltaGates,
    kDelta,
    kScale,
    kConcat,
    kHeadLinear,
    kRoute,
    kGather,
    kExpertLinear,
    kCombine,
    kGate,
    kCount
};

// What a convolution does with its sum: C * sum, its input being [B | C | x] and B*x what it sums; or silu(sum).
enum class ConvForm : int32_t { kGated = 0, kSilu };

inline constexpr int32_t kMaxSlots = 256; // experts of one row
inline constexpr int32_t kResidual = 0, kLogits = 1, kFirstScratch = 2, kNone = -1;

inline constexpr int32_t kMaxTaps = 16;

struct Op {
    OpKind kind;
    std::vector<int32_t> inputs, outputs, weights, ints;
    std::vector<float> floats;
};

struct Buffer {
    int64_t width;
    bool quantized;       // int8 rows with scales and sums instead of f32
    bool by_slots;        // as many rows for every row of the cell as it has chosen experts
    int64_t outliers = 0; // of an int8 row at most: what the ops ask for
};

// Checked when built: buffer ids, kinds, counts and widths fit together. All throw std::invalid_argument.
struct Program {
    Program(std::vector<Buffer> buffers, std::vector<Op> ops, int32_t slots = 1);
    const Buffer& buffer(int32_t id) const { return buffers[static_cast<size_t>(id - kFirstScratch)]; }

    std::vector<Buffer> buffers; // ids kFirstScratch and up
    std::vector<Op> ops;
    int32_t slots; // experts that a row of the cell chooses
    int32_t weight_slots = 0;
};

// A packed matrix, a stack of experts' matrices (each by itself, so that one can be read without the others), or a float vector.
struct ModelWeight {
    PackedWeight matrix;
    std::vector<float> vector;
    std::vector<PackedWeight> experts; // all of one shape and type
    bool is_vector() const { return matrix.bytes == 0 && experts.empty(); }
    bool in_memory() const { return is_vector() || (experts.empty() ? matrix : experts.front()).storage; }
    const Weight& shape() const { return experts.empty() ? matrix.w : experts.front().w; }
};

struct Stage {
    std::shared_ptr<const Program> program;
    std::vector<std::shared_ptr<const ModelWeight>> weights;
};

class WeightSource;

class Model {
public:
    Model(int64_t dim, int64_t vocab, int64_t outputs) : dim(dim), vocab(vocab), outputs(outputs) {}
    int32_t add_rope(std::shared_ptr<RopeTable> table);
    int32_t add_stage(std::shared_ptr<const Program> program, std::vector<std::shared_ptr<const ModelWeight>> weights); // checks shapes
    // Every op that touches pages or recurrent state finds its pool.
    void check_pools(const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states) const;

    const int64_t dim, vocab, outputs; // outputs: width of a row of logits, the vocabulary's size unless the head makes something else
    std::vector<std::shared_ptr<RopeTable>> ropes;
    std::vector<Stage> stages;
    std::shared_ptr<WeightSource> source; // of weights that are not in memory
    bool in_memory = true;                // all weights are
    size_t last_mixer = 0;                // last stage that leaves state behind: later ones run only for rows whose logits are wanted
};

} // namespace quaff
