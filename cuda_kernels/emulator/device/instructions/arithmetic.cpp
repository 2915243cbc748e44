// Floating-point arithmetic: float32, float64, both 16-bit formats alone and in pairs, pairs of float32.
//
// Results of float32 arithmetic that are NaN are 0x7FFFFFFF, of 16-bit arithmetic 0x7FFF. Subnormals stay unless the
// opcode says .ftz. A rounding other than to nearest is the processor's own.
#include <cfenv>

#include "../approximate.h"
#include "choice.h"

namespace device {

namespace {

// An action of a function with one, two or three arguments of a type.
template <class T, int SOURCES, class F>
Action of_count(F f) {
    if constexpr (SOURCES == 1) return unary<T>(f);
    else if constexpr (SOURCES == 2) return binary<T>(f);
    else return ternary<T>(f);
}

// --- roundings of the processor --------------------------------------------------------------------------------------

// The action is called by a pointer, so that the compiler moves nothing out of the changed mode.
template <int MODE>
void run_in_mode(Warp& warp, const Instruction& instruction, u32 mask) {
    std::fesetround(MODE);
    instruction.inner(warp, instruction, mask);
    std::fesetround(FE_TONEAREST);
}

// --- float32 ---------------------------------------------------------------------------------------------------------

template <bool FLUSH, bool SATURATE, class F>
struct Finished {
    template <class... Sources>
    f32 operator()(Sources... sources) const {
        f32 v = FLUSH ? flushed(F{}(flushed(sources)...)) : F{}(sources...);
        return SATURATE ? saturated(v) : canonical(v);
    }
};

template <int SOURCES, class F>
Action single(const Cast& cast, F) {
    if (cast.flush && cast.saturate) return of_count<f32, SOURCES>(Finished<true, true, F>{});
    if (cast.flush) return of_count<f32, SOURCES>(Finished<true, false, F>{});
    if (cast.saturate) return of_count<f32, SOURCES>(Finished<false, true, F>{});
    return of_count<f32, SOURCES>(Finished<false, false, F>{});
}

Action single_arithmetic(Opcode& opcode, const Cast& cast) {
    const std::string& name = opcode.name();
    if (name == "add") return single<2>(cast, [](f32 a, f32 b) { return a + b; });
    if (name == "sub") return single<2>(cast, [](f32 a, f32 b) { return a - b; });
    if (name == "mul") return single<2>(cast, [](f32 a, f32 b) { return a * b; });
    if (name == "fma" || name == "mad") return single<3>(cast, [](f32 a, f32 b, f32 c) { return std::fma(a, b, c); });
    if (cast.saturate) return nullptr;
    if (name == "div") return single<2>(cast, [](f32 a, f32 b) { return a / b; });
    if (name == "rcp") return single<1>(cast, [](f32 a) { return 1.0f / a; });
    if (name == "sqrt") return single<1>(cast, [](f32 a) { return std::sqrt(a); });
    return nullptr;
}

// --- float64 ---------------------------------------------------------------------------------------------------------

Action double_arithmetic(Opcode& opcode) {
    const std::string& name = opcode.name();
    if (name == "add") return binary<f64>([](f64 a, f64 b) { return a + b; });
    if (name == "sub") return binary<f64>([](f64 a, f64 b) { return a - b; });
    if (name == "mul") return binary<f64>([](f64 a, f64 b) { return a * b; });
    if (name == "fma" || name == "mad") return ternary<f64>([](f64 a, f64 b, f64 c) { return std::fma(a, b, c); });
    if (name == "div") return binary<f64>([](f64 a, f64 b) { return a / b; });
    if (name == "rcp") return unary<f64>([](f64 a) { return 1.0 / a; });
    if (name == "sqrt") return unary<f64>([](f64 a) { return std::sqrt(a); });
    return nullptr;
}

// The first guess of a software division: the upper word alone, 20 bits of mantissa.
f64 upper_word(f64 v) { return std::bit_cast<f64>(std::bit_cast<u64>(v) & 0xFFFFFFFF00000000ull); }

f64 gross(f64 v) {
    if (v != v) return std::bit_cast<f64>(0x7FFFFFFF00000000ull);
    if (std::fabs(v) < 0x1p-1022) return std::copysign(0.0, v);
    return upper_word(v);
}

Action gross_guess(Opcode& opcode) {
    const std::string& name = opcode.name();
    bool flush = opcode.take("ftz");
    if (name == "rcp" && flush) return unary<f64>([](f64 a) { return gross(1.0 / gross(a)); });
    if (name == "rsqrt" && flush) return unary<f64>([](f64 a) { return gross(1.0 / std::sqrt(gross(a))); });
    if (name == "rsqrt") return unary<f64>([](f64 a) { return 1.0 / std::sqrt(a); });
    return nullptr;
}

// --- approximate units -----------------------------------------------------------------------------------------------

template <Unit UNIT, bool FLUSH>
void run_unit(Warp& warp, const Instruction& instruction, u32 mask) {
    int seed = warp.block->perturb;
    const u32* a = warp.registers + instruction.sources[0];
    u32* d = warp.registers + instruction.results[0];
    each_set_lane(mask, [=](int lane) {
        f32 argument = value<f32>(a[lane]);
        if (FLUSH) argument = flushed(argument);
        f32 found = approximated(UNIT, argument, seed);
        d[lane] = word<f32>(FLUSH ? flushed(found) : found);
    });
}

template <Unit UNIT, bool FLUSH>
void run_quotient(Warp& warp, const Instruction& instruction, u32 mask) {
    int seed = warp.block->perturb;
    const u32* a = warp.registers + instruction.sources[0];
    const u32* b = warp.registers + instruction.sources[1];
    u32* d = warp.registers + instruction.results[0];
    each_set_lane(mask, [=](int lane) {
        f32 dividend = value<f32>(a[lane]);
        f32 divisor = value<f32>(b[lane]);
        f32 found = FLUSH ? flushed(approximate_quotient(UNIT, flushed(dividend), flushed(divisor), seed))
                          : approximate_quotient(UNIT, dividend, divisor, seed);
        d[lane] = word<f32>(found);
    });
}

template <Unit UNIT>
Action unit(bool flush) {
    return flush ? run_unit<UNIT, true> : run_unit<UNIT, false>;
}

template <Unit UNIT>
Action quotient_unit(bool flush) {
    return flush ? run_quotient<UNIT, true> : run_quotient<UNIT, false>;
}

Action single_unit(Opcode& opcode, bool flush) {
    const std::string& name = opcode.name();
    if (name == "ex2") return unit<Unit::exp2>(flush);
    if (name == "lg2") return unit<Unit::log2>(flush);
    if (name == "rcp") return unit<Unit::reciprocal>(flush);
    if (name == "rsqrt") return unit<Unit::inverse_root>(flush);
    if (name == "sqrt") return unit<Unit::root>(flush);
    if (name == "sin") return unit<Unit::sine>(flush);
    if (name == "cos") return unit<Unit::cosine>(flush);
    if (name == "tanh" && !flush) return unit<Unit::tangent>(false);
    if (name == "div") return quotient_unit<Unit::divide>(flush);
    return nullptr;
}

// --- both 16-bit formats ---------------------------------------------------------------------------------------------

// A function of one value in both halves of a register.
template <class T, class F>
struct InBothHalves {
    template <class... Sources>
    u32 operator()(Sources... sources) const {
        T low = F{}(T{u16(sources)}...);
        T high = F{}(T{u16(sources >> 16)}...);
        return u32(high.bits) << 16 | low.bits;
    }
};

enum class Ending : uint8_t { plain, flush, saturate, flush_saturate, relu, flush_relu };

template <class T, Ending ENDING, class F>
struct HalfFinished {
    static constexpr bool FLUSH =
        ENDING == Ending::flush || ENDING == Ending::flush_saturate || ENDING == Ending::flush_relu;
    static constexpr bool SATURATE = ENDING == Ending::saturate || ENDING == Ending::flush_saturate;
    static constexpr bool RELU = ENDING == Ending::relu || ENDING == Ending::flush_relu;

