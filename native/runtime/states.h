// Memory of recurrent state of one kind: slots of [layer][size] f32. A step reads one slot of a sequence and leaves its results in others, so
// a state that was reached never changes: sequences share it, and a cancelled step leaves nothing to undo.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace quaff {

class StatePool {
public:
    StatePool(const StatePool&) = delete;
    StatePool& operator=(const StatePool&) = delete;
    StatePool(int64_t layers, int64_t size); // throws std::invalid_argument for a size that no layer has

    int64_t layers() const { return layers_; }
    int64_t size() const { return size_; }
    int64_t slot_bytes() const { return layers_ * size_ * 4; }
    int64_t in_use() const { return in_use_; }

    int32_t take();          // its values are those of an earlier use; throws std::bad_alloc
    void give(int32_t slot); // its memory serves the next slot; the last slot gives all of it back
    bool holds(int32_t slot) const { return slot >= 0 && slot < static_cast<int32_t>(slots_.size()) && slots_[static_cast<size_t>(slot)]; }
    float* data(int32_t slot) const { return slots_[static_cast<size_t>(slot)].get(); }
    std::shared_ptr<float> memory(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }

private:
    using Slot = std::shared_ptr<float>;

    int64_t layers_, size_, in_use_ = 0;
    std::vector<Slot> slots_, spare_;
    std::vector<int32_t> free_;
};

} // namespace quaff
