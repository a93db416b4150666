// Linear ops of the executor: which rows and panels a worker takes.
#include "step_run.h"

#include <algorithm>

namespace quaff {

namespace {

// The height of a tile in panels, and so the least that a worker claims of a layer with many rows.
constexpr int64_t kLeastPanels = 2;

// Bytes that a worker fetches ahead at most: a part of the second-level cache.
constexpr int64_t kExpectedBytes = 256 << 10;

} // namespace

// Panels that a worker claims at once. With rows of his own he takes whole claims; else claims are small enough that workers end together.
int64_t StepRun::panels_per_claim(const Weight& w, bool owned) const {
    const int64_t panels = panel_count(w), threads = rt_.threads();
    if (cell_size() <= kFewRows) {
        const int64_t want = std::min(panels / (4 * threads), kBytesPerClaim / std::max<int64_t>(1, w.panel_bytes));
        return std::max(kFewRowsPanels, want / kFewRowsPanels * kFewRowsPanels);
    }
    return std::clamp<int64_t>(owned ? panels : panels / (8 * threads), kLeastPanels, panels_at_once(w));
}

// Weight `w` for `rows` rows of the op's input from row, or slot, `first` on; x are the same rows quantised. Where to is up to the caller.
LinearArgs StepRun::linear_args(const Weight& w, const Op& op, int64_t first, int64_t rows, const QuantRows* x) const {
    LinearArgs a{};
    a.w = &w;
    a.rows = rows;
    if (op.inputs[0] != kNone && w.scales != Scales::kNone) {
        a.x = x;
    } else {
        a.xf_stride = program_->buffer(op.inputs[1]).width;
        a.xf = buffer_row(op.inputs[1], first);
    }
    return a;
}

void StepRun::linear(const Stage& stage, const Op& op, bool tail) {
    const size_t n = op.weights.size() / 2;
    const int64_t rows = cell_size();
    logits_map_.clear();
    if (std::find(op.outputs.begin(), op.outputs.end(), kLogits) != op.outputs.end()) {
        for (const int32_t row : cell_rows_)
            logits_map_.push_back(logits_index_[static_cast<size_t>(row)]);
    }
    const std::vector<int64_t> bounds = row_blocks();
    std::vector<QuantRows> x(bounds.size() - 1);
    rt_.owned_ += x.size() > 1;
    const Weight* next = nullptr; // few rows have their weights fetched by workers that wait (run_stage)
    if (model_.in_memory && rows > kFewRows)
        if (const auto [s, o] = next_linear(static_cast<size_t>(stage_), static_cast<size_t>(&op - program_->ops.data()) + 1); o)
            next = &weight(*s, o->weights[0]).matrix.w;
    std::vector<LinearArgs> args; // [block][weight]
    for (size_t b = 0; b < x.size(); ++b) {
        if (op.inputs[0] != kNone)
            x[b] = rows_from(quant(op.inputs[0]), bounds[b]);
        for (size_t j = 0; j < n; ++j) {
            LinearArgs a = linear_args(weight(stage, op.weights[j]).matrix.w, op, bounds[b], bounds[b + 1] - bounds[b], &x[b]);
            a.accumulate = op.ints[1] != 0;
            if (const int32_t bias = op.weights[n + j]; bias != kNone)
                a.bias = weight(stage, bias).vector.data();
            if (const int32_t out = op.outputs[j]; out == kResidual) {
                a.out = residual_;
                a.out_stride = model_.dim;
                a.row_map = cell_rows_.data() + bounds[b];
            } else if (out == kLogits) {
                a.out = in_.logits;
                a.out_stride = model_.outputs;
                a.row_map = logits_map_.data() + bounds[b];
            } else {
                a.out = buffer_row(out, bounds[b]);
                a.out_stride = program_->buffer(out).width;
            }
            a.next = j + 1 < n ? &weight(stage, op.weights[j + 1]).matrix.w : next;
            args.push_back(a);
        }
    }
    for (size_t j = 0; j < n; ++j) {
        const PackedWeight& m = weight(stage, op.weights[j]).matrix;
        auto& c = result_.counters;
        (tail ? c.head_bytes_touched : c.weight_bytes_touched) += m.bytes;
        (tail ? c.head_macs : c.macs) += rows * m.w.rows * m.w.cols;
    }
    const int64_t blocks = model_.source && !logits_map_.empty() ? model_.source->head_blocks(stage_) : 0;
    if (blocks == 0)
        return multiply(args, n);
    for (int64_t b = 0; b < blocks; ++b) {
        const WeightSource::Block block = model_.source->head_block(stage_, b);
        std::vector<LinearArgs> part = args;
        for (LinearArgs& a : part) {
            a.w = &block.w;
            a.out += block.first;
            a.bias = a.bias ? a.bias + block.first : nullptr;
        }
        multiply(part, n);
    }
}

StepRun::Claims StepRun::claims(const std::vector<const Weight*>& weights, bool owned) const {
    Claims c{{}, {0}};
    for (const Weight* w : weights) {
        c.panels.push_back(panels_per_claim(*w, owned));
        c.first.push_back(c.first.back() + (panel_count(*w) + c.panels.back() - 1) / c.panels.back());
    }
    return c;
}

// The next linear op from `op` of a stage on, and its stage; after the last stage comes the first one of the next step.
std::pair<const Stage*, const Op*> StepRun::next_linear(size_t stage, size_t op) const {
    const size_t stages = model_.stages.size();
    for (size_t looked = 0; looked <= stages; ++looked, ++stage, op = 0) {
        const Stage& s = model_.stages[stage % stages];
        for (; op < s.program->ops.size(); ++op)
            if (s.program->ops[op].kind == OpKind::kLinear)
                return {&s, &s.program->ops[op]};
    }
    return {nullptr, nullptr};
}

// Every worker his own stretch, or the beginning of it.
void StepRun::expect_weights(const Stage& stage, const Op& op) {
    ++rt_.expected_;
    std::vector<const Weight*> weights;
    for (size_t j = 0; j < op.outputs.size(); ++j)
        weights.push_back(&weight(stage, op.weights[j]).matrix.w);
    const auto [panels, first] = claims(weights, false);
    const int64_t units = first.back(), threads = rt_.threads();
    for (int64_t worker = 0; worker < threads; ++worker) {
        ThreadPool::Span spans[ThreadPool::kSpans];
        int64_t left = kExpectedBytes;
        for (size_t j = 0; j < std::min<size_t>(weights.size(), ThreadPool::kSpans); ++j) {
            const Weight& w = *weights[j];
            const int64_t begin = std::max(units * worker / threads - first[j], int64_t{0}) * panels[j];
            const int64_t end = std::min((units * (worker + 1) / threads - first[j]) * panels[j], panel_count(w));
            if (begin < end)
                spans[j] = {w.data + begin * w.panel_bytes, std::min(left, (end - begin) * w.panel_bytes)};
            left -= spans[j].bytes;
        }
        rt_.pool_.expect(static_cast<int>(worker), spans);
    }
}

// One launch for args[block][weight].
void StepRun::multiply(const std::vector<LinearArgs>& args, size_t n) {
    const size_t blocks = args.size() / n;
    std::vector<const Weight*> weights;
    for (size_t j = 0; j < n; ++j)
        weights.push_back(args[j].w);
    const Claims c = claims(weights, blocks > 1);
    const std::vector<int64_t>&claim = c.panels, &first = c.first;
    const auto one = [&](int64_t u, int worker) {
        const LinearArgs* of_block = args.data() + static_cast<size_t>(u / first[n]) * n;
        u %= first[n];
        size_t j = 0;
        while (u >= first[j + 1])
            ++j;
        const int64_t begin = (u - first[j]) * claim[j], end = std::min(begin + claim[j], panel_count(*of_block[j].w));
        compute(of_block[j], begin, end, worker);
    };
    // With a block for each worker the even stretches of the pool are the blocks.
    rt_.pool_.run(first[n] * static_cast<int64_t>(blocks), one);
}

// Every head's part of the input times a matrix of its own.
void StepRun::head_linear(const Stage& stage, const Op& op, bool tail) {
    const ModelWeight& stack = weight(stage, op.weights[0]);
    const float* bias = op.weights[1] == kNone ? nullptr : weight(stage, op.weights[1]).vector.data();
    const int64_t heads = op.ints[2], rows = stack.shape().rows, cols = stack.shape().cols;
    auto& c = result_.counters;
    (tail ? c.head_bytes_touched : c.weight_bytes_touched) += heads * stack.experts.front().bytes;
    (tail ? c.head_macs : c.macs) += cell_size() * heads * rows * cols;
    const std::vector<int64_t> bounds = row_blocks();
    rt_.owned_ += bounds.size() > 2;
    std::vector<QuantRows> x((bounds.size() - 1) * static_cast<size_t>(heads));
    std::vector<LinearArgs> args; // [block][head]
    for (size_t b = 0; b + 1 < bounds.size(); ++b)
        for (int64_t head = 0; head < heads; ++head) {
            QuantRows& part = x[args.size()];
            LinearArgs a = linear_args(stack.experts[static_cast<size_t>(head)].w, op, bounds[b], bounds[b + 1] - bounds[b], &part);
            if (a.x)
                part = part_of(rows_from(quant(op.inputs[0]), bounds[b]), head, cols);
            else
                a.xf += head * cols;
            a.bias = bias ? bias + head * rows : nullptr;
            a.out = buffer_row(op.outputs[0], bounds[b]) + head * rows;
            a.out_stride = heads * rows;
            args.push_back(a);
        }
    multiply(args, static_cast<size_t>(heads));
}

} // namespace quaff
