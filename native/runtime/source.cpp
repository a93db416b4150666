#include "source.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace quaff {
namespace {

// Panels are read in pieces of this size: large enough for a disk's full speed, small enough that several readers share a unit.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
// Panels so near to each other are read together, with what lies between them: a stage's vectors, most often.
constexpr int64_t kNear = 64 << 10;
// Tokens whose rows lie so near to each other are read together.
constexpr int64_t kRowsSpan = 64 << 10;
// Experts are loaded in groups of about this size, so that the first ones compute while the others are read.
constexpr int64_t kGroupBytes = int64_t{16} << 20;
constexpr int64_t kMostBuffers = 8;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("weight source: " + what); }

template <class T> bool contains(const std::vector<T>& list, T value) { return std::find(list.begin(), list.end(), value) != list.end(); }

} // namespace

WeightSource::WeightSource(std::vector<std::shared_ptr<WeightFile>> files, int readers, int64_t buffer_bytes)
    : files_(std::move(files)), loader_(readers, static_cast<size_t>(buffer_bytes)) {
    memory_bytes_ = int64_t{readers} * buffer_bytes;
}

WeightSource::~WeightSource() { stop(); }

void WeightSource::stop() { loader_.stop(); }

StreamCounters WeightSource::counters() const {
    const std::lock_guard lock(counters_mutex_);
    StreamCounters c = counters_;
    c.read_bytes = read_bytes_;
    c.read_seconds = clock_.seconds();
    c.pack_seconds = static_cast<double>(pack_ns_) * 1e-9;
    return c;
}

// ---- what there is ----

std::shared_ptr<ModelWeight> WeightSource::add(std::string name, int32_t ggml_type, int64_t matrices, int64_t rows, int64_t cols,
                                               const WeightPlace& place) {
    const int64_t panels = packed_bytes(ggml_type, rows, cols);
    if (bound_ || panels < 0 || matrices < 0 || matrices > (1 << 20) || place.file < 0 || static_cast<size_t>(place.file) >= files_.size())
        refuse("'" + name + "' has a shape, a type or a file that cannot be");
    auto t = std::make_unique<Tensor>();
    t->name = std::move(name);
    t->place = place;
    t->ggml_type = ggml_type;
    t->rows = rows;
    t->cols = cols;
    t->row_bytes = ggml_row_bytes(ggml_type, cols);
    t->matrix_bytes = panels;
    t->weight = std::make_shared<ModelWeight>();
    PackedWeight matrix;
    matrix.w = weight_shape(ggml_type, rows, cols);
    matrix.bytes = panels;
    matrix.ggml_type = ggml_type;
    t->panel_bytes = matrix.w.panel_bytes;
    if (matrices)
        t->weight->experts.assign(static_cast<size_t>(matrices), matrix);
    else
        t->weight->matrix = matrix;
    const int64_t size = place.packed ? panels : (rows - 1) * place.row_stride + t->row_bytes, last = std::max<int64_t>(matrices, 1) - 1;
    int64_t end;
    if (place.offset < 0 || (last && place.matrix_stride < size) || (!place.packed && place.row_stride < t->row_bytes) ||
        __builtin_mul_overflow(last, place.matrix_stride, &end) || __builtin_add_overflow(end, size, &end) ||
        __builtin_add_overflow(end, place.offset, &end) || end > files_[static_cast<size_t>(place.file)]->bytes())
        refuse("'" + t->name + "' does not lie in its file");
    by_weight_[t->weight.get()] = t.get();
    tensors_.push_back(std::move(t));
    return tensors_.back()->weight;
}

