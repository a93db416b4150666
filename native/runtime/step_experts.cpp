// Experts of the executor (NUMERICS 18): rows choose experts, are sorted by them, and every chosen expert multiplies its rows together.
#include "step_run.h"

namespace quaff {

namespace {

enum Mark : int32_t { kFree, kChosen, kExcluded };

// Marks the `count` best of those that are free: by value descending, then index ascending. Something is chosen even among NaN.
void mark_best(const float* value, int32_t* mark, int64_t n, int64_t count) {
    for (; count > 0; --count) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; ++e)
            if (mark[e] == kFree && (best < 0 || value[e] > value[best]))
                best = e;
        mark[best] = kChosen;
    }
}

float ascending_sum(const float* x, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i)
        sum = sum + x[i];
    return sum;
}

// Excludes all experts but those of the best groups; a group is worth the sum of its `top` best keys, added from the best one on.
void exclude_groups(const float* key, int32_t* mark, float* worth, int64_t experts, int64_t groups, int64_t used, int64_t top) {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
        int32_t* in_group = mark + g * size;
        float sum = 0.0f;
        for (int64_t n = 0; n < top; ++n) {
            int64_t best = -1;
            for (int64_t e = 0; e < size; ++e)
                if (in_group[e] == kFree && (best < 0 || key[g * size + e] > key[g * size + best]))
                    best = e;
            in_group[best] = kExcluded;
            sum = sum + key[g * size + best];
        }
        worth[g] = sum;
    }
    std::fill(mark, mark + experts, kExcluded);
    for (int64_t n = 0; n < used; ++n) {
        int64_t best = -1;
        for (int64_t g = 0; g < groups; ++g)
            if (mark[g * size] == kExcluded && (best < 0 || worth[g] > worth[best]))
                best = g;
        std::fill(mark + best * size, mark + (best + 1) * size, kFree);
    }
}

// Smallest sum that weights are divided by: a bias may choose experts whose scores are all zero.
constexpr float kLeastSum = 0x1p-64f;

} // namespace

void StepRun::route(const Stage& stage, const Op& op) {
    const int64_t experts = op.ints[0], used = op.ints[1], groups = op.ints[4];
    const bool softmax = op.ints[2] == 0, sigmoid = op.ints[2] == 1, of_chosen = op.ints[2] == 2;
    const float* bias = op.weights[0] == kNone ? nullptr : weight(stage, op.weights[0]).vector.data();
    each_row([&](int64_t i, int worker) {
        const float *logits = buffer_row(op.inputs[0], i), *scores = logits, *key = logits;
        auto* made = reinterpret_cast<float*>(worker_scratch(worker));
        float *keys = made + experts, *worth = keys + experts;
        auto* mark = reinterpret_cast<int32_t*>(worth + experts);
        if (softmax) {
            k_.probabilities(logits, k_.row_max(logits, experts), made, experts);
            const float sum = ascending_sum(made, experts);
            for (int64_t e = 0; e < experts; ++e)
                made[e] = made[e] / sum;
            scores = made;
        } else if (sigmoid) {
            k_.sigmoid_row(logits, made, experts);
            scores = key = made;
        }
        if (bias) {
            for (int64_t e = 0; e < experts; ++e)
                keys[e] = scores[e] + bias[e];
            key = keys;
        }
        std::fill(mark, mark + experts, kFree);
        if (groups > 1)
            exclude_groups(key, mark, worth, experts, groups, op.ints[5], op.ints[6]);
        mark_best(key, mark, experts, used);
        float *ids = buffer_row(op.outputs[0], i), *w = ids + used;
        for (int64_t e = 0, j = 0; e < experts; ++e)
            if (mark[e] == kChosen) {
                ids[j] = static_cast<float>(e);
                w[j++] = scores[e];
            }
        if (of_chosen)
            k_.probabilities(w, k_.row_max(w, used), w, used);
        if (of_chosen || op.ints[3]) {
            const float sum = ascending_sum(w, used), divisor = sum > kLeastSum ? sum : kLeastSum;
            for (int64_t j = 0; j < used; ++j)
                w[j] = w[j] / divisor;
        }
        for (int64_t j = 0; j < used; ++j)
            w[j] = w[j] * op.floats[0];
    });
    sort_slots(op);
    if (model_.source && model_.source->streams_experts(stage_))
        model_.source->choose_experts(stage_, chosen_experts(op));
}

// Those that a row of the cell has chosen, ascending.
std::vector<int32_t> StepRun::chosen_experts(const Op& op) const {
    std::vector<int32_t> chosen;
    for (int32_t e = 0; e < op.ints[op.kind == OpKind::kRoute ? 0 : 1]; ++e)
        if (expert_begin_[static_cast<size_t>(e) + 1] > expert_begin_[static_cast<size_t>(e)])
            chosen.push_back(e);
    return chosen;
}

// Counting sort of (row, expert) pairs by expert: rows of an expert stay in order.
void StepRun::sort_slots(const Op& op) {
    const int64_t experts = op.ints[0], used = op.ints[1], rows = cell_size();
    expert_begin_.assign(static_cast<size_t>(experts) + 1, 0);
    slot_row_.resize(static_cast<size_t>(rows * used));
    slots_of_row_.resize(static_cast<size_t>(rows * used));
    const auto expert = [&](int64_t i, int64_t j) { return static_cast<size_t>(buffer_row(op.outputs[0], i)[j]); };
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < used; ++j)
            ++expert_begin_[expert(i, j) + 1];
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
        result_.counters.experts_touched += expert_begin_[e + 1] > 0;
        expert_begin_[e + 1] += expert_begin_[e];
    }
    std::vector<int32_t> next(expert_begin_.begin(), expert_begin_.end() - 1);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < used; ++j) {
            const int32_t slot = next[expert(i, j)]++;
            slot_row_[static_cast<size_t>(slot)] = static_cast<int32_t>(i);
            slots_of_row_[static_cast<size_t>(i * used + j)] = slot;
        }
    result_.counters.expert_rows += rows * used;
}

