// Instructions that touch memory: loads, stores, atomics, matrices of 8 by 8, and what changes an address's space.
//
// Every access is checked for its address, its alignment and its bytes before it is made, and counted.
#include <algorithm>
#include <cstring>
#include <utility>

#include "access.h"
#include "choice.h"

namespace device {

// --- addresses -------------------------------------------------------------------------------------------------------

void find_addresses(Warp& warp, const Instruction& instruction, int which, int source, u64* addresses) {
    u64 offset = u64(instruction.offsets[which]);
    if (source < 0) {
        std::fill(addresses, addresses + LANES, offset);
    } else if (instruction.short_addresses >> which & 1) {
        const u32* base = warp.registers + source;
        for (int lane = 0; lane < LANES; lane++) addresses[lane] = u32(base[lane] + u32(offset));
    } else {
        const u64* base = lanes<u64>(warp, source);
        for (int lane = 0; lane < LANES; lane++) addresses[lane] = base[lane] + offset;
    }
}

Space space_of(u64 address) {
    u64 window = address & ~(WINDOW_BYTES - 1);
    if (window == SHARED_WINDOW) return Space::shared;
    if (window == LOCAL_WINDOW) return Space::local;
    if (window == PARAMETER_WINDOW) return Space::parameter;
    return Space::global;
}

namespace {

bool all_global(const Access& access) {
    bool found = true;
    each_set_lane(access.mask, [&](int lane) { found &= space_of(access.addresses[lane]) == Space::global; });
    return found;
}

// Calls `use` with an access of one memory; generic addresses may need several.
template <class F>
void each_space(Warp& warp, const Instruction& instruction, u32 mask, int bytes, bool reads, bool writes, F use) {
    Access access{instruction.space, mask, bytes, reads, writes, {}};
    find_addresses(warp, instruction, 0, instruction.sources[0], access.addresses);
    if (access.space == Space::generic && all_global(access)) access.space = Space::global;
    if (access.space != Space::generic) return use(access);
    for (Space space : {Space::global, Space::shared, Space::local, Space::parameter}) {
        Access part = access;
        part.space = space;
        part.mask = 0;
        each_set_lane(mask, [&](int lane) {
            if (space_of(access.addresses[lane]) != space) return;
            part.mask |= 1u << lane;
            if (space != Space::global) part.addresses[lane] &= WINDOW_BYTES - 1;
        });
        if (part.mask) use(part);
    }
}

}  // namespace

// --- checks ----------------------------------------------------------------------------------------------------------

void check_alignment(Warp& warp, const Instruction& instruction, const Access& access) {
    u64 together = 0;
    each_set_lane(access.mask, [&](int lane) { together |= access.addresses[lane]; });
    if (!(together & u64(access.bytes - 1))) return;
    each_set_lane(access.mask, [&](int lane) {
        u64 address = access.addresses[lane];
        if (address % access.bytes)
            fail(warp, instruction, lane,
                 "misaligned access of " + std::to_string(access.bytes) + " bytes at offset " +
                     std::to_string(address % 512) + " of 512",
                 FaultKind::misaligned);
    });
}

static void check_global_lane(Warp& warp, const Instruction& instruction, const Access& access, int lane) {
    u64 address = access.addresses[lane];
    if (!heap().holds(address, access.bytes))
        fail(warp, instruction, lane,
             std::string("invalid ") + (access.writes ? "write" : "read") + " of " +
                 heap().describe(address, access.bytes),
             FaultKind::address);
}

static bool lie_behind_each_other(const Access& access) {
    if (access.mask != EVERY) return false;
    u64 differ = 0;
    for (int lane = 0; lane < LANES; lane++)
        differ |= access.addresses[lane] ^ (access.addresses[0] + u64(lane * access.bytes));
    return !differ;
}

static void note_touched(const Access& access, u64 lowest, u64 highest) {
    if (lie_behind_each_other(access))
        return heap().note_touched(lowest, highest - lowest + access.bytes, access.writes);
    each_set_lane(access.mask,
                  [&](int lane) { heap().note_touched(access.addresses[lane], access.bytes, access.writes); });
}

void check_global(Warp& warp, const Instruction& instruction, const Access& access) {
    u64 lowest = ~u64(0);
    u64 highest = 0;
    each_set_lane(access.mask, [&](int lane) {
        lowest = std::min(lowest, access.addresses[lane]);
        highest = std::max(highest, access.addresses[lane]);
    });
    if (!heap().holds(lowest, highest - lowest + access.bytes))  // not all in one allocation
        each_set_lane(access.mask, [&](int lane) { check_global_lane(warp, instruction, access, lane); });
    note_touched(access, lowest, highest);
    if (!warp.block->check_written) return;
    each_set_lane(access.mask, [&](int lane) {
        u64 address = access.addresses[lane];
        if (access.reads && !heap().is_written(address, access.bytes))
            fail(warp, instruction, lane,
                 "read of memory that nobody wrote: " + heap().describe(address, access.bytes));
        if (access.writes) heap().mark_written(address, access.bytes);
    });
}

static void check_inside(Warp& warp, const Instruction& instruction, const Access& access, size_t size,
                         const char* memory) {
    each_set_lane(access.mask, [&](int lane) {
        u64 address = access.addresses[lane];
        if (address < size && size_t(access.bytes) <= size - address) return;
        fail(warp, instruction, lane,
             "access beyond the " + std::to_string(size) + " bytes of " + memory + " memory, at " +
                 std::to_string(address));
    });
}

static size_t local_bytes(const Warp& warp) { return warp.local.size() / LANES; }

static void check_local(Warp& warp, const Instruction& instruction, const Access& access) {
    check_inside(warp, instruction, access, local_bytes(warp), "local");
    if (!warp.block->check_written) return;
    each_set_lane(access.mask, [&](int lane) {
        u64 at = local_bytes(warp) * lane + access.addresses[lane];
        if (access.reads && !warp.local_written.covers(at, access.bytes))
            fail(warp, instruction, lane,
                 "read of local memory that nobody wrote, at byte " + std::to_string(access.addresses[lane]));
        if (access.writes) warp.local_written.mark(at, access.bytes);
    });
}

// All but what shared memory notes lane by lane: races and bytes that nobody wrote.
void check(Warp& warp, const Instruction& instruction, const Access& access) {
    Block& block = *warp.block;
    check_alignment(warp, instruction, access);
    if (access.space == Space::global) return check_global(warp, instruction, access);
    if (access.space == Space::local) return check_local(warp, instruction, access);
    if (access.space == Space::parameter)
        return check_inside(warp, instruction, access, block.kernel->parameter_bytes, "parameter");
    check_inside(warp, instruction, access, block.shared.size(), "shared");
    block.shared.begin_instruction();
}

u8* place(Warp& warp, const Access& access, int lane) {
    u64 address = access.addresses[lane];
    if (access.space == Space::global) return reinterpret_cast<u8*>(address);
    if (access.space == Space::shared) return warp.block->shared.at(address);
    if (access.space == Space::parameter) return const_cast<u8*>(warp.block->parameters) + address;
    return warp.local.data() + local_bytes(warp) * lane + address;
}

// --- counts ----------------------------------------------------------------------------------------------------------

static int sectors(const Access& access) {
    u64 found[LANES];
    int count = 0;
    each_set_lane(access.mask, [&](int lane) {
        u64 sector = access.addresses[lane] >> 5;
        if (!count || found[count - 1] != sector) found[count++] = sector;
    });
    if (!std::is_sorted(found, found + count)) std::sort(found, found + count);
    return int(std::unique(found, found + count) - found);
}

void count(Warp& warp, const Access& access) {
    Counters& counters = warp.block->kernel->counters;
    if (access.space == Space::shared) return count_wavefronts(counters, access.mask, access.addresses, access.bytes);
    if (access.space != Space::global) return;
    u64 bytes = u64(std::popcount(access.mask)) * access.bytes;
    if (access.writes) {
        counters.global_stores++;
        counters.global_store_sectors += sectors(access);
        counters.global_store_bytes += bytes;
    } else {
        counters.global_loads++;
        counters.global_load_sectors += sectors(access);
        counters.global_load_bytes += bytes;
    }
}

namespace {

// --- loads and stores ------------------------------------------------------------------------------------------------

// What an element becomes in a register of 8 bytes or of 4.
template <class T, bool WIDE>
using InRegister =
    std::conditional_t<std::is_signed_v<T>, std::conditional_t<WIDE, s64, s32>, std::conditional_t<WIDE, u64, u32>>;

// Elements of type T; registers of 8 bytes where WIDE, else of 4. Signed elements are extended.
template <class T, bool WIDE>
void run_load(Warp& warp, const Instruction& instruction, u32 mask) {
    using Extended = InRegister<T, WIDE>;
    int elements = instruction.elements;
    each_space(warp, instruction, mask, int(sizeof(T)) * elements, true, false, [&](const Access& access) {
        check(warp, instruction, access);
        bool shared = access.space == Space::shared;
        each_set_lane(access.mask, [&](int lane) {
            if (shared) warp.block->shared.note_read(warp, instruction, lane, access.addresses[lane], access.bytes);
            const u8* from = place(warp, access, lane);
            for (int n = 0; n < elements; n++) {
                T element;
                std::memcpy(&element, from + n * sizeof(T), sizeof(T));
                lanes<Extended>(warp, instruction.results[n])[lane] = Word<Extended>(Extended(element));
            }
        });
        count(warp, access);
    });
}

template <class T, bool WIDE>
void run_parameter_load(Warp& warp, const Instruction& instruction, u32 mask) {
    using Extended = InRegister<T, WIDE>;
    if (instruction.sources[0] >= 0) return run_load<T, WIDE>(warp, instruction, mask);
    for (int n = 0; n < instruction.elements; n++) {
        T element;
        std::memcpy(&element, warp.block->parameters + instruction.offsets[0] + n * sizeof(T), sizeof(T));
        auto* d = lanes<Extended>(warp, instruction.results[n]);
        auto extended = Word<Extended>(Extended(element));
        each_lane(mask, [=](int lane) { d[lane] = extended; });
    }
}

template <class T>
void run_store(Warp& warp, const Instruction& instruction, u32 mask) {
    int elements = instruction.elements;
    each_space(warp, instruction, mask, int(sizeof(T)) * elements, false, true, [&](const Access& access) {
        check(warp, instruction, access);
        bool shared = access.space == Space::shared;
        each_set_lane(access.mask, [&](int lane) {
            T values[8];
            for (int n = 0; n < elements; n++) values[n] = value<T>(lanes<T>(warp, instruction.sources[1 + n])[lane]);
            if (shared)
                warp.block->shared.note_write(warp, instruction, lane, access.addresses[lane], access.bytes, values);
            std::memcpy(place(warp, access, lane), values, sizeof(T) * elements);
        });
        count(warp, access);
    });
}

// A type of PTX as an integer of its size: memory has bits only.
template <class F>
Action with_memory_type(const std::string& type, F f) {
    if (type == "s8") return f(s8{});
    if (type == "s16") return f(s16{});
    if (type == "s32") return f(s32{});
    if (type == "s64") return f(s64{});
    switch (bytes_of(type)) {
        case 1: return f(u8{});
        case 2: return f(u16{});
        case 4: return f(u32{});
        case 8: return f(u64{});
    }
    return nullptr;
}

Space take_space(Opcode& opcode) {
    if (opcode.take("global") || opcode.take("const")) return Space::global;
    if (opcode.take("shared") || opcode.take("shared::cta")) return Space::shared;
    if (opcode.take("local")) return Space::local;
    if (opcode.take("param") || opcode.take("param::entry") || opcode.take("param::func")) return Space::parameter;
    return Space::generic;
}

// Hints for caches and orders of memory, which change no value here.
void take_hints(Opcode& opcode) {
    opcode.take_all({"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "weak", "unified"});
    opcode.take_all(
        {"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
    opcode.take_all(
        {"L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"});
    opcode.take_all({"cta", "cluster", "gpu", "sys"});
}

bool take_strength(Opcode& opcode) {
    bool strong = false;
    for (const char* name : {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
        strong |= opcode.take(name);
    return strong;
}

bool take_vector(Opcode& opcode, int elements) {
    if (elements == 1) return true;
    return opcode.take("v" + std::to_string(elements));
}

// Fills in what every access has.
bool prepare(Opcode& opcode, int elements, Instruction& instruction) {
    Space space = take_space(opcode);
    if (instruction.space == Space::generic) instruction.space = space;  // lowering knows of parameters and locals
    take_hints(opcode);
    instruction.strong = take_strength(opcode);
    instruction.elements = u8(elements);
    instruction.element_bytes = u8(bytes_of(opcode.take_last()));
    return take_vector(opcode, elements) && instruction.element_bytes * elements <= 32;
}

Action choose_load(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (!prepare(opcode, operands.elements, instruction)) return nullptr;
    bool wide_register = operands.result_bytes.at(0) == 8;
    bool parameter = instruction.space == Space::parameter;
    return with_memory_type(opcode.last(), [&](auto t) -> Action {
        using T = decltype(t);
        if (sizeof(T) == 8 && !wide_register) return nullptr;
        if (parameter) return wide_register ? run_parameter_load<T, true> : run_parameter_load<T, false>;
        return wide_register ? run_load<T, true> : run_load<T, false>;
    });
}

Action choose_store(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (!prepare(opcode, operands.elements, instruction)) return nullptr;
    if (instruction.space == Space::parameter) return nullptr;
    return with_memory_type(opcode.last(), [](auto t) -> Action { return run_store<decltype(t)>; });
}

// --- atomics ---------------------------------------------------------------------------------------------------------

enum class Change : u8 {
    add, minimum, maximum, exchange, bit_and, bit_or, bit_xor, increment, decrement, compare_and_swap, none,
};

Change take_change(Opcode& opcode) {
    static const std::pair<const char*, Change> names[] = {
        {"add", Change::add},       {"min", Change::minimum},   {"max", Change::maximum},   {"exch", Change::exchange},
        {"and", Change::bit_and},   {"or", Change::bit_or},     {"xor", Change::bit_xor},   {"inc", Change::increment},
        {"dec", Change::decrement}, {"cas", Change::compare_and_swap}};
    for (auto& [name, change] : names)
        if (opcode.take(name)) return change;
    return Change::none;
}

// Two 16-bit floats that change together.
template <class T>
struct Packed {
    u32 bits;
};

template <class T>
constexpr bool is_packed = std::is_same_v<T, Packed<f16>> || std::is_same_v<T, Packed<bf16>>;

template <class T>
T changed_number(Change change, T old, T v) {
    if constexpr (is_half<T>) {
        if (change == Change::add) return narrow<T>(wide(old) + wide(v));
    } else if constexpr (std::is_integral_v<T>) {
        if (change == Change::add) return T(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(v));
    } else if (change == Change::add) {
        return old + v;
    }
    if constexpr (is_floating<T>) {
        if (change == Change::minimum) return smaller(old, v);
        if (change == Change::maximum) return larger(old, v);
    } else {
        if (change == Change::minimum) return std::min(old, v);
        if (change == Change::maximum) return std::max(old, v);
    }
    return v;  // exchange
}

template <class H>
Packed<H> changed_pair(Change change, Packed<H> old, Packed<H> v) {
    H low = changed_number(change, H{u16(old.bits)}, H{u16(v.bits)});
    H high = changed_number(change, H{u16(old.bits >> 16)}, H{u16(v.bits >> 16)});
    return {u32(high.bits) << 16 | low.bits};
}

template <class T>
T changed(Change change, T old, T v) {
    if constexpr (is_packed<T>) return changed_pair(change, old, v);
    else if constexpr (!std::is_integral_v<T>) return changed_number(change, old, v);
    else {
        if (change == Change::bit_and) return old & v;
        if (change == Change::bit_or) return old | v;
        if (change == Change::bit_xor) return old ^ v;
        if (change == Change::increment) return old >= v ? T(0) : T(old + 1);
        if (change == Change::decrement) return old == 0 || old > v ? v : T(old - 1);
        return changed_number(change, old, v);
    }
}

// Atomic sums of float32 flush subnormals in global memory, not in shared memory. Source: PTX ISA, atom.
template <class T>
T changed_in(Space space, Change change, T old, T v) {
    if constexpr (std::is_same_v<T, f32>) {
        if (change == Change::add && space == Space::global) return canonical(flushed(flushed(old) + flushed(v)));
        if (change == Change::add) return canonical(old + v);
    }
    return changed(change, old, v);
}

// Lanes change memory one after another, from the first to the last.
template <class T>
void run_atomic(Warp& warp, const Instruction& instruction, u32 mask) {
    Change change = Change(instruction.immediate);
    int elements = instruction.elements;
    each_space(warp, instruction, mask, int(sizeof(T)) * elements, true, true, [&](const Access& access) {
        check(warp, instruction, access);
        bool shared = access.space == Space::shared;
        each_set_lane(access.mask, [&](int lane) {
            u8* at = place(warp, access, lane);
            if (shared)
                warp.block->shared.note_write(warp, instruction, lane, access.addresses[lane], access.bytes, nullptr);
            for (int n = 0; n < elements; n++, at += sizeof(T)) {
                T old;
                std::memcpy(&old, at, sizeof(T));
                T given = value<T>(lanes<T>(warp, instruction.sources[1 + n])[lane]);
                T now = old;
                if (change == Change::compare_and_swap) {
                    T otherwise = value<T>(lanes<T>(warp, instruction.sources[2])[lane]);
                    if (!std::memcmp(&old, &given, sizeof(T))) now = otherwise;
                } else {
                    now = changed_in(access.space, change, old, given);
                }
                std::memcpy(at, &now, sizeof(T));
                if (instruction.results[n] >= 0) lanes<T>(warp, instruction.results[n])[lane] = word<T>(old);
            }
        });
        count(warp, access);
    });
    warp.block->kernel->counters.atomics++;
}

template <class T>
bool permits(Change change) {
    bool swaps = change == Change::exchange || change == Change::compare_and_swap;
    bool ordered = change == Change::add || change == Change::minimum || change == Change::maximum;
    if (std::is_same_v<T, f32> || std::is_same_v<T, f64>) return change == Change::add;
    if (!std::is_integral_v<T>) return ordered;
    if (sizeof(T) == 2) return swaps;
    return true;
}

Action choose_atomic(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (!prepare(opcode, operands.elements, instruction)) return nullptr;
    opcode.take("noftz");
    Change change = take_change(opcode);
    if (change == Change::none) return nullptr;
    instruction.immediate = u64(change);
    instruction.strong = true;
    auto of_type = [&](auto t) -> Action {
        return permits<decltype(t)>(change) ? Action(run_atomic<decltype(t)>) : nullptr;
    };
    const std::string& type = opcode.last();
    if (type == "f16x2") return of_type(Packed<f16>{});
    if (type == "bf16x2") return of_type(Packed<bf16>{});
    if (Action found = with_floating(type, of_type)) return found;
    return with_integer(type, [&](auto t) -> Action {
        if constexpr (sizeof(t) == 1) return nullptr;
        else return of_type(t);
    });
}

// --- matrices of 8 by 8 numbers of 16 bits ---------------------------------------------------------------------------

// Lane 8m + r holds the address of row r of matrix m; lane l holds row l/4, columns 2(l%4) and 2(l%4)+1.
struct Cell {
    int row, column;
};

Cell cell_of(int lane, int half, bool transposed) {
    int along = lane / 4;
    int across = 2 * (lane % 4) + half;
    return transposed ? Cell{across, along} : Cell{along, across};
}

Access rows_of(Warp& warp, const Instruction& instruction, bool writes) {
    int rows = 8 * instruction.elements;
    u32 mask = rows == LANES ? EVERY : (1u << rows) - 1;
    Access access{Space::shared, mask, 16, !writes, writes, {}};
    find_addresses(warp, instruction, 0, instruction.sources[0], access.addresses);
    if (instruction.space == Space::generic)
        for (u64& address : access.addresses) address &= WINDOW_BYTES - 1;
    return access;
}

template <bool TRANSPOSED>
void run_matrix_load(Warp& warp, const Instruction& instruction, u32 mask) {
    if (mask != EVERY)
        fail(warp, instruction, std::countr_zero(~mask), "a lane is missing at an instruction of all lanes");
    Access access = rows_of(warp, instruction, false);
    check(warp, instruction, access);
    each_set_lane(access.mask,
                  [&](int lane) { warp.block->shared.note_read(warp, instruction, lane, access.addresses[lane], 16); });
    u32 found[4][LANES];
    for (int matrix = 0; matrix < instruction.elements; matrix++)
        for (int lane = 0; lane < LANES; lane++) {
            u16 halves[2];
            for (int half = 0; half < 2; half++) {
                Cell cell = cell_of(lane, half, TRANSPOSED);
                std::memcpy(&halves[half],
                            warp.block->shared.at(access.addresses[8 * matrix + cell.row]) + 2 * cell.column, 2);
            }
            found[matrix][lane] = u32(halves[1]) << 16 | halves[0];
        }
    for (int matrix = 0; matrix < instruction.elements; matrix++)
        std::copy(found[matrix], found[matrix] + LANES, warp.registers + instruction.results[matrix]);
    count(warp, access);
}

template <bool TRANSPOSED>
void run_matrix_store(Warp& warp, const Instruction& instruction, u32 mask) {
    if (mask != EVERY)
        fail(warp, instruction, std::countr_zero(~mask), "a lane is missing at an instruction of all lanes");
    Access access = rows_of(warp, instruction, true);
    check(warp, instruction, access);
    for (int matrix = 0; matrix < instruction.elements; matrix++)
        for (int lane = 0; lane < LANES; lane++) {
            u32 pair = warp.registers[instruction.sources[1 + matrix] + lane];
            for (int half = 0; half < 2; half++) {
                Cell cell = cell_of(lane, half, TRANSPOSED);
                u64 offset = access.addresses[8 * matrix + cell.row] + 2 * cell.column;
                u16 one = u16(pair >> 16 * half);
                warp.block->shared.note_write(warp, instruction, lane, offset, 2, &one);
                std::memcpy(warp.block->shared.at(offset), &one, 2);
            }
        }
    count(warp, access);
}

Action choose_matrix(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    bool loads = opcode.name() == "ldmatrix";
    opcode.take_all({"sync", "aligned", "m8n8", "b16"});
    instruction.space = take_space(opcode);
    instruction.kind = Kind::together;
    instruction.elements = u8(operands.elements);
    instruction.element_bytes = 2;  // of what the lanes write, where races are looked for
    bool transposed = opcode.take("trans");
    if (!opcode.take("x" + std::to_string(operands.elements)) || operands.elements == 3) return nullptr;
    if (loads) return transposed ? run_matrix_load<true> : run_matrix_load<false>;
    return transposed ? run_matrix_store<true> : run_matrix_store<false>;
}

// --- spaces ----------------------------------------------------------------------------------------------------------

template <u64 WINDOW>
Action to_window(bool into) {
    if (into) return unary<u64>([](u64 a) { return a - WINDOW; });
    return unary<u64>([](u64 a) { return a + WINDOW; });
}

// cvta.to.shared: a generic address in a space; cvta.shared: back.
Action choose_space_change(Opcode& opcode) {
    bool into = opcode.take("to");
    if (opcode.take_last() != "u64") return nullptr;
    if (opcode.take("global") || opcode.take("const")) return unary<u64>([](u64 a) { return a; });
    if (opcode.take("shared") || opcode.take("shared::cta")) return to_window<SHARED_WINDOW>(into);
    if (opcode.take("local")) return to_window<LOCAL_WINDOW>(into);
    if (opcode.take("param") || opcode.take("param::entry")) return to_window<PARAMETER_WINDOW>(into);
    return nullptr;
}

Action choose_space_test(Opcode& opcode) {
    if (opcode.take("shared") || opcode.take("shared::cta"))
        return unary<u32, u64>([](u64 a) { return u32(space_of(a) == Space::shared); });
    if (opcode.take("local")) return unary<u32, u64>([](u64 a) { return u32(space_of(a) == Space::local); });
    if (opcode.take("global")) return unary<u32, u64>([](u64 a) { return u32(space_of(a) == Space::global); });
    return nullptr;
}

// Nothing is cached here; the address need not be valid.
Action choose_prefetch(Opcode& opcode) {
    take_space(opcode);
    opcode.take_all({"L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap"});
    return do_nothing;
}

Action choose_policy(Opcode& opcode) {
    opcode.take_all({"fractional", "b64"});
    take_hints(opcode);
    return [](Warp& warp, const Instruction& instruction, u32 mask) {
        u64* d = lanes<u64>(warp, instruction.results[0]);
        each_lane(mask, [=](int lane) { d[lane] = 0; });
    };
}

}  // namespace

Action choose_memory(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    const std::string& name = opcode.name();
    if (name == "ld" || name == "ldu") return choose_load(opcode, operands, instruction);
    if (name == "st") return choose_store(opcode, operands, instruction);
    if (name == "atom" || name == "red") return choose_atomic(opcode, operands, instruction);
    if (name == "ldmatrix" || name == "stmatrix") return choose_matrix(opcode, operands, instruction);
    if (name == "cvta") return choose_space_change(opcode);
    if (name == "isspacep") return choose_space_test(opcode);
    if (name == "prefetch" || name == "prefetchu" || name == "applypriority" || name == "discard")
        return choose_prefetch(opcode);
    if (name == "createpolicy") return choose_policy(opcode);
    return nullptr;
}

}  // namespace device
