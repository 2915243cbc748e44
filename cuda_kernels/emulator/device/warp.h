// A warp and a block while they run, and how an action reads and writes the registers of 32 lanes.
//
// Who writes an instruction needs this file: `unary`, `binary` and `ternary` make an action of a function of scalars.
#pragma once
#include <array>
#include <bit>
#include <string>
#include <type_traits>
#include <vector>

#include "device.h"
#include "numbers.h"
#include "shared_memory.h"

namespace device {

// Lanes of a warp that stand at the same instruction.
struct Group {
    enum class State : uint8_t {
        ready,
        stalled,  // at an instruction that names lanes which are not here yet
        waiting,  // at a barrier of the block
    };

    State state;
    int pc;
    uint32_t mask;
    int barrier = 0;   // which of the block's
    int expected = 0;  // threads that it waits for, 0: all
};

// cp.async: a copy that is not done before somebody waits for it.
struct PendingCopy {
    int lane;
    int group;
    uint64_t to, from;  // offset in shared memory, address in global memory
    int bytes, read;    // bytes beyond those that are read become 0
    int instruction;    // its place in the code
};

struct Barrier {
    int arrived = 0;  // threads that arrived without waiting
    uint32_t warps = 0;
};

// mbarrier: what stands in 8 bytes of shared memory. A phase ends when nobody and nothing is missing any more.
struct MemoryBarrier {
    int64_t expected = 0;  // arrivals of a phase
    int64_t missing = 0;   // of this phase
    int64_t bytes = 0;     // that copies still have to bring
    uint64_t phase = 0;
    uint32_t warps = 0;    // that arrived in this phase, or whose copies did
    uint32_t givers = 0;   // in the last one
};

// cp.async.bulk into shared memory: it is not done before somebody asks its mbarrier.
struct BulkCopy {
    struct Warp* warp;
    int lane;
    uint64_t barrier, to, from;  // offsets in shared memory; an address in global memory
    int bytes;
    int instruction;             // its place in the code
};

struct Block {
    Kernel* kernel = nullptr;
    const uint8_t* parameters = nullptr;
    Shape grid{}, shape{}, index{};
    int threads = 0;
    unsigned dynamic_shared = 0;
    int perturb = 0;                // Options::perturb at the launch
    bool check_written = false;     // Options::uninitialised
    SharedMemory shared;
    std::array<Barrier, 16> barriers;
    std::map<uint64_t, MemoryBarrier> memory_barriers;  // offset in shared memory ->
    std::vector<BulkCopy> bulk_copies;
    uint64_t phases = 0;            // of mbarriers that ended
};

struct Warp {
    Block* block = nullptr;
    int number = 0;
    uint32_t live = 0;  // lanes that exist and have not ended
    uint32_t* registers = nullptr;
    std::vector<Group> groups;
    std::vector<uint8_t> local;  // one lane's after another's
    Shadow local_written;
    Meetings lanes;              // which lanes have met at a barrier, __syncwarp or shuffle
    std::vector<PendingCopy> copies;
    std::array<int, LANES> copy_group{};  // the group of cp.async that each lane fills
    bool gives_way = false;               // ends its turn: it waits for what another warp has to do
    bool waits_in_vain = false;           // in this turn it only asked mbarriers whose phase goes on
    uint64_t instructions = 0;            // in this block
    unsigned turns = 0;                   // that it used up in loops
};

// Throws a Fault: what is wrong, where, in which thread.
[[noreturn]] void fail(const Warp& warp, const Instruction& instruction, int lane, const std::string& what,
                       FaultKind kind = FaultKind::execution);

// --- registers -------------------------------------------------------------------------------------------------------

// What a value takes in a slot: a word of 4 bytes, or of 8.
template <class T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline Word<T>* lanes(Warp& warp, int slot) {
    return reinterpret_cast<Word<T>*>(warp.registers + slot);
}

// The upper bits of a word mean nothing to a narrower type.
template <class T>
inline T value(Word<T> word) {
    if constexpr (sizeof(T) == 1) return std::bit_cast<T>(uint8_t(word));
    else if constexpr (sizeof(T) == 2) return std::bit_cast<T>(uint16_t(word));
    else return std::bit_cast<T>(word);
}

// Narrow signed integers are extended, so that a wider register holds the same number.
template <class T>
inline Word<T> word(T value) {
    if constexpr (std::is_same_v<T, int8_t> || std::is_same_v<T, int16_t>) return uint32_t(int32_t(value));
    else if constexpr (sizeof(T) == 1) return std::bit_cast<uint8_t>(value);
    else if constexpr (sizeof(T) == 2) return std::bit_cast<uint16_t>(value);
    else return std::bit_cast<Word<T>>(value);
}

// --- loops over lanes ------------------------------------------------------------------------------------------------

// All 32 lanes in a loop that the compiler makes vectors of, or those of a mask.
template <class F>
inline __attribute__((always_inline)) void each_lane(uint32_t mask, F f) {
    if (mask == EVERY) {
#ifndef __clang__
#pragma GCC ivdep
#endif
        for (int lane = 0; lane < LANES; lane++) f(lane);
        return;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1) f(lane);
}

// For loops that no vector helps: only the lanes that are there.
template <class F>
inline void each_set_lane(uint32_t mask, F f) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) f(std::countr_zero(rest));
}

// The function is a lambda without captures: its type alone says what it does.
template <class D, class A, class F>
void run_unary(Warp& warp, const Instruction& instruction, uint32_t mask) {
    auto* d = lanes<D>(warp, instruction.results[0]);
    auto* a = lanes<A>(warp, instruction.sources[0]);
    each_lane(mask, [=](int lane) { d[lane] = word<D>(F{}(value<A>(a[lane]))); });
}

template <class D, class A, class B, class F>
void run_binary(Warp& warp, const Instruction& instruction, uint32_t mask) {
    auto* d = lanes<D>(warp, instruction.results[0]);
    auto* a = lanes<A>(warp, instruction.sources[0]);
    auto* b = lanes<B>(warp, instruction.sources[1]);
    each_lane(mask, [=](int lane) { d[lane] = word<D>(F{}(value<A>(a[lane]), value<B>(b[lane]))); });
}

template <class D, class A, class B, class C, class F>
void run_ternary(Warp& warp, const Instruction& instruction, uint32_t mask) {
    auto* d = lanes<D>(warp, instruction.results[0]);
    auto* a = lanes<A>(warp, instruction.sources[0]);
    auto* b = lanes<B>(warp, instruction.sources[1]);
    auto* c = lanes<C>(warp, instruction.sources[2]);
    each_lane(mask, [=](int lane) { d[lane] = word<D>(F{}(value<A>(a[lane]), value<B>(b[lane]), value<C>(c[lane]))); });
}

template <class D, class A = D, class F>
Action unary(F) {
    return run_unary<D, A, F>;
}

template <class D, class A = D, class B = A, class F>
Action binary(F) {
    return run_binary<D, A, B, F>;
}

template <class D, class A = D, class B = A, class C = A, class F>
Action ternary(F) {
    return run_ternary<D, A, B, C, F>;
}

}  // namespace device
