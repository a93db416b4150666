#include "program.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quaff {

namespace {

[[noreturn]] void refuse(size_t op, const std::string& what) { throw std::invalid_argument("op " + std::to_string(op) + ": " + what); }

// How many inputs, outputs, ints and floats each kind takes; -1 = checked by hand (linear).
struct Arity {
    const char* name;
    int inputs, outputs, weights, ints, floats;
};
constexpr Arity kArity[] = {
    {"embed", 0, 1, 1, 0, 1},       {"rms_norm", 1, 2, 1, 1, 1}, {"quantize", 1, 1, 0, 1, 0}, {"linear", 2, -1, -1, 2, 0},
    {"rope", 1, 1, 0, 4, 0},        {"kv_write", 2, 0, 0, 5, 0}, {"attend", 1, 1, 1, 7, 2},   {"glu", 2, 2, 0, 1, -1},
    {"add", 1, 1, 0, 0, 1},         {"conv", 1, 2, 2, 5, 0},     {"split", 1, -1, 0, -1, 0},  {"unit_norm", 1, 1, 0, 2, 2},
    {"delta_gates", 2, 2, 2, 0, 0}, {"delta", 5, 1, 0, 7, 0},    {"scale", 1, 1, 0, 0, 2},    {"concat", 2, 1, 0, 1, 0},
    {"head_linear", 2, 1, 2, 3, 0}, {"route", 1, 1, 1, 7, 1},    {"gather", 2, 1, 0, 0, 0},   {"expert_linear", 3, -1, -1, 2, 0},
    {"combine", 2, 1, 0, 1, 0},     {"gate", 2, 1, 1, 0, 0},
};
static_assert(std::size(kArity) == static_cast<size_t>(OpKind::kCount));

bool leaves_state(const Op& op) { return op.kind == OpKind::kKvWrite || op.kind == OpKind::kConv || op.kind == OpKind::kDelta; }

bool fits(int want, size_t have) { return want < 0 || static_cast<size_t>(want) == have; }

class Checker {
public:
    // `parts` are those that an int8 row of each buffer consists of at this point; the op's outputs change them.
    Checker(const Program& program, std::vector<int32_t>& parts, size_t index)
        : program_(program), parts_(parts), op_(program.ops[index]), index_(index) {}

