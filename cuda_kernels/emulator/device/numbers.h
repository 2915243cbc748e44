// Floating-point formats: their bits to numbers and back, in every rounding.
//
// Each format is one `Format`; `encode` and `decode` are the only conversions by rule. f16 and bf16 have faster ones
// besides, for the loops over lanes.
#pragma once
#ifdef __F16C__
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernel.h"

namespace device {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

struct f16 {
    u16 bits;
};

struct bf16 {
    u16 bits;
};

constexpr u32 NAN_F32 = 0x7FFFFFFF;  // what float32 arithmetic makes of every NaN
constexpr u16 NAN_HALF = 0x7FFF;     // and arithmetic of both 16-bit formats

// --- formats by rule -------------------------------------------------------------------------------------------------

struct Format {
    int mantissa;  // bits behind the point
    int bias;
    int sign;      // place of the sign bit
    u32 largest;   // code of the largest finite magnitude
    u32 infinity;  // 0: there is none
    u32 nan;       // what a NaN becomes
};

constexpr Format F32{23, 127, 31, 0x7F7FFFFF, 0x7F800000, NAN_F32};
constexpr Format F16{10, 15, 15, 0x7BFF, 0x7C00, NAN_HALF};
constexpr Format BF16{7, 127, 15, 0x7F7F, 0x7F80, NAN_HALF};
constexpr Format TF32{10, 127, 18, 0x3FBFF, 0x3FC00, 0x3FFFF};  // the upper 19 bits of a float32
constexpr Format E4M3{3, 7, 7, 0x7E, 0, 0x7F};
constexpr Format E5M2{2, 15, 7, 0x7B, 0x7C, 0x7F};
constexpr Format E2M1{1, 1, 3, 0x7, 0, 0x7};  // no NaN: it becomes the largest
constexpr Format E2M3{3, 1, 5, 0x1F, 0, 0x1F};
constexpr Format E3M2{2, 3, 5, 0x1F, 0, 0x1F};

// The bits that a stochastic rounding adds to what is cut off, the highest to the highest.
struct RandomBits {
    u32 bits = 0;
    int count = 0;
};

// Is there a carry out of the sum of random bits and of `rest`, which has `shift` bits?
inline bool carries(u64 rest, int shift, RandomBits random) {
    u64 added = shift >= random.count ? u64(random.bits) << (shift - random.count)
                                      : u64(random.bits) >> (random.count - shift);
    return (rest + added) >> shift;
}

// Does the magnitude go up by one unit, when `rest` of 2^shift is cut off?
inline bool rounds_up(Rounding rounding, bool negative, u64 kept, u64 rest, int shift, RandomBits random = {}) {
    u64 half = shift ? u64(1) << (shift - 1) : 0;
    switch (rounding) {
        case Rounding::nearest_even: return rest > half || (rest == half && rest && (kept & 1));
        case Rounding::nearest_away: return rest >= half && rest;
        case Rounding::zero: return false;
        case Rounding::down: return negative && rest;
        case Rounding::up: return !negative && rest;
        case Rounding::stochastic: return carries(rest, shift, random);
    }
    return false;
}

// A magnitude beyond the largest: infinity, or the largest where the rounding goes towards it.
inline u32 overflowed(const Format& format, const Cast& cast, bool negative) {
    bool inward = cast.rounding == Rounding::zero || (cast.rounding == Rounding::down && !negative) ||
                  (cast.rounding == Rounding::up && negative);
    return cast.finite || inward || !format.infinity ? format.largest : format.infinity;
}

// The code of a float32 or float64 in a format of fewer bits.
template <class Source>
inline u32 encode(Source value, const Format& format, const Cast& cast, RandomBits random = {}) {
    using Bits = std::conditional_t<sizeof(Source) == 8, u64, u32>;
    constexpr int mantissa = sizeof(Source) == 8 ? 52 : 23;
    constexpr int bias = sizeof(Source) == 8 ? 1023 : 127;
    Bits bits = std::bit_cast<Bits>(value);
    bool negative = bits >> (sizeof(Source) * 8 - 1);
    if (value != value) return format.nan;
    if (negative && cast.relu) return 0;
    u32 sign = u32(negative) << format.sign;
    Bits magnitude = bits & (~Bits(0) >> 1);
    if (magnitude >> mantissa == Bits(2 * bias + 1))
        return sign | (cast.finite || !format.infinity ? format.largest : format.infinity);
    bool normal = magnitude >> mantissa;
    int exponent = normal ? int(magnitude >> mantissa) - bias : 1 - bias;
    u64 significand = (magnitude & ((Bits(1) << mantissa) - 1)) | (Bits(normal) << mantissa);
    int lowest = 1 - format.bias;
    int shift = mantissa - format.mantissa + (exponent < lowest ? lowest - exponent : 0);
    if (shift < 0) {  // a subnormal float32 in a format with more bits: not used
        significand <<= -shift;
        shift = 0;
    }
    if (shift > 62) shift = 62;  // significands are below 2^53: all of it is cut off
    u64 kept = significand >> shift;
    u64 rest = significand & ((u64(1) << shift) - 1);
    kept += rounds_up(cast.rounding, negative, kept, rest, shift, random);
    u64 code = kept;
    if (exponent >= lowest && normal) code += u64(exponent + format.bias - 1) << format.mantissa;
    if (code > format.largest) code = overflowed(format, cast, negative);
    return sign | u32(code);
}

// `encode` of a float32 to the nearest, ties to even, saturating: without branches, for the loops over lanes.
template <Format FORMAT>
inline u32 nearest_code(f32 value) {
    constexpr int shift = 23 - FORMAT.mantissa;
    constexpr u32 rebias = u32(127 - FORMAT.bias) << FORMAT.mantissa;
    constexpr u32 smallest_normal = u32(128 - FORMAT.bias) << 23;
    // A sum with it ends at the last place of subnormals.
    constexpr u32 unit = u32(127 + 1 - FORMAT.bias + shift) << 23;
    u32 bits = std::bit_cast<u32>(value);
    u32 magnitude = bits & 0x7FFFFFFF;
    u32 normal = ((magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1)) >> shift) - rebias;
    u32 subnormal = std::bit_cast<u32>(std::bit_cast<f32>(magnitude) + std::bit_cast<f32>(unit)) - unit;
    u32 code = magnitude < smallest_normal ? subnormal : normal;
    code = code > FORMAT.largest ? FORMAT.largest : code;
    code |= (bits >> 31) << FORMAT.sign;
    return magnitude > 0x7F800000 ? FORMAT.nan : code;
}

