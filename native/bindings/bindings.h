// Conversion only: each bind_<topic> checks shapes and types once and calls the runtime. src/quaff/_native.pyi is the checked-in stub.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace quaff {

namespace nb = nanobind;

template <typename T, size_t N> using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T, size_t N> using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// A new NumPy array that owns its values.
template <typename T> nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape, T** data) {
    size_t n = 1;
    for (size_t s : shape)
        n *= s;
    *data = new T[n ? n : 1]();
    nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(*data, shape.size(), shape.begin(), owner);
}

// A NumPy array over memory that others hold too: the memory lives as long as the array.
template <typename T> nb::ndarray<nb::numpy, T> shared_array(std::initializer_list<size_t> shape, std::shared_ptr<T> memory) {
    auto* held = new std::shared_ptr<T>(std::move(memory));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(held->get(), shape.size(), shape.begin(), owner);
}

void bind_machine(nb::module_& m);
void bind_model(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_source(nb::module_& m);

} // namespace quaff
