// Compares linear_int and linear_float of every instruction set, by bytes, with double loops written from NUMERICS 13 and 14.
//   linear_check            exit status 0 when all agree
//   linear_check --speed [type [threads]]  multiply-accumulates per second and their share of spin_int8; for few tokens also bytes of weights per
//                        second and their share of a plain read of the same memory, in turns. QUAFF_ISA chooses the set
#include "numerics.h"
#include "pack/memory.h"
#include "pack/pack.h"
#include "runtime/cpu.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

using namespace quaff;

namespace {

std::mt19937 random_bits(1);
int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }
float around(float size) { return std::uniform_real_distribution<float>(-size, size)(random_bits); }

struct Form {
    int32_t type;
    int block;
    std::vector<int> halves; // where a block keeps its f16 scales
};
const std::vector<Form> kForms = {
    {2, 32, {0}},      {3, 32, {0, 2}},   {6, 32, {0}},     {7, 32, {0, 2}}, {8, 32, {0}},   {10, 256, {80, 82}}, {11, 256, {108}},
    {12, 256, {0, 2}}, {13, 256, {0, 2}}, {14, 256, {208}}, {20, 32, {0}},   {23, 256, {0}}, {39, 32, {}},        {0, 1, {}},
    {1, 1, {}},        {30, 1, {}},       {16, 256, {0}},   {17, 256, {0}},  {18, 256, {0}}, {19, 256, {0}},      {21, 256, {0}},
    {22, 256, {0}},    {29, 256, {}},     {34, 256, {52}},  {35, 256, {64}}, {40, 64, {}}};

// Random blocks by bytes with scales of about 2^-8 (f16 exponent bits 5..8); every fourth row holds codes of one extreme only.
std::vector<uint8_t> random_blocks(const Form& form, int64_t rows, int64_t cols) {
    const int64_t row_bytes = ggml_row_bytes(form.type, cols), block_bytes = row_bytes / (cols / form.block);
    std::vector<uint8_t> data(size_t(rows * row_bytes));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < row_bytes; at += block_bytes) {
            uint8_t* b = &data[size_t(row * row_bytes + at)];
            const int extreme = row % 4 ? -1 : row % 8 ? 0x00 : form.type == 8 ? 0x80 : 0xff;
            for (int64_t i = 0; i < block_bytes; i++)
                b[i] = uint8_t(extreme < 0 || form.block == 1 ? any(0, 255) : extreme);
            for (int half : form.halves)
                b[half] = uint8_t(any(0, 255)), b[half + 1] = uint8_t(any(0, 1) << 7 | any(0x14, 0x23));
            if (form.type == 39)
                b[0] = uint8_t(any(116, 124));
            if (form.type == 29) // the f16 lies in the high four bits of bytes 49, 51, 53 and 55
                b[55] = uint8_t((b[55] & 15) | any(0, 1) << 7 | 0x10), b[53] = uint8_t((b[53] & 15) | any(4, 15) << 4);
            if (form.type == 40)
                for (int i = 0; i < 4; i++)
                    b[i] = uint8_t(any(0, 1) << 7 | any(0, 0x38));
            if (form.type == 0)
                *reinterpret_cast<float*>(b) = around(1);
            if (form.type == 1)
                b[1] = uint8_t((b[1] & 0x83) | any(0x28, 0x3c));
            if (form.type == 30)
                b[1] = uint8_t(any(0, 1) << 7 | any(0x3c, 0x3f));
        }
    return data;
}

template <class T> struct Aligned { // kernels may be given any f32 rows; panels and scratch are 64-byte aligned
    T* p;
    explicit Aligned(size_t n) : p(static_cast<T*>(::operator new (n * sizeof(T) + 64, std::align_val_t{64}))) {}
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    ~Aligned() { ::operator delete (p, std::align_val_t{64}); }
};

struct Activations {
    int64_t rows, cols;
    std::vector<int8_t> q;
    std::vector<float> scale, x;
    std::vector<int32_t> sum32, sum16;
    std::vector<Outlier> outlier;
    QuantRows view{};

