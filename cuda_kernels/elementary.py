"""exp, tanh and the reciprocal of float32: the GPU's own on a GPU, elsewhere polynomials that LLVM vectorises.

    accurate    `exp`, `tanh`, `reciprocal`: CUDA's expf and tanhf (at most 2 ulp) and the correctly rounded 1 / x, as
                TransformerEngine's kernels have them. Off the GPU: float32 polynomials, at most 1 and 1.5 ulp.
    exact       `EXACT`, exp and tanh, and `reciprocal`: correctly rounded, the text of `refops.elementary`, in float64.
    fast        `exp2_unit`, `reciprocal_seed`: the GPU's approximate units, within 2 and 1 ulp, off the GPU nearest
                results. `fast` makes formulas of them.

No multiply-add is contracted off the GPU, so every machine gets the same bits. An ulp here is the spacing of float32 at
the true value, down to 2^-149. tests/cuda_kernels/test_elementary_functions.py measures these bounds.
"""

import math

import numpy as np

from cuda_kernels.simt import U32, F, as_f32, as_u32, clipped, device, magnitude, on_gpu, ptx, select
from refops.elementary import Words, make_elementary

ONE, TWO = F(1), F(2)
INF = F(np.inf)
LOG2_E = F(1.4426950408889634)
LN_2 = F(0.6931471805599453)
#: ln 2 in two parts: the first has 15 zero bits at its end, so that n * LN_2_HIGH is exact for |n| < 2^15.
LN_2_HIGH = F(0.693359375)
LN_2_LOW = F(0.6931471805599453 - 0.693359375)
#: 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
TO_INTEGER = F(12582912.0)
TO_INTEGER_BITS = U32(0x4B400000)
#: e^x is 0 below and inf above.
EXP_LOWEST, EXP_HIGHEST = F(-104.0), F(89.0)
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: minimax, relative error of e^r below 2^-28.2.
E0, E1, E2 = F(0.4999999403953552), F(0.1666651964187622), F(0.041668400168418884)
E3, E4 = F(0.00836885068565607), F(0.001381434965878725)
#: Up to here tanh uses its polynomial; beyond, 1 - 2 / (e^2x + 1) cancels little.
TANH_SMALL = F(0.75)
#: From e^this on 1 - 2 / (e^2x + 1) is 1.
TANH_LIMIT = F(44)
# (tanh(x)/x - 1) / x^2 as a polynomial in x^2 on |x| <= 0.75: minimax, relative error of tanh below 2^-29.
T0, T1, T2 = F(-0.33333316445350647), F(0.1333269476890564), F(-0.053892724215984344)
T3, T4, T5 = F(0.0214520376175642), F(-0.007657259702682495), F(0.0017369386041536927)

#: What `newton_reciprocal` scales with.
DOWN, MINUS_UP = F(2.0**-24), F(-(2.0**24))
#: What `reciprocal_of_small` scales with, and the largest x whose reciprocal overflows.
SMALLEST_NORMAL, UP, OVERFLOWING, LARGEST = F(2.0**-126), F(2.0**24), F(2.0**-128), F(np.finfo(np.float32).max)


# --- accurate ---------------------------------------------------------------------------------------


@device
def signed_as(y, x):
    """y with the sign of x, for y >= 0 or with that sign."""
    return as_f32(as_u32(y) | np.uint32(as_u32(x) & U32(0x80000000)))


@device
def power_of_two(n):
    """2^n for an integer -126 <= n <= 127, given as uint32 (negative n wrapped around)."""
    return as_f32(np.uint32(n + U32(127)) << U32(23))


@on_gpu(math.exp)
def exp(x):
    """e^x: n = x / ln 2 rounded, r = x - n ln 2, then 2^n times a polynomial in r. NaN stays NaN."""
    x = select(x < EXP_LOWEST, EXP_LOWEST, x)
    x = select(x > EXP_HIGHEST, EXP_HIGHEST, x)
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    p = (((E4 * r + E3) * r + E2) * r + E1) * r + E0
    p = (p * (r * r) + r) + ONE
    biased = np.uint32(as_u32(shifted) - TO_INTEGER_BITS + U32(256))
    half = np.uint32(biased >> U32(1))  # 2^n in two steps: e^x may be subnormal, or overflow just below 2^128
    return (p * power_of_two(np.uint32(half - U32(128)))) * power_of_two(np.uint32(biased - half - U32(128)))


