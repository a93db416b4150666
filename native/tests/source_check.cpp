// Streamed weights under stress: steps of any stages, ended anywhere, must find every matrix as packing it in memory leaves it.
#include "runtime/source.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

using namespace quaff;

namespace {

constexpr int32_t kType = 2; // Q4_0
constexpr int64_t kCols = 64, kRows = 1000, kExpertRows = 48;
constexpr int32_t kExperts = 9, kUsed = 2, kDense = 5;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "source_check: %s\n", what);
    std::exit(1);
}

struct Stored {
    int64_t offset, matrices, rows;
    std::vector<PackedWeight> packed;
};

// Random blocks with scales near one, in a file, and packed in memory.
class Blocks {
public:
    explicit Blocks(std::filesystem::path p) : path(std::move(p)) {}

    Stored add(int64_t matrices, int64_t rows) {
        const int64_t row_bytes = ggml_row_bytes(kType, kCols), begin = static_cast<int64_t>(bytes_.size());
        for (int64_t i = 0; i < std::max<int64_t>(1, matrices) * rows * row_bytes; ++i)
            bytes_.push_back(static_cast<uint8_t>(i % 18 == 1 ? 0x3c : random_() & 0xff));
        Stored stored{begin, matrices, rows, {}};
        for (int64_t m = 0; m < std::max<int64_t>(1, matrices); ++m)
            stored.packed.push_back(pack_weight(kType, {bytes_.data() + begin + m * rows * row_bytes, rows * row_bytes}, rows, kCols, 1));
        return stored;
    }

    std::shared_ptr<WeightFile> open() const {
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes_.data()), static_cast<std::streamsize>(bytes_.size()));
        struct stat status;
        if (stat(path.c_str(), &status))
            fail("no file");
        return std::make_shared<WeightFile>(path.string(), status.st_size,
                                            int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec);
    }

    const std::filesystem::path path;

private:
    std::vector<uint8_t> bytes_;
    std::mt19937 random_{1};
};

std::shared_ptr<const Program> dense_program() {
    const Op linear{OpKind::kLinear, {kNone, 2}, {3}, {0, kNone}, {1, 0}, {}};
    return std::make_shared<Program>(std::vector<Buffer>{{kCols, false, false}, {kRows, false, false}}, std::vector<Op>{linear});
}

std::shared_ptr<const Program> head_program() {
    const Op linear{OpKind::kLinear, {kNone, 2}, {kLogits}, {0, kNone}, {1, 0}, {}};
    return std::make_shared<Program>(std::vector<Buffer>{{kCols, false, false}}, std::vector<Op>{linear});
}

std::shared_ptr<const Program> expert_program() {
    const std::vector<Buffer> buffers{
        {kCols, false, false}, {kExperts, false, false}, {2 * kUsed, false, false}, {kCols, false, true}, {kExpertRows, false, true}};
    const Op route{OpKind::kRoute, {3}, {4}, {kNone}, {kExperts, kUsed, 0, 0, 1, 1, 1}, {1.0f}};
    const Op gather{OpKind::kGather, {2, 4}, {5}, {}, {}, {}};
    const Op linear{OpKind::kExpertLinear, {kNone, 5, 4}, {6}, {0, kNone}, {1, kExperts}, {}};
    return std::make_shared<Program>(buffers, std::vector<Op>{route, gather, linear}, kUsed);
}

void same(const Weight& w, const PackedWeight& expected, int64_t first_row) {
    const int64_t at = first_row / 16 * w.panel_bytes, bytes = panel_count(w) * w.panel_bytes;
    if (!w.data || std::memcmp(w.data, expected.w.data + at, static_cast<size_t>(bytes)))
        fail("a stage finds other panels");
}

struct Model {
    std::vector<Stage> stages;
    std::vector<Stored> stored;
};