    void check() {
        const auto kind = static_cast<int32_t>(op_.kind);
        if (kind < 0 || kind >= static_cast<int32_t>(OpKind::kCount))
            refuse(index_, "unknown kind " + std::to_string(kind));
        const Arity& a = kArity[kind];
        if (!fits(a.inputs, op_.inputs.size()) || !fits(a.outputs, op_.outputs.size()) || !fits(a.weights, op_.weights.size()) ||
            !fits(a.ints, op_.ints.size()) || !fits(a.floats, op_.floats.size()))
            refuse(index_, std::string(a.name) + " has the wrong number of inputs, outputs, weights, ints or floats");
        const auto& in = op_.inputs;
        const auto& out = op_.outputs;
        const auto& ints = op_.ints;
        switch (op_.kind) {
        case OpKind::kEmbed:
            if (out[0] != kResidual)
                scratch(out[0], false);
            break;
        case OpKind::kRmsNorm:
            source(in[0]);
            need(ints[0] >= 1, "heads must be positive");
            results(out, in[0] == kResidual ? -1 : width(in[0]));
            break;
        case OpKind::kQuantize:
            scratch(in[0], false, by_slots(in[0]));
            scratch(out[0], true, by_slots(in[0]));
            need(width(in[0]) == width(out[0]), "input and output differ in width");
            need(of_head(in[0], ints[0]) % kQuantGroup == 0, "needs parts of a multiple of 32");
            parts(out[0]) = ints[0];
            break;
        case OpKind::kLinear:
            need(ints[0] >= 1 && op_.outputs.size() == static_cast<size_t>(ints[0]) && op_.weights.size() == 2 * op_.outputs.size(),
                 "n outputs need n weights and n biases");
            need(in[0] != kNone || in[1] != kNone, "has no input");
            if (in[0] != kNone)
                scratch(in[0], true);
            need(in[0] == kNone || parts(in[0]) == 1, "needs rows that were quantised as one");
            if (in[1] != kNone)
                scratch(in[1], false);
            for (int32_t o : out)
                if (ints[1])
                    need(o == kResidual, "accumulates into the residual only");
                else if (o != kLogits)
                    scratch(o, false);
            break;
        case OpKind::kRope:
            scratch(in[0], false);
            need(in[0] == out[0], "works in place");
            need(ints[0] >= 0 && ints[1] >= 1 && ints[2] >= 2 && width(in[0]) == int64_t{ints[1]} * ints[2], "heads and width disagree");
            break;
        case OpKind::kKvWrite:
            scratch(in[0], false);
            scratch(in[1], false);
            head_dim(ints[3]);
            head_dim(ints[4]);
            need(ints[2] >= 1 && width(in[0]) == int64_t{ints[2]} * ints[3] && width(in[1]) == int64_t{ints[2]} * ints[4],
                 "heads and width disagree");
            break;
        case OpKind::kAttend:
            scratch(in[0], false);
            scratch(out[0], false);
            need(in[0] != out[0], "cannot work in place");
            need(ints[3] >= 1 && ints[2] >= 1 && ints[2] % ints[3] == 0, "query heads must be a multiple of KV heads");
            head_dim(ints[4]);
            head_dim(ints[6]);
            need(ints[5] >= 0, "window is negative");
            need(width(in[0]) == int64_t{ints[2]} * ints[4] && width(out[0]) == int64_t{ints[2]} * ints[6], "heads and width disagree");
            break;
        case OpKind::kGlu:
            scratch(in[0], false, by_slots(in[0]));
            scratch(in[1], false, by_slots(in[0]));
            need(width(in[0]) == width(in[1]), "gate and up differ in width");
            need(ints[0] >= 0 && ints[0] <= 3, "unknown activation");
            need(op_.floats.size() == (ints[0] == 3 ? 2 : 0), "has floats that its activation does not take");
            results(out, width(in[0]), by_slots(in[0]));
            break;
        case OpKind::kAdd:
            scratch(in[0], false);
            if (out[0] != kResidual)
                scratch(out[0], false);
            need(in[0] != out[0], "cannot add a value to itself");
            break;
        case OpKind::kConv:
            scratch(in[0], false);
            need(ints[2] >= 1 && ints[3] >= 2 && ints[3] <= kMaxTaps, "needs channels, and 2 to 16 taps");
            need(ints[4] == 0 || ints[4] == 1, "has an unknown form");
            need(width(in[0]) == int64_t{ints[2]} * (ints[4] == static_cast<int32_t>(ConvForm::kGated) ? 3 : 1),
                 "channels and width disagree");
            need(in[0] != out[0], "cannot work in place");
            results(out, ints[2]);
            break;
        case OpKind::kSplit: {
            scratch(in[0], false);
            need(out.size() >= 2 && ints.size() == out.size() + 1 && ints[0] >= 1, "needs heads and a width for each of its parts");
            int64_t total = 0;
            for (size_t i = 0; i < out.size(); ++i) {
                scratch(out[i], false);
                need(out[i] != in[0] && ints[i + 1] >= 1 && width(out[i]) == int64_t{ints[0]} * ints[i + 1], "heads and width disagree");
                total += width(out[i]);
            }
            need(total == width(in[0]), "parts are not the whole");
            break;
        }
        case OpKind::kUnitNorm:
            scratch(in[0], false);
            need(in[0] == out[0], "works in place");
            need(ints[0] >= 1 && ints[1] >= 1 && width(in[0]) == int64_t{ints[0]} * ints[1], "heads and width disagree");
            break;
        case OpKind::kDeltaGates:
            scratch(in[0], false);
            scratch(in[1], false);
            need(in == out && in[0] != in[1], "works in place");
            need(width(in[0]) % width(in[1]) == 0, "needs as many decays for every head");
            break;
        case OpKind::kDelta: {
            for (int32_t id : in)
                scratch(id, false);
            scratch(out[0], false);
            need(std::find(in.begin(), in.end(), out[0]) == in.end(), "cannot work in place");
            const int64_t key_heads = ints[2], heads = ints[3], dk = ints[4], dv = ints[5];
            need(key_heads >= 1 && heads >= 1 && heads % key_heads == 0, "value heads must be a multiple of key heads");
            need(dk >= 1 && dv >= 16 && dv % 16 == 0, "value heads must be a multiple of 16 wide");
            need(width(in[0]) == key_heads * dk && width(in[1]) == key_heads * dk && width(in[2]) == heads * dv &&
                     (width(in[3]) == heads || (width(in[3]) == heads * dk && heads == key_heads)) && width(in[4]) == heads &&
                     width(out[0]) == heads * dv,
                 "heads and width disagree");
            break;
        }
        case OpKind::kScale:
            if (in[0] != kLogits)
                source(in[0]);
            if (out[0] != in[0] && out[0] != kLogits)
                scratch(out[0], false);
            need(out[0] == in[0] || in[0] != kLogits, "keeps logits where they are");
            break;
        case OpKind::kConcat:
            scratch(in[0], false);
            scratch(in[1], false);
            scratch(out[0], false);
            need(in[0] != out[0] && in[1] != out[0], "cannot work in place");
            need(of_head(in[0], ints[0]) + of_head(in[1], ints[0]) == of_head(out[0], ints[0]), "inputs and output differ in width");
            break;
        case OpKind::kHeadLinear:
            need(in[0] != kNone || in[1] != kNone, "has no input");
            need(ints[0] == 1 && ints[1] == 0, "has one weight and accumulates nowhere");
            scratch(out[0], false);
            of_head(out[0], ints[2]);
            for (int i = 0; i < 2; ++i)
                if (in[i] != kNone) {
                    scratch(in[i], i == 0);
                    need(of_head(in[i], ints[2]) % (i == 0 ? kQuantGroup : 1) == 0, "needs int8 heads of a multiple of 32");
                    need(i != 0 || parts(in[0]) == ints[2], "needs heads that were quantised one by one");
                }
            break;
        case OpKind::kRoute:
            scratch(in[0], false);
            scratch(out[0], false);
            need(ints[0] >= 1 && ints[1] >= 1 && ints[1] <= ints[0] && ints[1] == program_.slots, "experts used disagree");
            need(width(in[0]) == ints[0] && width(out[0]) == 2 * int64_t{ints[1]}, "experts and width disagree");
            need(ints[2] >= 0 && ints[2] <= 2, "unknown scoring");
            need(ints[4] >= 1 && ints[0] % ints[4] == 0 && ints[5] >= 1 && ints[5] <= ints[4] && ints[6] >= 1 &&
                     ints[6] <= ints[0] / ints[4] && int64_t{ints[1]} <= int64_t{ints[5]} * (ints[0] / ints[4]),
                 "groups disagree with experts");
            need(std::none_of(program_.ops.begin(), program_.ops.begin() + static_cast<std::ptrdiff_t>(index_),
                              [](const Op& op) { return op.kind == OpKind::kRoute; }),
                 "happens once in a program");
            break;
        case OpKind::kGather:
            routing(in[1]);
            scratch(in[0], quantized(out[0]));
            scratch(out[0], quantized(out[0]), true);
            need(parts(in[0]) == 1, "needs rows that were quantised as one");
            parts(out[0]) = 1;
            need(width(in[0]) == width(out[0]), "input and output differ in width");
            break;
        case OpKind::kExpertLinear:
            need(ints[0] >= 1 && op_.outputs.size() == static_cast<size_t>(ints[0]) && op_.weights.size() == 2 * op_.outputs.size(),
                 "n outputs need n weights and n biases");
            need(in[0] != kNone || in[1] != kNone, "has no input");
            routing(in[2]);
            for (int i = 0; i < 2; ++i)
                if (in[static_cast<size_t>(i)] != kNone)
                    scratch(in[static_cast<size_t>(i)], i == 0, true);
            need(in[0] == kNone || parts(in[0]) == 1, "needs rows that were quantised as one");
            for (int32_t o : out)
                scratch(o, false, true);
            break;
        case OpKind::kCombine:
            scratch(in[0], false, true);
            routing(in[1]);
            if (ints[0])
                need(out[0] == kResidual, "accumulates into the residual only");
            else
                scratch(out[0], false);
            need(out[0] == kResidual || width(in[0]) == width(out[0]), "input and output differ in width");
            break;
        case OpKind::kGate:
            scratch(in[0], false);
            scratch(in[1], false);
            need(in[0] == out[0], "works in place");
            break;
        case OpKind::kCount:
            break;
        }
    }

private:
    void need(bool ok, const char* what) const {
        if (!ok)
            refuse(index_, std::string(kArity[static_cast<int32_t>(op_.kind)].name) + " " + what);
    }
    int64_t width(int32_t id) const { return program_.buffer(id).width; }
    bool exists(int32_t id) const { return id >= kFirstScratch && static_cast<size_t>(id - kFirstScratch) < program_.buffers.size(); }
    bool by_slots(int32_t id) const { return exists(id) && program_.buffer(id).by_slots; }
    bool quantized(int32_t id) const { return exists(id) && program_.buffer(id).quantized; }
    void scratch(int32_t id, bool quantized, bool by_slots = false) const {
        need(exists(id), "names a buffer that does not exist");
        need(program_.buffer(id).quantized == quantized, quantized ? "needs an int8 buffer here" : "needs an f32 buffer here");
        need(program_.buffer(id).by_slots == by_slots, by_slots ? "needs a buffer by slots here" : "needs a buffer by rows here");
    }
    int32_t& parts(int32_t id) const { return parts_[static_cast<size_t>(id - kFirstScratch)]; }
    // Slots are those of the last route: the buffer must be what it wrote.
    void routing(int32_t id) const {
        scratch(id, false);
        need(std::any_of(program_.ops.begin(), program_.ops.begin() + static_cast<std::ptrdiff_t>(index_),
                         [id](const Op& op) { return op.kind == OpKind::kRoute && op.outputs[0] == id; }),
             "comes before its route");
    }
    void head_dim(int32_t n) const { need(n >= 16 && n <= kMaxHeadDim && n % 16 == 0, "head size must be 16 to 1024, a multiple of 16"); }
    int64_t of_head(int32_t id, int32_t heads) const {
        need(heads >= 1 && width(id) % heads == 0, "heads and width disagree");
        return width(id) / heads;
    }
    void source(int32_t id) const {
        if (id != kResidual)
            scratch(id, false);
    }
    // The f32 result and its quantised form; one of them at least.
    void results(const std::vector<int32_t>& out, int64_t want, bool by_slots = false) const {
        need(out[0] != kNone || out[1] != kNone, "has no output");
        for (int i = 0; i < 2; ++i) {
            if (out[static_cast<size_t>(i)] == kNone)
                continue;
            scratch(out[static_cast<size_t>(i)], i == 1, by_slots);
            need(want < 0 || width(out[static_cast<size_t>(i)]) == want, "input and output differ in width");
            parts(out[static_cast<size_t>(i)]) = 1;
        }
    }

