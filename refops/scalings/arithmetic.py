"""The vocabulary in which scale rules are written, and its NumPy meaning.

A rule is a function of `words`, an object with the words below. It takes the words that it needs as local names and
returns a closure over them and over np.float32 and np.uint32 constants: `REFERENCE` makes it a function of arrays,
`cuda_kernels` one of numbers that Numba compiles, with an instruction for a word where the GPU has one.

Every number in a rule is such a constant: a bare literal would make compiled arithmetic float64 or int64.

    + - * / < > <= >= == !=     of float32, one rounding each, NaN and infinity as IEEE 754 says
    & |                         of truth values
    function(f)                 decorates every function of a rule, so that others can call it compiled
    where(c, a, b)              a where c holds, else b; both are computed
    bits_of(x)                  the bits of a float32 as uint32
    u32(w)                      a sum, difference or shift of uint32 as uint32 (compiled arithmetic widens them)
    magnitude(x)                |x|
    rounded(x)                  x, a product, which no sum or difference is contracted with into a multiply-add
    at_most(x, limit)           the smaller one, `limit` for NaN in NumPy
    encode(fmt, rounding)       f(x) -> code of a scale; rounding "nearest_even" or, for E8M0, "up"; saturates
    decode(fmt)                 f(code) -> its value; NaN codes give NaN
    inverse_power(byte)         2^(127 - byte) of an E8M0 byte
    quotient(limit, power_2)    f(amax, overflow) -> limit / amax, `overflow` where that is infinite; `power_2` clears
                                the mantissa. Where amax is 0, infinite or NaN the result means nothing.
    reciprocal(power_2)         f(scale) -> 1 / scale; `power_2` promises a power of two from 2^-126 to 2^127
    reciprocal_to_scale(x)      1 / x, at most the largest float32, for 0 <= x < 2^126 or NaN
"""

from functools import cache

import numpy as np

from refops.formats import E8M0, encode_tile

F = np.float32
FLT_MAX = np.finfo(np.float32).max


class Reference:
    """The words as functions of NumPy arrays. Callers silence NumPy's warnings (`np.errstate`)."""

    u32 = np.uint32
    where = staticmethod(np.where)
    at_most = staticmethod(np.fmin)
    magnitude = staticmethod(np.abs)

    @staticmethod
    def rounded(x):
        return x

    @staticmethod
    def function(f):
        return f

    @staticmethod
    def bits_of(x):
        return x.view(np.uint32)

    @staticmethod
    def encode(fmt, rounding="nearest_even"):
        return lambda x: encode_tile(x, fmt, rounding=rounding)

    @staticmethod
    def decode(fmt):
        return lambda code: fmt.values[code]

    @staticmethod
    def inverse_power(byte):
        return _inverse_powers()[byte]

    @staticmethod
    def quotient(limit, power_2):
        def quotient(amax, overflow):
            scale = limit / amax
            scale = np.where(np.isinf(scale), overflow, scale)
            return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if power_2 else scale

        return quotient

    @staticmethod
    def reciprocal(power_2):
        return lambda scale: F(1) / scale

    @staticmethod
    def reciprocal_to_scale(x):
        return np.fmin(F(1) / x, FLT_MAX)


REFERENCE = Reference()


@cache
def _inverse_powers():
    """2^(127 - byte) for every byte; 2^-127 (subnormal) for 254, NaN for 255."""
    powers = (2.0 ** (127.0 - np.arange(256))).astype(np.float32)
    powers[E8M0.nan_code] = np.nan
    return powers
