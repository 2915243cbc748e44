// The approximate units of a GPU: the nearest result, or with a seed any that the PTX ISA's bound allows.
//
// With a seed a result depends on the seed, the unit and the argument's bits alone, as a unit's result depends on its
// argument alone: the same argument gives the same error everywhere in a run.
#pragma once
#include <cstdint>

#include "numbers.h"

namespace device {

enum class Unit : uint8_t {
    exp2,         // ex2.approx: 2 ulp
    reciprocal,   // rcp.approx: 1 ulp
    inverse_root, // rsqrt.approx: 2^-22.9, relative
    root,         // sqrt.approx: 2^-23, relative
    log2,         // lg2.approx: 2^-22, absolute in (0.5, 2), else relative
    sine,         // sin.approx: 2^-20.5 in [-2 pi, 2 pi], 2^-14.7 in [-100 pi, 100 pi], absolute
    cosine,       // cos.approx: likewise
    tangent,      // tanh.approx: 2^-11, relative
    divide,       // div.approx: 2 ulp; 0 where |b| > 2^126
    divide_full,  // div.full: 2 ulp
    exp2_half,    // ex2.approx of f16: 2^-9.9, relative
    exp2_brain,   // of bf16: 2^-7, relative
    tangent_half, // tanh.approx of f16: 2^-10.987, absolute
    tangent_brain,// of bf16: 2^-8, absolute
};

// Seed 0: the nearest float32.
f32 approximated(Unit unit, f32 argument, int seed);
// Whether a result is within the bound: for those that are rounded once more, to 16 bits.
bool is_within_bound(Unit unit, f32 argument, f64 result);
f32 approximate_quotient(Unit unit, f32 dividend, f32 divisor, int seed);

}  // namespace device
