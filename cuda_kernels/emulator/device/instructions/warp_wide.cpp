// Instructions in which lanes see each other: shuffles, votes, reductions, matches, masks.
//
// The warp runs them when all lanes that their mask names are there, once for each mask that is named.
#include <algorithm>

#include "choice.h"

namespace device {

namespace {

// --- shuffles --------------------------------------------------------------------------------------------------------

enum class Shuffle : uint8_t { up, down, butterfly, index };

struct Source {
    int lane;
    bool inside;  // of the segment; if not, a lane keeps its own
};

// Source: PTX ISA, shfl.sync.
template <Shuffle HOW>
Source source_of(int lane, u32 b, u32 c) {
    b &= 31;
    u32 segment = c >> 8 & 31;
    u32 clamp = c & 31;
    int highest = int((u32(lane) & segment) | (clamp & ~segment));
    int lowest = int(u32(lane) & segment);
    int found = lane;
    if (HOW == Shuffle::up) found = lane - int(b);
    if (HOW == Shuffle::down) found = lane + int(b);
    if (HOW == Shuffle::butterfly) found = lane ^ int(b);
    if (HOW == Shuffle::index) found = int(u32(lowest) | (b & ~segment));
    bool inside = HOW == Shuffle::up ? found >= highest : found <= highest;
    return {inside ? found : lane, inside};
}

template <Shuffle HOW>
void run_shuffle(Warp& warp, const Instruction& instruction, u32 mask) {
    const u32* given = warp.registers + instruction.sources[0];
    const u32* b = warp.registers + instruction.sources[1];
    const u32* c = warp.registers + instruction.sources[2];
    u32 found[LANES];
    u32 inside[LANES];
    each_set_lane(mask, [&](int lane) {
        Source source = source_of<HOW>(lane, b[lane], c[lane]);
        if (!(mask >> source.lane & 1))
            fail(warp, instruction, lane,
                 "a shuffle reads lane " + std::to_string(source.lane) + ", which takes no part");
        found[lane] = given[source.lane];
        inside[lane] = source.inside;
    });
    each_set_lane(mask, [&](int lane) {
        warp.registers[instruction.results[0] + lane] = found[lane];
        if (instruction.results[1] >= 0) warp.registers[instruction.results[1] + lane] = inside[lane];
    });
}

Action choose_shuffle(Opcode& opcode, Instruction& instruction) {
    instruction.members = instruction.sources[3];
    opcode.take("b32");
    if (opcode.take("up")) return run_shuffle<Shuffle::up>;
    if (opcode.take("down")) return run_shuffle<Shuffle::down>;
    if (opcode.take("bfly")) return run_shuffle<Shuffle::butterfly>;
    if (opcode.take("idx")) return run_shuffle<Shuffle::index>;
    return nullptr;
}

// --- votes -----------------------------------------------------------------------------------------------------------

enum class Vote : uint8_t { ballot, any, all, uniform };

template <Vote HOW>
void run_vote(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 held = 0;
    each_set_lane(mask, [&](int lane) { held |= (warp.registers[instruction.sources[0] + lane] & 1) << lane; });
    u32 found = held;
    if (HOW == Vote::any) found = held != 0;
    if (HOW == Vote::all) found = held == mask;
    if (HOW == Vote::uniform) found = held == mask || held == 0;
    each_set_lane(mask, [&](int lane) { warp.registers[instruction.results[0] + lane] = found; });
}

Action choose_vote(Opcode& opcode, Instruction& instruction) {
    instruction.members = instruction.sources[1];
    opcode.take_last();
    if (opcode.take("ballot")) return run_vote<Vote::ballot>;
    if (opcode.take("any")) return run_vote<Vote::any>;
    if (opcode.take("all")) return run_vote<Vote::all>;
    if (opcode.take("uni")) return run_vote<Vote::uniform>;
    return nullptr;
}

// --- reductions ------------------------------------------------------------------------------------------------------

template <class T, class F>
void run_reduction(Warp& warp, const Instruction& instruction, u32 mask) {
    T found{};
    bool first = true;
    each_set_lane(mask, [&](int lane) {
        T v = value<T>(warp.registers[instruction.sources[0] + lane]);
        found = first ? v : F{}(found, v);
        first = false;
    });
    each_set_lane(mask, [&](int lane) { warp.registers[instruction.results[0] + lane] = word<T>(found); });
}

template <class T, class F>
Action reduction(F) {
    return run_reduction<T, F>;
}

template <class T>
Action integer_reduction(Opcode& opcode) {
    if (opcode.take("add")) return reduction<T>([](T a, T b) { return T(u32(a) + u32(b)); });
    if (opcode.take("min")) return reduction<T>([](T a, T b) { return std::min(a, b); });
    if (opcode.take("max")) return reduction<T>([](T a, T b) { return std::max(a, b); });
    if (opcode.take("and")) return reduction<T>([](T a, T b) { return T(a & b); });
    if (opcode.take("or")) return reduction<T>([](T a, T b) { return T(a | b); });
    if (opcode.take("xor")) return reduction<T>([](T a, T b) { return T(a ^ b); });
    return nullptr;
}

template <bool ABSOLUTE>
f32 taken(f32 v) {
    return ABSOLUTE ? std::fabs(v) : v;
}

template <bool ABSOLUTE, bool NAN_WINS>
Action single_reduction(Opcode& opcode) {
    if (opcode.take("max"))
        return reduction<f32>([](f32 a, f32 b) {
            f32 found = larger(taken<ABSOLUTE>(a), taken<ABSOLUTE>(b));
            return NAN_WINS && (a != a || b != b) ? canonical(NAN) : found;
        });
    if (opcode.take("min"))
        return reduction<f32>([](f32 a, f32 b) {
            f32 found = smaller(taken<ABSOLUTE>(a), taken<ABSOLUTE>(b));
            return NAN_WINS && (a != a || b != b) ? canonical(NAN) : found;
        });
    return nullptr;
}

Action choose_reduction(Opcode& opcode, Instruction& instruction) {
    instruction.members = instruction.sources[1];
    const std::string& type = opcode.take_last();
    if (type == "u32" || type == "b32") return integer_reduction<u32>(opcode);
    if (type == "s32") return integer_reduction<s32>(opcode);
    if (type != "f32") return nullptr;
    bool absolute = opcode.take("abs");
    bool nan_wins = opcode.take("NaN");
    if (absolute && nan_wins) return single_reduction<true, true>(opcode);
    if (absolute) return single_reduction<true, false>(opcode);
    if (nan_wins) return single_reduction<false, true>(opcode);
    return single_reduction<false, false>(opcode);
}

// --- matches and masks -----------------------------------------------------------------------------------------------

template <class T>
u32 lanes_with(Warp& warp, const Instruction& instruction, u32 mask, T wanted) {
    u32 found = 0;
    each_set_lane(mask,
                  [&](int lane) { found |= u32(lanes<T>(warp, instruction.sources[0])[lane] == wanted) << lane; });
    return found;
}

template <class T>
void run_match_any(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 found[LANES];
    const auto* given = lanes<T>(warp, instruction.sources[0]);
    each_set_lane(mask, [&](int lane) { found[lane] = lanes_with<T>(warp, instruction, mask, given[lane]); });
    each_set_lane(mask, [&](int lane) { warp.registers[instruction.results[0] + lane] = found[lane]; });
}

template <class T>
void run_match_all(Warp& warp, const Instruction& instruction, u32 mask) {
    T first = lanes<T>(warp, instruction.sources[0])[std::countr_zero(mask)];
    bool same = lanes_with<T>(warp, instruction, mask, first) == mask;
    each_set_lane(mask, [&](int lane) {
        warp.registers[instruction.results[0] + lane] = same ? mask : 0;
        if (instruction.results[1] >= 0) warp.registers[instruction.results[1] + lane] = same;
    });
}

Action choose_match(Opcode& opcode, Instruction& instruction) {
    instruction.members = instruction.sources[1];
    bool wide = opcode.take_last() == "b64";
    if (opcode.take("any")) return wide ? run_match_any<u64> : run_match_any<u32>;
    if (opcode.take("all")) return wide ? run_match_all<u64> : run_match_all<u32>;
    return nullptr;
}

// The lowest lane is elected; the ISA leaves open which one, and says it is always the same.
void run_election(Warp& warp, const Instruction& instruction, u32 mask) {
    int leader = std::countr_zero(mask);
    each_set_lane(mask, [&](int lane) {
        warp.registers[instruction.results[0] + lane] = u32(leader);
        if (instruction.results[1] >= 0) warp.registers[instruction.results[1] + lane] = lane == leader;
    });
}

void run_active_mask(Warp& warp, const Instruction& instruction, u32 mask) {
    each_set_lane(mask, [&](int lane) { warp.registers[instruction.results[0] + lane] = mask; });
}

// --- barriers --------------------------------------------------------------------------------------------------------

enum class Reduction : uint64_t { none, count, all, any };

// bar.sync a{, b}; bar.red.popc.u32 d, a{, b}, p; bar.arrive a, b; barrier is the same, lanes may come one by one.
Action choose_barrier(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (opcode.take("warp")) {
        opcode.take("sync");
        instruction.kind = Kind::together;
        instruction.members = instruction.sources[0];
        return do_nothing;
    }
    if (opcode.has("cluster")) return nullptr;
    instruction.aligned = opcode.name() == "bar";
    instruction.aligned |= opcode.take("aligned");
    opcode.take("cta");
    instruction.kind = Kind::barrier;
    if (opcode.take("sync")) return do_nothing;
    if (opcode.take("arrive")) {
        instruction.kind = Kind::arrive;
        return operands.sources == 2 ? do_nothing : Action(nullptr);
    }
    if (!opcode.take("red")) return nullptr;
    opcode.take_last();
    if (opcode.take("popc")) instruction.immediate = u64(Reduction::count);
    else if (opcode.take("and")) instruction.immediate = u64(Reduction::all);
    else if (opcode.take("or")) instruction.immediate = u64(Reduction::any);
    else return nullptr;
    instruction.sources[2] = instruction.sources[operands.sources - 1];  // the predicate
    if (operands.sources == 2) instruction.sources[1] = -1;
    return do_nothing;
}

}  // namespace

Action choose_warp_wide(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    const std::string& name = opcode.name();
    if (name == "bar" || name == "barrier") return choose_barrier(opcode, operands, instruction);
    if (name == "activemask" && opcode.take("b32")) return run_active_mask;
    if (!opcode.take("sync")) return nullptr;  // forms without a mask are gone since sm_70
    instruction.kind = Kind::together;
    if (name == "shfl") return choose_shuffle(opcode, instruction);
    if (name == "vote") return choose_vote(opcode, instruction);
    if (name == "redux") return choose_reduction(opcode, instruction);
    if (name == "match") return choose_match(opcode, instruction);
    if (name == "elect") {
        instruction.members = instruction.sources[0];
        return run_election;
    }
    return nullptr;
}

}  // namespace device