    Activations(int64_t rows, int64_t cols) : rows(rows), cols(cols) {
        const int64_t groups = cols / 32, stride = (groups + 15) / 16 * 16;
        q.resize(size_t(rows * cols)), scale.resize(size_t(rows * stride)), x.resize(size_t(rows * cols));
        sum32.resize(size_t(rows * stride)), sum16.resize(size_t(2 * rows * stride));
        for (float& v : x)
            v = around(2);
        for (float& s : scale)
            s = std::ldexp(float(any(8, 15)), any(-13, -7));
        for (int64_t i = 0; i < rows * groups * 32; i++) {
            const int64_t row = i / cols, k = i % cols;
            q[size_t(i)] = int8_t(row % 5 == 1 ? 127 : row % 5 == 3 ? -127 : any(-127, 127));
            sum32[size_t(row * stride + k / 32)] += q[size_t(i)], sum16[size_t(2 * row * stride + k / 16)] += q[size_t(i)];
        }
        const int64_t blocks = outlier_count(cols);
        for (int64_t i = 0; i < rows * blocks; i++)
            outlier.push_back({uint32_t(any(0, int(std::min<int64_t>(kOutlierBlock, cols - i % blocks * kOutlierBlock)) - 1)), around(40)});
        view = {q.data(), scale.data(), sum32.data(), sum16.data(), outlier.data(), cols, stride, blocks};
    }
};

// Values before bias and residual, [rows][w.rows].
std::vector<float> reference_int(const Weight& w, const Activations& a) {
    std::vector<int8_t> code(size_t(w.cols));
    std::vector<float> scale(size_t(w.groups)), min(size_t(w.groups)), out(size_t(a.rows * w.rows));
    for (int64_t n = 0; n < w.rows; n++) {
        unpack_rows(w, n, 1, code.data(), scale.data(), min.data());
        for (int64_t t = 0; t < a.rows; t++) {
            float acc = 0;
            for (int64_t g = 0; g < w.groups; g++) {
                int32_t dot = 0, sum = 0;
                for (int64_t k = g * w.group; k < (g + 1) * w.group; k++)
                    dot += code[size_t(k)] * a.q[size_t(t * a.cols + k)], sum += a.q[size_t(t * a.cols + k)];
                const float a_scale = a.scale[size_t(t * a.view.s_stride + g * w.group / 32)];
                int e = 0;
                const float mantissa = 2 * std::frexp(a_scale, &e);
                acc = std::fma(std::ldexp(float(dot), e - 1), scale[size_t(g)] * mantissa, acc);
                if (w.has_min)
                    acc = std::fma(min[size_t(g)], a_scale * float(sum), acc);
                const int64_t k = (g + 1) * w.group, block = (k - 1) / kOutlierBlock;
                if (k % kOutlierBlock && k != w.cols)
                    continue;
                const Outlier& o = a.outlier[size_t(t * a.view.o_stride + block)];
                const auto at = size_t(block * kOutlierBlock + o.column), of = at / size_t(w.group);
                acc = std::fma(std::fma(scale[of], float(code[at]), w.has_min ? min[of] : 0.0f), o.value, acc);
            }
            out[size_t(t * w.rows + n)] = acc;
        }
    }
    return out;
}

std::vector<float> reference_float(const Weight& w, const Activations& a) {
    std::vector<float> row(size_t(w.cols)), out(size_t(a.rows * w.rows));
    for (int64_t n = 0; n < w.rows; n++) {
        dequantize_rows(w, n, 1, row.data());
        for (int64_t t = 0; t < a.rows; t++) {
            float total = 0;
            for (int64_t k0 = 0; k0 < w.cols; k0 += 128) {
                float acc = 0;
                for (int64_t k = k0; k < std::min(k0 + 128, w.cols); k++)
                    acc = std::fma(row[size_t(k)], a.x[size_t(t * a.cols + k)], acc);
                total = total + acc;
            }
            out[size_t(t * w.rows + n)] = total;
        }
    }
    return out;
}

