#include "bindings.h"
#include "pack/mapping.h"
#include "runtime/step.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>

namespace quaff {

using namespace nb::literals;

namespace {

std::span<const int32_t> span(const In<int32_t, 1>& a) { return {a.data(), a.size()}; }

// batch.Segment: tokens, the position of the first, page tables and states by kind.
using SegmentTuple = std::tuple<In<int32_t, 1>, int32_t, std::vector<In<int32_t, 1>>, std::vector<In<int32_t, 1>>>;

// Draw::Segment: temperature, top_k, top_p, min_p, seed and choice, and the tokens that end it.
using DrawTuple = std::tuple<float, int64_t, double, double, uint64_t, uint32_t, In<int32_t, 1>>;

// The rows of all segments, for as long as a step's input points at them.
struct Rows {
    Rows(const std::vector<SegmentTuple>& segments, size_t kinds, size_t state_kinds, StepInput& in) {
        in.page_tables.resize(kinds);
        in.states.resize(state_kinds);
        int32_t index = 0;
        for (const auto& [some, start, tables, slots] : segments) {
            if (tables.size() != kinds || slots.size() != state_kinds)
                throw std::invalid_argument("step: a segment has one page table per KV kind, and one list of slots per kind of state");
            const auto count = static_cast<int32_t>(some.size());
            tokens.insert(tokens.end(), some.data(), some.data() + count);
            for (int32_t row = 0; row < count; ++row)
                positions.push_back(static_cast<int32_t>(int64_t{start} + row));
            segment_of_row.insert(segment_of_row.end(), some.size(), index++);
            for (size_t k = 0; k < kinds; ++k)
                in.page_tables[k].push_back(span(tables[k]));
            for (size_t k = 0; k < state_kinds; ++k)
                in.states[k].push_back(span(slots[k]));
        }
        in.tokens = tokens;
        in.positions = positions;
        in.segment_of_row = segment_of_row;
    }