// Gives every part a place, and cuts what must be read into pieces. Panels with gaps of at most `near` bytes are read together.
void WeightSource::lay_out(Unit& unit, std::vector<Part> parts, int64_t near) const {
    const auto offset = [](const Part& p) {
        return p.tensor->place.offset + p.matrix * p.tensor->place.matrix_stride + p.first_row / 16 * p.tensor->panel_bytes;
    };
    std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) {
        return std::pair(a.tensor->place.file, offset(a)) < std::pair(b.tensor->place.file, offset(b));
    });
    int64_t at = 0;
    for (size_t i = 0; i < parts.size();) {
        const Tensor& t = *parts[i].tensor;
        if (!t.place.packed) {
            parts[i].at = at;
            cut(unit, parts[i]);
            at += lines((parts[i].rows + 15) / 16 * t.panel_bytes);
            ++i;
            continue;
        }
        // Panels are read where they belong: a run of them lies in memory as in the file, from the same place of a sector on.
        at = sector_end(at);
        const int64_t begin = sector_begin(offset(parts[i]));
        int64_t end = begin;
        for (; i < parts.size(); ++i) {
            const Part& p = parts[i];
            if (!p.tensor->place.packed || p.tensor->place.file != t.place.file || (end > begin && offset(p) > end + near))
                break;
            parts[i].at = at + offset(p) - begin;
            end = std::max(end, offset(p) + (p.rows + 15) / 16 * p.tensor->panel_bytes);
        }
        for (int64_t from = begin; from < end; from += kPieceBytes)
            unit.pieces.push_back({&t, from, std::min(kPieceBytes, end - from), 0, at + from - begin});
        at += sector_end(end - begin);
    }
    unit.bytes = sector_end(at);
    unit.parts = std::move(parts);
}

void WeightSource::cut(Unit& unit, const Part& part) const {
    const Tensor& t = *part.tensor;
    const int64_t room = static_cast<int64_t>(loader_.buffer_bytes()) - 2 * kSector;
    const int64_t rows = std::max<int64_t>(1, room / t.place.row_stride / 16) * 16;
    for (int64_t r = 0; r < part.rows; r += rows) {
        const int64_t n = std::min(rows, part.rows - r), bytes = (n - 1) * t.place.row_stride + t.row_bytes;
        if (bytes > room)
            refuse("16 rows of '" + t.name + "' do not fit into a reader's buffer");
        unit.pieces.push_back({&t, t.place.offset + part.matrix * t.place.matrix_stride + (part.first_row + r) * t.place.row_stride, bytes,
                               n, part.at + r / 16 * t.panel_bytes});
    }
}

int32_t WeightSource::add_unit(std::vector<Part> parts, bool kept) {
    Unit unit;
    lay_out(unit, std::move(parts), kNear);
    unit.kept = kept;
    if (!kept)
        cycle_.push_back(static_cast<int32_t>(units_.size()));
    units_.push_back(std::move(unit));
    return static_cast<int32_t>(units_.size()) - 1;
}

void WeightSource::bind(const std::vector<Stage>& stages, const StreamPlan& plan) {
    if (bound_ || plan.slots < 1 || plan.head_rows < 16 || plan.head_rows % 16)
        refuse("needs a slot, and blocks of the head of a multiple of 16 rows");
    bound_ = true;
    stages_ = stages;
    of_stage_.resize(stages.size());
    for (size_t s = 0; s < stages.size(); ++s)
        bind_stage(static_cast<int32_t>(s), stages_[s], plan);
    bind_experts(plan);
    slots_.resize(std::min(cycle_.size(), static_cast<size_t>(plan.slots)));
    allocate();
    for (const auto& t : tensors_)
        if (const int64_t span = t->place.packed ? t->panel_bytes : t->row_bytes;
            span + 2 * kSector > static_cast<int64_t>(loader_.buffer_bytes()))
            refuse("a row of '" + t->name + "' does not fit into a reader's buffer");
}

// All memory in one piece: its end alone is rounded up to a huge page.
void WeightSource::allocate() {
    int64_t largest = 0;
    for (const int32_t id : cycle_)
        largest = std::max(largest, units_[static_cast<size_t>(id)].bytes);
    std::vector<std::pair<uint8_t**, int64_t>> wanted;
    for (Unit& unit : units_)
        if (unit.kept)
            wanted.push_back({&unit.home, unit.bytes});
    for (Slot& slot : slots_)
        wanted.push_back({&slot.memory, largest});
    for (StageUnits& of : of_stage_)
        for (Home& home : of.homes)
            wanted.push_back({&home.memory, home.bytes});
    for (uint8_t*& buffer : buffers_)
        wanted.push_back({&buffer, buffer_bytes_});
    int64_t bytes = 0;
    for (const auto& [where, size] : wanted)
        bytes += size;
    memory_ = sector_memory(static_cast<size_t>(bytes));
    memory_bytes_ += bytes;
    uint8_t* at = memory_.get();
    for (const auto& [where, size] : wanted)
        *where = std::exchange(at, at + size);
}

