// Streamed weights: what there is, which of it is loaded together, and where it comes to lie in memory.
#include "source.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace quaff {
namespace {

// Panels are read in pieces of this size: large enough for a disk's full speed, small enough that several readers share a unit.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
// Panels so near to each other are read together, with what lies between them.
constexpr int64_t kNear = 64 << 10;
constexpr int64_t kMostBuffers = 8;

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Memory of one matrix among others: panels as they are may begin anywhere in a sector.
int64_t room_of(const WeightPlace& place, int64_t matrix_bytes) {
    return place.packed ? sector_end(matrix_bytes) + kSector : lines(matrix_bytes);
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("weight source: " + what); }

template <class T> bool contains(const std::vector<T>& list, T value) { return std::find(list.begin(), list.end(), value) != list.end(); }

} // namespace

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
    const int64_t last = std::max<int64_t>(matrices, 1) - 1;
    int64_t size = panels, end;
    const bool fits = place.packed || (place.row_stride >= t->row_bytes && !__builtin_mul_overflow(rows - 1, place.row_stride, &size) &&
                                       !__builtin_add_overflow(size, t->row_bytes, &size));
    if (!fits || place.offset < 0 || (last && place.matrix_stride < size) || __builtin_mul_overflow(last, place.matrix_stride, &end) ||
        __builtin_add_overflow(end, size, &end) || __builtin_add_overflow(end, place.offset, &end) ||
        end > files_[static_cast<size_t>(place.file)]->bytes())
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
    const int64_t room = static_cast<int64_t>(loader_->buffer_bytes()) - 2 * kSector;
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
        if (const int64_t span = t->place.packed ? t->panel_bytes : t->row_bytes + panel_room(*t);
            span + 2 * kSector > static_cast<int64_t>(loader_->buffer_bytes()))
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
            found->second->table = found->second->table || op.kind == OpKind::kEmbed;
        }
    const auto keep = [&](const std::vector<Part>& list) {
        for (const Part& p : list) {
            if (p.tensor->table && !plan.pin_tables)
                refuse("'" + p.tensor->name + "' is pinned, and a table whose rows come from the file"); // the table is asked first
            by_weight_.at(p.tensor->weight.get())->kept = true;
        }
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
    buffer_bytes_ = sector_end(std::max(largest, std::min(plan.expert_bytes / count, kGroupBytes)));
    buffers_.resize(static_cast<size_t>(count));
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

} // namespace quaff
