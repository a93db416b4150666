#include "dot_avx2.h"
#include "isa_table.h"

namespace quaff {

const KernelTable* table_avx2() {
    static constexpr KernelTable table = isa::make_table<isa::DotAvx2>("avx2");
    return &table;
}

} // namespace quaff
