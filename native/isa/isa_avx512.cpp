#include "dot_avx512.h"
#include "isa_table.h"

namespace quaff {

const KernelTable* table_avx512() {
    static constexpr KernelTable table = isa::make_table<isa::DotAvx512>("avx512");
    return &table;
}

} // namespace quaff
