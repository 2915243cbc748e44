"""What casts and scales are by definition: exact rational numbers, and constants from the tables of OCP.

Nothing here comes from `refops` or `cuda_kernels`. A value of a format is a `Fraction`; a rounding is written as its
sentence reads. The float32 at which one code gives way to the next is found by bisection over all float32, and a solver
is given that. Sources: OCP 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats (MX) 1.0, tables 1
to 7; UE5M3: PTX ISA 9.4.
"""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import z3
from terms import EQUATIONS, NEAREST, Term, fresh, look_up

INFINITE, MAGNITUDE = 0x7F800000, 0x7FFFFFFF
#: IEEE 754's binary16, and bfloat16, as the solvers' theory of floats has them.
HALVES = {"float16": z3.Float16(), "bfloat16": z3.FPSort(8, 8)}
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Format:
    """A row of the tables.

    Attributes:
        exponent_bits, mantissa_bits, bias: of magnitudes.
        largest: the largest finite value.
        nan: what NaN is cast to. infinity: code of +inf, None without.
        sign: whether there is one. integers: whether negative codes are two's complements.
        zero: whether exponent field 0 means zero and subnormal numbers.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: Fraction
    nan: int
    infinity: int | None = None
    has_nan: bool = True
    sign: bool = True
    integers: bool = False
    zero: bool = True

    @property
    def bits(self):
        """Width of a code."""
        return self.sign + self.exponent_bits + self.mantissa_bits


FORMATS = {
    "e4m3": Format(4, 3, 7, Fraction(448), nan=0x7F),
    "e5m2": Format(5, 2, 15, Fraction(57344), nan=0x7F, infinity=0x7C),
    "e3m2": Format(3, 2, 3, Fraction(28), nan=0x1F, has_nan=False),
    "e2m3": Format(2, 3, 1, Fraction(15, 2), nan=0x1F, has_nan=False),
    "e2m1": Format(2, 1, 1, Fraction(6), nan=0x7, has_nan=False),
    "e8m0": Format(8, 0, 127, Fraction(2) ** 127, nan=0xFF, sign=False, zero=False),
    "ue5m3": Format(5, 3, 15, Fraction(114688), nan=0xFF, sign=False),
    "int8": Format(1, 6, 1, Fraction(127, 64), nan=0, has_nan=False, integers=True),
}

#: Rounding of a magnitude: f(distance to the lower neighbour as a part of the step, whether the lower code is even) ->
#: whether it goes up. Exact values stay.
ROUNDINGS = {
    "nearest_even": lambda part, even: part > HALF or (part == HALF and not even),
    "nearest_away": lambda part, even: part >= HALF,
    "toward_zero": lambda part, even: False,
    "away_from_zero": lambda part, even: True,
}


@cache
def magnitudes(fmt):
    """The finite magnitudes, by code, and the one that would follow."""
    values, code = [], 0
    while not values or values[-1] <= fmt.largest:
        exponent, fraction = divmod(code, 1 << fmt.mantissa_bits)
        part = Fraction(fraction, 1 << fmt.mantissa_bits)
        if fmt.zero and exponent == 0:
            values.append(part * Fraction(2) ** (1 - fmt.bias))
        else:
            values.append((1 + part) * Fraction(2) ** (exponent - fmt.bias))
        code += 1
    return values


def value_of_bits(bits):
    """The finite float32 magnitude with these bits."""
    return Fraction(float(np.uint32(bits).view(np.float32)))


def code_of(x, fmt, rounding):
    """The magnitude code of a rational x >= 0; one more than the largest code is overflow."""
    values = magnitudes(fmt)
    lower = min(max(bisect_right(values, x) - 1, 0), len(values) - 2)
    part = (x - values[lower]) / (values[lower + 1] - values[lower])
    return lower + (part > 0 and ROUNDINGS[rounding](part, lower % 2 == 0))


@cache
def first_of(function, count, *more):
    """For each of 1 to `count`, the bits of the first float32 >= 0 of which a growing function gives at least that."""

    def reaches(goal):
        low, high = 0, INFINITE
        while low < high:
            middle = (low + high) // 2
            if function(value_of_bits(middle), *more) >= goal:
                high = middle
            else:
                low = middle + 1
        return low

    return [reaches(goal) for goal in range(1, count + 1)]


def first_bits(fmt, rounding):
    """For each magnitude code from 1 on, and for overflow, the bits of the first float32 that is rounded to it.

    Bits of floats are in the order of their magnitudes. `INFINITE` where no finite one is.
    """
    return first_of(code_of, len(magnitudes(fmt)) - 1, fmt, rounding)


def index_among(key, firsts):
    """How many of the ascending `firsts` are at most `key`, as 9 bits or more: a tree of comparisons of solver terms.

    Args:
        key: a bit vector. firsts: integers, signed, or bit vectors of its width.
    """
    width = max(16, len(firsts).bit_length())

    def tree(low, high):
        if low == high:
            return z3.BitVecVal(low, width)
        middle = (low + high) // 2
        return z3.If(key < firsts[middle], tree(low, middle), tree(middle + 1, high))

    return tree(0, len(firsts))


def finished(index, negative, nan, infinite, fmt, saturate):
    """Codes of magnitude codes, which may overflow: overflow, sign and NaN."""
    largest = len(magnitudes(fmt)) - 2
    overflow = largest
    if not saturate:
        overflow = fmt.infinity if fmt.infinity is not None else fmt.nan if fmt.has_nan else largest
    too_large = index > largest if saturate else z3.Or(index > largest, infinite)
    magnitude = z3.If(too_large, z3.BitVecVal(overflow, 16), index)
    if fmt.sign:
        with_sign = (-magnitude) & ((1 << fmt.bits) - 1) if fmt.integers else magnitude | (1 << (fmt.bits - 1))
        magnitude = z3.If(negative, with_sign, magnitude)
    return Term(np.uint16, z3.If(nan, z3.BitVecVal(fmt.nan, 16), magnitude)).astype(np.uint8)


def encoded(x, name, rounding="nearest_even", saturate=True):
    """The code of a float32 `Term`: nearest value, ties to even (or another rounding), saturation, the format's NaN."""
    fmt = FORMATS[name]
    magnitude, negative = x.bits & MAGNITUDE, z3.Extract(31, 31, x.bits) == 1
    index = _index(magnitude, negative, fmt, rounding)
    return finished(index, negative, z3.UGT(magnitude, INFINITE), magnitude == INFINITE, fmt, saturate)


