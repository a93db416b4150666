// Linear ops of the executor: which rows and panels a worker takes.
#include "step_run.h"

#include <algorithm>
#include <memory>

namespace quaff {

namespace {

// The height of a tile in panels, and so the least that a worker claims of a layer with many rows.
constexpr int64_t kLeastPanels = 2;

// What a worker claims of what is left of his stretch when there are few rows: a third.
constexpr int64_t kClaimShare = 3;

// Bytes that a worker fetches ahead at most: a part of the second-level cache.
constexpr int64_t kExpectedBytes = 256 << 10;

} // namespace

// Weight `w` for `rows` rows of the op's input from row, or slot, `first` on; x are the same rows quantised. Where to is up to the caller.
LinearArgs StepRun::linear_args(const Weight& w, const Op& op, int64_t first, int64_t rows, const QuantRows* x) const {
    LinearArgs a{};
    a.w = &w;
    a.rows = rows;
    a.ahead_bytes = rt_.ahead_bytes_;
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
    LinearJob job{std::vector<QuantRows>(bounds.size() - 1), {}};
    rt_.owned_ += job.x.size() > 1;
    const Weight* next = nullptr; // few rows have their weights fetched by workers that wait (run_stage)
    if (model_.in_memory && rows > kFewRows)
        if (const auto [s, o] = next_linear(static_cast<size_t>(stage_), static_cast<size_t>(&op - program_->ops.data()) + 1); o)
            next = &weight(*s, o->weights[0]).matrix.w;
    for (size_t b = 0; b < job.x.size(); ++b) {
        if (op.inputs[0] != kNone)
            job.x[b] = rows_from(quant(op.inputs[0]), bounds[b]);
        for (size_t j = 0; j < n; ++j) {
            LinearArgs a = linear_args(weight(stage, op.weights[j]).matrix.w, op, bounds[b], bounds[b + 1] - bounds[b], &job.x[b]);
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
            job.args.push_back(a);
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
        return multiply(std::move(job), n);
    for (int64_t b = 0; b < blocks; ++b) {
        const WeightSource::Block block = model_.source->head_block(stage_, b);
        LinearJob part{{}, job.args};
        for (LinearArgs& a : part.args) {
            a.w = &block.w;
            a.out += block.first;
            a.bias = a.bias ? a.bias + block.first : nullptr;
        }
        multiply(std::move(part), n);
    }
}

// Many rows: with rows of his own a worker takes whole claims; else claims are small enough that workers end together.
StepRun::Claims StepRun::claims(const std::vector<const Weight*>& weights, size_t blocks) const {
    Claims c;
    const int64_t threads = rt_.threads();
    for (size_t j = 0; j < weights.size(); ++j) {
        const int64_t panels = panel_count(*weights[j]);
        const int64_t claim = std::clamp<int64_t>(blocks > 1 ? panels : panels / (8 * threads), kLeastPanels, panels_at_once(*weights[j]));
        for (int64_t begin = 0; begin < panels; begin += claim)
            c.all.push_back({j, begin, std::min(begin + claim, panels)});
    }
    c.bounds = rt_.pool_.even(static_cast<int64_t>(c.all.size() * blocks));
    return c;
}

// The claims of an op are wanted when it is next, and when it runs. Streamed weights may be others at the same place.
const StepRun::Claims& StepRun::few_rows_claims(const std::vector<const Weight*>& weights) {
    for (const FewRows& known : few_rows_)
        if (model_.in_memory && known.weights == weights)
            return known.claims;
    std::swap(few_rows_[0], few_rows_[1]);
    few_rows_[0].weights = weights;
    shrinking_claims(weights, few_rows_[0].claims);
    return few_rows_[0].claims;
}

// Few rows: every worker an even stretch of the bytes, of which he claims a share of what is left each time. What he reads at once is long, since every
// claim costs about 0.6 us, and what he reads last is short, so that workers end together.
void StepRun::shrinking_claims(const std::vector<const Weight*>& weights, Claims& c) const {
    c.all.clear();
    c.bounds.clear();
    int64_t total = 0, past = 0;
    for (const Weight* w : weights)
        total += panel_count(*w) * w->panel_bytes;
    size_t j = 0;
    int64_t panel = 0;
    for (int64_t worker = 0, threads = rt_.threads(); worker < threads; ++worker) {
        c.bounds.push_back(static_cast<int64_t>(c.all.size()));
        const int64_t end = total * (worker + 1) / threads;
        while (past < end) {
            const Weight& w = *weights[j];
            const int64_t left = end - past, bytes = std::min(left, std::max(left / kClaimShare, kBytesPerClaim));
            const int64_t count = std::clamp<int64_t>(bytes / std::max<int64_t>(1, w.panel_bytes), 1, panel_count(w) - panel);
            c.all.push_back({j, panel, panel + count});
            past += count * w.panel_bytes, panel += count;
            if (panel == panel_count(w))
                ++j, panel = 0;
        }
    }
    c.bounds.push_back(static_cast<int64_t>(c.all.size()));
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
    const Claims& c = few_rows_claims(weights);
    for (size_t worker = 0; worker + 1 < c.bounds.size(); ++worker) {
        ThreadPool::Span spans[ThreadPool::kSpans];
        int64_t left = kExpectedBytes;
        int span = -1;
        size_t of = weights.size();
        for (int64_t i = c.bounds[worker]; i < c.bounds[worker + 1] && left > 0; ++i) {
            const Claim& claim = c.all[static_cast<size_t>(i)];
            const Weight& w = *weights[claim.weight];
            if (claim.weight != of) {
                if (++span == ThreadPool::kSpans)
                    break;
                spans[span].begin = w.data + claim.begin * w.panel_bytes;
                of = claim.weight;
            }
            const int64_t bytes = std::min(left, (claim.end - claim.begin) * w.panel_bytes);
            spans[span].bytes += bytes, left -= bytes;
        }
        rt_.pool_.expect(static_cast<int>(worker), spans);
    }
}

// One launch for args[block][weight].
void StepRun::multiply(LinearJob job, size_t n) {
    const size_t blocks = job.args.size() / n;
    std::vector<const Weight*> weights;
    for (size_t j = 0; j < n; ++j)
        weights.push_back(job.args[j].w);
    const auto unit = [this, n](const LinearJob& job, const Claims& c, int64_t u, int worker) {
        const Claim& claim = c.all[static_cast<size_t>(u) % c.all.size()];
        compute(job.args[static_cast<size_t>(u) / c.all.size() * n + claim.weight], claim.begin, claim.end, worker);
    };
    if (cell_size() <= kFewRows) {
        const Claims& c = few_rows_claims(weights);
        return rt_.pool_.run(c.bounds, [&](int64_t u, int worker) { unit(job, c, u, worker); });
    }
    // With a block for each worker their stretches are the blocks.
    const auto both = std::make_shared<const std::pair<LinearJob, Claims>>(std::move(job), claims(weights, blocks));
    const std::vector<int64_t>& bounds = both->second.bounds;
    run_owned(bounds, bounds.back(), [both, unit](int64_t u, int worker) { unit(both->first, both->second, u, worker); });
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
    LinearJob job{std::vector<QuantRows>((bounds.size() - 1) * static_cast<size_t>(heads)), {}};
    for (size_t b = 0; b + 1 < bounds.size(); ++b)
        for (int64_t head = 0; head < heads; ++head) {
            QuantRows& part = job.x[job.args.size()];
            LinearArgs a = linear_args(stack.experts[static_cast<size_t>(head)].w, op, bounds[b], bounds[b + 1] - bounds[b], &part);
            if (a.x)
                part = part_of(rows_from(quant(op.inputs[0]), bounds[b]), head, cols);
            else
                a.xf += head * cols;
            a.bias = bias ? bias + head * rows : nullptr;
            a.out = buffer_row(op.outputs[0], bounds[b]) + head * rows;
            a.out_stride = heads * rows;
            job.args.push_back(a);
        }
    multiply(std::move(job), static_cast<size_t>(heads));
}

} // namespace quaff
