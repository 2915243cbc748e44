// cvt: between integers, floats of every width, and the small formats that are packed in pairs.
//
// Conversions that kernels make all the time have loops of their own; the others share one that rounds by rule.
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "choice.h"

namespace device {

namespace {

// --- one value, any pair of types ------------------------------------------------------------------------------------

// To an integral number in the cast's direction.
f64 integral(f64 v, Rounding rounding) {
    switch (rounding) {
        case Rounding::zero: return std::trunc(v);
        case Rounding::down: return std::floor(v);
        case Rounding::up: return std::ceil(v);
        case Rounding::nearest_away: return std::round(v);
        case Rounding::stochastic:
        case Rounding::nearest_even: break;
    }
    return std::nearbyint(v);
}

// NaN gives 0, but the highest bit alone where a type of 64 bits takes part. Source: PTX ISA, cvt, integer notes.
template <class To, class From>
To integer_of_nan() {
    using U = std::make_unsigned_t<To>;
    bool wide_pair = sizeof(From) == 8 || sizeof(To) == 8;
    return wide_pair ? To(U(1) << (sizeof(To) * 8 - 1)) : To(0);
}

// .ftz concerns float32 alone.
template <class T>
T flushed_single(T v) {
    if constexpr (std::is_same_v<T, f32>) return flushed(v);
    else return v;
}

template <class To, class From>
To float_to_integer(From from, const Cast& cast) {
    if (cast.flush) from = flushed_single(from);
    if (is_nan(from)) return integer_of_nan<To, From>();
    f64 v = integral(wide(from), cast.rounding);
    if (v <= f64(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (v >= f64(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return To(v);
}

template <class To, class From>
To integer_to_integer(From from, const Cast& cast) {
    if (!cast.saturate) return To(from);
    if (std::cmp_less(from, std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (std::cmp_greater(from, std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return To(from);
}

template <class T>
constexpr Format format_of() {
    if constexpr (std::is_same_v<T, f16>) return F16;
    else if constexpr (std::is_same_v<T, bf16>) return BF16;
    else return F32;
}

template <class To>
To saturated_to(To v) {
    if constexpr (is_half<To>) return narrow<To>(saturated(wide(v)));
    else if constexpr (sizeof(To) == 4) return saturated(v);
    else return v > 0 ? (v < 1 ? v : 1.0) : 0.0;
}

template <class To>
To rounded(f64 v, const Cast& cast) {
    if constexpr (std::is_same_v<To, f64>) return v;
    else return of_bits<To>(encode(v, format_of<To>(), cast));
}

template <class To, class From>
To float_to_float(From from, const Cast& cast) {
    if (cast.flush) from = flushed_single(from);
    f64 v = wide(from);
    if (cast.to_integer) v = integral(v, cast.rounding);
    To found = v != v ? canonical_nan<To>() : rounded<To>(v, cast);
    if (cast.flush) found = flushed_single(found);
    return cast.saturate ? saturated_to(found) : found;
}

// A 64-bit integer as float64, to odd where it has more bits.
template <class From>
f64 integer_to_odd(From from) {
    if constexpr (sizeof(From) < 8) return f64(from);
    bool negative = from < 0;
    u64 size = negative ? u64(0) - u64(from) : u64(from);
    if (size >> 53) size = (size >> 11 | ((size & 0x7FF) != 0)) << 11;
    f64 v = f64(size >> 11) * 2048.0 + f64(size & 0x7FF);
    return negative ? -v : v;
}

template <class To, class From>
To integer_to_float(From from, const Cast& cast) {
    if constexpr (std::is_same_v<To, f64>) {
        if (cast.rounding == Rounding::nearest_even) return f64(from);
        f64 near = f64(from);
        __int128 excess = __int128(near) - from;
        bool down = cast.rounding == Rounding::down || (cast.rounding == Rounding::zero && from > 0);
        bool up = cast.rounding == Rounding::up || (cast.rounding == Rounding::zero && from < 0);
        if (excess > 0 && down) return std::nextafter(near, -INFINITY);
        if (excess < 0 && up) return std::nextafter(near, INFINITY);
        return near;
    } else {
        To found = rounded<To>(integer_to_odd(from), cast);
        return cast.saturate ? saturated_to(found) : found;
    }
}

template <class To, class From>
To converted(From from, const Cast& cast) {
    if constexpr (!is_floating<To> && !is_floating<From>) return integer_to_integer<To>(from, cast);
    else if constexpr (!is_floating<To>) return float_to_integer<To>(from, cast);
    else if constexpr (!is_floating<From>) return integer_to_float<To>(from, cast);
    else return float_to_float<To>(from, cast);
}

template <class To, class From>
void run_conversion(Warp& warp, const Instruction& instruction, u32 mask) {
    auto* d = lanes<To>(warp, instruction.results[0]);
    auto* a = lanes<From>(warp, instruction.sources[0]);
    const Cast& cast = instruction.cast;
    each_set_lane(mask, [&](int lane) { d[lane] = word<To>(converted<To>(value<From>(a[lane]), cast)); });
}

// --- the frequent ones -----------------------------------------------------------------------------------------------

template <class To, class From>
Action frequent(const Cast& cast) {
    bool unusual = cast.flush || cast.saturate || cast.finite || cast.relu || cast.to_integer;
    bool nearest = cast.rounding == Rounding::nearest_even;
    if (unusual || !nearest) return nullptr;
    constexpr bool to_float = std::is_floating_point_v<To>;
    constexpr bool from_float = std::is_floating_point_v<From>;
    if constexpr (!is_floating<To> && !is_floating<From>) return unary<To, From>([](From a) { return To(a); });
    else if constexpr (to_float && !is_floating<From>) return unary<To, From>([](From a) { return To(a); });
    else if constexpr (std::is_same_v<To, f32> && is_half<From>)
        return unary<To, From>([](From a) { return canonical(wide(a)); });
    else if constexpr (is_half<To> && std::is_same_v<From, f32>)
        return unary<To, From>([](From a) { return narrow<To>(a); });
    else if constexpr (to_float && from_float && sizeof(To) != sizeof(From))
        return unary<To, From>([](From a) { return a != a ? canonical_nan<To>() : To(a); });
    else return nullptr;
}

// float32 clamped to [0, 1], and to an integral float32.
Action frequent_rounding(const std::string& to, const std::string& from, const Cast& cast) {
    bool clamps = cast.saturate && !cast.flush && !cast.to_integer;
    if (to == "f32" && from == "f32" && clamps) return unary<f32>([](f32 a) { return saturated(a); });
    if (from != "f32" || !cast.to_integer || cast.flush || cast.saturate) return nullptr;
    if (to != "f32") return nullptr;
    switch (cast.rounding) {
        case Rounding::zero: return unary<f32>([](f32 a) { return canonical(std::trunc(a)); });
        case Rounding::down: return unary<f32>([](f32 a) { return canonical(std::floor(a)); });
        case Rounding::up: return unary<f32>([](f32 a) { return canonical(std::ceil(a)); });
        case Rounding::nearest_even: return unary<f32>([](f32 a) { return canonical(std::nearbyint(a)); });
        case Rounding::stochastic:
        case Rounding::nearest_away: break;
    }
    return nullptr;
}

// --- pairs -----------------------------------------------------------------------------------------------------------

struct SmallFormat {
    std::string_view name;
    Format format;
    int bits;  // that a value takes in a pair
};

constexpr SmallFormat SMALL[] = {
    {"e4m3x2", E4M3, 8}, {"e5m2x2", E5M2, 8}, {"e2m1x2", E2M1, 4}, {"e2m3x2", E2M3, 8}, {"e3m2x2", E3M2, 8},
    {"f16x2", F16, 16},  {"bf16x2", BF16, 16}};

// cvt.rn.satfinite.e4m3x2.f32 d, a, b: a is the upper one
template <int INDEX>
void run_pair_from_single(Warp& warp, const Instruction& instruction, u32 mask) {
    static constexpr SmallFormat small = SMALL[INDEX];
    const u32* a = warp.registers + instruction.sources[0];
    const u32* b = warp.registers + instruction.sources[1];
    u32* d = warp.registers + instruction.results[0];
    const Cast cast = instruction.cast;
    each_set_lane(mask, [=](int lane) {
        u32 high = encode(value<f32>(a[lane]), small.format, cast);
        u32 low = encode(value<f32>(b[lane]), small.format, cast);
        d[lane] = high << small.bits | low;
    });
}

template <int INDEX>
Action nearest_pair() {
    if constexpr (SMALL[INDEX].bits == 16) return nullptr;
    else
        return binary<u32, f32>([](f32 a, f32 b) {
            constexpr Format format = SMALL[INDEX].format;
            return nearest_code<format>(a) << SMALL[INDEX].bits | nearest_code<format>(b);
        });
}

template <int INDEX, class From>
void run_pair_from_half(Warp& warp, const Instruction& instruction, u32 mask) {
    static constexpr SmallFormat small = SMALL[INDEX];
    const Cast cast = instruction.cast;
    each_set_lane(mask, [&](int lane) {
        u32 a = warp.registers[instruction.sources[0] + lane];
        u32 high = encode(wide(From{u16(a >> 16)}), small.format, cast);
        u32 low = encode(wide(From{u16(a)}), small.format, cast);
        warp.registers[instruction.results[0] + lane] = high << small.bits | low;
    });
}

template <int INDEX>
void run_pair_to_half(Warp& warp, const Instruction& instruction, u32 mask) {
    static constexpr SmallFormat small = SMALL[INDEX];
    constexpr u32 below = (1u << small.bits) - 1;
    bool relu = instruction.cast.relu;
    auto one = [relu](u32 code) {
        f32 v = decode(code, small.format);
        return u32(narrow<f16>(relu && std::signbit(v) && v == v ? 0.0f : v).bits);
    };
    each_set_lane(mask, [&](int lane) {
        u32 a = warp.registers[instruction.sources[0] + lane];
        warp.registers[instruction.results[0] + lane] = one(a >> small.bits & below) << 16 | one(a & below);
    });
}

template <int INDEX = 0, class F>
Action with_small(std::string_view name, F f) {
    if constexpr (INDEX < int(std::size(SMALL))) {
        if (SMALL[INDEX].name == name) return f.template operator()<INDEX>();
        return with_small<INDEX + 1>(name, f);
    }
    return nullptr;
}

Action to_pair(const std::string& to, const std::string& from, const Cast& cast) {
    bool halves = to == "f16x2" || to == "bf16x2";
    bool plain = cast.rounding == Rounding::nearest_even && !cast.finite && !cast.relu;
    if (from == "f32" && to == "f16x2" && plain)
        return binary<u32, f32>([](f32 a, f32 b) { return u32(narrow<f16>(a).bits) << 16 | narrow<f16>(b).bits; });
    if (from == "f32" && to == "bf16x2" && plain)
        return binary<u32, f32>([](f32 a, f32 b) { return u32(narrow<bf16>(a).bits) << 16 | narrow<bf16>(b).bits; });
    if (!halves && (!cast.finite || cast.rounding != Rounding::nearest_even)) return nullptr;
    if (from == "f32" && !halves && !cast.relu)
        return with_small(to, []<int INDEX>() { return nearest_pair<INDEX>(); });
    if (from == "f32") return with_small(to, []<int INDEX>() -> Action { return run_pair_from_single<INDEX>; });
    if (from == "f16x2" && !halves)
        return with_small(to, []<int INDEX>() -> Action { return run_pair_from_half<INDEX, f16>; });
    if (from == "bf16x2" && !halves)
        return with_small(to, []<int INDEX>() -> Action { return run_pair_from_half<INDEX, bf16>; });
    return nullptr;
}

Action from_pair(const std::string& from) {
    if (from == "f16x2" || from == "bf16x2") return nullptr;
    return with_small(from, []<int INDEX>() -> Action { return run_pair_to_half<INDEX>; });
}

// --- stochastic rounding ---------------------------------------------------------------------------------------------

// cvt.rs.bf16x2.f32 d, a, b, random: each value has its half of the random bits, of which float16 uses 13.
template <int INDEX>
void run_random_pair(Warp& warp, const Instruction& instruction, u32 mask) {
    static constexpr Format format = SMALL[INDEX].format;
    constexpr int bits = 23 - format.mantissa;
    each_set_lane(mask, [&](int lane) {
        u32 random = warp.registers[instruction.sources[2] + lane];
        auto one = [&](int which, u32 half) {
            f32 v = value<f32>(warp.registers[instruction.sources[which] + lane]);
            return encode(v, format, instruction.cast, {half & ((1u << bits) - 1), bits});
        };
        warp.registers[instruction.results[0] + lane] = one(0, random >> 16) << 16 | one(1, random);
    });
}

// cvt.rs.satfinite.e4m3x4.f32 d, {a, b, e, f}, random. Two values share 16 bits of formats with 8 bits: a and b the
// upper ones. With 4 bits, a and b use the upper byte of each half, e and f the lower one; the ISA's text leaves open
// which of the two has which, and whether 8-bit formats use their 16 bits in the same order: here a and e come first.
template <int INDEX>
void run_random_four(Warp& warp, const Instruction& instruction, u32 mask) {
    static constexpr SmallFormat small = SMALL[INDEX];
    each_set_lane(mask, [&](int lane) {
        u32 random = warp.registers[instruction.sources[4] + lane];
        const RandomBits bytes[] = {
            {random >> 24, 8}, {random >> 8 & 255, 8}, {random >> 16 & 255, 8}, {random & 255, 8}};
        const RandomBits halves[] = {
            {random >> 16, 16}, {random >> 16, 16}, {random & 0xFFFF, 16}, {random & 0xFFFF, 16}};
        u32 found = 0;
        for (int n = 0; n < 4; n++) {
            f32 v = value<f32>(warp.registers[instruction.sources[n] + lane]);
            found =
                found << small.bits | encode(v, small.format, instruction.cast, small.bits == 4 ? bytes[n] : halves[n]);
        }
        warp.registers[instruction.results[0] + lane] = found;
    });
}

Action to_random(std::string to, const std::string& from, const Cast& cast, const Operands& operands) {
    if (from != "f32") return nullptr;
    bool halves = to == "f16x2" || to == "bf16x2";
    if (halves && operands.sources == 3 && !operands.source_is_list)
        return with_small(to, []<int INDEX>() -> Action { return run_random_pair<INDEX>; });
    if (!to.ends_with("x4") || operands.sources != 5 || !cast.finite) return nullptr;
    to.back() = '2';
    return with_small(to, []<int INDEX>() -> Action { return run_random_four<INDEX>; });
}

// --- powers of two and TF32 ------------------------------------------------------------------------------------------

void run_scales(Warp& warp, const Instruction& instruction, u32 mask) {
    each_set_lane(mask, [&](int lane) {
        f32 a = value<f32>(warp.registers[instruction.sources[0] + lane]);
        f32 b = value<f32>(warp.registers[instruction.sources[1] + lane]);
        warp.registers[instruction.results[0] + lane] =
            to_ue8m0(a, instruction.cast) << 8 | to_ue8m0(b, instruction.cast);
    });
}

void run_scales_of_halves(Warp& warp, const Instruction& instruction, u32 mask) {
    each_set_lane(mask, [&](int lane) {
        u32 a = warp.registers[instruction.sources[0] + lane];
        u32 high = to_ue8m0(wide(bf16{u16(a >> 16)}), instruction.cast);
        u32 low = to_ue8m0(wide(bf16{u16(a)}), instruction.cast);
        warp.registers[instruction.results[0] + lane] = high << 8 | low;
    });
}

Action to_scales(const std::string& from, const Cast& cast) {
    if (cast.rounding != Rounding::up && cast.rounding != Rounding::zero) return nullptr;
    if (from == "f32") return run_scales;
    if (from == "bf16x2") return run_scales_of_halves;
    return nullptr;
}

void run_tf32(Warp& warp, const Instruction& instruction, u32 mask) {
    each_set_lane(mask, [&](int lane) {
        f32 a = value<f32>(warp.registers[instruction.sources[0] + lane]);
        u32 code = encode(a, TF32, instruction.cast) << 13;
        warp.registers[instruction.results[0] + lane] = a != a ? NAN_F32 : code;  // the ISA names no NaN of TF32
    });
}

// cvt.pack.sat.u8.s32.b32 d, a, b, c: c moves up, a and b come below
constexpr Cast SATURATING{Rounding::nearest_even, false, false, true, false, false};

template <class T>
Action packed_integers(bool with_third) {
    constexpr u32 bits = sizeof(T) * 8;
    constexpr u32 below = (1u << bits) - 1;
    if (!with_third)
        return binary<u32, s32>([](s32 a, s32 b) {
            return (u32(integer_to_integer<T>(a, SATURATING)) & below) << bits |
                   (u32(integer_to_integer<T>(b, SATURATING)) & below);
        });
    return ternary<u32, s32>([](s32 a, s32 b, s32 c) {
        u32 pair = (u32(integer_to_integer<T>(a, SATURATING)) & below) << bits |
                   (u32(integer_to_integer<T>(b, SATURATING)) & below);
        return bits < 16 ? u32(c) << 2 * bits | pair : pair;
    });
}

Action choose_pack(Opcode& opcode, const Operands& operands) {
    opcode.take_all({"sat", "s32", "b32"});
    bool third = operands.sources == 3;
    if (opcode.take("u8") && third) return packed_integers<u8>(true);
    if (opcode.take("s8") && third) return packed_integers<s8>(true);
    if (opcode.take("u16") && !third) return packed_integers<u16>(false);
    if (opcode.take("s16") && !third) return packed_integers<s16>(false);
    return nullptr;
}

// --- the choice ------------------------------------------------------------------------------------------------------

Cast take_cast(Opcode& opcode) {
    Cast cast;
    cast.rounding = take_rounding(opcode);
    if (opcode.take("rs")) cast.rounding = Rounding::stochastic;
    if (opcode.take("rna")) cast.rounding = Rounding::nearest_away;
    if (opcode.take("rni")) cast.to_integer = true;
    const std::pair<const char*, Rounding> integral[] = {
        {"rzi", Rounding::zero}, {"rmi", Rounding::down}, {"rpi", Rounding::up}};
    for (auto& [name, rounding] : integral) {
        if (!opcode.take(name)) continue;
        cast.to_integer = true;
        cast.rounding = rounding;
    }
    cast.flush = opcode.take("ftz");
    cast.saturate = opcode.take("sat");
    cast.finite = opcode.take("satfinite");
    cast.relu = opcode.take("relu");
    return cast;
}

template <class To>
Action conversion_to(const std::string& from, const Cast& cast) {
    auto of_type = [&](auto source) -> Action {
        using From = decltype(source);
        if (is_floating<From> && !is_floating<To> && !cast.to_integer) return nullptr;  // a rounding is required
        if (Action found = frequent<To, From>(cast)) return found;
        return run_conversion<To, From>;
    };
    if (Action found = with_floating(from, of_type)) return found;
    return with_integer(from, of_type);
}

}  // namespace

Action choose_conversion(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (opcode.take("pack")) return choose_pack(opcode, operands);
    const std::string& from = opcode.take_last();
    const std::string& to = opcode.take_last(1);
    Cast cast = take_cast(opcode);
    instruction.cast = cast;
    if (cast.rounding == Rounding::stochastic) return to_random(to, from, cast, operands);
    if (to == "ue8m0x2") return to_scales(from, cast);
    if (from == "ue8m0x2" && to == "bf16x2")
        return unary<u32, u16>([](u16 a) { return u32(of_ue8m0(a >> 8).bits) << 16 | of_ue8m0(a & 255).bits; });
    if (to == "tf32" && from == "f32") return run_tf32;
    if (operands.sources == 2 || bytes_of(to) == 0 || to.ends_with("x2")) {
        Action found = to_pair(to, from, cast);
        return found || to != "f16x2" ? found : from_pair(from);
    }
    if (from.ends_with("x2")) return nullptr;
    if (Action found = frequent_rounding(to, from, cast)) return found;
    auto of_type = [&](auto target) { return conversion_to<decltype(target)>(from, cast); };
    if (Action found = with_floating(to, of_type)) return found;
    return with_integer(to, of_type);
}

}  // namespace device
