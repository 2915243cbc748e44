// Statements of PTX -> instructions of a kernel: registers become slots, labels places in the code, names addresses.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "kernel.h"
#include "ptx.h"

namespace device {

// What contraction needs to know of a kernel that is lowered.
struct Lowered {
    std::vector<const Statement*> statements;  // of each instruction, nullptr for helpers
    std::set<int> starts;                      // instructions that a branch may go to
};

// Make one instruction of a product and its only sum, as ptxas may where PTX names no rounding. Defined in
// contraction.cpp.
void contract(Kernel& kernel, const Lowered& lowered);

}  // namespace device
