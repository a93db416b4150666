// Memory in frames of one size, by id. What is given back serves the next frame; what nobody needs for a while goes back to the system, but for
// a little.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace quaff {

class Frames {
public:
    explicit Frames(int64_t bytes = 0) : bytes_(bytes) {}

    int64_t bytes() const { return bytes_; }
    int64_t in_use() const { return in_use_; }
    int64_t spare() const { return static_cast<int64_t>(spare_.size()); } // given back, and still resident

    int32_t take();        // its bytes are those of an earlier use, or zero; throws std::bad_alloc
    void give(int32_t id); // what the last frame leaves goes back at once, but for that little
    bool holds(int32_t id) const { return id >= 0 && id < static_cast<int32_t>(frames_.size()) && frames_[static_cast<size_t>(id)]; }
    uint8_t* data(int32_t id) const { return frames_[static_cast<size_t>(id)].get(); }
    const std::shared_ptr<uint8_t>& memory(int32_t id) const { return frames_[static_cast<size_t>(id)]; }

private:
    using Frame = std::shared_ptr<uint8_t>;

    void hand_back(size_t count);

    int64_t bytes_, in_use_ = 0;
    std::vector<Frame> frames_, spare_, empty_; // by id; resident; addresses alone
    std::vector<int32_t> free_;
    size_t given_ = 0, unneeded_ = 0; // since the last look: frames given back, and the fewest that were spare
};

} // namespace quaff
