#include "bindings.h"
#include "runtime/dispatch.h"
#include "runtime/sample.h"

#include <stdexcept>

namespace quaff {

using namespace nb::literals;

namespace {

void check(int64_t code) {
    if (code == kNotFinite)
        throw std::invalid_argument("logits are not finite");
    if (code == kBadArgument)
        throw std::invalid_argument("a sampling option or a token id is out of range");
}

auto row_function(void (*KernelTable::*kernel)(const float*, float*, int64_t)) {
    return [kernel](In<float, 1> x) {
        float* out;
        auto array = new_array<float>({x.size()}, &out);
        (kernels().*kernel)(x.data(), out, static_cast<int64_t>(x.size()));
        return array;
    };
}

} // namespace

void bind_sample(nb::module_& m) {
    m.def(
        "sample",
        [](In<float, 1> logits, float temperature, int64_t top_k, double top_p, double min_p, float repetition_penalty,
           In<int32_t, 1> history, uint64_t seed, uint32_t position, uint32_t choice) {
            const SampleOptions options{temperature, top_k, top_p, min_p, repetition_penalty, seed, position, choice};
            const int64_t id = sample_token(kernels(), logits.data(), static_cast<int64_t>(logits.size()), options, history.data(),
                                            static_cast<int64_t>(history.size()));
            check(id);
            return id;
        },
        "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a, "history"_a, "seed"_a, "position"_a,
        "choice"_a);
    m.def(
        "logprobs",
        [](In<float, 1> logits, In<int32_t, 1> ids) {
            double* out;
            auto array = new_array<double>({ids.size()}, &out);
            check(log_probabilities(kernels(), logits.data(), static_cast<int64_t>(logits.size()), ids.data(),
                                    static_cast<int64_t>(ids.size()), out));
            return array;
        },
        "logits"_a, "ids"_a);
    m.def("exp_row", row_function(&KernelTable::exp_row), "x"_a);
    m.def("sigmoid_row", row_function(&KernelTable::sigmoid_row), "x"_a);
    m.def("tanh_row", row_function(&KernelTable::tanh_row), "x"_a);
}

} // namespace quaff
