// The family of an opcode, by its name and then by its type; and the few instructions that belong to none.
#include "choice.h"

#include <set>
#include <string_view>

namespace device {

namespace {

using Names = std::set<std::string_view>;

const Names MEMORY = {"ld",   "ldu",      "st",       "atom",      "red",           "ldmatrix", "stmatrix",
                      "cvta", "isspacep", "prefetch", "prefetchu", "applypriority", "discard",  "createpolicy"};
const Names WARP_WIDE = {"bar", "barrier", "activemask", "shfl", "vote", "redux", "match", "elect"};
const Names BITS = {"and",  "or",   "xor", "not",  "cnot", "shl",   "shr",  "popc", "clz", "brev", "bfe",
                    "bfi",  "bfind", "lop3", "prmt", "shf", "dp4a", "dp2a", "szext", "bmsk"};
const Names MOVES = {"mov", "selp", "slct"};
const Names COMPARISONS = {"setp", "set"};
const Names ASYNCHRONOUS = {"cp", "mbarrier"};
// What orders memory, in which everything is in order here, and what is there for the hardware's speed.
const Names NOTHING = {"membar", "fence", "pmevent", "griddepcontrol", "setmaxnreg"};

// --- moves -----------------------------------------------------------------------------------------------------------

u64 part_mask(int bytes) { return bytes == 8 ? ~u64(0) : (u64(1) << bytes * 8) - 1; }

u64 read_register(Warp& warp, int slot, int lane, int bytes) {
    return bytes == 8 ? lanes<u64>(warp, slot)[lane] : warp.registers[slot + lane];
}

void write_register(Warp& warp, int slot, int lane, int bytes, u64 v) {
    if (bytes == 8) lanes<u64>(warp, slot)[lane] = v;
    else warp.registers[slot + lane] = u32(v);
}

// mov.b64 {low, high}, wide;
void run_unpack(Warp& warp, const Instruction& instruction, u32 mask) {
    int bytes = instruction.element_bytes;
    int whole = bytes * instruction.elements;
    each_set_lane(mask, [&](int lane) {
        u64 v = read_register(warp, instruction.sources[0], lane, whole);
        for (int n = 0; n < instruction.elements; n++)
            write_register(warp, instruction.results[n], lane, bytes, v >> bytes * 8 * n & part_mask(bytes));
    });
}

// mov.b64 wide, {low, high};
void run_pack(Warp& warp, const Instruction& instruction, u32 mask) {
    int bytes = instruction.element_bytes;
    int whole = bytes * instruction.elements;
    each_set_lane(mask, [&](int lane) {
        u64 v = 0;
        for (int n = 0; n < instruction.elements; n++) {
            u64 part = read_register(warp, instruction.sources[n], lane, bytes) & part_mask(bytes);
            v |= part << bytes * 8 * n;
        }
        write_register(warp, instruction.results[0], lane, whole, v);
    });
}

Action choose_vector_move(const std::string& type, const Operands& operands, Instruction& instruction) {
    int whole = bytes_of(type);
    if (operands.elements < 2 || whole > 8 || whole % operands.elements) return nullptr;
    instruction.elements = u8(operands.elements);
    instruction.element_bytes = u8(whole / operands.elements);
    return operands.result_is_list ? run_unpack : run_pack;
}

template <class U, bool FLUSH>
Action select_by_single() {
    return ternary<U, U, U, f32>([](U a, U b, f32 c) { return (FLUSH ? flushed(c) : c) >= 0 ? a : b; });
}

template <class U>
Action select(Opcode& opcode, const std::string& chooser) {
    if (opcode.name() == "selp") return ternary<U, U, U, u32>([](U a, U b, u32 p) { return p & 1 ? a : b; });
    if (chooser == "s32") return ternary<U, U, U, s32>([](U a, U b, s32 c) { return c >= 0 ? a : b; });
    if (chooser != "f32") return nullptr;
    return opcode.take("ftz") ? select_by_single<U, true>() : select_by_single<U, false>();
}

Action choose_select(Opcode& opcode) {
    bool by_number = opcode.name() == "slct";
    const std::string& last = opcode.take_last();
    const std::string& type = by_number ? opcode.take_last(1) : last;
    switch (bytes_of(type)) {
        case 2: return select<u16>(opcode, last);
        case 4: return select<u32>(opcode, last);
        case 8: return select<u64>(opcode, last);
    }
    return nullptr;
}

// --- what ends a kernel ----------------------------------------------------------------------------------------------

constexpr const char* SAID[] = {
    "the kernel trapped",
    "a breakpoint",
    "an assertion of the kernel failed",
    "the kernel prints (vprintf), which this device does not do: take printf out",
    "the kernel allocates memory (malloc), which this device does not do",
    "the kernel frees memory (free), which this device does not do",
};

template <int WHAT>
void run_fault(Warp& warp, const Instruction& instruction, u32 mask) {
    fail(warp, instruction, std::countr_zero(mask), SAID[WHAT]);
}

// A lane that waits by time lets others go on.
void run_sleep(Warp& warp, const Instruction&, u32) { warp.gives_way = true; }

Action choose_nothing(Opcode& opcode) {
    opcode.take_all({"cta", "gl", "gpu", "sys", "cluster", "sc", "acq_rel", "acquire", "release", "u32", "wait",
                     "launch_dependents"});
    opcode.take_all({"proxy", "async", "async::generic", "alias", "mbarrier_init", "inc", "dec", "sync", "aligned",
                     "mask", "global", "shared::cta"});
    return do_nothing;
}

}  // namespace

const char* refusal_of(std::string_view function) {
    if (function == "__assertfail") return SAID[2];
    if (function == "vprintf") return SAID[3];
    if (function == "malloc") return SAID[4];
    if (function == "free") return SAID[5];
    return nullptr;
}

Action choose_refusal(const char* said) {
    if (said == SAID[2]) return run_fault<2>;
    if (said == SAID[3]) return run_fault<3>;
    return said == SAID[4] ? run_fault<4> : run_fault<5>;
}

Action choose_move(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (opcode.name() != "mov") return choose_select(opcode);
    const std::string& type = opcode.take_last();
    if (operands.result_is_list || operands.source_is_list) return choose_vector_move(type, operands, instruction);
    switch (bytes_of(type)) {
        case 2: return unary<u16>([](u16 a) { return a; });
        case 4: return unary<u32>([](u32 a) { return a; });
        case 8: return unary<u64>([](u64 a) { return a; });
    }
    return nullptr;
}

Action choose(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    const std::string& name = opcode.name();
    instruction.elements = u8(operands.elements);
    if (MEMORY.count(name)) return choose_memory(opcode, operands, instruction);
    if (WARP_WIDE.count(name)) return choose_warp_wide(opcode, operands, instruction);
    if (MOVES.count(name)) return choose_move(opcode, operands, instruction);
    if (COMPARISONS.count(name)) return choose_comparison(opcode, operands, instruction);
    if (BITS.count(name)) return choose_bits(opcode, operands, instruction);
    if (NOTHING.count(name)) return choose_nothing(opcode);
    if (name == "cvt") return choose_conversion(opcode, operands, instruction);
    if (ASYNCHRONOUS.count(name)) return choose_asynchronous(opcode, operands, instruction);
    if (name == "trap") return run_fault<0>;
    if (name == "brkpt") return run_fault<1>;
    if (name == "nanosleep") return opcode.take("u32") ? run_sleep : nullptr;
    if (Action found = choose_integer(opcode, instruction)) return found;
    return choose_floating(opcode, operands, instruction);
}

}  // namespace device
