// How instructions reach memory: the addresses of a warp's lanes, checked before an access is made, and counted.
#pragma once
#include "../warp.h"

namespace device {

// The bytes that the lanes of one instruction use in one of the memories.
struct Access {
    Space space;
    u32 mask;
    int bytes;
    bool reads, writes;
    u64 addresses[LANES];  // in global memory, or offsets in the other memories
};

// The addresses of an instruction's address operand, whose base stands in a slot; -1: there is none but the offset.
void find_addresses(Warp& warp, const Instruction& instruction, int which, int source, u64* addresses);

// Which memory a generic address lies in.
Space space_of(u64 address);

// Throw a Fault: for the address and the alignment of every lane, and for bytes that nobody wrote. Shared memory notes
// its races lane by lane where the access is made.
void check(Warp& warp, const Instruction& instruction, const Access& access);
void check_alignment(Warp& warp, const Instruction& instruction, const Access& access);
void check_global(Warp& warp, const Instruction& instruction, const Access& access);

// Where the bytes of a lane lie.
u8* place(Warp& warp, const Access& access, int lane);

// Add an access to the kernel's counters.
void count(Warp& warp, const Access& access);

}  // namespace device