inline f32 decode(u32 code, const Format& format) {
    u32 magnitude = code & ((1u << format.sign) - 1);
    bool negative = code >> format.sign & 1;
    f32 sign = negative ? -1.0f : 1.0f;
    if (magnitude > format.largest) return magnitude == format.infinity ? sign * INFINITY : std::bit_cast<f32>(NAN_F32);
    u32 exponent = magnitude >> format.mantissa;
    u32 fraction = magnitude & ((1u << format.mantissa) - 1);
    if (exponent == 0) return sign * std::ldexp(f32(fraction), 1 - format.bias - format.mantissa);
    return sign * std::ldexp(f32(fraction | 1u << format.mantissa), int(exponent) - format.bias - format.mantissa);
}

// --- float32 ---------------------------------------------------------------------------------------------------------

inline f32 canonical(f32 v) { return v != v ? std::bit_cast<f32>(NAN_F32) : v; }

inline f32 flushed(f32 v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

// NaN and -0 give +0.
inline f32 saturated(f32 v) { return v > 0 ? (v < 1 ? v : 1.0f) : 0.0f; }

// A float64 as float32, to odd where it is inexact: a later rounding to fewer bits is then as if there had been one.
inline f32 narrowed_to_odd(f64 v) {
    f32 near = f32(v);
    if (f64(near) == v || v != v || !std::isfinite(near)) return near;
    u32 bits = std::bit_cast<u32>(near);
    if (bits & 1) return near;
    bool away = std::fabs(v) > std::fabs(f64(near));  // the value lies on the other side of `near` than 0
    return std::bit_cast<f32>(away ? bits + 1 : bits - 1);
}

// a + b in float64, to odd where it is inexact.
inline f64 sum_to_odd(f64 a, f64 b) {
    f64 sum = a + b;
    if (!std::isfinite(sum)) return sum;
    f64 of_b = sum - a;
    f64 error = (a - (sum - of_b)) + (b - of_b);
    u64 bits = std::bit_cast<u64>(sum);
    if (error == 0 || (bits & 1)) return sum;
    bool away = (error > 0) == (sum > 0);
    return std::bit_cast<f64>(away ? bits + 1 : bits - 1);
}

// --- 16-bit formats --------------------------------------------------------------------------------------------------

#ifdef __F16C__
inline f32 wide(f16 v) { return _cvtsh_ss(v.bits); }
#else
inline f32 wide(f16 v) {
    constexpr f32 rescaled = 0x1p112f;  // from the bias of float32 to that of float16
    u32 magnitude = u32(v.bits & 0x7FFF) << 13;
    u32 special = magnitude >= 0x7C00u << 13 ? 0x7F800000u : 0u;
    u32 finite = std::bit_cast<u32>(std::bit_cast<f32>(magnitude) * rescaled);
    return std::bit_cast<f32>((special ? special | magnitude : finite) | u32(v.bits & 0x8000) << 16);
}
#endif

inline f32 wide(bf16 v) { return std::bit_cast<f32>(u32(v.bits) << 16); }

inline f32 wide(f32 v) { return v; }

inline f64 wide(f64 v) { return v; }

// To the nearest, ties to even; NaN becomes the canonical one.
template <class T>
T narrow(f32 v);

template <>
inline f16 narrow<f16>(f32 v) {
#ifdef __F16C__
    return {u16(v != v ? NAN_HALF : _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT))};
#else
    return {u16(encode(v, F16, Cast{}))};
#endif
}

