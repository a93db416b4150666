// The kernel table in use: the widest set this processor runs, or the one QUAFF_ISA names.
#pragma once
#include "kernels/table.h"

#include <string>
#include <vector>

namespace quaff {

std::vector<std::string> available_isas(); // narrowest first: scalar, avx2, avxvnni, avx512 or scalar, neon
const KernelTable& kernels();              // fixed at first use, changed only by set_isa
void set_isa(const std::string& name);     // throws std::invalid_argument: unknown, or not supported here

} // namespace quaff
