// Bounds of the approximate units, as the PTX ISA documents them, and results that use them up.
#include "approximate.h"

#include <cmath>

namespace device {

namespace {

enum class Measure : uint8_t { ulp, relative, absolute };

struct Bound {
    Measure measure;
    f64 size;
};

constexpr f64 PI = 3.14159265358979323846;
constexpr Bound EXACT{Measure::ulp, 0};

Bound bound_of_wave(f32 argument) {
    f64 a = std::fabs(f64(argument));
    if (a <= 2 * PI) return {Measure::absolute, std::exp2(-20.5)};
    if (a <= 100 * PI) return {Measure::absolute, std::exp2(-14.7)};
    return EXACT;  // no bound is documented: the nearest
}

Bound bound_of_log2(f32 argument) {
    bool near_one = argument > 0.5f && argument < 2.0f;
    return {near_one ? Measure::absolute : Measure::relative, 0x1p-22};
}

// The ISA's tables give results of zeros, infinities and NaN without an error.
Bound bound_of(Unit unit, f32 argument) {
    if (argument == 0 || !std::isfinite(argument)) return EXACT;
    switch (unit) {
        case Unit::exp2: return {Measure::ulp, 2};
        case Unit::reciprocal: return {Measure::ulp, 1};
        case Unit::inverse_root: return {Measure::relative, std::exp2(-22.9)};
        case Unit::root: return {Measure::relative, 0x1p-23};
        case Unit::log2: return bound_of_log2(argument);
        case Unit::sine:
        case Unit::cosine: return bound_of_wave(argument);
        case Unit::tangent: return {Measure::relative, 0x1p-11};
        case Unit::divide:
        case Unit::divide_full: return {Measure::ulp, 2};
        case Unit::exp2_half: return {Measure::relative, std::exp2(-9.9)};
        case Unit::exp2_brain: return {Measure::relative, 0x1p-7};
        case Unit::tangent_half: return {Measure::absolute, std::exp2(-10.987)};
        case Unit::tangent_brain: return {Measure::absolute, 0x1p-8};
    }
    return EXACT;
}

f64 exact(Unit unit, f64 a) {
    switch (unit) {
        case Unit::exp2:
        case Unit::exp2_half:
        case Unit::exp2_brain: return std::exp2(a);
        case Unit::reciprocal: return 1.0 / a;
        case Unit::inverse_root: return 1.0 / std::sqrt(a);
        case Unit::root: return std::sqrt(a);
        case Unit::log2: return std::log2(a);
        case Unit::sine: return std::sin(a);
        case Unit::cosine: return std::cos(a);
        case Unit::tangent:
        case Unit::tangent_half:
        case Unit::tangent_brain: return std::tanh(a);
        case Unit::divide:
        case Unit::divide_full: break;
    }
    return a;
}

// splitmix64's finish: every bit of the input reaches every bit of the output.
u64 mixed(u64 v) {
    v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9ull;
    v = (v ^ v >> 27) * 0x94D049BB133111EBull;
    return v ^ v >> 31;
}

u64 hash_of(int seed, Unit unit, u64 argument) {
    return mixed(mixed(u64(u32(seed)) * 0x9E3779B97F4A7C15ull + u64(unit)) ^ argument);
}

f32 moved_by_ulps(f32 nearest, int most, u64 hash) {
    s32 bits = std::bit_cast<s32>(nearest);
    if ((bits & 0x7FFFFFFF) <= most) return nearest;  // not across zero
    f32 moved = std::bit_cast<f32>(bits + s32(hash % u64(2 * most + 1)) - most);
    return std::isfinite(moved) ? moved : nearest;
}

f32 moved_within(f32 nearest, f64 truth, f64 reach, u64 hash) {
    f64 share = f64(hash >> 11) * 0x1p-52 - 1;  // in [-1, 1)
    f32 moved = f32(truth + share * reach);
    bool allowed = std::isfinite(moved) && std::fabs(f64(moved) - truth) <= reach;
    return allowed ? moved : nearest;
}

f32 moved(f64 truth, const Bound& bound, u64 hash) {
    f32 nearest = f32(truth);
    if (!std::isfinite(nearest) || bound.size == 0) return nearest;
    if (bound.measure == Measure::ulp) return moved_by_ulps(nearest, int(bound.size), hash);
    f64 reach = bound.measure == Measure::relative ? bound.size * std::fabs(truth) : bound.size;
    return moved_within(nearest, truth, reach, hash);
}

}  // namespace

f32 approximated(Unit unit, f32 argument, int seed) {
    f64 truth = exact(unit, argument);
    if (!seed) return canonical(f32(truth));
    return canonical(moved(truth, bound_of(unit, argument), hash_of(seed, unit, std::bit_cast<u32>(argument))));
}

bool is_within_bound(Unit unit, f32 argument, f64 result) {
    f64 truth = exact(unit, argument);
    Bound bound = bound_of(unit, argument);
    f64 reach = bound.measure == Measure::relative ? bound.size * std::fabs(truth) : bound.size;
    return std::fabs(result - truth) <= reach;
}

f32 approximate_quotient(Unit unit, f32 dividend, f32 divisor, int seed) {
    bool huge = std::fabs(divisor) > 0x1p126f && std::isfinite(divisor);
    if (unit == Unit::divide && huge && dividend == dividend) {
        if (std::isinf(dividend)) return canonical(NAN);
        return std::signbit(dividend) != std::signbit(divisor) ? -0.0f : 0.0f;
    }
    f64 truth = f64(dividend) / f64(divisor);
    bool plain = dividend != 0 && divisor != 0 && std::isfinite(divisor);
    if (!seed || !plain) return canonical(f32(truth));
    u64 argument = u64(std::bit_cast<u32>(dividend)) << 32 | std::bit_cast<u32>(divisor);
    return canonical(moved(truth, bound_of(unit, dividend), hash_of(seed, unit, argument)));
}

}  // namespace device
