// Copies that somebody waits for, and what threads wait at: cp.async, cp.async.bulk, mbarrier.
//
// A copy into shared memory is made when it is waited for: what is used before shows as never written.
#include <algorithm>
#include <cstring>

#include "access.h"
#include "choice.h"

namespace device {

namespace {

int place_in_code(const Warp& warp, const Instruction& instruction) {
    return int(&instruction - warp.block->kernel->code.data());
}

// Offsets in shared memory, from addresses there or from generic ones.
void find_offsets(Warp& warp, const Instruction& instruction, int which, int source, u64* offsets) {
    find_addresses(warp, instruction, which, source, offsets);
    for (int lane = 0; lane < LANES; lane++)
        if (space_of(offsets[lane]) == Space::shared) offsets[lane] &= WINDOW_BYTES - 1;
}

// Bytes of one copy: those of a shared buffer are noted as written by the lane that started it.
void write_shared(Warp& warp, int instruction, int lane, u64 to, const u8* bytes, int count) {
    SharedMemory& shared = warp.block->shared;
    shared.begin_instruction();
    shared.note_write(warp, warp.block->kernel->code[instruction], lane, to, count, bytes);
    std::memcpy(shared.at(to), bytes, count);
}

// --- cp.async --------------------------------------------------------------------------------------------------------

// cp.async [to], [from], bytes{, how many are read}: the rest becomes 0. Or a predicate, that nothing is read.
template <bool IGNORES>
u32 read_bytes(Warp& warp, const Instruction& instruction, int lane) {
    u32 bytes = u32(instruction.immediate);
    if (instruction.sources[2] < 0) return bytes;
    u32 given = warp.registers[instruction.sources[2] + lane];
    if (IGNORES) return given & 1 ? 0 : bytes;
    if (given > bytes)
        fail(warp, instruction, lane, "cp.async reads " + std::to_string(given) + " bytes and writes fewer");
    return given;
}

void check_source(Warp& warp, const Instruction& instruction, Access from, int lane, int bytes) {
    from.mask = 1u << lane;
    from.bytes = bytes;
    check_global(warp, instruction, from);
}

template <bool IGNORES>
void run_copy(Warp& warp, const Instruction& instruction, u32 mask) {
    int bytes = int(instruction.immediate);
    Access to{Space::shared, mask, bytes, false, true, {}};
    Access from{Space::global, mask, bytes, true, false, {}};
    find_offsets(warp, instruction, 0, instruction.sources[0], to.addresses);
    find_addresses(warp, instruction, 1, instruction.sources[1], from.addresses);
    check(warp, instruction, to);
    Access whole = from;
    whole.mask = 0;
    each_set_lane(mask, [&](int lane) {
        int read = int(read_bytes<IGNORES>(warp, instruction, lane));
        if (read == bytes) whole.mask |= 1u << lane;
        else if (read) check_source(warp, instruction, from, lane, read);
        warp.copies.push_back({lane, warp.copy_group[lane], to.addresses[lane], from.addresses[lane], bytes, read,
                               place_in_code(warp, instruction)});
    });
    check_alignment(warp, instruction, from);
    if (whole.mask) {
        check_global(warp, instruction, whole);
        count(warp, whole);
    }
    count(warp, to);
}

void finish_copy(Warp& warp, const PendingCopy& copy) {
    u8 bytes[16] = {};
    std::memcpy(bytes, reinterpret_cast<const void*>(copy.from), copy.read);
    write_shared(warp, copy.instruction, copy.lane, copy.to, bytes, copy.bytes);
}

void run_commit(Warp& warp, const Instruction&, u32 mask) {
    each_set_lane(mask, [&](int lane) { warp.copy_group[lane]++; });
}

constexpr u64 EVERYTHING = ~u64(0);

// The copies of some lanes, but those of the newest `groups` groups.
void finish_copies(Warp& warp, u32 mask, u64 groups) {
    std::erase_if(warp.copies, [&](const PendingCopy& copy) {
        if (!(mask >> copy.lane & 1)) return false;
        if (groups != EVERYTHING && copy.group >= warp.copy_group[copy.lane] - int(groups)) return false;
        finish_copy(warp, copy);
        return true;
    });
}

void run_wait(Warp& warp, const Instruction& instruction, u32 mask) {
    finish_copies(warp, mask, instruction.immediate);
}

// --- mbarrier --------------------------------------------------------------------------------------------------------

std::string described(u64 offset) { return "the mbarrier at byte " + std::to_string(offset) + " of shared memory"; }

MemoryBarrier& barrier_at(Warp& warp, const Instruction& instruction, int lane, u64 offset) {
    auto found = warp.block->memory_barriers.find(offset);
    if (found == warp.block->memory_barriers.end())
        fail(warp, instruction, lane, described(offset) + " was never initialised");
    return found->second;
}

void end_phase_if_complete(Warp& warp, MemoryBarrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.phase++;
    barrier.missing = barrier.expected;
    barrier.givers = barrier.warps;
    barrier.warps = 0;
    warp.block->phases++;
}

// The copies that an mbarrier counts are made when somebody asks it.
void finish_bulk_copies(Warp& warp, u64 offset) {
    auto& copies = warp.block->bulk_copies;
    std::vector<BulkCopy> mine;
    std::erase_if(copies, [&](const BulkCopy& copy) {
        if (copy.barrier != offset) return false;
        mine.push_back(copy);
        return true;
    });
    for (auto& copy : mine) {
        const u8* bytes = reinterpret_cast<const u8*>(copy.from);
        write_shared(*copy.warp, copy.instruction, copy.lane, copy.to, bytes, copy.bytes);
        MemoryBarrier& barrier = warp.block->memory_barriers[offset];
        barrier.warps |= 1u << copy.warp->number;
        barrier.bytes -= copy.bytes;
        end_phase_if_complete(warp, barrier);
    }
}

template <class F>
void each_barrier(Warp& warp, const Instruction& instruction, u32 mask, F f) {
    Access access{Space::shared, mask, 8, true, true, {}};
    find_offsets(warp, instruction, 0, instruction.sources[0], access.addresses);
    check(warp, instruction, access);
    each_set_lane(mask, [&](int lane) { f(lane, access.addresses[lane]); });
}

u32 number_of(Warp& warp, const Instruction& instruction, int which, int lane, u32 otherwise) {
    int slot = instruction.sources[which];
    return slot < 0 ? otherwise : warp.registers[slot + lane];
}

void run_initialisation(Warp& warp, const Instruction& instruction, u32 mask) {
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        MemoryBarrier barrier;
        barrier.expected = barrier.missing = number_of(warp, instruction, 1, lane, 1);
        if (barrier.expected < 1 || barrier.expected > (1 << 20) - 1)
            fail(warp, instruction, lane, "an mbarrier counts from 1 to 1048575 arrivals, not " +
                                              std::to_string(barrier.expected));
        warp.block->memory_barriers[offset] = barrier;
    });
}