void StepRun::gather(const Op& op) {
    const Buffer& b = program_->buffer(op.outputs[0]);
    each_of(op.outputs[0], [&](int64_t slot, int) {
        const int64_t i = slot_row_[static_cast<size_t>(slot)];
        if (!b.quantized) {
            std::copy_n(buffer_row(op.inputs[0], i), b.width, buffer_row(op.outputs[0], slot));
            return;
        }
        const QuantRows from = rows_from(quant(op.inputs[0]), i), to = rows_from(quant(op.outputs[0]), slot);
        std::copy_n(from.q, b.width, to.q);
        std::copy_n(from.scale, from.s_stride, to.scale);
        std::copy_n(from.sum32, from.s_stride, to.sum32);
        std::copy_n(from.sum16, 2 * from.s_stride, to.sum16);
        std::copy_n(from.outlier, outlier_count(b.width), to.outlier);
    });
}

void StepRun::expert_linear(const Stage& stage, const Op& op, bool tail) {
    const int64_t slots = cell_size() * program_->slots;
    auto& c = result_.counters;
    for (size_t j = 0; j < op.outputs.size(); ++j) {
        const Weight& w = weight(stage, op.weights[j]).shape();
        (tail ? c.head_macs : c.macs) += slots * w.rows * w.cols;
    }
    if (!model_.source || !model_.source->streams_experts(stage_))
        return multiply_experts(stage, op, chosen_experts(op));
    while (const std::vector<int32_t>* there = model_.source->next_experts(op))
        multiply_experts(stage, op, *there);
}

// One ragged product: a claim is of one matrix of one expert, for all slots of that expert.
void StepRun::multiply_experts(const Stage& stage, const Op& op, const std::vector<int32_t>& experts) {
    const size_t n = op.outputs.size();
    std::vector<QuantRows> x;
    std::vector<LinearArgs> args;
    std::vector<const Weight*> weights;
    x.reserve(experts.size()); // args keep pointers into it
    for (const int32_t number : experts) {
        const auto e = static_cast<size_t>(number);
        const int64_t first = expert_begin_[e], rows = expert_begin_[e + 1] - first;
        x.push_back(op.inputs[0] != kNone ? rows_from(quant(op.inputs[0]), first) : QuantRows{});
        for (size_t j = 0; j < n; ++j) {
            const PackedWeight& m = weight(stage, op.weights[j]).experts[e];
            LinearArgs a = linear_args(m.w, op, first, rows, &x.back());
            if (const int32_t bias = op.weights[n + j]; bias != kNone)
                a.bias = weight(stage, bias).vector.data() + static_cast<int64_t>(e) * m.w.rows;
            a.out = buffer_row(op.outputs[j], first);
            a.out_stride = m.w.rows;
            weights.push_back(&m.w);
            args.push_back(a);
            result_.counters.expert_bytes_touched += m.bytes;
        }
    }
    for (size_t i = 0; i + 1 < args.size(); ++i)
        args[i].next = args[i + 1].w;
    Claims c;
    if (cell_size() <= kFewRows) {
        shrinking_claims(weights, c);
    } else {
        for (size_t i = 0; i < weights.size(); ++i) {
            const int64_t panels = panel_count(*weights[i]), claim = panels_at_once(*weights[i]);
            for (int64_t begin = 0; begin < panels; begin += claim)
                c.all.push_back({i, begin, std::min(panels, begin + claim)});
        }
        c.bounds = rt_.pool_.even(static_cast<int64_t>(c.all.size()));
    }
    rt_.pool_.run(c.bounds, [&](int64_t u, int worker) {
        const Claim& claim = c.all[static_cast<size_t>(u)];
        compute(args[claim.weight], claim.begin, claim.end, worker);
    });
}

void StepRun::combine(const Op& op) {
    const int64_t used = program_->slots, width = program_->buffer(op.inputs[0]).width;
    const bool accumulate = op.ints[0] != 0;
    each_row([&](int64_t i, int) {
        const float* rows[kMaxSlots];
        for (int64_t j = 0; j < used; ++j)
            rows[j] = buffer_row(op.inputs[0], slots_of_row_[static_cast<size_t>(i * used + j)]);
        float* y = accumulate ? residual_row(i) : buffer_row(op.outputs[0], i);
        k_.combine(rows, buffer_row(op.inputs[1], i) + used, used, y, width, accumulate);
    });
}

void StepRun::gate(const Stage& stage, const Op& op) {
    const std::vector<float>& w = weight(stage, op.weights[0]).vector;
    each_row([&](int64_t i, int) {
        float open = k_.dot16(buffer_row(op.inputs[1], i), w.data(), static_cast<int64_t>(w.size()));
        k_.sigmoid_row(&open, &open, 1);
        k_.scale(buffer_row(op.inputs[0], i), open, program_->buffer(op.inputs[0]).width);
    });
}

} // namespace quaff
