#include "bindings.h"
#include "runtime/source.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

namespace quaff {

using namespace nb::literals;

void bind_source(nb::module_& m) {
    nb::exception<SourceError>(m, "SourceError", PyExc_OSError);
    nb::class_<WeightSource>(m, "WeightSource")
        .def(
            "__init__",
            [](WeightSource* self, const std::vector<std::tuple<std::string, int64_t, int64_t>>& files, int readers, int64_t buffer_bytes) {
                if (readers < 1 || readers > 64 || buffer_bytes < 4 * kSector || buffer_bytes % kSector)
                    throw std::invalid_argument("a weight source has 1 to 64 readers with buffers of whole sectors");
                std::vector<std::shared_ptr<WeightFile>> opened;
                for (const auto& [path, bytes, mtime_ns] : files)
                    opened.push_back(std::make_shared<WeightFile>(path, bytes, mtime_ns));
                new (self) WeightSource(std::move(opened), readers, buffer_bytes);
            },
            "files"_a, "readers"_a, "buffer_bytes"_a)
        .def(
            "add",
            [](WeightSource& self, std::string name, int32_t type, int64_t matrices, int64_t rows, int64_t cols, int32_t file,
               int64_t offset, int64_t matrix_stride, int64_t row_stride, bool packed) {
                return self.add(std::move(name), type, matrices, rows, cols, {file, offset, matrix_stride, row_stride, packed});
            },
            "name"_a, "ggml_type"_a, "matrices"_a, "rows"_a, "cols"_a, "file"_a, "offset"_a, "matrix_stride"_a, "row_stride"_a, "packed"_a)
        .def(
            "bind",
            [](std::shared_ptr<WeightSource> self, Model& model, int32_t slots, std::vector<int32_t> pinned, bool pin_tables,
               int64_t head_rows, int64_t expert_bytes) {
                self->bind(model.stages, {slots, std::move(pinned), pin_tables, head_rows, expert_bytes});
                model.source = std::move(self);
            },
            "model"_a, "slots"_a, "pinned"_a, "pin_tables"_a, "head_rows"_a, "expert_bytes"_a)
        .def("stop", &WeightSource::stop, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("memory_bytes", &WeightSource::memory_bytes)
        .def_prop_ro("counters", [](const WeightSource& self) {
            const StreamCounters c = self.counters();
            nb::dict d;
            d["disk_bytes"] = c.disk_bytes;
            d["read_bytes"] = c.read_bytes;
            d["passes"] = c.passes;
            d["prefetch_hits"] = c.prefetch_hits;
            d["prefetch_misses"] = c.prefetch_misses;
            d["wait_seconds"] = c.wait_seconds;
            d["compute_seconds"] = c.compute_seconds;
            d["read_seconds"] = c.read_seconds;
            d["pack_seconds"] = c.pack_seconds;
            return d;
        });
}

} // namespace quaff