void run_invalidation(Warp& warp, const Instruction& instruction, u32 mask) {
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        barrier_at(warp, instruction, lane, offset);
        warp.block->memory_barriers.erase(offset);
    });
}

// How an arrival counts.
enum class Arrival : u64 { plain, with_bytes, drops };

void arrive(Warp& warp, const Instruction& instruction, int lane, MemoryBarrier& barrier, u64 offset, u32 count) {
    if (count > barrier.missing)
        fail(warp, instruction, lane, "more threads arrive at " + described(offset) + " than it expects");
    barrier.missing -= count;
    barrier.warps |= 1u << warp.number;
    end_phase_if_complete(warp, barrier);
}

void run_arrival(Warp& warp, const Instruction& instruction, u32 mask) {
    Arrival how = Arrival(instruction.immediate);
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        MemoryBarrier& barrier = barrier_at(warp, instruction, lane, offset);
        u32 given = number_of(warp, instruction, 1, lane, 1);
        if (how == Arrival::with_bytes) barrier.bytes += given;
        u32 count = how == Arrival::with_bytes ? 1 : given;
        if (how == Arrival::drops) barrier.expected -= count;
        if (instruction.results[0] >= 0) lanes<u64>(warp, instruction.results[0])[lane] = barrier.phase;
        arrive(warp, instruction, lane, barrier, offset, count);
    });
}