    template <class... Sources>
    T operator()(Sources... sources) const {
        T v = FLUSH ? flushed_to_zero(F{}(flushed_to_zero(sources)...)) : F{}(sources...);
        if (SATURATE) v = narrow<T>(saturated(wide(v)));
        if (RELU && is_negative(v) && !is_nan(v)) v = T{0};
        return v;
    }
};

template <class T, int SOURCES, class F>
Action in_register(bool packed, F f) {
    if (packed) return of_count<u32, SOURCES>(InBothHalves<T, F>{});
    return of_count<T, SOURCES>(f);
}

template <class T, int SOURCES, class F>
Action half(const Cast& cast, bool packed, F) {
    if (cast.saturate && cast.flush)
        return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::flush_saturate, F>{});
    if (cast.saturate) return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::saturate, F>{});
    if (cast.relu && cast.flush) return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::flush_relu, F>{});
    if (cast.relu) return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::relu, F>{});
    if (cast.flush) return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::flush, F>{});
    return in_register<T, SOURCES>(packed, HalfFinished<T, Ending::plain, F>{});
}

// One rounding: float32 has more than twice the bits and two, so that its own rounding of a sum or a product of two
// 16-bit numbers changes nothing, but for products of bfloat16 that are subnormal.
template <class T>
T half_product(T a, T b) {
    f32 product = wide(a) * wide(b);
    if (std::is_same_v<T, bf16> && std::fabs(product) < 0x1p-126f)
        product = narrowed_to_odd(f64(wide(a)) * f64(wide(b)));
    return narrow<T>(product);
}

