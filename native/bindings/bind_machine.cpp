#include "bindings.h"
#include "runtime/ceilings.h"
#include "runtime/cpu.h"
#include "runtime/dispatch.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace quaff {

using namespace nb::literals;

void bind_machine(nb::module_& m) {
    m.def("isa", [] { return std::string(kernels().isa); });
    m.def("available_isas", &available_isas);
    m.def("set_isa", &set_isa, "name"_a);
    m.def("default_threads", &default_threads);
    const auto check = [](int threads, bool ok) {
        if (threads < 1 || threads > 1024 || !ok)
            throw std::invalid_argument("measure: threads must be 1 to 1024, the length positive and bounded");
    };
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    const auto arithmetic = [&](const char* name, double (*measure)(int threads, double seconds)) {
        m.def(
            name,
            [check, measure](int threads, double s) {
                check(threads, s > 0 && s <= 60);
                return measure(threads, s);
            },
            "threads"_a, "seconds"_a, released);
    };
    arithmetic("measure_int8", &measure_int8);
    arithmetic("measure_int16", &measure_int16);
    arithmetic("measure_fma", &measure_fma);
    m.def(
        "measure_bandwidth",
        [check](int threads, int64_t mb) {
            check(threads, mb > 0 && mb <= 65536);
            return measure_bandwidth(threads, mb);
        },
        "threads"_a, "megabytes"_a, released);
    m.def(
        "measure_cache",
        [check](int threads, int64_t kb, double s) {
            check(threads, kb > 0 && kb <= 1 << 20 && s > 0 && s <= 60);
            return measure_cache(threads, kb, s);
        },
        "threads"_a, "kilobytes"_a, "seconds"_a, released);
}

} // namespace quaff