template <bool COMPLETES>
void run_bytes(Warp& warp, const Instruction& instruction, u32 mask) {
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        MemoryBarrier& barrier = barrier_at(warp, instruction, lane, offset);
        u32 bytes = number_of(warp, instruction, 1, lane, 0);
        barrier.bytes += COMPLETES ? -s64(bytes) : s64(bytes);
        if (COMPLETES) end_phase_if_complete(warp, barrier);
    });
}

// What the warps of a phase did lies before what the lanes do that saw its end. Lenient: so does what those warps did
// between their arrival and this question.
void learn(Warp& warp, u32 mask, u32 givers) {
    warp.block->shared.warps.some(givers, 1u << warp.number);
    if (givers >> warp.number & 1) warp.lanes.some(EVERY, mask);
}

// The token of an arrival is its phase's number; a parity is that of the phase.
template <bool PARITY>
void run_question(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 ended = 0;
    u32 givers = 0;
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        barrier_at(warp, instruction, lane, offset);
        finish_bulk_copies(warp, offset);
        MemoryBarrier& barrier = barrier_at(warp, instruction, lane, offset);
        bool over = PARITY ? (barrier.phase & 1) != (number_of(warp, instruction, 1, lane, 0) & 1)
                           : barrier.phase != lanes<u64>(warp, instruction.sources[1])[lane];
        warp.registers[instruction.results[0] + lane] = over;
        ended |= u32(over) << lane;
        givers |= over ? barrier.givers : 0;
    });
    if (ended) return learn(warp, ended, givers);
    warp.gives_way = true;
    warp.waits_in_vain = true;
}

void run_copies_arrive(Warp& warp, const Instruction& instruction, u32 mask) {
    finish_copies(warp, mask, EVERYTHING);
    each_barrier(warp, instruction, mask, [&](int lane, u64 offset) {
        MemoryBarrier& barrier = barrier_at(warp, instruction, lane, offset);
        barrier.missing += instruction.immediate ? 0 : 1;  // .noinc: the arrival is one of those that are expected
        arrive(warp, instruction, lane, barrier, offset, 1);
    });
}