def _index(key, negative, fmt, rounding):
    if rounding not in ("up", "down"):
        return index_among(key, first_bits(fmt, rounding))
    to, away = index_among(key, first_bits(fmt, "toward_zero")), index_among(key, first_bits(fmt, "away_from_zero"))
    grows = z3.Not(negative) if fmt.sign else z3.BoolVal(True)
    return z3.If(grows if rounding == "up" else z3.Not(grows), away, to)


def stochastic(x, random, name):
    """The code of x with a random byte r: the largest value that is at most |x| + r / 256 of the step at |x|.

    The sum is rounded to float32 once. (TE's software meaning of `cvt.rs.satfinite.e2m1x4.f32`.)
    """
    fmt = FORMATS[name]
    values = magnitudes(fmt)
    magnitude = Term(x.dtype, bits=x.bits & MAGNITUDE)
    lower = index_among(magnitude.bits, first_bits(fmt, "toward_zero")[: len(values) - 2])
    steps = np.array([float(above - below) for below, above in pairwise(values)], np.float32)
    step = look_up(steps, Term(np.uint16, lower))
    part = Term(np.float32, z3.fpUnsignedToFP(NEAREST, random.node, z3.Float32())) * np.float32(1 / 256)
    total = z3.fpFMA(NEAREST, step.node, part.node, magnitude.node)
    code = z3.BitVecVal(0, 16)
    for number, value in enumerate(values[1:-1], 1):
        code = z3.If(z3.fpGEQ(total, z3.FPVal(float(value), z3.Float32())), z3.BitVecVal(number, 16), code)
    nan = z3.UGT(magnitude.bits, INFINITE)
    return finished(code, z3.Extract(31, 31, x.bits) == 1, nan, z3.BoolVal(False), fmt, True)


@cache
def values_of(name):
    """The float32 of every code."""
    fmt = FORMATS[name]
    codes, finite = 1 << fmt.bits, magnitudes(fmt)[:-1]
    values = np.full(codes >> fmt.sign, np.nan, np.float32)
    values[: len(finite)] = [float(value) for value in finite]
    if fmt.infinity is not None:
        values[fmt.infinity] = np.inf
    if fmt.integers:
        return np.concatenate([values, [-2], -values[:0:-1]]).astype(np.float32)
    return np.concatenate([values, -values]) if fmt.sign else values


def decoded(code, name):
    """The value of a code, a `Term` of any integer type, below the number of codes."""
    return look_up(values_of(name), code.astype(np.uint8).simplified())


def narrowed(x, name):
    """The bits of a float32 rounded to a 16-bit float, nearest even; NaN is 0x7FFF."""
    half = fresh("half", 16)
    EQUATIONS[half] = z3.If(
        z3.fpIsNaN(x.node),
        half == 0x7FFF,
        z3.fpBVToFP(half, HALVES[name]) == z3.fpFPToFP(NEAREST, x.node, HALVES[name]),
    )
    return Term(np.uint16, half)


