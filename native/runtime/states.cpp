#include "states.h"
#include "pack/memory.h"

#include <stdexcept>
#include <string>

namespace quaff {

StatePool::StatePool(int64_t layers, int64_t size) : layers_(layers), size_(size) {
    if (layers < 1 || layers > 4096 || size < 1 || size > (int64_t{1} << 28))
        throw std::invalid_argument("no recurrent state of " + std::to_string(layers) + " layers with " + std::to_string(size) + " values");
}

int32_t StatePool::take() {
    Slot slot;
    if (!spare_.empty()) {
        slot = std::move(spare_.back());
        spare_.pop_back();
    } else {
        const std::shared_ptr<uint8_t> memory = slab_memory(static_cast<size_t>(slot_bytes()));
        slot = {memory, reinterpret_cast<float*>(memory.get())};
    }
    if (free_.empty()) {
        // Room for every slot, so that give() cannot fail.
        free_.reserve(slots_.size() + 1);
        spare_.reserve(slots_.size() + 1);
        free_.push_back(static_cast<int32_t>(slots_.size()));
        slots_.emplace_back();
    }
    const int32_t id = free_.back();
    free_.pop_back();
    slots_[static_cast<size_t>(id)] = std::move(slot);
    ++in_use_;
    return id;
}

void StatePool::give(int32_t slot) {
    spare_.push_back(std::move(slots_[static_cast<size_t>(slot)]));
    free_.push_back(slot);
    if (--in_use_ == 0)
        spare_.clear();
}

} // namespace quaff