// One step, maybe ended by another thread: every stage is checked as it is entered.
void step(WeightSource& source, const Model& model, std::mt19937& random) {
    std::vector<int32_t> cells;
    for (int pass = 0; pass < 2; ++pass)
        for (int32_t s = 0; s < static_cast<int32_t>(model.stages.size()); ++s)
            for (uint32_t n = random() % 3; n > 0; --n)
                cells.push_back(s);
    std::atomic<bool> cancelled{false};
    std::thread killer;
    if (random() % 2)
        killer = std::thread([&cancelled, wait = random() % 400] {
            std::this_thread::sleep_for(std::chrono::microseconds(wait));
            cancelled = true;
        });
    bool whole = false;
    source.begin(cells, cancelled);
    try {
        for (const int32_t s : cells) {
            source.enter(s);
            const auto i = static_cast<size_t>(s);
            const Stored& stored = model.stored[i];
            if (source.streams_experts(s)) {
                std::vector<int32_t> chosen;
                for (int32_t e = 0; e < kExperts; ++e)
                    if (random() % 3)
                        chosen.push_back(e);
                source.choose_experts(s, chosen);
                size_t seen = 0;
                while (const auto* there = source.next_experts(model.stages[i].program->ops.back()))
                    for (const int32_t e : *there) {
                        same(model.stages[i].weights[0]->experts[static_cast<size_t>(e)].w, stored.packed[static_cast<size_t>(e)], 0);
                        ++seen;
                    }
                if (seen != chosen.size())
                    fail("an expert is missing");
            } else if (const int64_t blocks = source.head_blocks(s)) {
                for (int64_t b = 0; b < blocks; ++b) {
                    const WeightSource::Block block = source.head_block(s, b);
                    same(block.w, stored.packed[0], block.first);
                }
            } else {
                same(model.stages[i].weights[0]->matrix.w, stored.packed[0], 0);
            }
        }
        whole = true;
    } catch (const Cancelled&) {
    }
    source.end(whole);
    if (killer.joinable())
        killer.join();
}

void check(Blocks& blocks, const std::vector<Stored>& stored, const StreamPlan& plan, uint32_t seed) {
    WeightSource source({blocks.open()}, 2, 16 << 10);
    Model model{{}, stored};
    for (size_t i = 0; i < stored.size(); ++i) {
        const int64_t matrix = stored[i].rows * ggml_row_bytes(kType, kCols);
        const auto weight = source.add("weight " + std::to_string(i), kType, stored[i].matrices, stored[i].rows, kCols,
                                       {0, stored[i].offset, matrix, ggml_row_bytes(kType, kCols), false});
        const bool head = i + 1 == stored.size();
        model.stages.push_back({stored[i].matrices ? expert_program() : head ? head_program() : dense_program(), {weight}});
    }
    source.bind(model.stages, plan);
    std::mt19937 random(seed);
    for (int i = 0; i < 60; ++i)
        step(source, model, random);
    const StreamCounters counters = source.counters();
    if (counters.disk_bytes > counters.read_bytes || counters.passes < 60)
        fail("counters");
}

} // namespace

int main() {
    Blocks blocks(std::filesystem::temp_directory_path() / ("quaff_source_check." + std::to_string(getpid())));
    std::vector<Stored> stored;
    for (int i = 0; i < kDense; ++i)
        stored.push_back(blocks.add(0, kRows));
    stored.push_back(blocks.add(kExperts, kExpertRows));
    stored.push_back(blocks.add(0, kRows));
    uint32_t seed = 1;
    for (const int32_t slots : {1, 2, 4})
        for (const std::vector<int32_t>& pinned : {std::vector<int32_t>{}, {0, 2}, {5}, {0, 1, 2, 3, 4, 5, 6}})
            for (const int64_t head_rows : {64, 1024})
                check(blocks, stored, {slots, pinned, false, head_rows, 0}, seed++);
    std::filesystem::remove(blocks.path);
    std::puts("source_check: ok");
}
