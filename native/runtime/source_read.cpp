// Streamed weights: reads, by the readers' threads, into the memory of a load or into rows of the caller.
#include "source.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace quaff {
namespace {

// Tokens whose rows lie so near to each other are read together.
constexpr int64_t kRowsSpan = 64 << 10;

} // namespace

std::shared_ptr<Load> WeightSource::load(const Unit& unit, uint8_t* memory, bool urgent) {
    const auto task = [this, &unit, memory](size_t i, uint8_t* buffer) { return fetch(unit.pieces[i], memory, buffer); };
    return loader_->start(unit.pieces.size(), task, urgent);
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
    const double began = now_seconds();
    uint8_t* blocks = buffer + (piece.offset - sector_begin(piece.offset));
    if (t.place.row_stride != t.row_bytes)
        for (int64_t r = 1; r < piece.rows; ++r)
            std::memmove(blocks + r * t.row_bytes, blocks + r * t.place.row_stride, static_cast<size_t>(t.row_bytes));
    pack(t, blocks, piece.rows, memory + piece.to);
    pack_ns_ += static_cast<int64_t>((now_seconds() - began) * 1e9);
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
    const int64_t room = std::min<int64_t>(kRowsSpan, static_cast<int64_t>(loader_->buffer_bytes()) - 2 * kSector - panel_room(t));
    // Tasks: ranges of the list whose bytes lie near to each other.
    std::vector<size_t> bounds{0};
    for (size_t i = 1; i < rows.size(); ++i) {
        const int64_t first = rows[bounds.back()].first / group, before = rows[i - 1].first / group, at = rows[i].first / group;
        if ((at - before) * stride > bytes + kSector || (at - first) * stride + bytes > std::max(room, bytes))
            bounds.push_back(i);
    }
    bounds.push_back(rows.size());
    const auto task = [&](size_t i, uint8_t* buffer) { return fetch_rows(t, rows, bounds[i], bounds[i + 1], buffer); };
    const auto load = loader_->start(bounds.size() - 1, task, true);
    try {
        wait(*load, false);
    } catch (...) {
        loader_->abandon(*load); // it writes to the caller's rows
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
    uint8_t* panel = buffer + loader_->buffer_bytes() - panel_room(t);
    Weight w = weight_shape(t.ggml_type, 1, t.cols);
    w.data = panel;
    for (size_t i = begin; i < end; ++i) {
        pack(t, buffer + (at - sector_begin(at)) + (rows[i].first - first) * t.place.row_stride, 1, panel);
        dequantize_rows(w, 0, 1, rows[i].second);
    }
    return got;
}

} // namespace quaff