    const Program& program_;
    std::vector<int32_t>& parts_;
    const Op& op_;
    size_t index_;
};

} // namespace

Program::Program(std::vector<Buffer> b, std::vector<Op> o, int32_t s) : buffers(std::move(b)), ops(std::move(o)), slots(s) {
    if (slots < 1 || slots > kMaxSlots)
        throw std::invalid_argument("a row has 1 to " + std::to_string(kMaxSlots) + " slots, not " + std::to_string(slots));
    for (const Buffer& x : buffers)
        if (x.width < 1 || x.width > (int64_t{1} << 31) || (x.quantized && x.width % kQuantGroup))
            throw std::invalid_argument("a buffer of width " + std::to_string(x.width) +
                                        " cannot be made; int8 rows need a multiple of 32");
    std::vector<int32_t> parts(buffers.size(), 1);
    for (size_t i = 0; i < ops.size(); ++i) {
        Checker(*this, parts, i).check();
        for (size_t b = 0; b < parts.size(); ++b)
            buffers[b].outliers = std::max(buffers[b].outliers, parts[b] * outlier_count(buffers[b].width / parts[b]));
        for (int32_t slot : ops[i].weights) {
            if (slot < kNone || slot > 4096)
                refuse(i, "names an impossible weight slot");
            weight_slots = std::max(weight_slots, slot + 1);
        }
    }
}

