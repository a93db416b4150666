// Ops of the executor whose state is not a list of positions. What a sequence had before the step is only read; each layer's state walks on in
// the slot of the segment's end, and is copied where the caller wants to keep it.
#include "step_run.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace quaff {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("step: " + what); }

} // namespace

void StepRun::resolve_states() {
    if (in_.states.size() != state_pools_.size())
        refuse("one list of states per kind is needed");
    states_.resize(state_pools_.size());
    for (size_t kind = 0; kind < state_pools_.size(); ++kind) {
        const StatePool& pool = *state_pools_[kind];
        if (static_cast<int64_t>(in_.states[kind].size()) != segments_)
            refuse("one state per segment is needed");
        for (int32_t s = 0; s < segments_; ++s) {
            const std::span<const int32_t> given = in_.states[kind][static_cast<size_t>(s)];
            const int64_t begin = segment_begin_[static_cast<size_t>(s)],
                          end = s + 1 < segments_ ? segment_begin_[static_cast<size_t>(s + 1)] : rows_;
            if (given.size() < 3 || given.size() % 2 == 0)
                refuse("a state is a slot and pairs of rows and slot");
            if ((given[0] == kNone) != (in_.positions[static_cast<size_t>(begin)] == 0))
                refuse("a sequence has a state before it exactly when it does not begin");
            SegmentStates states{given[0] == kNone ? nullptr : pool.holds(given[0]) ? pool.data(given[0]) : nullptr, {}};
            if (given[0] != kNone && !states.before)
                refuse("state slot " + std::to_string(given[0]) + " is not in use");
            for (size_t i = 1; i < given.size(); i += 2) {
                const int64_t rows = given[i], least = states.saves.empty() ? 1 : states.saves.back().first + 1;
                if (rows < least || rows > end - begin || !pool.holds(given[i + 1]))
                    refuse("states are kept after ascending numbers of rows, in slots that are in use");
                states.saves.emplace_back(rows, pool.data(given[i + 1]));
            }
            if (states.saves.back().first != end - begin)
                refuse("the last state is the segment's end");
            states_[kind].push_back(std::move(states));
        }
    }
}

std::vector<StepRun::StateRun> StepRun::state_runs(int32_t kind, int32_t layer) const {
    const int64_t offset = layer * state_pools_[static_cast<size_t>(kind)]->size();
    std::vector<StateRun> runs;
    for (int64_t begin = 0, end; begin < cell_size(); begin = end) {
        const int32_t segment = segment_of(begin);
        for (end = begin; end < cell_size() && segment_of(end) == segment; ++end) {
        }
        const SegmentStates& states = states_[static_cast<size_t>(kind)][static_cast<size_t>(segment)];
        const bool first = cell_rows_[static_cast<size_t>(begin)] == segment_begin_[static_cast<size_t>(segment)];
        const float* before = first ? states.before : states.saves.back().second;
        runs.push_back({begin, end, before ? before + offset : nullptr});
    }
    return runs;
}

// save(rows of the run, where) for every state to keep that the run reaches, and for its own end, which comes last: it may lie where the run began.
template <typename Save> void StepRun::save_states(int32_t kind, int32_t layer, const StateRun& run, Save&& save) const {
    const int64_t offset = layer * state_pools_[static_cast<size_t>(kind)]->size();
    const int32_t segment = segment_of(run.begin);
    const int64_t done = cell_rows_[static_cast<size_t>(run.begin)] - segment_begin_[static_cast<size_t>(segment)];
    const auto& saves = states_[static_cast<size_t>(kind)][static_cast<size_t>(segment)].saves;
    for (size_t i = 0; i + 1 < saves.size(); ++i)
        if (saves[i].first > done && saves[i].first <= done + run.end - run.begin)
            save(saves[i].first - done, saves[i].second + offset);
    save(run.end - run.begin, saves.back().second + offset);
}

