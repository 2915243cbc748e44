// setp and set: comparisons of every type, what they become, and what another predicate adds to them.
#include <map>

#include "choice.h"

namespace device {

namespace {

// Ordered comparisons are false where an operand is NaN, unordered ones true.
enum class How : uint8_t { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan, none };

How how_of(Opcode& opcode) {
    static const std::pair<const char*, How> names[] = {
        {"eq", How::eq},   {"ne", How::ne},   {"lt", How::lt},   {"le", How::le},   {"gt", How::gt},
        {"ge", How::ge},   {"equ", How::equ}, {"neu", How::neu}, {"ltu", How::ltu}, {"leu", How::leu},
        {"gtu", How::gtu}, {"geu", How::geu}, {"num", How::num}, {"nan", How::nan}, {"lo", How::lt},
        {"ls", How::le},   {"hi", How::gt},   {"hs", How::ge}};
    for (auto& [name, how] : names)
        if (opcode.take(name)) return how;
    return How::none;
}

template <How HOW, class T>
u32 compared(T x, T y) {
    auto a = [&] { if constexpr (is_half<T>) return wide(x); else return x; }();
    auto b = [&] { if constexpr (is_half<T>) return wide(y); else return y; }();
    switch (HOW) {
        case How::eq: return a == b;
        case How::ne: return (a < b) | (a > b);
        case How::lt: return a < b;
        case How::le: return a <= b;
        case How::gt: return a > b;
        case How::ge: return a >= b;
        case How::equ: return !((a < b) | (a > b));
        case How::neu: return !(a == b);
        case How::ltu: return !(a >= b);
        case How::leu: return !(a > b);
        case How::gtu: return !(a <= b);
        case How::geu: return !(a < b);
        case How::num: return (a == a) & (b == b);
        case How::nan: return (a != a) | (b != b);
        case How::none: break;
    }
    return 0;
}

template <How HOW, class T>
struct Comparison {
    u32 operator()(T a, T b) const { return compared<HOW>(a, b); }
};

template <How HOW, class T>
struct FlushedComparison {
    u32 operator()(T a, T b) const { return compared<HOW>(flushed_to_zero(a), flushed_to_zero(b)); }
};

// Bit 0: of the lower half, bit 1: of the upper.
template <class COMPARISON, class T>
struct Packed {
    u32 operator()(u32 a, u32 b) const {
        u32 low = COMPARISON{}(T{u16(a)}, T{u16(b)});
        u32 high = COMPARISON{}(T{u16(a >> 16)}, T{u16(b >> 16)});
        return high << 1 | low;
    }
};

template <How HOW, class T>
Action comparison(bool flush) {
    if constexpr (is_floating<T>)
        if (flush) return binary<u32, T>(FlushedComparison<HOW, T>{});
    return binary<u32, T>(Comparison<HOW, T>{});
}

template <How HOW, class T>
Action packed_comparison(bool flush) {
    if (flush) return binary<u32>(Packed<FlushedComparison<HOW, T>, T>{});
    return binary<u32>(Packed<Comparison<HOW, T>, T>{});
}

// A table by comparison of what a template makes for each.
template <class F>
Action by_how(How how, F f) {
    switch (how) {
        case How::eq: return f.template operator()<How::eq>();
        case How::ne: return f.template operator()<How::ne>();
        case How::lt: return f.template operator()<How::lt>();
        case How::le: return f.template operator()<How::le>();
        case How::gt: return f.template operator()<How::gt>();
        case How::ge: return f.template operator()<How::ge>();
        case How::equ: return f.template operator()<How::equ>();
        case How::neu: return f.template operator()<How::neu>();
        case How::ltu: return f.template operator()<How::ltu>();
        case How::leu: return f.template operator()<How::leu>();
        case How::gtu: return f.template operator()<How::gtu>();
        case How::geu: return f.template operator()<How::geu>();
        case How::num: return f.template operator()<How::num>();
        case How::nan: return f.template operator()<How::nan>();
        case How::none: break;
    }
    return nullptr;
}

Action comparison_of(const std::string& type, How how, bool flush) {
    if (type == "f16x2") return by_how(how, [&]<How HOW>() { return packed_comparison<HOW, f16>(flush); });
    if (type == "bf16x2") return by_how(how, [&]<How HOW>() { return packed_comparison<HOW, bf16>(flush); });
    auto of_type = [&](auto t) { return by_how(how, [&]<How HOW>() { return comparison<HOW, decltype(t)>(flush); }); };
    if (Action found = with_floating(type, of_type)) return found;
    return with_integer(type, of_type);
}

// --- what the bits of a comparison become ----------------------------------------------------------------------------

enum class Combine : u64 { none, with_and, with_or, with_xor };

Combine take_combine(Opcode& opcode) {
    if (opcode.take("and")) return Combine::with_and;
    if (opcode.take("or")) return Combine::with_or;
    if (opcode.take("xor")) return Combine::with_xor;
    return Combine::none;
}

u32 combined(Combine how, u32 a, u32 b) {
    if (how == Combine::with_and) return a & b;
    if (how == Combine::with_or) return a | b;
    if (how == Combine::with_xor) return a ^ b;
    return a;
}

// The immediate of an instruction says what follows the comparison.
u64 plan_of(Combine combine, u32 truth) { return u64(combine) << 32 | truth; }
Combine combine_of(const Instruction& instruction) { return Combine(instruction.immediate >> 32); }
u32 truth_of(const Instruction& instruction) { return u32(instruction.immediate); }

// The other predicate may be the result too, so it is read before the comparison runs.
void read_others(Warp& warp, const Instruction& instruction, u32* others) {
    if (combine_of(instruction) == Combine::none) return;
    const u32* given = warp.registers + instruction.sources[2];
    for (int lane = 0; lane < LANES; lane++) others[lane] = given[lane] & 1;
}

// setp.lt.and.f32 p|q, a, b, c: p = (a < b) and c, q = not (a < b) and c
void run_two_predicates(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 others[LANES] = {};
    read_others(warp, instruction, others);
    instruction.inner(warp, instruction, mask);
    Combine how = combine_of(instruction);
    u32* p = warp.registers + instruction.results[0];
    u32* q = instruction.results[1] < 0 ? nullptr : warp.registers + instruction.results[1];
    each_set_lane(mask, [&](int lane) {
        u32 held = p[lane];
        p[lane] = combined(how, held, others[lane]);
        if (q) q[lane] = combined(how, held ^ 1, others[lane]);
    });
}

// setp.lt.f16x2 p|q, a, b: p is of the lower halves, q of the upper
void run_predicates_of_halves(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 others[LANES] = {};
    read_others(warp, instruction, others);
    instruction.inner(warp, instruction, mask);
    Combine how = combine_of(instruction);
    each_set_lane(mask, [&](int lane) {
        u32 held = warp.registers[instruction.results[0] + lane];
        warp.registers[instruction.results[0] + lane] = combined(how, held & 1, others[lane]);
        if (instruction.results[1] >= 0)
            warp.registers[instruction.results[1] + lane] = combined(how, held >> 1, others[lane]);
    });
}

// set.lt.f32.f32 d, a, b: 1.0 or 0
void run_set(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 others[LANES] = {};
    read_others(warp, instruction, others);
    instruction.inner(warp, instruction, mask);
    Combine how = combine_of(instruction);
    u32 truth = truth_of(instruction);
    u32* d = warp.registers + instruction.results[0];
    const u32* other = others;
    if (how == Combine::none) return each_lane(mask, [=](int lane) { d[lane] = d[lane] ? truth : 0; });
    each_lane(mask, [=](int lane) { d[lane] = combined(how, d[lane], other[lane]) ? truth : 0; });
}

// set.lt.f16x2.f16x2: the truth of each half
void run_set_of_halves(Warp& warp, const Instruction& instruction, u32 mask) {
    u32 others[LANES] = {};
    read_others(warp, instruction, others);
    instruction.inner(warp, instruction, mask);
    Combine how = combine_of(instruction);
    u32 truth = truth_of(instruction);
    each_set_lane(mask, [&](int lane) {
        u32& d = warp.registers[instruction.results[0] + lane];
        u32 low = combined(how, d & 1, others[lane]) ? truth & 0xFFFF : 0;
        u32 high = combined(how, d >> 1, others[lane]) ? truth & 0xFFFF0000 : 0;
        d = high | low;
    });
}

u32 truth_for(const std::string& type) {
    static const std::map<std::string, u32> known = {
        {"u32", EVERY},       {"s32", EVERY},           {"u16", 0xFFFF},          {"s16", 0xFFFF}, {"f32", 0x3F800000},
        {"f16", 0x3C00},      {"bf16", 0x3F80},         {"f16x2", 0x3C003C00},    {"bf16x2", 0x3F803F80}};
    auto found = known.find(type);
    return found == known.end() ? 0 : found->second;
}

}  // namespace

Action choose_comparison(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    bool sets_predicate = opcode.name() == "setp";
    const std::string& type = opcode.take_last();
    bool packed = type == "f16x2" || type == "bf16x2";
    u32 truth = sets_predicate ? 1 : truth_for(opcode.take_last(1));
    if (!truth) return nullptr;
    How how = how_of(opcode);
    Combine combine = take_combine(opcode);
    Action compare = comparison_of(type, how, opcode.take("ftz"));
    if (!compare || (combine != Combine::none && operands.sources < 3)) return nullptr;
    bool plain = sets_predicate && combine == Combine::none && !operands.has_second && !packed;
    if (plain) return compare;
    instruction.inner = compare;
    instruction.immediate = plan_of(combine, truth);
    if (sets_predicate) return packed ? run_predicates_of_halves : run_two_predicates;
    return packed ? run_set_of_halves : run_set;
}

}  // namespace device