int32_t Model::add_rope(std::shared_ptr<RopeTable> table) {
    ropes.push_back(std::move(table));
    return static_cast<int32_t>(ropes.size()) - 1;
}

int32_t Model::add_stage(std::shared_ptr<const Program> program, std::vector<std::shared_ptr<const ModelWeight>> weights) {
    const Program& p = *program;
    if (source)
        throw std::invalid_argument("the model has its source of weights already: stages come before it");
    if (static_cast<int32_t>(weights.size()) != p.weight_slots)
        throw std::invalid_argument("the program has " + std::to_string(p.weight_slots) + " weight slots, " +
                                    std::to_string(weights.size()) + " were given");
    auto width = [&](int32_t id) { return id == kResidual ? dim : id == kLogits ? outputs : p.buffer(id).width; };
    auto matrix = [&](size_t i, int32_t slot, int64_t rows, int64_t cols) -> const Weight& {
        if (slot == kNone)
            refuse(i, "a weight is missing");
        const ModelWeight& w = *weights[static_cast<size_t>(slot)];
        if (w.is_vector() || !w.experts.empty() || w.matrix.w.rows != rows || w.matrix.w.cols != cols)
            refuse(i,
                   "weight slot " + std::to_string(slot) + " is not a " + std::to_string(rows) + " x " + std::to_string(cols) + " matrix");
        return w.matrix.w;
    };
    auto vector = [&](size_t i, int32_t slot, int64_t size) {
        const ModelWeight& w = *weights[static_cast<size_t>(slot)];
        if (!w.is_vector() || static_cast<int64_t>(w.vector.size()) != size)
            refuse(i, "weight slot " + std::to_string(slot) + " is not a vector of " + std::to_string(size));
    };
    for (size_t i = 0; i < p.ops.size(); ++i) {
        const Op& op = p.ops[i];
        switch (op.kind) {
        case OpKind::kEmbed:
            matrix(i, op.weights[0], vocab, width(op.outputs[0]));
            break;
        case OpKind::kRmsNorm: {
            const int64_t total = width(op.inputs[0]);
            if (total % op.ints[0] || op.weights[0] == kNone)
                refuse(i, "rms_norm width is not a multiple of its heads, or has no weight");
            vector(i, op.weights[0], total / op.ints[0]);
            for (int32_t out : op.outputs)
                if (out != kNone && width(out) != total)
                    refuse(i, "rms_norm input and output differ in width");
            break;
        }
        case OpKind::kLinear: {
            const size_t n = op.outputs.size();
            for (size_t j = 0; j < n; ++j) {
                const int64_t cols = op.inputs[0] != kNone ? width(op.inputs[0]) : width(op.inputs[1]);
                const Weight& w = matrix(i, op.weights[j], width(op.outputs[j]), cols);
                const bool integer = w.scales != Scales::kNone;
                if ((integer ? op.inputs[0] == kNone && op.inputs[1] == kNone : op.inputs[1] == kNone))
                    refuse(i, "float weights need the f32 input");
                if (op.inputs[0] != kNone && op.inputs[1] != kNone && width(op.inputs[0]) != width(op.inputs[1]))
                    refuse(i, "linear inputs differ in width");
                if (op.weights[n + j] != kNone)
                    vector(i, op.weights[n + j], w.rows);
            }
            break;
        }
        case OpKind::kRope:
            if (op.ints[0] >= static_cast<int32_t>(ropes.size()) || ropes[static_cast<size_t>(op.ints[0])]->rotary_dim() > op.ints[2])
                refuse(i, "rope names a table that does not exist or is wider than a head");
            break;
        case OpKind::kAdd:
            if (width(op.inputs[0]) != width(op.outputs[0]))
                refuse(i, "add input and output differ in width");
            break;
        case OpKind::kConv: {
            const Weight& w = matrix(i, op.weights[0], op.ints[2], op.ints[3]);
            if (w.codes != Codes::kF32)
                refuse(i, "the taps of a convolution must be F32");
            if (op.weights[1] != kNone)
                vector(i, op.weights[1], op.ints[2]);
            break;
        }
        case OpKind::kDeltaGates:
            if (op.weights[0] == kNone || op.weights[1] == kNone)
                refuse(i, "a weight is missing");
            vector(i, op.weights[0], width(op.inputs[1]));
            vector(i, op.weights[1], width(op.inputs[0]));
            break;
        case OpKind::kScale:
            if (width(op.inputs[0]) != width(op.outputs[0]))
                refuse(i, "scale input and output differ in width");
            break;
        case OpKind::kHeadLinear: {
            const int64_t heads = op.ints[2], rows = width(op.outputs[0]) / heads;
            const int64_t cols = width(op.inputs[0] != kNone ? op.inputs[0] : op.inputs[1]) / heads;
            if (op.weights[0] == kNone)
                refuse(i, "a weight is missing");
            const ModelWeight& w = *weights[static_cast<size_t>(op.weights[0])];
            if (static_cast<int64_t>(w.experts.size()) != heads || w.shape().rows != rows || w.shape().cols != cols)
                refuse(i, "weight slot " + std::to_string(op.weights[0]) + " is not " + std::to_string(heads) + " matrices of " +
                              std::to_string(rows) + " x " + std::to_string(cols));
            if (op.inputs[1] == kNone && w.shape().scales == Scales::kNone)
                refuse(i, "float weights need the f32 input");
            if (op.inputs[0] != kNone && op.inputs[1] != kNone && width(op.inputs[0]) != width(op.inputs[1]))
                refuse(i, "inputs of heads differ in width");
            if (op.weights[1] != kNone)
                vector(i, op.weights[1], heads * rows);
            break;
        }
        case OpKind::kAttend:
            if (op.weights[0] != kNone)
                vector(i, op.weights[0], op.ints[2]);
            break;
        case OpKind::kRoute:
            if (op.weights[0] != kNone)
                vector(i, op.weights[0], op.ints[0]);
            break;
        case OpKind::kExpertLinear: {
            const size_t n = op.outputs.size();
            const int64_t experts = op.ints[1], cols = width(op.inputs[0] != kNone ? op.inputs[0] : op.inputs[1]);
            if (op.inputs[0] != kNone && op.inputs[1] != kNone && width(op.inputs[0]) != width(op.inputs[1]))
                refuse(i, "inputs of experts differ in width");
            const auto route = std::find_if(p.ops.begin(), p.ops.end(), [](const Op& o) { return o.kind == OpKind::kRoute; });
            if (route == p.ops.end() || route->ints[0] != experts)
                refuse(i, "experts disagree with the route");
            for (size_t j = 0; j < n; ++j) {
                if (op.weights[j] == kNone)
                    refuse(i, "a weight is missing");
                const ModelWeight& w = *weights[static_cast<size_t>(op.weights[j])];
                const int64_t rows = width(op.outputs[j]);
                if (static_cast<int64_t>(w.experts.size()) != experts || w.shape().rows != rows || w.shape().cols != cols)
                    refuse(i, "weight slot " + std::to_string(op.weights[j]) + " is not " + std::to_string(experts) + " matrices of " +
                                  std::to_string(rows) + " x " + std::to_string(cols));
                if (op.inputs[1] == kNone && w.shape().scales == Scales::kNone)
                    refuse(i, "float weights need the f32 input");
                if (op.weights[n + j] != kNone)
                    vector(i, op.weights[n + j], experts * rows);
            }
            break;
        }
        case OpKind::kCombine:
            if (op.outputs[0] == kResidual && width(op.inputs[0]) != dim)
                refuse(i, "combine input is not as wide as the residual");
            break;
        case OpKind::kGate:
            if (op.weights[0] == kNone)
                refuse(i, "a weight is missing");
            vector(i, op.weights[0], width(op.inputs[1]));
            break;
        default:
            break;
        }
    }
    if (std::any_of(p.ops.begin(), p.ops.end(), leaves_state))
        last_mixer = stages.size();
    in_memory = in_memory && std::all_of(weights.begin(), weights.end(), [](const auto& w) { return w->in_memory(); });
    stages.push_back({std::move(program), std::move(weights)});
    return static_cast<int32_t>(stages.size()) - 1;
}

