#include "dot_scalar.h"
#include "isa_table.h"

namespace quaff {

const KernelTable* table_scalar() {
    static constexpr KernelTable table = isa::make_table<isa::DotScalar>("scalar");
    return &table;
}

} // namespace quaff