def widened(half, name):
    """The float32 of the bits of a 16-bit float."""
    return Term(np.float32, z3.fpFPToFP(NEAREST, z3.fpBVToFP(half.bits, HALVES[name]), z3.Float32()))


# --- scales -----------------------------------------------------------------------------------------


def exponent_of(x):
    """floor(log2 x) of a rational x > 0."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def half_up(x, mantissa_bits):
    """x > 0 rounded to so many mantissa bits, half up."""
    step = Fraction(2) ** (exponent_of(x) - mantissa_bits)
    return (x / step + HALF).__floor__() * step


#: Rule -> f(amax, mantissa bits of the elements) -> the exponent e of the scale 2^(e - emax).
EXPONENTS = {
    "floor": lambda amax, mantissa_bits: exponent_of(amax),
    "even": lambda amax, mantissa_bits: exponent_of(half_up(amax, mantissa_bits)),
    "ceil_ocp": lambda amax, mantissa_bits: exponent_of(amax) + (amax != Fraction(2) ** exponent_of(amax)),
}


def byte_of(amax, fmt, rounding):
    """The E8M0 byte of a rational amax >= 0 by a rule of `EXPONENTS`: 0 of zero, and of what is too small."""
    if amax == 0:
        return 0
    exponent = EXPONENTS[rounding](amax, fmt.mantissa_bits) - exponent_of(fmt.largest)
    return min(max(exponent + 127, 0), 254)


def scale_byte(amax, name, rounding):
    """The E8M0 byte of an amax without sign; infinity gives the largest.

    "up" is the smallest power of two that is not below float32(amax * float32(1 / largest value)).
    """
    fmt = FORMATS[name]
    if rounding == "up":
        inverse = np.float32(float(1 / fmt.largest))  # rounded once: the quotient in float64 is no tie of float32
        return encoded(amax * inverse, "e8m0", "up")
    index = index_among(amax.bits, first_of(byte_of, 254, fmt, rounding))
    return Term(np.uint16, index).astype(np.uint8)


def power_below(amax, name):
    """The largest power of two that is at most largest value / amax, for 0 < amax < infinity, at most 2^127."""
    largest = FORMATS[name].largest
    # How far below 2^127: -floor(log2(largest / amax)) grows with amax.
    index = index_among(amax.bits, first_of(halvings_of, 254, largest))
    exponent = 254 - z3.ZeroExt(16, index)  # biased; 2^-127 is subnormal
    return Term(np.float32, bits=z3.If(exponent == 0, z3.BitVecVal(0x400000, 32), exponent << 23))


def halvings_of(amax, largest):
    """How many halvings lead from 2^127 to the largest power of two that is at most `largest` / amax."""
    return 0 if amax == 0 else max(127 - exponent_of(largest / amax), 0)


def exact_key(x, byte):
    """The bits of |x| * 2^(127 - byte) without a limit to the exponent: signed, 48 bits, as ordered as magnitudes.

    A float's bits are 2^23 times its exponent, plus its fraction. The highest bit of a subnormal number is made the
    hidden one.
    """
    magnitude = z3.ZeroExt(16, x.bits & MAGNITUDE)
    key = magnitude
    for leading in range(23):  # the position of the highest bit of a subnormal number
        moved = ((magnitude << (23 - leading)) & 0x7FFFFF) - z3.BitVecVal((22 - leading) << 23, 48)
        key = z3.If(z3.And(z3.ULT(magnitude, 0x800000), z3.UGE(magnitude, 1 << leading)), moved, key)
    return key + ((127 - z3.ZeroExt(40, byte.node)) << 23)


def scaled_and_encoded(x, byte, name):
    """The code nearest to the exact x * 2^(127 - byte), ties to even, saturating; byte at most 254."""
    fmt, magnitude = FORMATS[name], x.bits & MAGNITUDE
    index = index_among(exact_key(x, byte), first_bits(fmt, "nearest_even"))
    index = z3.If(magnitude == 0, z3.BitVecVal(0, index.size()), index)
    index = z3.If(magnitude == INFINITE, z3.BitVecVal(len(magnitudes(fmt)) - 1, index.size()), index)
    return finished(index, z3.Extract(31, 31, x.bits) == 1, z3.UGT(magnitude, INFINITE), z3.BoolVal(False), fmt, True)


def overflow_from(name):
    """The bits of the first float32 that is rounded to more than the largest value."""
    return first_bits(FORMATS[name], "nearest_even")[-1]


def no_scale_from(name):
    """The bits of the first amax that saturates under E8M0's largest scale, 2^127; infinity if none does."""
    scaled = value_of_bits(overflow_from(name)) * Fraction(2) ** 127
    return INFINITE if scaled >= 2**128 else int(np.float32(float(scaled)).view(np.uint32))


def float_of_bits(bits):
    """A float32."""
    return np.uint32(bits).view(np.float32)