@device
def exp_up_to_limit(x):
    """`exp` of x >= 0 or NaN, but e^`TANH_LIMIT` beyond that: 2^n is one float32."""
    x = select(x > TANH_LIMIT, TANH_LIMIT, x)
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    p = (((E4 * r + E3) * r + E2) * r + E1) * r + E0
    return (p * (r * r) + r + ONE) * power_of_two(np.uint32(as_u32(shifted) - TO_INTEGER_BITS))


@on_gpu(math.tanh)
def tanh(x):
    """Hyperbolic tangent: a polynomial up to 0.75, 1 - 2 / (e^2|x| + 1) beyond. Keeps NaN and the sign of zero."""
    a = magnitude(x)
    s = a * a
    small = a + a * (s * (((((T5 * s + T4) * s + T3) * s + T2) * s + T1) * s + T0))
    large = ONE - TWO / (exp_up_to_limit(a + a) + ONE)
    t = select(a > TANH_SMALL, large, small)
    return signed_as(t, x)


@ptx("rcp.approx.ftz.f32 $0, $1;", "=f,f", F, F)
def reciprocal_seed(x):
    """1 / x within 1 ulp; subnormal results are flushed to 0."""
    y = ONE / x
    return select(magnitude(y) >= SMALLEST_NORMAL, y, y * F(0))


@ptx("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", F, F, F, F)
def fma(a, b, c):
    """a * b + c, rounded once."""
    return F(np.float64(a) * np.float64(b) + np.float64(c))


@device
def newton_reciprocal(x):
    """1 / x correctly rounded for x >= 1, without the calls that a general division makes.

    One Newton step with exact remainder from a seed within 1 ulp. `start` is the seed of the true exponent, so that the
    last multiply-add is the only rounding also where 1 / x is subnormal; there `start` lost bits, and the square of its
    error counts. Markstein's exception (1990), an x whose mantissa is all ones, needs a seed that is not too small;
    CUDA's own division takes the same step from the same seed.
    """
    scaled = x * DOWN  # the unit flushes subnormal results: 1 / x times 2^24 is none
    start = reciprocal_seed(scaled) * DOWN
    error = fma(scaled, start * MINUS_UP, ONE)
    return select(x == INF, F(0), fma(start, fma(error, error, error), start))


@on_gpu(newton_reciprocal)
def reciprocal(x):
    """1 / x correctly rounded, for x >= 1 or NaN: the only reciprocal that activations need."""
    return ONE / x


@device
def reciprocal_of_small(x):
    """`reciprocal_to_scale` on a GPU: CUDA's own steps where 1 / x is normal, x scaled up if subnormal.

    Scaling adds so many x to x: 0 needs no register, as a factor of 1 would.
    """
    more = select(x < SMALLEST_NORMAL, UP - ONE, F(0))
    scaled = fma(x, more, x)
    start = reciprocal_seed(scaled)
    inverse = fma(start, fma(-scaled, start, ONE), start)
    return select(x <= OVERFLOWING, LARGEST, fma(inverse, more, inverse))


@on_gpu(reciprocal_of_small)
def reciprocal_to_scale(x):
    """1 / x correctly rounded, at most the largest float32, for 0 <= x < 2^126 or NaN, without a division's calls."""
    inverse = ONE / x
    return select(inverse > LARGEST, LARGEST, inverse)


# --- exact ------------------------------------------------------------------------------------------


@device
def wide_power_of_two(shifted):
    """2^n in float64 for an integer -1023 < n < 1024 in the low bits of a float64."""
    return np.int64((np.float64(shifted).view(np.int64) << 52) + (1023 << 52)).view(np.float64)


#: exp and tanh with the bits of `refops.elementary`, on a GPU too.
EXACT = make_elementary(
    Words(
        clipped=clipped,
        wide=device(lambda x: np.float64(x)),
        narrow=device(lambda x: F(x)),
        power_of_two=wide_power_of_two,
        signed_as=signed_as,
    ),
    device,
)


# --- fast -------------------------------------------------------------------------------------------


@ptx("ex2.approx.ftz.f32 $0, $1;", "=f,f", F, F)
def exp2_unit(x):
    """2^x by the special function unit, within 2 ulp; subnormal results are flushed to 0."""
    return F(np.exp2(np.float64(x)))


@ptx("div.full.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def full_range_quotient(x, y):
    """x / y within 2 ulp, without the calls that a correctly rounded division makes."""
    return x / y


@device
def full_range_reciprocal(x):
    """1 / x within 2 ulp."""
    return full_range_quotient(ONE, x)
