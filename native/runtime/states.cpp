#include "states.h"

#include <stdexcept>
#include <string>

namespace quaff {

StatePool::StatePool(int64_t layers, int64_t size) : layers_(layers), size_(size) {
    if (layers < 1 || layers > 4096 || size < 1 || size > (int64_t{1} << 28))
        throw std::invalid_argument("no recurrent state of " + std::to_string(layers) + " layers with " + std::to_string(size) + " values");
    frames_ = Frames(layers * size * 4);
}

} // namespace quaff
