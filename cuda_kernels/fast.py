"""The vocabulary of fast formulas, for single numbers and for pairs of them: approximate units, within 8 ulp.

Activations declare a fast form in it (`refops.activations.declaration`); `make_fast_words(n)` returns the words for an
`Arithmetic` n, of numbers (`NUMBERS`) or of pairs (`pairs.make_pairs`). Every multiply-add is written out: the same is
rounded everywhere.

Where a derivative is s + m (1 - s), s = sigmoid, 1 - s is (d - 1) s for the denominator d = 1 / s: then the error of
the approximate reciprocal is a factor; 1 - s would magnify it. Where d overflows s is 0 and so is this product, which
only ever multiplies s.
"""

from collections import namedtuple
from functools import cache
from typing import Any

from cuda_kernels.elementary import LN_2, LOG2_E, exp2_unit, fma, full_range_reciprocal, reciprocal_seed
from cuda_kernels.simt import (
    F,
    at_least,
    at_most,
    clipped,
    device,
    fma_sat,
    is_at_most,
    is_within,
    mul_sat,
    smaller_magnitude,
)

#: What formulas are made of, of numbers or of pairs:
#:   constant(x)       of a Python number, when the formula is made
#:   spread(x), inverse(x)     x, and 1 / x within 2 ulp, of a float32 parameter
#:   mul sub fma at_most at_least smaller_magnitude    as in `simt` and `elementary`
#:   clipped(x, limit)         x cut to [-limit, limit]; NaN stays
#:   is_at_most, is_within     (x, limit): 1 where x, |x| <= limit, else 0
#:   less_one(d, s)    (d - 1) s cut to [0, 1]; NaN gives 0
#:   mul_sat(x, y)     x y cut to [0, 1]; NaN gives 0
#:   exp2, reciprocal  the approximate units
Arithmetic = namedtuple(
    "Arithmetic",
    "constant spread inverse mul sub fma at_most at_least smaller_magnitude clipped is_at_most is_within less_one"
    " mul_sat exp2 reciprocal",
)


#: The words of fast formulas: those of `Arithmetic`, and what is made of them.
#:   sigmoid(x), sigmoid_pair(x)     1 / (1 + e^-x), and with it 1 - that
#:   sigmoid_denominator(x)          1 + e^-x
#:   tanh(y), scaled_tanh(x, beta)   tanh y; beta tanh(x / beta) with its slope, beta a float32 parameter
#:   tanh_fraction(x, beta)          numerator and denominator of 2^8 beta tanh(x / beta)
MADE = ("sigmoid", "sigmoid_pair", "sigmoid_denominator", "tanh", "scaled_tanh", "tanh_fraction")
FastWords: Any = namedtuple("FastWords", (*Arithmetic._fields, *MADE))  # type: ignore[misc]


@device
def less_one(d, s):
    """(d - 1) s for s = 1 / d; 0 where d is infinite."""
    return fma_sat(d, s, -s)


NUMBERS = Arithmetic(
    constant=F,
    spread=device(lambda x: x),
    inverse=full_range_reciprocal,
    mul=device(lambda x, y: x * y),
    sub=device(lambda x, y: x - y),
    fma=fma,
    at_most=at_most,
    at_least=at_least,
    smaller_magnitude=smaller_magnitude,
    clipped=clipped,
    is_at_most=is_at_most,
    is_within=is_within,
    less_one=less_one,
    mul_sat=mul_sat,
    exp2=exp2_unit,
    reciprocal=reciprocal_seed,
)

#: 1 to the reference's last bit; see `make_sigmoids`.
ALMOST_ONE = 1 - 2.0**-24
#: Here tanh is 1 to within 2.3e-7. Up to here it is y P(y^2) / Q(y^2), relative error below 3.2e-7: minimax.
TANH_END = F(8)
TANH_P = 0.9999998807907104, 0.12925663590431213, 0.002951023168861866, 1.1428416655689944e-05
TANH_Q = 1.0, 0.4625887870788574, 0.02381555177271366, 0.00023866906121838838, 2.4592085878794023e-07
#: Makes Q at most 1, so that a product of denominators overflows no sooner than one of them.
SMALLER = 2.0**-8


@cache
def make_sigmoids(n):
    """Return `sigmoid_denominator`, `sigmoid` and `sigmoid_pair`."""
    mul, sub, fma, exp2, reciprocal = n.mul, n.sub, n.fma, n.exp2, n.reciprocal
    smaller_magnitude, less_one = n.smaller_magnitude, n.less_one
    minus_log2_e, ln_2, almost_one, one, two = (n.constant(c) for c in (-LOG2_E, LN_2, ALMOST_ONE, 1, 2))

    @device
    def denominator(x):
        """1 + e^-x; what rounding y = -x log2(e) lost comes back as a factor 1 - (x + y ln 2).

        Far out, where the power is 0 or infinity, the factor is cut to a number; it is never 0: no float32 x below
        -2^8 gives `almost_one` as x + y ln 2 (several give 1).
        """
        y = mul(x, minus_log2_e)
        factor = smaller_magnitude(two, sub(almost_one, fma(y, ln_2, x)))
        return fma(exp2(y), factor, one)

    @device
    def sigmoid(x):
        return reciprocal(denominator(x))

    @device
    def pair(x):
        d = denominator(x)
        s = reciprocal(d)
        return s, less_one(d, s)

    return denominator, sigmoid, pair


@cache
def make_tanh(n):
    """Return `tanh`, `scaled_tanh` and `tanh_fraction`: quotients of polynomials for |y| <= TANH_END, where tanh ends.

    A fraction is x P(y^2) over Q(y^2) / 256 for y = x / beta: several quotients can go over one reciprocal.
    """
    mul, sub, fma, reciprocal, spread, inverse = n.mul, n.sub, n.fma, n.reciprocal, n.spread, n.inverse
    clipped, is_within = n.clipped, n.is_within
    (p0, p1, p2, p3), (q0, q1, q2, q3, q4) = map(n.constant, TANH_P), map(n.constant, TANH_Q)
    r0, r1, r2, r3, r4 = (n.constant(c * SMALLER) for c in TANH_Q)
    one, end = n.constant(1), n.constant(TANH_END)

    @device
    def above(w):
        return fma(fma(fma(p3, w, p2), w, p1), w, p0)

    @device
    def fraction(x, beta):
        """x is cut to where tanh ends. NaN stays."""
        x = clipped(x, spread(TANH_END * beta))
        y = mul(x, inverse(beta))
        w = mul(y, y)
        return mul(x, above(w)), fma(fma(fma(fma(r4, w, r3), w, r2), w, r1), w, r0)

    @device
    def tanh(y):
        y = clipped(y, end)
        w = mul(y, y)
        return mul(mul(y, above(w)), reciprocal(fma(fma(fma(fma(q4, w, q3), w, q2), w, q1), w, q0)))

    @device
    def scaled_tanh(x, beta):
        """(beta t, 1 - t^2) for t = tanh(x / beta); the latter is 0 beyond the end."""
        y = mul(x, inverse(beta))
        t = tanh(y)
        return mul(t, spread(beta)), mul(sub(one, mul(t, t)), is_within(y, end))

    return tanh, scaled_tanh, fraction


@cache
def make_fast_words(n):
    """Return the `FastWords` of an `Arithmetic`."""
    denominator, sigmoid, pair = make_sigmoids(n)
    tanh, scaled_tanh, fraction = make_tanh(n)
    return FastWords(*n, sigmoid, pair, denominator, tanh, scaled_tanh, fraction)


#: The words of single numbers for every GPU.
FAST_NUMBERS = make_fast_words(NUMBERS)