void WeightSource::bind_stage(int32_t index, const Stage& stage, const StreamPlan& plan) {
    const bool kept = contains(plan.pinned, index);
    StageUnits& of = of_stage_[static_cast<size_t>(index)];
    of.stage = &stage;
    of.experts_kept = kept;
    std::vector<Part> parts, tables;
    const Tensor* head = nullptr;
    std::vector<const Tensor*> seen;
    for (const Op& op : stage.program->ops)
        for (size_t j = 0; j < op.weights.size(); ++j) {
            if (op.weights[j] == kNone)
                continue;
            const auto found = by_weight_.find(stage.weights[static_cast<size_t>(op.weights[j])].get());
            if (found == by_weight_.end() || found->second->kept || contains(seen, static_cast<const Tensor*>(found->second)))
                continue;
            const Tensor& t = *found->second;
            seen.push_back(&t);
            if (op.kind == OpKind::kExpertLinear && j < op.outputs.size()) {
                if (!contains(of.expert_ops, &op))
                    of.expert_ops.push_back(&op);
                continue;
            }
            if (op.kind == OpKind::kLinear && j < op.outputs.size() && op.outputs[j] == kLogits)
                head = &t;
            for (int64_t m = 0; m < t.matrices(); ++m)
                (op.kind == OpKind::kEmbed ? tables : parts).push_back({&t, m, 0, t.rows, 0});
        }
    const auto keep = [&](const std::vector<Part>& list) {
        for (const Part& p : list)
            by_weight_.at(p.tensor->weight.get())->kept = true;
    };
    if (plan.pin_tables && !tables.empty()) {
        keep(tables);
        of.tables = add_unit(std::move(tables), true);
    }
    if (kept)
        keep(parts);
    if (head && !kept && parts.size() == 1 && head->rows > plan.head_rows)
        for (int64_t row = 0; row < head->rows; row += plan.head_rows)
            of.head.push_back(add_unit({{head, 0, row, std::min(plan.head_rows, head->rows - row), 0}}, false));
    else if (!parts.empty())
        of.matrices = add_unit(std::move(parts), kept);
}

// ---- experts ----

namespace {

// Memory of one matrix among others: panels as they are may begin anywhere in a sector.
int64_t room_of(const WeightPlace& place, int64_t matrix_bytes) {
    return place.packed ? sector_end(matrix_bytes) + kSector : lines(matrix_bytes);
}

} // namespace

int64_t WeightSource::expert_bytes(const StageUnits& of, const Op& op) const {
    int64_t bytes = 0;
    for (size_t j = 0; j < op.outputs.size(); ++j) {
        const Tensor& t = tensor(*of.stage->weights[static_cast<size_t>(op.weights[j])]);
        bytes += room_of(t.place, t.matrix_bytes);
    }
    return bytes;
}

void WeightSource::bind_experts(const StreamPlan& plan) {
    int64_t largest = 0;
    for (size_t s = 0; s < stages_.size(); ++s) {
        StageUnits& of = of_stage_[s];
        for (const Op* op : of.expert_ops) {
            if (!of.experts_kept) {
                largest = std::max(largest, expert_bytes(of, *op));
                continue;
            }
            // All experts have a place; a page that is never written takes no memory.
            Home home;
            for (size_t j = 0; j < op->outputs.size(); ++j) {
                const Tensor& t = tensor(*of.stage->weights[static_cast<size_t>(op->weights[j])]);
                home.at.push_back(home.bytes);
                home.bytes += sector_end(t.matrices() * room_of(t.place, t.matrix_bytes));
            }
            home.loaded.assign(static_cast<size_t>(op->ints[1]), false);
            of.homes.push_back(std::move(home));
        }
    }
    if (!largest)
        return;
    const int64_t count = std::clamp(plan.expert_bytes / std::max(largest, kGroupBytes), int64_t{2}, kMostBuffers);
    buffer_bytes_ = sector_end(std::max(largest, plan.expert_bytes / count));
    buffers_.resize(static_cast<size_t>(count));
}

