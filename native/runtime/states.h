// Memory of recurrent state of one kind: slots of [layer][size] f32. A step reads one slot of a sequence and leaves its results in others, so
// a state that was reached never changes: sequences share it, and a cancelled step leaves nothing to undo.
#pragma once
#include "runtime/frames.h"

#include <cstdint>
#include <memory>

namespace quaff {

class StatePool {
public:
    StatePool(const StatePool&) = delete;
    StatePool& operator=(const StatePool&) = delete;
    StatePool(int64_t layers, int64_t size); // throws std::invalid_argument for a size that no layer has

    int64_t layers() const { return layers_; }
    int64_t size() const { return size_; }
    int64_t slot_bytes() const { return frames_.bytes(); }
    int64_t in_use() const { return frames_.in_use(); }
    int64_t spare() const { return frames_.spare(); }

    int32_t take() { return frames_.take(); } // its values are those of an earlier use, or zero; throws std::bad_alloc
    void give(int32_t slot) { frames_.give(slot); }
    bool holds(int32_t slot) const { return frames_.holds(slot); }
    float* data(int32_t slot) const { return reinterpret_cast<float*>(frames_.data(slot)); }
    std::shared_ptr<float> memory(int32_t slot) const { return {frames_.memory(slot), data(slot)}; }

private:
    int64_t layers_, size_;
    Frames frames_;
};

} // namespace quaff