    std::vector<int32_t> tokens, positions, segment_of_row;
};

BlockRows blocks_of(const In<uint8_t, 1>& data) { return {data.data(), static_cast<int64_t>(data.size())}; }

// A matrix, or of `experts` > 0 a stack of them.
template <class Make> std::shared_ptr<ModelWeight> weight_of(int64_t experts, Make make) {
    auto weight = std::make_shared<ModelWeight>();
    if (experts <= 0)
        weight->matrix = make(0);
    for (int64_t e = 0; e < experts; ++e)
        weight->experts.push_back(make(e));
    return weight;
}

void bind_weight(nb::module_& m) {
    m.attr("PANEL_VERSION") = kPanelVersion;
    m.def(
        "packed_bytes",
        [](int32_t type, int64_t rows, int64_t cols) {
            const int64_t bytes = packed_bytes(type, rows, cols);
            if (bytes < 0)
                throw std::invalid_argument("packed_bytes: unknown type, or a shape that does not fit it");
            return bytes;
        },
        "ggml_type"_a, "rows"_a, "cols"_a);
    m.def(
        "pack_panels",
        [](int32_t type, In<uint8_t, 1> data, int64_t rows, int64_t cols, int threads) {
            const int64_t bytes = packed_bytes(type, rows, cols);
            uint8_t* panels;
            auto array = new_array<uint8_t>({static_cast<size_t>(std::max<int64_t>(bytes, 0))}, &panels);
            nb::gil_scoped_release release;
            pack_panels(type, blocks_of(data), rows, cols, panels, threads);
            return array;
        },
        "ggml_type"_a, "data"_a, "rows"_a, "cols"_a, "threads"_a = 1);
    nb::class_<MappedFile>(m, "MappedFile")
        .def(nb::init<int, int64_t>(), "fd"_a, "nbytes"_a)
        .def("array",
             [](nb::handle_t<MappedFile> self) { // the file stays mapped as long as the array lives
                 const auto& file = nb::cast<const MappedFile&>(self);
                 return nb::ndarray<nb::numpy, const uint8_t>(file.data(), {static_cast<size_t>(file.size())}, self);
             })
        .def_prop_ro("moved_bytes", &MappedFile::moved_bytes)
        .def("wait", &MappedFile::wait, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<ModelWeight>(m, "Weight")
        .def(
            "__init__",
            [](ModelWeight* self, int32_t type, In<uint8_t, 1> data, int64_t rows, int64_t cols, int threads) {
                nb::gil_scoped_release release;
                new (self) ModelWeight{pack_weight(type, blocks_of(data), rows, cols, threads), {}, {}};
            },
            "ggml_type"_a, "data"_a, "rows"_a, "cols"_a, "threads"_a = 1)
        .def_static(
            "vector",
            [](In<float, 1> v) {
                return std::make_shared<ModelWeight>(ModelWeight{{}, {v.data(), v.data() + v.size()}, {}});
            },
            "values"_a)
        .def_static(
            "stack",
            [](int32_t type, In<uint8_t, 1> data, int64_t experts, int64_t rows, int64_t cols, int threads) {
                const auto size = static_cast<int64_t>(data.size());
                if (experts < 1 || size % experts)
                    throw std::invalid_argument("a stack of " + std::to_string(experts) + " matrices cannot have " + std::to_string(size) +
                                                " bytes");
                nb::gil_scoped_release release;
                auto weight = std::make_shared<ModelWeight>();
                for (int64_t e = 0; e < experts; ++e)
                    weight->experts.push_back(pack_weight(type, {data.data() + e * (size / experts), size / experts}, rows, cols, threads));
                return weight;
            },
            "ggml_type"_a, "data"_a, "experts"_a, "rows"_a, "cols"_a, "threads"_a = 1)
        .def_static(
            "read",
            [](int32_t type, int fd, int64_t offset, int64_t stride, int64_t experts, int64_t rows, int64_t cols, int threads) {
                nb::gil_scoped_release release;
                return weight_of(experts, [&](int64_t e) {
                    return pack_weight(type, {nullptr, 0, fd, offset + e * rows * stride, stride}, rows, cols, threads);
                });
            },
            "ggml_type"_a, "fd"_a, "offset"_a, "stride"_a, "experts"_a, "rows"_a, "cols"_a, "threads"_a = 1)
        .def_static(
            "view",
            [](int32_t type, In<uint8_t, 1> panels, int64_t stride, int64_t experts, int64_t rows, int64_t cols) {
                const int64_t bytes = packed_bytes(type, rows, cols), between = std::max<int64_t>(experts, 1) - 1;
                int64_t end;
                if (bytes < 0 || (between > 0 && stride < bytes) || __builtin_mul_overflow(between, stride, &end) ||
                    __builtin_add_overflow(end, bytes, &end) || end != static_cast<int64_t>(panels.size()))
                    throw std::invalid_argument(std::to_string(panels.size()) + " bytes are not the panels of this shape");
                const std::shared_ptr<const uint8_t> kept(panels.data(), [panels](const uint8_t*) {}); // with the array they lie in
                return weight_of(experts, [&](int64_t e) {
                    return view_panels(type, {kept, panels.data() + e * stride}, bytes, rows, cols);
                });
            },
            "ggml_type"_a, "panels"_a, "stride"_a, "experts"_a, "rows"_a, "cols"_a)
        .def_prop_ro("experts", [](const ModelWeight& w) { return std::max<size_t>(1, w.experts.size()); })
        .def_prop_ro("rows", [](const ModelWeight& w) { return w.is_vector() ? 1 : w.shape().rows; })
        .def_prop_ro("cols", [](const ModelWeight& w) { return w.is_vector() ? static_cast<int64_t>(w.vector.size()) : w.shape().cols; })
        .def_prop_ro("nbytes",
                     [](const ModelWeight& w) {
                         int64_t bytes = w.is_vector() ? static_cast<int64_t>(w.vector.size() * 4) : w.matrix.bytes;
                         for (const PackedWeight& expert : w.experts)
                             bytes += expert.bytes;
                         return bytes;
                     })
        .def_prop_ro("is_integer", [](const ModelWeight& w) { return !w.is_vector() && w.shape().scales != Scales::kNone; })
        .def_prop_ro("group", [](const ModelWeight& w) { return w.is_vector() ? 0 : w.shape().group; })
        .def(
            "dequantize",
            [](const ModelWeight& w, int64_t row0, int64_t count) {
                if (!w.experts.empty())
                    throw std::invalid_argument("dequantize: one matrix or vector, not a stack");
                if (!w.in_memory())
                    throw std::invalid_argument("dequantize: the weight is not in memory");
                const int64_t rows = w.is_vector() ? 1 : w.matrix.w.rows,
                              cols = w.is_vector() ? static_cast<int64_t>(w.vector.size()) : w.matrix.w.cols;
                if (count < 0)
                    count = rows - row0;
                if (row0 < 0 || row0 > rows || count > rows - row0)
                    throw std::invalid_argument("dequantize: rows out of range");
                float* out;
                auto array = new_array<float>({static_cast<size_t>(count), static_cast<size_t>(cols)}, &out);
                if (w.is_vector())
                    std::memcpy(out, w.vector.data(), static_cast<size_t>(count * cols) * 4);
                else
                    dequantize_rows(w.matrix.w, row0, count, out);
                return array;
            },
            "row0"_a = 0, "count"_a = -1);
}

void bind_state(nb::module_& m) {
    nb::class_<RopeTable>(m, "RopeTable")
        .def(nb::init<double, int64_t, const std::vector<double>&, double, double, int64_t>(), "theta"_a, "rotary_dim"_a,
             "factors"_a = std::vector<double>{}, "scale"_a = 1.0, "temperature"_a = 0.0, "temperature_length"_a = 0)
        .def(
            "rows",
            [](RopeTable& t, In<int32_t, 1> positions) {
                float* out;
                auto array = new_array<float>({positions.size(), static_cast<size_t>(t.rotary_dim())}, &out);
                for (size_t i = 0; i < positions.size(); ++i) {
                    if (positions.data()[i] < 0)
                        throw std::invalid_argument("positions must not be negative");
                    t.ensure(int64_t{positions.data()[i]} + 1);
                    std::memcpy(out + i * static_cast<size_t>(t.rotary_dim()), t.row(positions.data()[i]),
                                static_cast<size_t>(t.rotary_dim()) * 4);
                }
                return array;
            },
            "positions"_a);

    const auto held = [](const PagePool& p, int32_t page) {
        if (!p.holds(page))
            throw std::invalid_argument("page " + std::to_string(page) + " is not in use");
    };
    nb::class_<PagePool>(m, "PagePool")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), "layers"_a, "kv_heads"_a, "dim"_a, "value_dim"_a, "value_bytes"_a = 2)
        .def_prop_ro("page_bytes", &PagePool::page_bytes)
        .def_prop_ro("pages_in_use", &PagePool::in_use)
        .def_prop_ro("spare_pages", &PagePool::spare)
        .def_prop_ro("bytes_in_use", [](const PagePool& p) { return p.in_use() * p.page_bytes(); })
        .def("take", &PagePool::take, "zeroed"_a = true)
        .def(
            "give",
            [held](PagePool& p, int32_t page) {
                held(p, page);
                p.give(page);
            },
            "page"_a)
        .def(
            "copy",
            [held](PagePool& p, int32_t page) {
                held(p, page);
                return p.copy(page);
            },
            "page"_a)
        .def(
            "array",
            [held](const PagePool& p, int32_t page) {
                held(p, page);
                uint16_t* out;
                auto array = new_array<uint16_t>(
                    {static_cast<size_t>(p.layers()), static_cast<size_t>(p.kv_heads()), static_cast<size_t>(p.head_elements())}, &out);
                std::memcpy(out, p.data(page), static_cast<size_t>(p.page_bytes()));
                return array;
            },
            "page"_a)
        .def(
            "view",
            [held](const PagePool& p, int32_t page) {
                held(p, page);
                return shared_array<uint16_t>(
                    {static_cast<size_t>(p.layers()), static_cast<size_t>(p.kv_heads()), static_cast<size_t>(p.head_elements())},
                    p.memory(page));
            },
            "page"_a);
}

void bind_states(nb::module_& m) {
    const auto held = [](const StatePool& p, int32_t slot) {
        if (!p.holds(slot))
            throw std::invalid_argument("state slot " + std::to_string(slot) + " is not in use");
    };
    nb::class_<StatePool>(m, "StatePool")
        .def(nb::init<int64_t, int64_t>(), "layers"_a, "size"_a)
        .def_prop_ro("slot_bytes", &StatePool::slot_bytes)
        .def_prop_ro("slots_in_use", &StatePool::in_use)
        .def_prop_ro("spare_slots", &StatePool::spare)
        .def("take", &StatePool::take)
        .def(
            "give",
            [held](StatePool& p, int32_t slot) {
                held(p, slot);
                p.give(slot);
            },
            "slot"_a)
        .def(
            "array",
            [held](const StatePool& p, int32_t slot) {
                held(p, slot);
                float* out;
                auto array = new_array<float>({static_cast<size_t>(p.layers()), static_cast<size_t>(p.size())}, &out);
                std::memcpy(out, p.data(slot), static_cast<size_t>(p.slot_bytes()));
                return array;
            },
            "slot"_a)
        .def(
            "view",
            [held](const StatePool& p, int32_t slot) {
                held(p, slot);
                return shared_array<float>({static_cast<size_t>(p.layers()), static_cast<size_t>(p.size())}, p.memory(slot));
            },
            "slot"_a);
}

using OpTuple =
    std::tuple<int32_t, std::vector<int32_t>, std::vector<int32_t>, std::vector<int32_t>, std::vector<int32_t>, std::vector<float>>;

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program")
        .def(
            "__init__",
            [](Program* self, const std::vector<std::pair<int64_t, int>>& buffers, const std::vector<OpTuple>& ops, int32_t slots) {
                std::vector<Buffer> b;
                for (const auto& [width, kind] : buffers) {
                    if (kind < 0 || kind > 3)
                        throw std::invalid_argument("a buffer has kind 0 to 3");
                    b.push_back({width, kind % 2 != 0, kind >= 2});
                }
                std::vector<Op> o;
                for (const auto& [kind, in, out, weights, ints, floats] : ops)
                    o.push_back({static_cast<OpKind>(kind), in, out, weights, ints, floats});
                new (self) Program(std::move(b), std::move(o), slots);
            },
            "buffers"_a, "ops"_a, "slots"_a = 1);
    nb::class_<Model>(m, "Model")
        .def(nb::init<int64_t, int64_t, int64_t>(), "dim"_a, "vocab"_a, "outputs"_a)
        .def("add_rope", &Model::add_rope, "table"_a)
        .def(
            "add_stage",
            [](Model& self, std::shared_ptr<Program> program, const std::vector<std::shared_ptr<ModelWeight>>& weights) {
                return self.add_stage(std::move(program), {weights.begin(), weights.end()});
            },
            "program"_a, "weights"_a)
        .def_prop_ro("stages", [](const Model& self) { return self.stages.size(); });
}