template <class T>
T half_fma(T a, T b, T c) {
    f64 product = f64(wide(a)) * f64(wide(b));
    return narrow<T>(narrowed_to_odd(sum_to_odd(product, wide(c))));
}

template <class T>
Action half_arithmetic(Opcode& opcode, bool packed, Cast& cast) {
    const std::string& name = opcode.name();
    opcode.take("rn");
    cast.saturate = opcode.take("sat");
    cast.relu = name == "fma" && opcode.take("relu");
    if (name == "add") return half<T, 2>(cast, packed, [](T a, T b) { return narrow<T>(wide(a) + wide(b)); });
    if (name == "sub") return half<T, 2>(cast, packed, [](T a, T b) { return narrow<T>(wide(a) - wide(b)); });
    if (name == "mul") return half<T, 2>(cast, packed, [](T a, T b) { return half_product(a, b); });
    if (name == "fma") return half<T, 3>(cast, packed, [](T a, T b, T c) { return half_fma(a, b, c); });
    return nullptr;
}

// The bound holds for the result in 16 bits; where its rounding leaves the bound, it is the nearest.
template <class T, Unit UNIT>
T half_unit(f32 argument, int seed) {
    T found = narrow<T>(approximated(UNIT, argument, seed));
    if (!seed || is_within_bound(UNIT, argument, wide(found))) return found;
    return narrow<T>(approximated(UNIT, argument, 0));
}

template <class T, Unit UNIT, bool FLUSH, bool PACKED>
void run_half_unit(Warp& warp, const Instruction& instruction, u32 mask) {
    int seed = warp.block->perturb;
    auto one = [seed](u16 bits) {
        f32 argument = FLUSH ? flushed(wide(T{bits})) : wide(T{bits});
        T found = half_unit<T, UNIT>(argument, seed);
        return FLUSH ? narrow<T>(flushed(wide(found))).bits : found.bits;
    };
    each_set_lane(mask, [&](int lane) {
        u32 a = warp.registers[instruction.sources[0] + lane];
        u32 found = one(u16(a));
        if (PACKED) found |= u32(one(u16(a >> 16))) << 16;
        warp.registers[instruction.results[0] + lane] = found;
    });
}

template <class T, Unit EXP2, Unit TANGENT>
Action half_units(Opcode& opcode, bool packed, bool flush) {
    if (opcode.name() == "ex2" && packed)
        return flush ? run_half_unit<T, EXP2, true, true> : run_half_unit<T, EXP2, false, true>;
    if (opcode.name() == "ex2")
        return flush ? run_half_unit<T, EXP2, true, false> : run_half_unit<T, EXP2, false, false>;
    if (opcode.name() != "tanh" || flush) return nullptr;
    return packed ? run_half_unit<T, TANGENT, false, true> : run_half_unit<T, TANGENT, false, false>;
}

// --- minima, maxima, signs: of every format --------------------------------------------------------------------------

enum class NanRule : uint8_t { number_wins, nan_wins };

template <class T, bool MAXIMUM, NanRule RULE, bool XORSIGN, bool FLUSH>
struct Extreme {
    T operator()(T a, T b) const {
        if (FLUSH) {
            a = flushed_to_zero(a);
            b = flushed_to_zero(b);
        }
        bool differ = is_negative(a) != is_negative(b);
        if (XORSIGN) {
            a = magnitude(a);
            b = magnitude(b);
        }
        T found = MAXIMUM ? larger(a, b) : smaller(a, b);
        bool any_nan = is_nan(a) || is_nan(b);
        if (RULE == NanRule::nan_wins && any_nan) found = canonical_nan<T>();
        if (XORSIGN && differ && !is_nan(found)) found = negated(found);
        return found;
    }
};

template <class E, class T>
struct ExtremeOfThree {
    T operator()(T a, T b, T c) const { return E{}(E{}(a, b), c); }
};

