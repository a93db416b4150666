#include "dispatch.h"
#include "cpu.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace quaff {

namespace {

std::vector<const KernelTable*> tables() {
    const CpuFeatures f = cpu_features();
    std::vector<const KernelTable*> out{table_scalar()};
#if defined(__x86_64__)
    if (f.avx2)
        out.push_back(table_avx2());
    if (f.avxvnni)
        out.push_back(table_avxvnni());
    if (f.avx512)
        out.push_back(table_avx512());
#elif defined(__aarch64__)
    if (f.neon)
        out.push_back(table_neon());
#endif
    return out;
}

const KernelTable* find(const std::string& name) {
    std::string known;
    for (const KernelTable* t : tables()) {
        if (name == t->isa)
            return t;
        known += (known.empty() ? "" : ", ") + std::string(t->isa);
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not supported by this processor; available: " + known);
}

std::atomic<const KernelTable*> current{nullptr};

} // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> out;
    for (const KernelTable* t : tables())
        out.emplace_back(t->isa);
    return out;
}

const KernelTable& kernels() {
    const KernelTable* t = current.load(std::memory_order_acquire);
    if (!t) {
        const char* forced = std::getenv("QUAFF_ISA");
        t = forced && *forced ? find(forced) : tables().back();
        current.store(t, std::memory_order_release);
    }
    return *t;
}

void set_isa(const std::string& name) { current.store(find(name), std::memory_order_release); }

} // namespace quaff
