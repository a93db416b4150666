// Streamed weights: what a step asks for, and what is loaded ahead of it.
#include "source.h"

#include <algorithm>
#include <new>
#include <utility>

namespace quaff {

WeightSource::WeightSource(std::vector<std::shared_ptr<WeightFile>> files, int readers, int64_t buffer_bytes)
    : files_(std::move(files)), loader_(std::make_unique<Loader>(readers, static_cast<size_t>(buffer_bytes))) {
    memory_bytes_ = int64_t{readers} * buffer_bytes;
}

WeightSource::~WeightSource() {
    stop();
    if (!loader_->here())
        (void)loader_.release();
}

void WeightSource::stop() { loader_->stop(); }

StreamCounters WeightSource::counters() const {
    const std::lock_guard lock(counters_mutex_);
    StreamCounters c = counters_;
    c.read_bytes = read_bytes_;
    c.read_seconds = clock_.seconds();
    c.pack_seconds = static_cast<double>(pack_ns_) * 1e-9;
    return c;
}

void WeightSource::begin(std::span<const int32_t> cell_stages, const std::atomic<bool>& cancelled) {
    if (!loader_->here())
        throw SourceError(
            "weights are streamed by threads of the process that loaded the model, and this one was forked from it; load the model here");
    cancelled_ = &cancelled;
    for (const auto& file : files_)
        file->check();
    sequence_.clear();
    cursor_ = 0;
    int64_t passes = cell_stages.empty() ? 0 : 1;
    int32_t last = -1;
    for (const int32_t stage : cell_stages) {
        const StageUnits& of = of_stage_[static_cast<size_t>(stage)];
        passes += stage < last;
        if (stage != last)
            for (const int32_t id : {of.tables, of.matrices})
                if (id >= 0)
                    sequence_.push_back(id);
        sequence_.insert(sequence_.end(), of.head.begin(), of.head.end());
        last = stage;
    }
    began_ = now_seconds();
    waited_ = 0;
    {
        const std::lock_guard lock(counters_mutex_);
        counters_.passes += passes;
    }
    fill();
}

// Loads what comes next: units that are kept, and as many others as there are slots, soonest first; after the last one of the step
// those of the next pass.
void WeightSource::fill() {
    std::vector<int32_t> order, wanted;
    const auto is_wanted = [&](int32_t id) { return std::find(wanted.begin(), wanted.end(), id) != wanted.end(); };
    const auto want = [&](int32_t id) {
        if (!units_[static_cast<size_t>(id)].kept) {
            if (is_wanted(id))
                return true;
            if (wanted.size() == slots_.size())
                return false;
            wanted.push_back(id);
        }
        order.push_back(id);
        return true;
    };
    bool room = true;
    for (size_t i = cursor_; room && i < sequence_.size(); ++i)
        room = want(sequence_[i]);
    for (size_t i = 0; room && i < cycle_.size(); ++i)
        room = want(cycle_[i]);
    for (const int32_t id : order) {
        Unit& unit = units_[static_cast<size_t>(id)];
        if (unit.kept) {
            if (!unit.load || loader_->failed(*unit.load))
                unit.load = load(unit, unit.home, false);
            continue;
        }
        auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.unit == id; });
        if (slot != slots_.end() && !loader_->failed(*slot->load))
            continue;
        if (slot == slots_.end())
            slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.unit < 0 || !is_wanted(s.unit); });
        if (slot->load)
            loader_->abandon(*slot->load); // what a step that was ended would have needed
        slot->unit = -1;                   // where no load can be queued, nobody shall take what is there for the unit
        slot->load = load(unit, slot->memory, false);
        slot->unit = id;
    }
}

uint8_t* WeightSource::acquire(int32_t id) {
    while (cursor_ < sequence_.size() && sequence_[cursor_] != id)
        ++cursor_;
    if (cursor_ == sequence_.size())
        sequence_.push_back(id);
    fill();
    Unit& unit = units_[static_cast<size_t>(id)];
    if (unit.kept) {
        wait(*unit.load, !unit.used);
        unit.used = true;
        return unit.home;
    }
    const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.unit == id; });
    wait(*slot->load, true);
    return slot->memory;
}

void WeightSource::wait(Load& load, bool prefetched) {
    const bool ready = loader_->done(load);
    const double since = now_seconds();
    int64_t bytes = 0;
    try {
        bytes = loader_->wait(load, *cancelled_);
    } catch (...) {
        waited_ += now_seconds() - since;
        throw;
    }
    waited_ += now_seconds() - since;
    const std::lock_guard lock(counters_mutex_);
    counters_.disk_bytes += bytes;
    if (prefetched)
        ++(ready ? counters_.prefetch_hits : counters_.prefetch_misses);
}

void WeightSource::use(const Unit& unit, uint8_t* memory) const {
    for (const Part& p : unit.parts)
        if (p.rows == p.tensor->rows)
            p.tensor->matrix(p.matrix).w.data = memory + p.at;
}