// Runs a kernel in two random panel ranges; with `extras` a bias, a residual and a row map are in play, else none.
bool agrees(const KernelTable& table, const Weight& w, const Activations& a, bool integer, bool extras, const std::vector<float>& want) {
    std::vector<float> bias(size_t(w.rows)), out(size_t(a.rows * (w.rows + 3)), -7.0f), expected = out;
    std::vector<int32_t> map(size_t(a.rows));
    for (float& b : bias)
        b = around(1);
    for (size_t t = 0; t < map.size(); t++)
        map[t] = int32_t(t);
    std::shuffle(map.begin(), map.end(), random_bits);
    for (int64_t t = 0; t < a.rows; t++)
        for (int64_t n = 0; n < w.rows; n++) {
            float value = want[size_t(t * w.rows + n)];
            if (extras)
                value = value + bias[size_t(n)];
            float& to = expected[size_t((extras ? map[size_t(t)] : t) * (w.rows + 3) + n)];
            to = extras ? to + value : value;
        }
    Aligned<uint8_t> scratch(linear_scratch_bytes(w));
    const LinearArgs args{&w,         a.rows,     &a.view,
                          a.x.data(), a.cols,     extras ? bias.data() : nullptr,
                          out.data(), w.rows + 3, extras ? map.data() : nullptr,
                          extras,     nullptr,    any(0, 1) * 512};
    const auto kernel = integer ? table.linear_int : table.linear_float;
    const int64_t cut = any(0, int(panel_count(w)));
    kernel(&args, 0, cut, scratch.p);
    kernel(&args, cut, panel_count(w), scratch.p);
    return std::memcmp(out.data(), expected.data(), out.size() * 4) == 0;
}

std::vector<const KernelTable*> tables() {
    std::vector<const KernelTable*> found;
    for (const std::string& isa : available_isas())
        set_isa(isa), found.push_back(&kernels());
    return found;
}

int check() {
    int failures = 0, compared = 0;
    const std::vector<const KernelTable*> sets = tables();
    for (const Form& form : kForms) {
        const bool is_float = form.block == 1;
        // The last ones with rows so long that their panels are prepared in parts, and more tokens than have sums at once.
        for (int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 40, 64, 50, 517}) {
            const bool parts = tokens == 50 || tokens == 517;
            if (parts && (is_float || (tokens == 517 && form.block != 32)))
                continue;
            const int64_t rows = parts ? 49 : std::vector<int>{1, 15, 16, 17, 33, 64, 80, 100}[size_t(any(0, 7))];
            const int64_t cols = is_float ? any(1, 300) : (parts * 8192 / form.block + any(1, 2560 / form.block)) * form.block;
            const std::vector<uint8_t> data = random_blocks(form, rows, cols);
            const PackedWeight packed = pack_weight(form.type, {data.data(), int64_t(data.size())}, rows, cols, 1);
            if (parts && panels_at_once(packed.w) < 4) // whole, no more than two fit
                failures++, std::printf("not in parts: %s, %d columns\n", ggml_type_name(form.type), int(cols));
            const Activations a(tokens, cols);
            for (bool integer : {true, false}) {
                if (integer && is_float)
                    continue;
                const std::vector<float> want = integer ? reference_int(packed.w, a) : reference_float(packed.w, a);
                for (const KernelTable* set : sets)
                    for (bool extras : {false, true}) {
                        compared++;
                        if (agrees(*set, packed.w, a, integer, extras, want))
                            continue;
                        failures++;
                        std::printf("differs: %s %s %s, %d tokens, %d x %d%s\n", set->isa, ggml_type_name(form.type),
                                    integer ? "int8" : "float", int(tokens), int(rows), int(cols), extras ? ", bias and residual" : "");
                    }
            }
            // Negative control: one flipped bit of one code (of one sign) must show.
            const std::vector<float> want = is_float ? reference_float(packed.w, a) : reference_int(packed.w, a);
            const_cast<uint8_t*>(packed.w.data)[form.type == 0 ? 3 : is_float ? 1 : 0] ^= is_float ? 0x80 : 2;
            for (const KernelTable* set : sets)
                if (agrees(*set, packed.w, a, !is_float, false, want))
                    failures++, std::printf("a flipped bit does not show: %s\n", ggml_type_name(form.type));
        }
    }
    std::printf("%d comparisons on %d instruction sets, %d failures\n", compared, int(sets.size()), failures);
    return failures != 0;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Shape {
    int64_t rows, cols;
};
const std::vector<Shape> kShapes = {{576, 1536}, {1536, 576}, {1536, 1536}, {8960, 1536}, {1536, 8960}};
constexpr int64_t kBlock = 65536;             // bytes that a worker reads at a time
constexpr int64_t kMemory = int64_t{1} << 28; // copies of a weight, so that no cache holds what few tokens read

