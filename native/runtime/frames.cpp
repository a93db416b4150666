#include "frames.h"
#include "pack/memory.h"

#include <algorithm>
#include <iterator>

namespace quaff {
namespace {

constexpr size_t kPatience = 16;                   // frames that come and go around a boundary are no reason to give memory back
constexpr int64_t kReadyBytes = int64_t{16} << 20; // kept in any case: the next short prompt shall not wait for the system to clear pages

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
    count = std::min(count, spare_.size() - std::min(spare_.size(), static_cast<size_t>(kReadyBytes / bytes_)));
    const auto end = spare_.begin() + static_cast<std::ptrdiff_t>(count);
    std::sort(spare_.begin(), end, [](const Frame& a, const Frame& b) { return a.get() > b.get(); });
    for (size_t i = 0, next = 0; i < count; i = next) {
        // Neighbours go together, or the huge pages that they share would be split, and never come back as such.
        for (next = i + 1; next < count && spare_[next].get() + bytes_ == spare_[next - 1].get(); ++next) {
        }
        // Addresses are used again: slabs have other tenants, and give none back while one of them is there.
        if (release_memory(spare_[next - 1].get(), static_cast<size_t>(bytes_) * (next - i)))
            std::move(spare_.begin() + static_cast<std::ptrdiff_t>(i), spare_.begin() + static_cast<std::ptrdiff_t>(next),
                      std::back_inserter(empty_));
    }
    spare_.erase(spare_.begin(), end);
    unneeded_ = spare_.size();
    given_ = 0;
}

} // namespace quaff