template <class T, class E>
Action extreme_of_count(bool packed, bool three) {
    if constexpr (is_half<T>) {
        if (packed)
            return three ? of_count<u32, 3>(InBothHalves<T, ExtremeOfThree<E, T>>{})
                         : of_count<u32, 2>(InBothHalves<T, E>{});
    }
    return three ? of_count<T, 3>(ExtremeOfThree<E, T>{}) : of_count<T, 2>(E{});
}

template <class T, bool MAXIMUM, NanRule RULE, bool XORSIGN>
Action extreme_with_flush(bool packed, bool three, bool flush) {
    if (flush) return extreme_of_count<T, Extreme<T, MAXIMUM, RULE, XORSIGN, true>>(packed, three);
    return extreme_of_count<T, Extreme<T, MAXIMUM, RULE, XORSIGN, false>>(packed, three);
}

template <class T, bool MAXIMUM>
Action extreme(Opcode& opcode, bool packed, bool three, bool flush) {
    bool nan_wins = opcode.take("NaN");
    bool xorsign = opcode.take("xorsign") && opcode.take("abs");
    if (nan_wins && xorsign) return extreme_with_flush<T, MAXIMUM, NanRule::nan_wins, true>(packed, three, flush);
    if (nan_wins) return extreme_with_flush<T, MAXIMUM, NanRule::nan_wins, false>(packed, three, flush);
    if (xorsign) return extreme_with_flush<T, MAXIMUM, NanRule::number_wins, true>(packed, three, flush);
    return extreme_with_flush<T, MAXIMUM, NanRule::number_wins, false>(packed, three, flush);
}

// The sign bit alone: what a NaN becomes is left open by the ISA.
template <class T>
Action sign_change(Opcode& opcode, bool packed, bool flush) {
    bool absolute = opcode.name() == "abs";
    if constexpr (is_half<T>) {
        if (absolute && flush) return in_register<T, 1>(packed, [](T a) { return magnitude(flushed_to_zero(a)); });
        if (absolute) return in_register<T, 1>(packed, [](T a) { return magnitude(a); });
        if (flush) return in_register<T, 1>(packed, [](T a) { return negated(flushed_to_zero(a)); });
        return in_register<T, 1>(packed, [](T a) { return negated(a); });
    } else {
        if (absolute && flush) return unary<T>([](T a) { return magnitude(flushed_to_zero(a)); });
        if (absolute) return unary<T>([](T a) { return magnitude(a); });
        if (flush) return unary<T>([](T a) { return negated(flushed_to_zero(a)); });
        return unary<T>([](T a) { return negated(a); });
    }
}

template <class T>
Action without_rounding(Opcode& opcode, const Operands& operands, bool packed, bool flush) {
    const std::string& name = opcode.name();
    bool three = operands.sources == 3;
    if (name == "max") return extreme<T, true>(opcode, packed, three, flush);
    if (name == "min") return extreme<T, false>(opcode, packed, three, flush);
    if (name == "abs" || name == "neg") return sign_change<T>(opcode, packed, flush);
    if constexpr (!is_half<T>)
        if (name == "copysign") return binary<T>([](T a, T b) { return std::copysign(b, a); });
    return nullptr;
}

// testp.finite and its like
template <class T>
Action property(Opcode& opcode) {
    if (opcode.take("finite")) return unary<u32, T>([](T a) { return u32(std::isfinite(a)); });
    if (opcode.take("infinite")) return unary<u32, T>([](T a) { return u32(std::isinf(a)); });
    if (opcode.take("number")) return unary<u32, T>([](T a) { return u32(a == a); });
    if (opcode.take("notanumber")) return unary<u32, T>([](T a) { return u32(a != a); });
    if (opcode.take("normal")) return unary<u32, T>([](T a) { return u32(std::isnormal(a)); });
    if (opcode.take("subnormal"))
        return unary<u32, T>([](T a) { return u32(a != 0 && std::fabs(a) < std::numeric_limits<T>::min()); });
    return nullptr;
}

// --- two float32 in a register ---------------------------------------------------------------------------------------

template <bool FLUSH, class F>
struct InBothWords {
    template <class... Sources>
    u64 operator()(Sources... sources) const {
        f32 low = Finished<FLUSH, false, F>{}(std::bit_cast<f32>(u32(sources))...);
        f32 high = Finished<FLUSH, false, F>{}(std::bit_cast<f32>(u32(sources >> 32))...);
        return u64(std::bit_cast<u32>(high)) << 32 | std::bit_cast<u32>(low);
    }
};