template <>
inline bf16 narrow<bf16>(f32 v) {
    u32 bits = std::bit_cast<u32>(v);
    u32 nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return {u16(v != v ? NAN_HALF : nearest)};
}

template <>
inline f32 narrow<f32>(f32 v) {
    return canonical(v);
}

template <class T>
constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;

template <class T>
constexpr bool is_floating = std::is_floating_point_v<T> || is_half<T>;

template <class T>
inline bool is_nan(T v) {
    return wide(v) != wide(v);
}

template <class T>
inline T canonical_nan() {
    if constexpr (is_half<T>) return T{NAN_HALF};
    else if constexpr (sizeof(T) == 4) return std::bit_cast<T>(NAN_F32);
    else return std::numeric_limits<T>::quiet_NaN();  // the ISA names none for float64
}

template <class T>
inline bool is_negative(T v) {
    if constexpr (is_half<T>) return v.bits >> 15;
    else return std::signbit(v);
}

template <class T>
inline T magnitude(T v) {
    if constexpr (is_half<T>) return T{u16(v.bits & 0x7FFF)};
    else return std::fabs(v);
}

template <class T>
inline T negated(T v) {
    if constexpr (is_half<T>) return T{u16(v.bits ^ 0x8000)};
    else return -v;
}

template <class T>
inline T flushed_to_zero(T v) {
    if constexpr (std::is_same_v<T, f32>) return flushed(v);
    else if constexpr (std::is_same_v<T, f16>) return (v.bits & 0x7C00) ? v : T{u16(v.bits & 0x8000)};
    else return v;
}

template <class T>
inline auto bits_of(T v) {
    if constexpr (is_half<T>) return v.bits;
    else if constexpr (sizeof(T) == 4) return std::bit_cast<u32>(v);
    else return std::bit_cast<u64>(v);
}

template <class T, class Bits>
inline T of_bits(Bits bits) {
    if constexpr (is_half<T>) return T{u16(bits)};
    else return std::bit_cast<T>(bits);
}

// PTX's maximum: a NaN loses against a number, +0 is larger than -0. Without branches, for the loops over lanes.
template <class T>
inline T larger(T a, T b) {
    auto x = wide(a);
    auto y = wide(b);
    T found = x > y ? a : b;
    T of_equal = of_bits<T>(bits_of(a) & bits_of(b));
    found = x == y ? of_equal : found;
    found = y != y ? a : found;
    return ((x != x) & (y != y)) ? canonical_nan<T>() : found;
}

template <class T>
inline T smaller(T a, T b) {
    auto x = wide(a);
    auto y = wide(b);
    T found = x < y ? a : b;
    T of_equal = of_bits<T>(bits_of(a) | bits_of(b));
    found = x == y ? of_equal : found;
    found = y != y ? a : found;
    return ((x != x) & (y != y)) ? canonical_nan<T>() : found;
}

// --- E8M0, powers of two ---------------------------------------------------------------------------------------------

// Magnitudes are rounded to zero or up. The sign is ignored, and what is too large is NaN without .satfinite: PTX ISA,
// cvt, says so of .satfinite alone; for the rest stands what cuda_fp8.h computes where the instruction is missing.
inline u32 to_ue8m0(f32 v, const Cast& cast) {
    if (v != v) return 0xFF;
    u32 magnitude = std::bit_cast<u32>(v) & 0x7FFFFFFF;
    u32 code = magnitude >> 23;
    bool exact = code == 0xFF || (code ? (magnitude & 0x7FFFFF) == 0 : magnitude <= 0x400000);  // code 0 is 2^-127
    if (cast.rounding == Rounding::up && !exact) code++;
    return code == 0xFF && cast.finite ? 0xFE : code;
}

inline bf16 of_ue8m0(u32 code) {
    if (code == 0xFF) return {NAN_HALF};
    return {u16(code == 0 ? 0x40 : code << 7)};
}

}  // namespace device