constexpr std::pair<const char*, int64_t Counters::*> kCounters[] = {
    {"weight_bytes_touched", &Counters::weight_bytes_touched},
    {"embedding_bytes_touched", &Counters::embedding_bytes_touched},
    {"head_bytes_touched", &Counters::head_bytes_touched},
    {"launches", &Counters::launches},
    {"macs", &Counters::macs},
    {"attention_macs", &Counters::attention_macs},
    {"state_macs", &Counters::state_macs},
    {"head_macs", &Counters::head_macs},
    {"head_rows", &Counters::head_rows},
    {"kv_bytes_written", &Counters::kv_bytes_written},
    {"expert_rows", &Counters::expert_rows},
    {"experts_touched", &Counters::experts_touched},
    {"expert_bytes_touched", &Counters::expert_bytes_touched},
    {"weight_bytes_loaded", &Counters::weight_bytes_loaded},
};

void bind_step(nb::module_& m) {
    nb::class_<Control>(m, "Control")
        .def(nb::init<>())
        .def("cancel", [](Control& c) { c.cancelled = true; })
        .def_prop_ro("cancelled", [](const Control& c) { return c.cancelled.load(); })
        .def("reset",
             [](Control& c) {
                 c.cancelled = false;
                 c.cells_done = 0;
                 c.work_done = 0;
             })
        .def_prop_ro("cells_done", [](const Control& c) { return c.cells_done.load(); })
        .def_prop_ro("work_done", [](const Control& c) { return c.work_done.load(); });

    nb::class_<Counters>(m, "Counters").def(nb::init<>()).def("as_dict", [](const Counters& c) {
        nb::dict d;
        for (const auto& [name, field] : kCounters)
            d[name] = c.*field;
        return d;
    });

    nb::class_<Runtime>(m, "Runtime")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("threads", &Runtime::threads)
        .def_prop_ro("scratch_bytes", &Runtime::scratch_bytes)
        .def_prop_ro("pulse", &Runtime::pulse)
        .def_prop_ro("owned_launches", &Runtime::owned_launches)
        .def_prop_ro("joined_launches", &Runtime::joined_launches)
        .def_prop_ro("shared_launches", &Runtime::shared_launches)
        .def_prop_ro("expected_launches", &Runtime::expected_launches)
        .def(
            "step",
            [](Runtime& self, Model& model, const std::vector<PagePool*>& pools, const std::vector<StatePool*>& state_pools,
               const std::vector<SegmentTuple>& segments, In<int32_t, 1> cell_stage, In<int32_t, 1> cell_ranges, In<int32_t, 2> ranges,
               In<int32_t, 1> logits_rows, Out<float, 2> logits, Control& control, Counters& counters,
               std::optional<Out<double, 1>> op_seconds, const std::vector<DrawTuple>& draw) {
                if (ranges.shape(1) != 2)
                    throw std::invalid_argument("step: ranges must be [n, 2]");
                size_t ops = 0;
                for (const Stage& stage : model.stages)
                    ops += stage.program->ops.size();
                if (op_seconds && op_seconds->size() != ops)
                    throw std::invalid_argument("step: op_seconds must have one value for every op of every stage");
                if (logits.shape(0) != (draw.empty() ? logits_rows.size() : draw.size()) ||
                    static_cast<int64_t>(logits.shape(1)) != model.outputs)
                    throw std::invalid_argument("step: logits must be [len(logits_rows), outputs], and [len(draw), outputs] to draw from");
                StepInput in;
                Rows rows(segments, pools.size(), state_pools.size(), in);
                if (!draw.empty())
                    in.draw = Draw{{}, rows.tokens};
                for (const auto& [temperature, top_k, top_p, min_p, seed, choice, ends] : draw)
                    in.draw->segments.push_back({{temperature, top_k, top_p, min_p, 1.0f, seed, 0, choice}, span(ends)});
                in.cell_stage = span(cell_stage);
                in.cell_ranges = span(cell_ranges);
                in.ranges = {ranges.data(), ranges.size()};
                in.logits_rows = span(logits_rows);
                in.logits = logits.data();
                in.profile = op_seconds.has_value();
                const std::vector<const PagePool*> held(pools.begin(), pools.end());
                const std::vector<const StatePool*> held_states(state_pools.begin(), state_pools.end());
                StepResult result;
                {
                    nb::gil_scoped_release release;
                    result = self.step(model, held, held_states, in, control);
                }
                for (const auto& [name, field] : kCounters)
                    counters.*field += result.counters.*field;
                for (size_t i = 0; i < result.op_seconds.size(); ++i)
                    op_seconds->data()[i] += result.op_seconds[i];
                nb::list poisoned, drawn;
                for (int32_t p : result.poisoned)
                    poisoned.append(p != 0);
                for (const std::vector<int32_t>& tokens : result.drawn) {
                    nb::list of_segment;
                    for (int32_t token : tokens)
                        of_segment.append(token);
                    drawn.append(of_segment);
                }
                return std::make_tuple(result.cells_done, nb::tuple(poisoned), nb::tuple(drawn));
            },
            "model"_a, "pools"_a, "state_pools"_a, "segments"_a, "cell_stage"_a, "cell_ranges"_a, "ranges"_a, "logits_rows"_a, "logits"_a,
            "control"_a, "counters"_a, "op_seconds"_a = nb::none(), "draw"_a = std::vector<DrawTuple>{});
}

} // namespace

void bind_model(nb::module_& m) {
    bind_weight(m);
    bind_state(m);
    bind_states(m);
    bind_program(m);
    bind_step(m);
}

} // namespace quaff