template <int SOURCES, class F>
Action pair(bool flush, F) {
    return flush ? of_count<u64, SOURCES>(InBothWords<true, F>{}) : of_count<u64, SOURCES>(InBothWords<false, F>{});
}

Action pair_arithmetic(Opcode& opcode, bool flush) {
    const std::string& name = opcode.name();
    if (name == "add") return pair<2>(flush, [](f32 a, f32 b) { return a + b; });
    if (name == "sub") return pair<2>(flush, [](f32 a, f32 b) { return a - b; });
    if (name == "mul") return pair<2>(flush, [](f32 a, f32 b) { return a * b; });
    if (name == "fma") return pair<3>(flush, [](f32 a, f32 b, f32 c) { return std::fma(a, b, c); });
    return nullptr;
}

// --- the choice by type ----------------------------------------------------------------------------------------------

Action choose_single(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    Cast cast;
    cast.flush = opcode.take("ftz");
    if (Action found = without_rounding<f32>(opcode, operands, false, cast.flush)) return found;
    if (opcode.name() == "testp") return property<f32>(opcode);
    if (opcode.name() == "div" && opcode.take("full")) return quotient_unit<Unit::divide_full>(cast.flush);
    if (opcode.take("approx")) return single_unit(opcode, cast.flush);
    cast.saturate = opcode.take("sat");
    Rounding rounding = take_rounding(opcode);
    return in_rounding(rounding, single_arithmetic(opcode, cast), instruction);
}

Action choose_double(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    if (Action found = without_rounding<f64>(opcode, operands, false, false)) return found;
    if (opcode.name() == "testp") return property<f64>(opcode);
    if (opcode.take("approx")) return gross_guess(opcode);
    Rounding rounding = take_rounding(opcode);
    return in_rounding(rounding, double_arithmetic(opcode), instruction);
}

template <class T>
Action choose_half(Opcode& opcode, const Operands& operands, bool packed) {
    Cast cast;
    cast.flush = opcode.take("ftz");
    if (Action found = without_rounding<T>(opcode, operands, packed, cast.flush)) return found;
    if (opcode.take("approx")) {
        if constexpr (std::is_same_v<T, f16>)
            return half_units<T, Unit::exp2_half, Unit::tangent_half>(opcode, packed, cast.flush);
        else return half_units<T, Unit::exp2_brain, Unit::tangent_brain>(opcode, packed, cast.flush);
    }
    return half_arithmetic<T>(opcode, packed, cast);
}

// Contracted forms.
template <int FORM, class T>
T contracted(T a, T b, T c) {
    return FORM == 0 ? std::fma(a, b, c) : FORM == 1 ? std::fma(a, b, -c) : std::fma(-a, b, c);
}

template <int FORM>
Action contracted_form(bool is_double, const Cast& cast) {
    if (is_double) return ternary<f64>([](f64 a, f64 b, f64 c) { return contracted<FORM>(a, b, c); });
    return single<3>(cast, [](f32 a, f32 b, f32 c) { return contracted<FORM>(a, b, c); });
}

}  // namespace

Action in_rounding(Rounding rounding, Action action, Instruction& instruction) {
    if (!action || rounding == Rounding::nearest_even) return action;
    instruction.inner = action;
    if (rounding == Rounding::zero) return run_in_mode<FE_TOWARDZERO>;
    if (rounding == Rounding::down) return run_in_mode<FE_DOWNWARD>;
    if (rounding == Rounding::up) return run_in_mode<FE_UPWARD>;
    return nullptr;
}

Action choose_floating(Opcode& opcode, const Operands& operands, Instruction& instruction) {
    const std::string& type = opcode.take_last();
    if (type == "f32") return choose_single(opcode, operands, instruction);
    if (type == "f64") return choose_double(opcode, operands, instruction);
    if (type == "f16" || type == "f16x2") return choose_half<f16>(opcode, operands, type == "f16x2");
    if (type == "bf16" || type == "bf16x2") return choose_half<bf16>(opcode, operands, type == "bf16x2");
    if (type != "f32x2") return nullptr;
    bool flush = opcode.take("ftz");
    Rounding rounding = take_rounding(opcode);
    return in_rounding(rounding, pair_arithmetic(opcode, flush), instruction);
}

Action choose_contracted(const std::string& form, const std::string& type, bool flush) {
    Cast cast;
    cast.flush = flush;
    if (form == "fma") return contracted_form<0>(type == "f64", cast);
    if (form == "fms") return contracted_form<1>(type == "f64", cast);
    return contracted_form<2>(type == "f64", cast);
}

}  // namespace device