void take_order(Opcode& opcode) {
    opcode.take_all(
        {"relaxed", "acquire", "release", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64"});
}

Action choose_memory_barrier(Opcode& opcode, const Operands&, Instruction& instruction) {
    take_order(opcode);
    if (opcode.take("init")) return run_initialisation;
    if (opcode.take("inval")) return run_invalidation;
    if (opcode.take("arrive") || opcode.take("arrive_drop")) {
        bool drops = opcode.part(1) == "arrive_drop";
        bool with_bytes = opcode.take("expect_tx");
        opcode.take("noComplete");
        if (drops && with_bytes) return nullptr;
        instruction.immediate = u64(drops ? Arrival::drops : with_bytes ? Arrival::with_bytes : Arrival::plain);
        return run_arrival;
    }
    if (opcode.take("expect_tx")) return run_bytes<false>;
    if (opcode.take("complete_tx")) return run_bytes<true>;
    if (opcode.take("test_wait") || opcode.take("try_wait"))
        return opcode.take("parity") ? run_question<true> : run_question<false>;
    return nullptr;
}

// --- cp.async.bulk ---------------------------------------------------------------------------------------------------

constexpr u64 BULK_UNIT = 16;  // bytes: of addresses and sizes

void require_units(Warp& warp, const Instruction& instruction, int lane, u64 shared, u64 global, u64 bytes) {
    if ((shared | global | bytes) % BULK_UNIT)
        fail(warp, instruction, lane,
             "misaligned cp.async.bulk: both addresses and the size must be multiples of 16 bytes",
             FaultKind::misaligned);
}

// cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [to], [from], bytes, [barrier]
void run_bulk_load(Warp& warp, const Instruction& instruction, u32 mask) {
    u64 to[LANES], from[LANES], barriers[LANES];
    find_offsets(warp, instruction, 0, instruction.sources[0], to);
    find_addresses(warp, instruction, 1, instruction.sources[1], from);
    find_offsets(warp, instruction, 2, instruction.sources[3], barriers);
    each_set_lane(mask, [&](int lane) {
        int bytes = int(warp.registers[instruction.sources[2] + lane]);
        require_units(warp, instruction, lane, to[lane], from[lane], u64(bytes));
        if (!bytes) return;
        barrier_at(warp, instruction, lane, barriers[lane]);
        Access written{Space::shared, 1u << lane, 1, false, true, {}};
        for (u64 end : {to[lane], to[lane] + u64(bytes) - 1}) {
            written.addresses[lane] = end;
            check(warp, instruction, written);
        }
        Access read{Space::global, 1u << lane, bytes, true, false, {}};
        read.addresses[lane] = from[lane];
        check_global(warp, instruction, read);
        warp.block->bulk_copies.push_back(
            {&warp, lane, barriers[lane], to[lane], from[lane], bytes, place_in_code(warp, instruction)});
    });
}

// cp.async.bulk.global.shared::cta.bulk_group [to], [from], bytes. Lenient: made at once.
void run_bulk_store(Warp& warp, const Instruction& instruction, u32 mask) {
    u64 to[LANES], from[LANES];
    find_addresses(warp, instruction, 0, instruction.sources[0], to);
    find_offsets(warp, instruction, 1, instruction.sources[1], from);
    each_set_lane(mask, [&](int lane) {
        int bytes = int(warp.registers[instruction.sources[2] + lane]);
        require_units(warp, instruction, lane, from[lane], to[lane], u64(bytes));
        if (!bytes) return;
        Access read{Space::shared, 1u << lane, 1, true, false, {}};
        for (u64 end : {from[lane], from[lane] + u64(bytes) - 1}) {
            read.addresses[lane] = end;
            check(warp, instruction, read);
        }
        Access written{Space::global, 1u << lane, bytes, false, true, {}};
        written.addresses[lane] = to[lane];
        check_global(warp, instruction, written);
        warp.block->shared.note_read(warp, instruction, lane, from[lane], bytes);
        std::memcpy(reinterpret_cast<void*>(to[lane]), warp.block->shared.at(from[lane]), bytes);
    });
}

Action choose_bulk(Opcode& opcode, const Operands& operands) {
    bool copies = !opcode.has("commit_group") && !opcode.has("wait_group");
    if (copies && !opcode.has("global")) return nullptr;  // from block to block
    opcode.take_all({"L2::cache_hint", "shared::cta", "shared::cluster", "global"});
    if (opcode.take("commit_group")) return do_nothing;
    if (opcode.take("wait_group")) {
        opcode.take("read");
        return do_nothing;
    }
    if (opcode.take("mbarrier::complete_tx::bytes")) return operands.sources == 4 ? run_bulk_load : nullptr;
    if (opcode.take("bulk_group")) return operands.sources == 3 ? run_bulk_store : nullptr;
    return nullptr;
}

// --- the choice ------------------------------------------------------------------------------------------------------

Action choose_copy(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    bool ignores = operands.sources == 4 && operands.last_is_predicate;
    opcode.take_all(
        {"ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"});
    if (operands.sources < 3 || operands.sources > 4 || !operands.constants[2]) return nullptr;
    u64 bytes = *operands.constants[2];
    if (bytes != 4 && bytes != 8 && bytes != 16) return nullptr;
    instruction.immediate = bytes;
    instruction.sources[2] = instruction.sources[3];  // how many are read; -1: all
    instruction.sources[3] = -1;
    instruction.space = Space::shared;
    instruction.element_bytes = u8(bytes);
    return ignores ? run_copy<true> : run_copy<false>;
}

}  // namespace

Action choose_asynchronous(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (opcode.name() == "mbarrier") return choose_memory_barrier(opcode, operands, instruction);
    if (!opcode.take("async")) return nullptr;
    if (opcode.take("bulk")) return choose_bulk(opcode, operands);
    if (opcode.take("mbarrier")) {
        take_order(opcode);
        instruction.immediate = opcode.take("noinc");
        return opcode.take("arrive") ? run_copies_arrive : nullptr;
    }
    if (opcode.take("commit_group")) return run_commit;
    if (opcode.take("wait_all")) {
        instruction.immediate = EVERYTHING;
        return run_wait;
    }
    if (opcode.take("wait_group")) {
        if (operands.constants.empty() || !operands.constants[0]) return nullptr;
        instruction.immediate = *operands.constants[0];
        return run_wait;
    }
    return choose_copy(opcode, operands, instruction);
}

}  // namespace device
