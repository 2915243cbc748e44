// From an opcode to its action. One function for each family; each takes the parts of an opcode that it understands
// and gives nullptr for what is not its own.
#pragma once
#include <optional>
#include <vector>

#include "../ptx.h"
#include "../warp.h"

namespace device {

// What a choice needs to know of the operands besides their slots.
struct Operands {
    std::vector<int> result_bytes;                    // of the registers
    std::vector<std::optional<uint64_t>> constants;   // of the sources that are numbers
    int elements = 1;                                 // of a vector
    bool result_is_list = false, source_is_list = false;
    int sources = 0;
    bool has_second = false;                          // d|p
    bool last_is_predicate = false;                   // of the sources
};

// nullptr: unknown. Fills in kind, space, size and the like.
Action choose(Opcode& opcode, const Operands& operands, Instruction& instruction);

Action choose_integer(Opcode& opcode, Instruction& instruction);
Action choose_bits(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_floating(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_comparison(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_conversion(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_move(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_memory(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_warp_wide(Opcode& opcode, const Operands& operands, Instruction& instruction);
Action choose_asynchronous(Opcode& opcode, const Operands& operands, Instruction& instruction);

// mul and add in one: "fms" is a*b - c, "fnma" c - a*b. PTX has no such opcodes; contraction.cpp makes them.
Action choose_contracted(const std::string& form, const std::string& type, bool flush);

// The rounding that an opcode names, nearest where it names none.
inline Rounding take_rounding(Opcode& opcode) {
    opcode.take("rn");
    if (opcode.take("rz")) return Rounding::zero;
    if (opcode.take("rm")) return Rounding::down;
    if (opcode.take("rp")) return Rounding::up;
    return Rounding::nearest_even;
}

// An action in a rounding of the processor's.
Action in_rounding(Rounding rounding, Action action, Instruction& instruction);

inline void do_nothing(Warp&, const Instruction&, uint32_t) {}

// What is said of a function that the device does not run, nullptr: none of those that are known; and the action that
// says it where a lane gets there.
const char* refusal_of(std::string_view function);
Action choose_refusal(const char* said);

// Calls a function with the C++ type of an integer type of PTX; b32 is unsigned.
template <class F>
Action with_integer(std::string_view type, F f) {
    if (type == "u8" || type == "b8") return f(u8{});
    if (type == "s8") return f(s8{});
    if (type == "u16" || type == "b16") return f(u16{});
    if (type == "s16") return f(s16{});
    if (type == "u32" || type == "b32") return f(u32{});
    if (type == "s32") return f(s32{});
    if (type == "u64" || type == "b64") return f(u64{});
    if (type == "s64") return f(s64{});
    return nullptr;
}

template <class F>
Action with_floating(std::string_view type, F f) {
    if (type == "f16") return f(f16{});
    if (type == "bf16") return f(bf16{});
    if (type == "f32") return f(f32{});
    if (type == "f64") return f(f64{});
    return nullptr;
}

}  // namespace device
