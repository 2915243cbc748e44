"""exp and tanh of float32, correctly rounded: the float32 nearest to the true value, and so the same bits everywhere.

Both are evaluated in float64 by additions, multiplications and one division, which IEEE 754 fixes on every machine, and
rounded once. One text serves NumPy arrays here and single numbers in compiled code (`cuda_kernels.elementary`):

    n = x / ln 2 rounded,  r = x - n ln 2,  q = e^r - 1
    e^x    = 2^n (1 + q)
    tanh x = m / (m + 2),  m = e^2x - 1 = (2^n - 1) + 2^n q

Relative error, in units u = 2^-53 of one rounding. |r| <= 0.3466, so e^r lies in [0.70, 1.42] and |q| below 0.42:

    r       n LN_2_HIGH and its difference from x are exact. The next difference is rounded: 0.35 u, as an absolute
            error; what LN_2_LOW lacks is 2^-30 of that. Where n = 0, r is x.
    q       Horner's last steps are 1 + s with |s| < 0.2, and a product by r: 1 u each, 0.6 u of what s has gathered;
            the terms left out are 0.11 u. Below 2.8 u.
    e^x     r: 0.35 u. q: 2.8 u |q| / e^r < 1.2 u. 1 + q: at most 0.71 u where q < 0, else 1 u. Below 2.3 u.
    m       n = 0: q's. Else ((0.35 e^r + 2.8 |q|) 2^n / |m| + 1) u, the most for n = 1, r = -0.35: 6.2 u.
    tanh x  m's times 2 / (m + 2): 5.2 u; m + 2 and the quotient: 2 u. Below 8 u.

Where the true value is as close as that to the middle between two float32, the wrong one could come out. It does for no
input: tests/exhaustive/correct_rounding.py compares all 2^32 with the nearest float32, found in another way, and
decides what is close by rational arithmetic.
"""

from collections import namedtuple
from functools import lru_cache
from math import factorial

import numpy as np

LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has 21 zero bits at its end, so that n * LN_2_HIGH is exact for |n| < 2^21.
LN_2_HIGH = 6.93147180369123816490e-01
LN_2_LOW = 1.90821492927058770002e-10
#: 1.5 * 2^52: adding it rounds to an integer, which then stands in the low bits.
TO_INTEGER = 6755399441055744.0
#: Taylor coefficients of e^r - 1, highest first, without the 0 at the end.
FIRST, *_REST = [1.0 / factorial(k) for k in range(13, 0, -1)]
REST = tuple(_REST)
#: Further out results are as here: 0 and infinity, -1 and 1.
EXP_LIMIT, TANH_LIMIT = np.float32(110), np.float32(20)

BFLOAT16_NUMBERS = 1 << 16

#: What differs between arrays and single numbers:
#:   clipped(x, limit)     x cut to [-limit, limit]; NaN stays
#:   wide(x), narrow(x)    float32 to float64, exactly; float64 to float32, to nearest even
#:   power_of_two(s)       2^n for s = n + TO_INTEGER
#:   signed_as(y, x)       y with the sign of x, for y >= 0 or with that sign
Words = namedtuple("Words", "clipped wide narrow power_of_two signed_as")
Elementary = namedtuple("Elementary", "exp tanh")


def make_elementary(words, device=lambda function: function):
    """Return exp and tanh, functions of float32, in `Words`; `device` makes functions that others can call."""
    clipped, wide, narrow, power_of_two, signed_as = words

    @device
    def reduced(x):
        """(2^n, q)."""
        shifted = x * LOG2_E + TO_INTEGER
        n = shifted - TO_INTEGER
        r = x - n * LN_2_HIGH
        r -= n * LN_2_LOW
        q = r * FIRST
        for coefficient in REST:
            q += coefficient
            q *= r
        return power_of_two(shifted), q

    @device
    def exp(x):
        power, y = reduced(wide(clipped(x, EXP_LIMIT)))
        y += 1.0
        y *= power
        return narrow(y)

    @device
    def tanh(x):
        y = clipped(x, TANH_LIMIT)
        power, m = reduced(wide(y + y))
        m *= power
        power -= 1.0
        m += power
        return signed_as(narrow(m / (m + 2.0)), x)

    return Elementary(exp, tanh)


def _power_of_two(shifted):
    exponent = shifted.view(np.int64) << 52
    exponent += 1023 << 52
    return exponent.view(np.float64)


#: The words for NumPy arrays.
ARRAYS = Words(
    clipped=lambda x, limit: np.clip(x, -limit, limit),
    wide=lambda x: x.astype(np.float64),
    narrow=lambda x: x.astype(np.float32),
    power_of_two=_power_of_two,
    signed_as=np.copysign,
)
_OF_ARRAYS = make_elementary(ARRAYS)


def exp(x):
    """e^x. float32 array in, float32 array out. NaN stays NaN; exp(-inf) = 0; overflow gives inf.

    An `x` that is no array has a method of this name, which is called: the oracle runs formulas on intervals.
    """
    return _of_array(_OF_ARRAYS.exp, x) if isinstance(x, np.ndarray | np.generic) else x.exp()


def tanh(x):
    """Hyperbolic tangent. float32 array in, float32 array out. NaN stays NaN; tanh(-0.0) = -0.0."""
    return _of_array(_OF_ARRAYS.tanh, x) if isinstance(x, np.ndarray | np.generic) else x.tanh()


def _of_array(function, x):
    """`function(x)`; where x has many numbers and all are bfloat16's, which end with 16 zero bits, from a table."""
    bits = x.view(np.uint32)
    if x.size < BFLOAT16_NUMBERS or (bits & 0xFFFF).any():
        return function(x)
    return _table(function).take(bits >> 16)


@lru_cache(maxsize=2)
def _table(function):
    """float32 (65536,): a function of every bfloat16 number."""
    with np.errstate(all="ignore"):
        return function((np.arange(BFLOAT16_NUMBERS, dtype=np.uint32) << 16).view(np.float32))
