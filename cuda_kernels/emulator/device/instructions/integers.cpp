// Integer arithmetic, and instructions on bits: shifts, fields, tables, permutations.
#include <algorithm>
#include <bit>

#include "choice.h"

namespace device {

namespace {

template <class T>
struct DoubleWidth;
template <>
struct DoubleWidth<u8> { using type = u16; };
template <>
struct DoubleWidth<s8> { using type = s16; };
template <>
struct DoubleWidth<u16> { using type = u32; };
template <>
struct DoubleWidth<s16> { using type = s32; };
template <>
struct DoubleWidth<u32> { using type = u64; };
template <>
struct DoubleWidth<s32> { using type = s64; };
template <>
struct DoubleWidth<u64> { using type = unsigned __int128; };
template <>
struct DoubleWidth<s64> { using type = __int128; };

template <class T>
constexpr u32 BITS = sizeof(T) * 8;

template <class T>
T high_half(T a, T b) {
    using Wide = typename DoubleWidth<T>::type;
    return T((Wide(a) * Wide(b)) >> BITS<T>);
}

// The lower half of a product, without the overflow that C++ leaves undefined.
template <class U>
U low_half(U a, U b) {
    return U(u64(a) * u64(b));
}

template <class T>
T quotient(T a, T b) {
    using U = std::make_unsigned_t<T>;
    if (b == 0) return T(-1);  // the ISA leaves it to the machine
    if (std::is_signed_v<T> && b == T(-1)) return T(U(0) - U(a));
    return T(a / b);
}

template <class T>
T remainder(T a, T b) {
    if (b == 0) return a;  // the ISA leaves it to the machine
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return T(a % b);
}

template <class T>
T shifted_right(T a, u32 count) {
    if (count >= BITS<T>) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
    return T(a >> count);
}

template <class U>
U shifted_left(U a, u32 count) {
    return count >= BITS<U> ? U(0) : U(a << count);
}

s32 saturated_sum(s64 v) { return s32(std::clamp<s64>(v, INT32_MIN, INT32_MAX)); }

s32 signed24(u32 v) { return s32(v << 8) >> 8; }

u32 unsigned24(u32 v) { return v & 0xFFFFFF; }

template <class T>
s64 product24(T a, T b) {
    if constexpr (std::is_signed_v<T>) return s64(signed24(u32(a))) * signed24(u32(b));
    else return s64(u64(unsigned24(a)) * unsigned24(b));
}

// --- multiplication --------------------------------------------------------------------------------------------------

template <class T>
Action multiplication(Opcode& opcode) {
    using U = std::make_unsigned_t<T>;
    bool adds = opcode.name() == "mad";
    if (opcode.take("lo")) {
        if (adds) return ternary<U>([](U a, U b, U c) { return U(low_half(a, b) + c); });
        return binary<U>([](U a, U b) { return low_half(a, b); });
    }
    if (opcode.take("hi")) {
        if (adds && std::is_same_v<T, s32> && opcode.take("sat"))
            return ternary<s32>([](s32 a, s32 b, s32 c) { return saturated_sum(s64(high_half(a, b)) + c); });
        if (adds) return ternary<T>([](T a, T b, T c) { return T(U(high_half(a, b)) + U(c)); });
        return binary<T>([](T a, T b) { return high_half(a, b); });
    }
    if constexpr (sizeof(T) < 8) {
        using Wide = typename DoubleWidth<T>::type;
        using WideU = std::make_unsigned_t<Wide>;
        if (!opcode.take("wide")) return nullptr;
        if (adds)
            return ternary<Wide, T, T, Wide>(
                [](T a, T b, Wide c) { return Wide(WideU(Wide(a) * Wide(b)) + WideU(c)); });
        return binary<Wide, T, T>([](T a, T b) { return Wide(Wide(a) * Wide(b)); });
    }
    return nullptr;
}

template <class T>
Action multiplication24(Opcode& opcode) {
    bool adds = opcode.name() == "mad24";
    if (opcode.take("lo")) {
        if (adds) return ternary<T>([](T a, T b, T c) { return T(u32(product24(a, b)) + u32(c)); });
        return binary<T>([](T a, T b) { return T(product24(a, b)); });
    }
    if (!opcode.take("hi")) return nullptr;
    if (adds) return ternary<T>([](T a, T b, T c) { return T(u32(product24(a, b) >> 16) + u32(c)); });
    return binary<T>([](T a, T b) { return T(product24(a, b) >> 16); });
}

// --- carries ---------------------------------------------------------------------------------------------------------

// add.cc, addc, sub.cc, subc, mad.lo.cc, madc.hi: lowering puts the carry into the last source and the last result.
constexpr u64 SUBTRACTS = 1, READS_CARRY = 2, WRITES_CARRY = 4, LOW_PRODUCT = 8, HIGH_PRODUCT = 16;

template <class T>
void run_with_carry(Warp& warp, const Instruction& instruction, u32 mask) {
    using U = std::make_unsigned_t<T>;
    u64 form = instruction.immediate;
    bool multiplies = form & (LOW_PRODUCT | HIGH_PRODUCT);
    u32* carry_in = warp.registers + instruction.sources[8];
    u32* carry_out = warp.registers + instruction.results[7];
    each_set_lane(mask, [&](int lane) {
        U a = value<U>(lanes<U>(warp, instruction.sources[0])[lane]);
        U b = value<U>(lanes<U>(warp, instruction.sources[1])[lane]);
        if (multiplies) {
            a = form & LOW_PRODUCT ? low_half(a, b) : U(high_half(T(a), T(b)));
            b = value<U>(lanes<U>(warp, instruction.sources[2])[lane]);
        }
        unsigned __int128 carry = form & READS_CARRY ? carry_in[lane] & 1 : 0;
        unsigned __int128 sum = form & SUBTRACTS ? (unsigned __int128)a - b - carry : (unsigned __int128)a + b + carry;
        lanes<U>(warp, instruction.results[0])[lane] = word<U>(U(sum));
        if (form & WRITES_CARRY) carry_out[lane] = u32(sum >> BITS<U>) & 1;
    });
}

template <class T>
Action with_carry(Opcode& opcode, Instruction& instruction) {
    const std::string& name = opcode.name();
    bool reads = name.back() == 'c';
    u64 form = reads ? READS_CARRY : 0;
    if (opcode.take("cc")) form |= WRITES_CARRY;
    if (name[0] == 's') form |= SUBTRACTS;
    if (name[0] == 'm') form |= opcode.take("lo") ? LOW_PRODUCT : opcode.take("hi") ? HIGH_PRODUCT : 0;
    instruction.immediate = form;
    return run_with_carry<T>;
}

// --- the rest --------------------------------------------------------------------------------------------------------

template <class T>
Action extreme(Opcode& opcode) {
    bool maximum = opcode.name() == "max";
    if constexpr (std::is_same_v<T, s32>) {
        if (opcode.take("relu")) {
            if (maximum) return binary<T>([](T a, T b) { return std::max(std::max(a, b), 0); });
            return binary<T>([](T a, T b) { return std::max(std::min(a, b), 0); });
        }
    }
    if (maximum) return binary<T>([](T a, T b) { return std::max(a, b); });
    return binary<T>([](T a, T b) { return std::min(a, b); });
}

template <class T>
Action integer(Opcode& opcode, Instruction& instruction) {
    using U = std::make_unsigned_t<T>;
    const std::string& name = opcode.name();
    bool carries = opcode.has("cc") || name == "addc" || name == "subc" || name == "madc";
    if (carries) return with_carry<T>(opcode, instruction);
    if constexpr (std::is_same_v<T, s32>) {
        if (name == "add" && opcode.take("sat"))
            return binary<s32>([](s32 a, s32 b) { return saturated_sum(s64(a) + b); });
        if (name == "sub" && opcode.take("sat"))
            return binary<s32>([](s32 a, s32 b) { return saturated_sum(s64(a) - b); });
    }
    if constexpr (sizeof(T) == 4)
        if (name == "mul24" || name == "mad24") return multiplication24<T>(opcode);
    if (name == "add") return binary<U>([](U a, U b) { return U(a + b); });
    if (name == "sub") return binary<U>([](U a, U b) { return U(a - b); });
    if (name == "mul" || name == "mad") return multiplication<T>(opcode);
    if (name == "div") return binary<T>([](T a, T b) { return quotient(a, b); });
    if (name == "rem") return binary<T>([](T a, T b) { return remainder(a, b); });
    if (name == "min" || name == "max") return extreme<T>(opcode);
    if (name == "neg") return unary<U>([](U a) { return U(0 - a); });
    if (name == "abs") return unary<T>([](T a) { return T(a < 0 ? U(0 - U(a)) : U(a)); });
    if (name == "sad")
        return ternary<T>([](T a, T b, T c) { return T(U(c) + (a < b ? U(U(b) - U(a)) : U(U(a) - U(b)))); });
    return nullptr;
}

// Two 16-bit integers in a register.
template <class T, class F>
u32 both_halves(u32 a, u32 b, F f) {
    u32 low = u16(f(T(u16(a)), T(u16(b))));
    u32 high = u16(f(T(u16(a >> 16)), T(u16(b >> 16))));
    return high << 16 | low;
}

template <class T>
Action packed_integer(Opcode& opcode) {
    const std::string& name = opcode.name();
    if (name == "add")
        return binary<u32>([](u32 a, u32 b) { return both_halves<T>(a, b, [](T x, T y) { return T(x + y); }); });
    bool relu = std::is_signed_v<T> && opcode.take("relu");
    if (name == "max" && relu)
        return binary<u32>(
            [](u32 a, u32 b) { return both_halves<T>(a, b, [](T x, T y) { return std::max({x, y, T(0)}); }); });
    if (name == "min" && relu)
        return binary<u32>(
            [](u32 a, u32 b) { return both_halves<T>(a, b, [](T x, T y) { return std::max(std::min(x, y), T(0)); }); });
    if (name == "max")
        return binary<u32>([](u32 a, u32 b) { return both_halves<T>(a, b, [](T x, T y) { return std::max(x, y); }); });
    if (name == "min")
        return binary<u32>([](u32 a, u32 b) { return both_halves<T>(a, b, [](T x, T y) { return std::min(x, y); }); });
    return nullptr;
}

// --- bits ------------------------------------------------------------------------------------------------------------

template <class T>
T field(T a, u32 position, u32 length) {
    using U = std::make_unsigned_t<T>;
    constexpr u32 top = BITS<T> - 1;
    position &= 255;
    length &= 255;
    bool negative = std::is_signed_v<T> && length && (U(a) >> std::min(position + length - 1, top) & 1);
    U bits = position > top ? U(0) : U(U(a) >> position);
    u32 present = position > top ? 0 : std::min(length, top + 1 - position);
    U below = present > top ? ~U(0) : U((U(1) << present) - 1);
    return T((bits & below) | (negative ? U(~below) : U(0)));
}

template <class U>
U inserted(U a, U b, u32 position, u32 length) {
    constexpr u32 top = BITS<U> - 1;
    position &= 255;
    length &= 255;
    if (position > top || length == 0) return b;
    U below = length > top ? ~U(0) : U((U(1) << length) - 1);
    U mask = U(below << position);
    return U((b & ~mask) | (U(a << position) & mask));
}

template <class U>
U reversed(U a) {
    U found = 0;
    for (u32 n = 0; n < BITS<U>; n++) found = U(found << 1 | (a >> n & 1));
    return found;
}

// The place of the highest bit that is not the sign's, all ones: none.
template <class T>
u32 highest(T a, bool shift_amount) {
    using U = std::make_unsigned_t<T>;
    U bits = std::is_signed_v<T> && a < 0 ? U(~U(a)) : U(a);
    if (!bits) return EVERY;
    u32 place = BITS<T> - 1 - u32(std::countl_zero(bits));
    return shift_amount ? BITS<T> - 1 - place : place;
}

template <class T>
void run_bit_insert(Warp& warp, const Instruction& instruction, u32 mask) {
    each_set_lane(mask, [&](int lane) {
        T a = lanes<T>(warp, instruction.sources[0])[lane];
        T b = lanes<T>(warp, instruction.sources[1])[lane];
        u32 position = warp.registers[instruction.sources[2] + lane];
        u32 length = warp.registers[instruction.sources[3] + lane];
        lanes<T>(warp, instruction.results[0])[lane] = inserted(a, b, position, length);
    });
}

template <class T>
Action bits(Opcode& opcode) {
    using U = std::make_unsigned_t<T>;
    const std::string& name = opcode.name();
    if (name == "and") return binary<U>([](U a, U b) { return U(a & b); });
    if (name == "or") return binary<U>([](U a, U b) { return U(a | b); });
    if (name == "xor") return binary<U>([](U a, U b) { return U(a ^ b); });
    if (name == "not") return unary<U>([](U a) { return U(~a); });
    if (name == "cnot") return unary<U>([](U a) { return U(a == 0); });
    if (name == "shl") return binary<U, U, u32>([](U a, u32 n) { return shifted_left(a, n); });
    if (name == "shr") return binary<T, T, u32>([](T a, u32 n) { return shifted_right(a, n); });
    if constexpr (sizeof(T) >= 4) {
        if (name == "popc") return unary<u32, U>([](U a) { return u32(std::popcount(a)); });
        if (name == "clz") return unary<u32, U>([](U a) { return u32(std::countl_zero(a)); });
        if (name == "brev") return unary<U>([](U a) { return reversed(a); });
        if (name == "bfe") return ternary<T, T, u32, u32>([](T a, u32 b, u32 c) { return field(a, b, c); });
        if (name == "bfi") return run_bit_insert<U>;
        if (name == "bfind" && opcode.take("shiftamt")) return unary<u32, T>([](T a) { return highest(a, true); });
        if (name == "bfind") return unary<u32, T>([](T a) { return highest(a, false); });
    }
    return nullptr;
}

Action predicate(const std::string& name) {
    if (name == "and") return binary<u32>([](u32 a, u32 b) { return a & b; });
    if (name == "or") return binary<u32>([](u32 a, u32 b) { return a | b; });
    if (name == "xor") return binary<u32>([](u32 a, u32 b) { return (a ^ b) & 1; });
    if (name == "not") return unary<u32>([](u32 a) { return ~a & 1; });
    return nullptr;
}

u32 permuted(u32 a, u32 b, u32 selector) {
    u64 all = u64(b) << 32 | a;
    u32 found = 0;
    for (int n = 0; n < 4; n++) {
        u32 pick = selector >> 4 * n & 15;
        u32 byte = u32(all >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        found |= byte << 8 * n;
    }
    return found;
}

u64 joined(u32 low, u32 high) { return u64(high) << 32 | low; }

Action funnel_shift(Opcode& opcode) {
    bool left = opcode.take("l");
    if (!left && !opcode.take("r")) return nullptr;
    bool wraps = opcode.take("wrap");
    if (!wraps && !opcode.take("clamp")) return nullptr;
    if (left && wraps) return ternary<u32>([](u32 a, u32 b, u32 c) { return u32(joined(a, b) << (c & 31) >> 32); });
    if (left) return ternary<u32>([](u32 a, u32 b, u32 c) { return u32(joined(a, b) << std::min(c, 32u) >> 32); });
    if (wraps) return ternary<u32>([](u32 a, u32 b, u32 c) { return u32(joined(a, b) >> (c & 31)); });
    return ternary<u32>([](u32 a, u32 b, u32 c) { return u32(joined(a, b) >> std::min(c, 32u)); });
}

// --- tables of three operands ----------------------------------------------------------------------------------------

void run_table(Warp& warp, const Instruction& instruction, u32 mask) {
    const u32* a = warp.registers + instruction.sources[0];
    const u32* b = warp.registers + instruction.sources[1];
    const u32* c = warp.registers + instruction.sources[2];
    u32* d = warp.registers + instruction.results[0];
    u32 row[8];
    for (int n = 0; n < 8; n++) row[n] = instruction.immediate >> n & 1 ? EVERY : 0;
    each_lane(mask, [=](int lane) {
        u32 x = a[lane];
        u32 y = b[lane];
        u32 z = c[lane];
        u32 without_x = (~y & ((~z & row[0]) | (z & row[1]))) | (y & ((~z & row[2]) | (z & row[3])));
        u32 with_x = (~y & ((~z & row[4]) | (z & row[5]))) | (y & ((~z & row[6]) | (z & row[7])));
        d[lane] = (~x & without_x) | (x & with_x);
    });
}

// lop3.or d|p, a, b, c, table, q: p = (d != 0) or q
template <bool AND>
void run_table_with_predicate(Warp& warp, const Instruction& instruction, u32 mask) {
    run_table(warp, instruction, mask);
    each_set_lane(mask, [&](int lane) {
        bool any = warp.registers[instruction.results[0] + lane];
        bool given = warp.registers[instruction.sources[4] + lane] & 1;
        warp.registers[instruction.results[1] + lane] = AND ? any && given : any || given;
    });
}

Action table(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (operands.sources < 4 || !operands.constants[3]) return nullptr;
    instruction.immediate = *operands.constants[3];
    if (!operands.has_second) return run_table;
    if (opcode.take("and")) return run_table_with_predicate<true>;
    if (opcode.take("or")) return run_table_with_predicate<false>;
    return nullptr;
}

// --- dot products of bytes -------------------------------------------------------------------------------------------

s32 part_of(u32 word, int n, int bits, bool is_signed) {
    u32 part = word >> n * bits;
    return is_signed ? s32(part << (32 - bits)) >> (32 - bits) : s32(part << (32 - bits) >> (32 - bits));
}

template <bool A_SIGNED, bool B_SIGNED>
Action dot_product(Opcode& opcode) {
    if (opcode.name() == "dp4a")
        return ternary<u32>([](u32 a, u32 b, u32 c) {
            for (int n = 0; n < 4; n++) c += u32(part_of(a, n, 8, A_SIGNED) * part_of(b, n, 8, B_SIGNED));
            return c;
        });
    if (opcode.take("lo"))
        return ternary<u32>([](u32 a, u32 b, u32 c) {
            for (int n = 0; n < 2; n++) c += u32(part_of(a, n, 16, A_SIGNED) * part_of(b, n, 8, B_SIGNED));
            return c;
        });
    if (!opcode.take("hi")) return nullptr;
    return ternary<u32>([](u32 a, u32 b, u32 c) {
        for (int n = 0; n < 2; n++) c += u32(part_of(a, n, 16, A_SIGNED) * part_of(b, n + 2, 8, B_SIGNED));
        return c;
    });
}

Action choose_dot_product(Opcode& opcode) {
    bool b_signed = opcode.take_last() == "s32";
    bool a_signed = opcode.take_last(1) == "s32";
    if (a_signed && b_signed) return dot_product<true, true>(opcode);
    if (a_signed) return dot_product<true, false>(opcode);
    if (b_signed) return dot_product<false, true>(opcode);
    return dot_product<false, false>(opcode);
}

// A mask of `length` bits from `position` on.
template <bool WRAP>
u32 bit_mask(u32 position, u32 length) {
    if (WRAP) {
        position &= 31;
        length &= 31;
    }
    if (position > 31 || length == 0) return 0;
    u32 below = length > 31 ? EVERY : (1u << length) - 1;
    return below << position;
}

template <bool WRAP, bool SIGNED>
u32 extended(u32 a, u32 length) {
    if (WRAP) length &= 31;
    if (length == 0) return 0;
    if (length > 31) return a;
    return u32(part_of(a, 0, int(length), SIGNED));
}

Action sign_extension(Opcode& opcode) {
    bool is_signed = opcode.take_last() == "s32";
    if (opcode.take("wrap")) {
        if (is_signed) return binary<u32>([](u32 a, u32 b) { return extended<true, true>(a, b); });
        return binary<u32>([](u32 a, u32 b) { return extended<true, false>(a, b); });
    }
    if (!opcode.take("clamp")) return nullptr;
    if (is_signed) return binary<u32>([](u32 a, u32 b) { return extended<false, true>(a, b); });
    return binary<u32>([](u32 a, u32 b) { return extended<false, false>(a, b); });
}

Action mask_of_bits(Opcode& opcode) {
    opcode.take("b32");
    if (opcode.take("wrap")) return binary<u32>([](u32 a, u32 b) { return bit_mask<true>(a, b); });
    if (opcode.take("clamp")) return binary<u32>([](u32 a, u32 b) { return bit_mask<false>(a, b); });
    return nullptr;
}

}  // namespace

Action choose_integer(Opcode& opcode, Instruction& instruction) {
    const std::string& type = opcode.last();
    if (type == "u16x2" || type == "s16x2") {
        opcode.take_last();
        return type == "u16x2" ? packed_integer<u16>(opcode) : packed_integer<s16>(opcode);
    }
    Action found = with_integer(type, [&](auto t) -> Action {
        if constexpr (sizeof(t) == 1) return nullptr;
        else return integer<decltype(t)>(opcode, instruction);
    });
    if (found) opcode.take_last();
    return found;
}

Action choose_bits(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    const std::string& name = opcode.name();
    if (name == "lop3") {
        opcode.take("b32");
        return table(opcode, operands, instruction);
    }
    if (name == "prmt" && opcode.take("b32"))
        return ternary<u32>([](u32 a, u32 b, u32 c) { return permuted(a, b, c); });
    if (name == "shf" && opcode.take("b32")) return funnel_shift(opcode);
    if (name == "dp4a" || name == "dp2a") return choose_dot_product(opcode);
    if (name == "szext") return sign_extension(opcode);
    if (name == "bmsk") return mask_of_bits(opcode);
    if (opcode.last() == "pred") {
        opcode.take_last();
        return predicate(name);
    }
    Action found = with_integer(opcode.last(), [&](auto t) -> Action { return bits<decltype(t)>(opcode); });
    if (found) opcode.take_last();
    return found;
}

}  // namespace device