// The state of a convolution is its last taps - 1 rows, oldest first.
void StepRun::conv(const Stage& stage, const Op& op) {
    const int32_t kind = op.ints[0], layer = op.ints[1];
    const int64_t channels = op.ints[2], taps = op.ints[3];
    const bool gated = op.ints[4] == static_cast<int32_t>(ConvForm::kGated);
    const float* w = reinterpret_cast<const float*>(weight(stage, op.weights[0]).matrix.w.data);
    const float* bias = op.weights[1] == kNone ? nullptr : weight(stage, op.weights[1]).vector.data();
    const std::vector<StateRun> runs = state_runs(kind, layer);
    std::vector<int32_t> run_of(static_cast<size_t>(cell_size()));
    for (size_t r = 0; r < runs.size(); ++r)
        std::fill(run_of.begin() + runs[r].begin, run_of.begin() + runs[r].end, static_cast<int32_t>(r));
    // Row `row` of a run, negative ones from the state before it. Gated rows of the cell are B and x, whose product is their value.
    const auto values = [&](const StateRun& run, int64_t row) -> std::pair<const float*, const float*> {
        if (row < 0)
            return {run.before ? run.before + (taps - 1 + row) * channels : nullptr, nullptr};
        const float* x = buffer_row(op.inputs[0], run.begin + row);
        return gated ? std::pair{x + 2 * channels, x} : std::pair<const float*, const float*>{x, nullptr};
    };
    each_row([&](int64_t i, int worker) {
        const StateRun& run = runs[static_cast<size_t>(run_of[static_cast<size_t>(i)])];
        const float *rows[kMaxTaps], *factors[kMaxTaps];
        for (int64_t t = 0; t < taps; ++t)
            std::tie(rows[t], factors[t]) = values(run, i - run.begin - (taps - 1) + t);
        float* y = result_row(op, i, worker);
        const ConvArgs a{rows, factors, w, bias, gated ? buffer_row(op.inputs[0], i) + channels : nullptr, y, channels, taps};
        k_.conv(&a);
        if (op.outputs[1] != kNone)
            quantize(y, op.outputs[1], i);
    });
    rt_.pool_.run(static_cast<int64_t>(runs.size()), [&](int64_t r, int) {
        const StateRun& run = runs[static_cast<size_t>(r)];
        save_states(kind, layer, run, [&](int64_t rows, float* to) {
            // Ascending: where the run began in the slot it ends in, a row moves down before it is overwritten.
            for (int64_t t = 0; t < taps - 1; ++t, to += channels) {
                const auto [x, factor] = values(run, rows - (taps - 1) + t);
                for (int64_t c = 0; c < channels; ++c)
                    to[c] = !x ? 0.0f : factor ? factor[c] * x[c] : x[c];
            }
        });
    });
    result_.counters.state_macs += cell_size() * channels * taps;
}

void StepRun::unit_norm(const Op& op) {
    each_row([&](int64_t i, int) {
        float* x = buffer_row(op.inputs[0], i);
        for (int64_t head = 0; head < op.ints[0]; ++head)
            if (!std::isfinite(k_.unit_norm(x + head * op.ints[1], op.floats[0], op.floats[1], op.ints[1])))
                poisoned_[static_cast<size_t>(segment_of(i))].store(1, std::memory_order_relaxed);
    });
}

void StepRun::delta_gates(const Stage& stage, const Op& op) {
    const std::vector<float>&rates = weight(stage, op.weights[0]).vector, &dt = weight(stage, op.weights[1]).vector;
    const size_t of_head = dt.size() / rates.size();
    std::vector<float> rate;
    for (const float r : rates)
        rate.insert(rate.end(), of_head, r);
    each_row([&](int64_t i, int) {
        k_.decay(buffer_row(op.inputs[0], i), rate.data(), dt.data(), static_cast<int64_t>(dt.size()));
        k_.sigmoid_row(buffer_row(op.inputs[1], i), buffer_row(op.inputs[1], i), static_cast<int64_t>(rates.size()));
    });
}

// A unit is some columns of one head's state over all rows of a run, which follow one another.
void StepRun::delta(const Op& op) {
    const int32_t kind = op.ints[0], layer = op.ints[1];
    const int64_t key_heads = op.ints[2], heads = op.ints[3], dk = op.ints[4], dv = op.ints[5];
    const int64_t decays = program_->buffer(op.inputs[3]).width / heads;
    const bool tiled = op.ints[6] != 0;
    const std::vector<StateRun> runs = state_runs(kind, layer);
    const int64_t blocks = (dv + kDeltaColumns - 1) / kDeltaColumns;
    rt_.pool_.run(static_cast<int64_t>(runs.size()) * heads * blocks, [&](int64_t u, int) {
        const StateRun& run = runs[static_cast<size_t>(u / blocks / heads)];
        const int64_t head = u / blocks % heads, column = u % blocks * kDeltaColumns, end = std::min(dv, column + kDeltaColumns);
        const int64_t key_head = tiled ? head % key_heads : head / (heads / key_heads);
        float* state = states_[static_cast<size_t>(kind)][static_cast<size_t>(segment_of(run.begin))].saves.back().second +
                       layer * state_pools_[static_cast<size_t>(kind)]->size() + head * dk * dv;
        const auto copy = [&](const float* from, float* to) {
            for (int64_t i = 0; i < dk; ++i)
                if (from)
                    std::memcpy(to + i * dv + column, from + i * dv + column, static_cast<size_t>(end - column) * 4);
                else
                    std::memset(to + i * dv + column, 0, static_cast<size_t>(end - column) * 4);
        };
        if (const float* before = run.before ? run.before + head * dk * dv : nullptr; before != state)
            copy(before, state);
        int64_t row = run.begin;
        save_states(kind, layer, run, [&](int64_t rows, float* to) {
            const DeltaArgs a{buffer_row(op.inputs[0], row) + key_head * dk,
                              buffer_row(op.inputs[1], row) + key_head * dk,
                              buffer_row(op.inputs[2], row) + head * dv,
                              buffer_row(op.inputs[3], row) + head * decays,
                              buffer_row(op.inputs[4], row) + head,
                              state,
                              buffer_row(op.outputs[0], row) + head * dv,
                              run.begin + rows - row,
                              dk,
                              dv,
                              key_heads * dk,
                              heads * dv,
                              heads * decays,
                              heads,
                              decays > 1};
            k_.delta(&a, column, end);
            row = run.begin + rows;
            if (to + head * dk * dv != state)
                copy(state, to + head * dk * dv);
        });
    });
    result_.counters.state_macs += cell_size() * heads * dk * dv * 3;
}

} // namespace quaff
