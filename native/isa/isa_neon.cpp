#include "dot_neon.h"
#include "isa_table.h"

namespace quaff {

const KernelTable* table_neon() {
    static constexpr KernelTable table = isa::make_table<isa::DotNeon>("neon");
    return &table;
}

} // namespace quaff