// Whoever reads panels that are not there any more shall not find others in their place.
void WeightSource::forget(const Unit& unit) const {
    for (const Part& p : unit.parts)
        p.tensor->matrix(p.matrix).w.data = nullptr;
}

void WeightSource::enter(int32_t stage) {
    if (stage == stage_)
        return;
    leave_experts();
    leave_unit();
    stage_ = -1;
    const StageUnits& of = of_stage_[static_cast<size_t>(stage)];
    if (of.tables >= 0) {
        use(units_[static_cast<size_t>(of.tables)], acquire(of.tables));
        ++cursor_;
    }
    if (of.matrices >= 0) {
        use(units_[static_cast<size_t>(of.matrices)], acquire(of.matrices));
        unit_ = of.matrices;
    }
    stage_ = stage;
}

int64_t WeightSource::head_blocks(int32_t stage) const { return static_cast<int64_t>(of_stage_[static_cast<size_t>(stage)].head.size()); }

WeightSource::Block WeightSource::head_block(int32_t stage, int64_t block) {
    leave_unit();
    const int32_t id = of_stage_[static_cast<size_t>(stage)].head[static_cast<size_t>(block)];
    const uint8_t* memory = acquire(id);
    unit_ = id;
    const Part& part = units_[static_cast<size_t>(id)].parts[0];
    Weight w = part.tensor->weight->matrix.w;
    w.rows = part.rows;
    w.data = memory + part.at;
    return {w, part.first_row};
}

void WeightSource::leave_unit() {
    if (unit_ < 0)
        return;
    const Unit& unit = units_[static_cast<size_t>(unit_)];
    if (!unit.kept)
        forget(unit);
    unit_ = -1;
    ++cursor_; // it stood at the unit while that was used
}

void WeightSource::end(bool whole) noexcept {
    leave_experts();
    leave_unit();
    stage_ = -1;
    sequence_.clear();
    cursor_ = 0;
    {
        const std::lock_guard lock(counters_mutex_);
        counters_.wait_seconds += waited_;
        counters_.compute_seconds += now_seconds() - began_ - waited_;
    }
    if (!whole)
        return;
    try {
        fill();
    } catch (const std::bad_alloc&) { // then the next step begins by waiting
    }
}

// ---- experts ----

bool WeightSource::streams_experts(int32_t stage) const { return !of_stage_[static_cast<size_t>(stage)].expert_ops.empty(); }

void WeightSource::choose_experts(int32_t stage, const std::vector<int32_t>& chosen) {
    leave_experts();
    StageUnits& of = of_stage_[static_cast<size_t>(stage)];
    for (size_t o = 0; o < of.expert_ops.size(); ++o) {
        const Op& op = *of.expert_ops[o];
        const int64_t each = expert_bytes(of, op), most = of.experts_kept ? kGroupBytes : buffer_bytes_;
        const auto count = static_cast<size_t>(std::max<int64_t>(1, most / each));
        for (size_t i = 0; i < chosen.size(); i += count) {
            Group& group = groups_.emplace_back();
            group.op = &op;
            group.home = of.experts_kept ? &of.homes[o] : nullptr;
            group.experts.assign(chosen.begin() + static_cast<std::ptrdiff_t>(i),
                                 chosen.begin() + static_cast<std::ptrdiff_t>(std::min(chosen.size(), i + count)));
            lay_out_experts(of, group);
        }
    }
    queue_experts();
}

// Loads groups ahead as far as there are buffers; those of kept experts all.
void WeightSource::queue_experts() {
    for (; queued_ < groups_.size() && (groups_[queued_].home || queued_ < group_ + buffers_.size()); ++queued_) {
        Group& group = groups_[queued_];
        group.memory = group.home ? group.home->memory : buffers_[queued_ % buffers_.size()];
        group.load = load(group.unit, group.memory, true);
    }
}

const std::vector<int32_t>* WeightSource::next_experts(const Op& op) {
    if (group_used_) {
        if (!groups_[group_].home)
            forget(groups_[group_].unit);
        group_used_ = false;
        ++group_;
        queue_experts();
    }
    if (group_ == groups_.size() || groups_[group_].op != &op)
        return nullptr;
    Group& group = groups_[group_];
    wait(*group.load, !group.unit.pieces.empty());
    if (group.home)
        for (const int32_t e : group.experts)
            group.home->loaded[static_cast<size_t>(e)] = true;
    use(group.unit, group.memory);
    group_used_ = true;
    return &group.experts;
}

void WeightSource::leave_experts() {
    for (Group& group : groups_) {
        if (group.load)
            loader_->abandon(*group.load);
        if (!group.home)
            forget(group.unit);
    }
    groups_.clear();
    group_ = queued_ = 0;
    group_used_ = false;
}

} // namespace quaff