void speed(const std::string& only, int threads) {
    const KernelTable& table = kernels();
    ThreadPool pool(threads);
    int64_t spun = 0;
    double peak = 0;
    for (int i = 0; i < 20; i++) {
        const double start = now();
        spun = table.spin_int8(200000);
        peak = std::max(peak, threads * double(spun) / (now() - start));
    }
    std::printf("%s, %d threads: spin_int8 %.0f GMAC/s\n", table.isa, threads, peak / 1e9);
    for (const Form& form : kForms)
        for (auto [rows, cols] : kShapes) {
            if (form.block == 1 || (!only.empty() && only != ggml_type_name(form.type)))
                continue;
            cols = (cols + form.block - 1) / form.block * form.block;
            const std::vector<uint8_t> data = random_blocks(form, rows, cols);
            const PackedWeight packed = pack_weight(form.type, {data.data(), int64_t(data.size())}, rows, cols, threads);
            const int64_t copies = kMemory / packed.bytes + 1, panels = panel_count(packed.w),
                          scratch_bytes = int64_t(linear_scratch_bytes(packed.w)) + 64;
            const std::shared_ptr<uint8_t> memory = slab_memory(size_t(copies * packed.bytes));
            Aligned<uint8_t> scratch(size_t(threads * scratch_bytes));
            for (int64_t i = 0; i < copies; i++)
                std::memcpy(memory.get() + i * packed.bytes, packed.w.data, size_t(packed.bytes));
            std::printf("%-7s %5d x %5d:", ggml_type_name(form.type), int(rows), int(cols));
            for (int64_t tokens : {1, 2, 4, 6, 512}) {
                const Activations a(tokens, cols);
                std::vector<float> out(size_t(tokens * rows));
                Weight w = packed.w;
                const LinearArgs args{&w,         tokens, &a.view, a.x.data(), cols,    nullptr,
                                      out.data(), rows,   nullptr, false,      nullptr, fetch_ahead_bytes()};
                const int64_t unit =
                    tokens > 6 ? panels_at_once(packed.w) : std::max<int64_t>(1, std::min(panels / (4 * threads), kBlock / w.panel_bytes));
                const int64_t passes = tokens > 6 ? 1 : copies;
                double best = 1e30, plain = 1e30;
                for (int repeat = 0; repeat < (tokens > 6 ? 9 : 7); repeat++) {
                    double start = now();
                    for (int64_t i = 0; i < passes; i++) {
                        w.data = memory.get() + i * packed.bytes;
                        pool.run((panels + unit - 1) / unit, [&](int64_t u, int worker) {
                            table.linear_int(&args, u * unit, std::min((u + 1) * unit, panels), scratch.p + worker * scratch_bytes);
                        });
                    }
                    best = std::min(best, (now() - start) / double(passes));
                    if (tokens > 6)
                        continue;
                    start = now();
                    pool.run(copies * packed.bytes / kBlock, [&](int64_t u, int) { table.read(memory.get() + u * kBlock, kBlock); });
                    plain = std::min(plain, (now() - start) * double(packed.bytes) / double(copies * packed.bytes / kBlock * kBlock));
                }
                const double macs = double(rows) * double(cols) * double(tokens) / best;
                if (tokens > 6)
                    std::printf(" | %d tokens %6.1f GMAC/s, %3.0f %% of spin", int(tokens), macs / 1e9, 100 * macs / peak);
                else
                    std::printf(" | %d %5.1f GB/s, %3.0f %% of a read", int(tokens), double(packed.bytes) / best / 1e9, 100 * plain / best);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
}

} // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "--speed")
        return speed(argc > 2 ? argv[2] : "", argc > 3 ? std::atoi(argv[3]) : 1), 0;
    return check();
}
