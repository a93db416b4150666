#include "frames.h"
#include "pack/memory.h"

#include <algorithm>

namespace quaff {
namespace {

constexpr size_t kPatience = 16; // frames that come and go around a boundary are no reason to give memory back

} // namespace

int32_t Frames::take() {
    if (free_.empty()) {
        frames_.emplace_back();
        // Room for every frame, so that give() cannot fail.
        for (std::vector<Frame>* list : {&spare_, &empty_})
            list->reserve(frames_.capacity());
        free_.reserve(frames_.capacity());
        free_.push_back(static_cast<int32_t>(frames_.size() - 1));
    }
    Frame frame;
    std::vector<Frame>& known = spare_.empty() ? empty_ : spare_;
    if (known.empty()) {
        frame = slab_memory(static_cast<size_t>(bytes_));
    } else {
        frame = std::move(known.back());
        known.pop_back();
    }
    unneeded_ = std::min(unneeded_, spare_.size());
    const int32_t id = free_.back();
    free_.pop_back();
    frames_[static_cast<size_t>(id)] = std::move(frame);
    ++in_use_;
    return id;
}

void Frames::give(int32_t id) {
    spare_.push_back(std::move(frames_[static_cast<size_t>(id)]));
    free_.push_back(id);
    // As many came back as are in use, and these were not needed meanwhile.
    if (--in_use_ == 0)
        hand_back(spare_.size());
    else if (++given_ > static_cast<size_t>(in_use_) + kPatience)
        hand_back(unneeded_);
}

void Frames::hand_back(size_t count) {
    for (size_t i = 0; i < count; ++i)
        // Addresses are used again: slabs have other tenants, and give none back while one of them is there.
        if (release_memory(spare_[i].get(), static_cast<size_t>(bytes_)))
            empty_.push_back(std::move(spare_[i]));
    spare_.erase(spare_.begin(), spare_.begin() + static_cast<std::ptrdiff_t>(count));
    unneeded_ = spare_.size();
    given_ = 0;
}

} // namespace quaff
