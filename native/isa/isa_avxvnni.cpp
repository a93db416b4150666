#include "dot_avxvnni.h"
#include "isa_table.h"

namespace quaff {

const KernelTable* table_avxvnni() {
    static constexpr KernelTable table = isa::make_table<isa::DotAvxVnni>("avxvnni");
    return &table;
}

} // namespace quaff