bool WeightSource::streams_experts(int32_t stage) const { return !of_stage_[static_cast<size_t>(stage)].expert_ops.empty(); }

void WeightSource::choose_experts(int32_t stage, const std::vector<int32_t>& chosen) {
    leave_experts();
    StageUnits& of = of_stage_[static_cast<size_t>(stage)];
    for (size_t o = 0; o < of.expert_ops.size(); ++o) {
        const Op& op = *of.expert_ops[o];
        const int64_t each = expert_bytes(of, op), most = of.experts_kept ? kGroupBytes : std::min(buffer_bytes_, kGroupBytes);
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

void WeightSource::lay_out_experts(const StageUnits& of, Group& group) const {
    std::vector<Part> parts;
    for (size_t j = 0; j < group.op->outputs.size(); ++j) {
        const Tensor& t = tensor(*of.stage->weights[static_cast<size_t>(group.op->weights[j])]);
        for (const int32_t e : group.experts)
            parts.push_back({&t, e, 0, t.rows, group.home ? group.home->at[j] + e * room_of(t.place, t.matrix_bytes) : 0});
    }
    if (!group.home)
        return lay_out(group.unit, std::move(parts), kSector); // room_of has room for such gaps
    for (Part& p : parts) {
        Unit alone;
        const int64_t home = p.at;
        lay_out(alone, {p}, 0);
        p.at = home + alone.parts[0].at;
        for (Piece piece : alone.pieces) {
            piece.to += home;
            if (!group.home->loaded[static_cast<size_t>(p.matrix)])
                group.unit.pieces.push_back(piece);
        }
    }
    group.unit.parts = std::move(parts);
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
            loader_.abandon(*group.load);
        if (!group.home)
            forget(group.unit);
    }
    groups_.clear();
    group_ = queued_ = 0;
    group_used_ = false;
}

// ---- reading ----

std::shared_ptr<Load> WeightSource::load(const Unit& unit, uint8_t* memory, bool urgent) {
    const auto task = [this, &unit, memory](size_t i, uint8_t* buffer) { return fetch(unit.pieces[i], memory, buffer); };
    return loader_.start(unit.pieces.size(), task, urgent);
}

int64_t WeightSource::read(const Tensor& t, int64_t offset, int64_t bytes, uint8_t* to) {
    try {
        const int64_t got = files_[static_cast<size_t>(t.place.file)]->read(offset, bytes, to, clock_);
        read_bytes_ += got;
        return got;
    } catch (const SourceError& error) {
        throw SourceError(std::string(error.what()) + " (tensor '" + t.name + "')");
    }
}

int64_t WeightSource::fetch(const Piece& piece, uint8_t* memory, uint8_t* buffer) {
    const Tensor& t = *piece.tensor;
    if (piece.rows == 0)
        return read(t, piece.offset, piece.bytes, memory + piece.to);
    const int64_t got = read(t, piece.offset, piece.bytes, buffer);
    const double began = now();
    uint8_t* blocks = buffer + (piece.offset - sector_begin(piece.offset));
    if (t.place.row_stride != t.row_bytes)
        for (int64_t r = 1; r < piece.rows; ++r)
            std::memmove(blocks + r * t.row_bytes, blocks + r * t.place.row_stride, static_cast<size_t>(t.row_bytes));
    pack(t, blocks, piece.rows, memory + piece.to);
    pack_ns_ += static_cast<int64_t>((now() - began) * 1e9);
    return got;
}

void WeightSource::pack(const Tensor& t, const uint8_t* blocks, int64_t rows, uint8_t* panels) const {
    try {
        pack_panels(t.ggml_type, {blocks, rows * t.row_bytes}, rows, t.cols, panels, 1);
    } catch (const std::invalid_argument& error) {
        throw SourceError(files_[static_cast<size_t>(t.place.file)]->path() + ": tensor '" + t.name + "': " + error.what());
    }
}

bool WeightSource::reads_rows(const ModelWeight& table) const {
    const auto found = by_weight_.find(&table);
    return found != by_weight_.end() && !found->second->kept;
}

void WeightSource::read_rows(const ModelWeight& table, const std::vector<std::pair<int32_t, float*>>& rows) {
    const Tensor& t = tensor(table);
    const int64_t group = t.place.packed ? 16 : 1, bytes = t.place.packed ? t.panel_bytes : t.row_bytes,
                  stride = t.place.packed ? t.panel_bytes : t.place.row_stride;
    const int64_t room = std::min<int64_t>(kRowsSpan, static_cast<int64_t>(loader_.buffer_bytes()) - 2 * kSector);
    // Tasks: ranges of the list whose bytes lie near to each other.
    std::vector<size_t> bounds{0};
    for (size_t i = 1; i < rows.size(); ++i) {
        const int64_t first = rows[bounds.back()].first / group, before = rows[i - 1].first / group, at = rows[i].first / group;
        if ((at - before) * stride > bytes + kSector || (at - first) * stride + bytes > std::max(room, bytes))
            bounds.push_back(i);
    }
    bounds.push_back(rows.size());
    const auto task = [&](size_t i, uint8_t* buffer) { return fetch_rows(t, rows, bounds[i], bounds[i + 1], buffer); };
    const auto load = loader_.start(bounds.size() - 1, task, true);
    try {
        wait(*load, false);
    } catch (...) {
        loader_.abandon(*load); // it writes to the caller's rows
        throw;
    }
}

int64_t WeightSource::fetch_rows(const Tensor& t, const std::vector<std::pair<int32_t, float*>>& rows, size_t begin, size_t end,
                                 uint8_t* buffer) {
    const int64_t first = rows[begin].first, last = rows[end - 1].first;
    if (t.place.packed) {
        const int64_t at = t.place.offset + first / 16 * t.panel_bytes;
        const int64_t got = read(t, at, (last / 16 - first / 16 + 1) * t.panel_bytes, buffer);
        Weight w = t.weight->matrix.w;
        w.data = buffer + (at - sector_begin(at));
        for (size_t i = begin; i < end; ++i)
            dequantize_rows(w, rows[i].first - first / 16 * 16, 1, rows[i].second);
        return got;
    }
    const int64_t at = t.place.offset + first * t.place.row_stride;
    const int64_t got = read(t, at, (last - first) * t.place.row_stride + t.row_bytes, buffer);
    const std::shared_ptr<uint8_t> panel = sector_memory(static_cast<size_t>(t.panel_bytes));
    Weight w = weight_shape(t.ggml_type, 1, t.cols);
    w.data = panel.get();
    for (size_t i = begin; i < end; ++i) {
        pack(t, buffer + (at - sector_begin(at)) + (rows[i].first - first) * t.place.row_stride, 1, panel.get());
        dequantize_rows(w, 0, 1, rows[i].second);
    }
    return got;
}

// ---- a step ----

void WeightSource::begin(std::span<const int32_t> cell_stages, const std::atomic<bool>& cancelled) {
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
    began_ = now();
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
    const auto want = [&](int32_t id) {
        if (!units_[static_cast<size_t>(id)].kept) {
            if (contains(wanted, id))
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
            if (!unit.load || loader_.failed(*unit.load))
                unit.load = load(unit, unit.home, false);
            continue;
        }
        auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.unit == id; });
        if (slot != slots_.end() && !loader_.failed(*slot->load))
            continue;
        if (slot == slots_.end())
            slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.unit < 0 || !contains(wanted, s.unit); });
        if (slot->load)
            loader_.abandon(*slot->load); // what a step that was ended would have needed
        slot->unit = id;
        slot->load = load(unit, slot->memory, false);
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
    const bool ready = loader_.done(load);
    const double since = now();
    int64_t bytes = 0;
    try {
        bytes = loader_.wait(load, *cancelled_);
    } catch (...) {
        waited_ += now() - since;
        throw;
    }
    waited_ += now() - since;
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
        counters_.compute_seconds += now() - began_ - waited_;
    }
    if (!whole)
        return;
    try {
        fill();
    } catch (const std::bad_alloc&) { // then the next step begins by waiting
    }
}

} // namespace quaff