void Model::check_pools(const std::vector<const PagePool*>& pools, const std::vector<const StatePool*>& states) const {
    for (const Stage& s : stages)
        for (size_t i = 0; i < s.program->ops.size(); ++i) {
            const Op& op = s.program->ops[i];
            if (op.kind == OpKind::kConv || op.kind == OpKind::kDelta) {
                const int32_t kind = op.ints[0], layer = op.ints[1];
                const int64_t size =
                    op.kind == OpKind::kConv ? int64_t{op.ints[3] - 1} * op.ints[2] : int64_t{op.ints[3]} * op.ints[4] * op.ints[5];
                if (kind < 0 || kind >= static_cast<int32_t>(states.size()) || layer < 0 ||
                    layer >= states[static_cast<size_t>(kind)]->layers() || states[static_cast<size_t>(kind)]->size() != size)
                    refuse(i, "no state pool of kind " + std::to_string(kind) + " fits layer " + std::to_string(layer));
            }
            if (op.kind != OpKind::kKvWrite && op.kind != OpKind::kAttend)
                continue;
            const bool attend = op.kind == OpKind::kAttend;
            const int32_t kind = op.ints[0], layer = op.ints[1], heads = op.ints[attend ? 3 : 2], dim = op.ints[attend ? 4 : 3],
                          value_dim = op.ints[attend ? 6 : 4];
            const PagePool* pool = kind >= 0 && kind < static_cast<int32_t>(pools.size()) ? pools[static_cast<size_t>(kind)] : nullptr;
            if (!pool || layer < 0 || layer >= pool->layers() || pool->kv_heads() != heads || pool->dim() != dim ||
                pool->value_dim() != value_dim)
                refuse(i, "no page pool of kind " + std::to_string(kind) + " fits layer " + std::to_string(layer));
        }
}

} // namespace quaff
