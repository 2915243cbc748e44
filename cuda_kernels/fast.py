"""Fast formulas, written once for single numbers and for pairs of them: approximate units, within 8 ulp of float32.

`make_fast(n)` returns formulas by the names that they have in `activations`; `n` is an `Arithmetic`, of numbers
(`NUMBERS`) or of pairs (`pairs.make_pairs`). Every multiply-add is written out: the same is rounded everywhere.

"NAME_derivative" is the derivative of x. What a gated gradient needs is computed together: "NAME_both" gives the value
and the derivative, "NAME_gradients" both halves, of (act, gate, dy, p) with the parameters as fields of p.
"situglu_product" is the gated value of (act, gate, p), three quotients over one reciprocal.

Where a derivative is s + m (1 - s), s = sigmoid, 1 - s is (d - 1) s for the denominator d = 1 / s: then the error of
the approximate reciprocal is a factor; 1 - s would magnify it. Where d overflows s is 0 and so is this product, which
only ever multiplies s.
"""

from collections import namedtuple
from functools import cache

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


@device
def less_one(d, s):
    """(d - 1) s for s = 1 / d; 0 where d is infinite."""
    return fma_sat(d, s, -s)


def second_of(both):
    """Return the function of x that is the second of the two that `both` gives."""
    return device(lambda x: both(x)[1])


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

# TE's constants, of float32.
SQRT_2_OVER_PI = F(0.79788456)
GELU_CUBIC = F(0.03567741)  # sqrt(2/pi) * 0.044715
GELU_CUBIC_SLOPE = F(0.1070322243)  # 3 * sqrt(2/pi) * 0.044715
QGELU_ALPHA = F(1.702)
#: 1 to the reference's last bit; see `make_sigmoids`.
ALMOST_ONE = 1 - 2.0**-24
MINUS_2_LOG2_E = -2 * 1.4426950408889634
#: Here tanh is 1 but for 2.3e-7. Up to here it is y P(y^2) / Q(y^2), relative error below 3.2e-7: minimax.
TANH_END = F(8)
TANH_P = 0.9999998807907104, 0.12925663590431213, 0.002951023168861866, 1.1428416655689944e-05
TANH_Q = 1.0, 0.4625887870788574, 0.02381555177271366, 0.00023866906121838838, 2.4592085878794023e-07
#: Makes Q at most 1, so that a product of denominators overflows no sooner than one of them.
SMALLER = 2.0**-8


@cache
def make_sigmoids(n):
    """Return (sigmoid, both): 1 / (1 + e^-x), and with it 1 - that."""
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
    def both(x):
        d = denominator(x)
        s = reciprocal(d)
        return s, less_one(d, s)

    return denominator, sigmoid, both


@cache
def make_unary(n, sigmoid, both):
    """Return the formulas of sigmoid, silu and qgelu; "NAME_both" gives (value, derivative)."""
    mul, fma, alpha = n.mul, n.fma, n.constant(QGELU_ALPHA)

    @device
    def silu(x):
        return mul(x, sigmoid(x))

    @device
    def qgelu(x):
        return mul(x, sigmoid(mul(alpha, x)))

    @device
    def sigmoid_both(x):
        s, rest = both(x)
        return s, mul(s, rest)

    @device
    def silu_both(x):
        s, rest = both(x)
        value = mul(x, s)
        return value, fma(value, rest, s)

    @device
    def qgelu_both(x):
        z = mul(alpha, x)
        s, rest = both(z)
        return mul(x, s), fma(mul(z, s), rest, s)

    values = {"sigmoid": sigmoid, "silu": silu, "qgelu": qgelu}
    pairs = {"sigmoid": sigmoid_both, "silu": silu_both, "qgelu": qgelu_both}
    derivatives = {f"{name}_derivative": second_of(f) for name, f in pairs.items()}
    return {**values, **{f"{name}_both": f for name, f in pairs.items()}, **derivatives}


@cache
def make_gelu(n):
    """Return gelu as x sigmoid(2 u), which equals x (0.5 + 0.5 tanh(u)), and its gradient.

    Nothing that rounding 2 u lost needs to come back: TE's formula cancels where the sigmoid is small.
    """
    mul, sub, fma, exp2, reciprocal, less_one = n.mul, n.sub, n.fma, n.exp2, n.reciprocal, n.less_one
    constants = 1, 2, MINUS_2_LOG2_E * SQRT_2_OVER_PI, MINUS_2_LOG2_E * GELU_CUBIC, SQRT_2_OVER_PI, GELU_CUBIC_SLOPE
    one, two, linear, cubic, slope_linear, slope_cubic = (n.constant(c) for c in constants)
    half, minus_half, minus_one, mul_sat = n.constant(0.5), n.constant(-0.5), n.constant(-1), n.mul_sat
    # -2 log2(e) u / x from u' = a + 3 b x^2: a third of it and two thirds of a.
    third, two_thirds = n.constant(MINUS_2_LOG2_E / 3), n.constant(MINUS_2_LOG2_E * SQRT_2_OVER_PI * 2 / 3)

    @device
    def denominator(power):
        return fma(exp2(power), one, one)

    @device
    def gelu(x):
        return mul(x, reciprocal(denominator(mul(x, fma(mul(cubic, x), x, linear)))))

    @device
    def gelu_both(x):
        """x s, and s + 2 x s (1 - s) u'. The cubic term overflows where TE's does."""
        slope = fma(mul(slope_cubic, x), x, slope_linear)
        d = denominator(mul(x, fma(slope, third, two_thirds)))
        s = reciprocal(d)
        value = mul(x, s)
        return value, fma(mul(mul(value, less_one(d, s)), slope), two, s)

    @device
    def derivative(x):
        """The same as 2 s (1/2 + x (1 - s) u'), from half of e^-2u: nothing is doubled."""
        slope = fma(mul(slope_cubic, x), x, slope_linear)
        power = exp2(fma(x, fma(slope, third, two_thirds), minus_one))
        twice_s = reciprocal(sub(power, minus_half))
        return mul(fma(mul(x, mul_sat(power, twice_s)), slope, half), twice_s)

    return {"gelu": gelu, "gelu_both": gelu_both, "gelu_derivative": derivative}


@cache
def make_clamped(n, sigmoid, both):
    """Return the formulas of clamped_swiglu and its gradients, TE's masks as factors."""
    mul, fma, at_most, at_least, spread = n.mul, n.fma, n.at_most, n.at_least, n.spread
    is_at_most, is_within, one = n.is_at_most, n.is_within, n.constant(1)

    @device
    def clamped_silu(x, limit, alpha):
        c = at_most(x, spread(limit))
        return mul(c, sigmoid(mul(spread(alpha), c)))

    @device
    def clamped_gate(g, limit, glu_linear_offset):
        return fma(at_most(at_least(g, spread(-limit)), spread(limit)), one, spread(glu_linear_offset))

    @device
    def gradients(act, g, dy, p):
        limit = spread(p.limit)
        c = at_most(act, limit)
        z = mul(spread(p.alpha), c)
        s, rest = both(z)
        d = mul(mul(is_at_most(act, limit), fma(mul(z, s), rest, s)), dy)
        return mul(d, clamped_gate(g, p.limit, p.glu_linear_offset)), mul(mul(is_within(g, limit), dy), mul(c, s))

    return {"clamped_silu": clamped_silu, "clamped_gate": clamped_gate, "clamped_swiglu_gradients": gradients}


@cache
def make_situ(n, denominator, both):
    """Return the fused value and gradients of situglu.

    tanh(y) is a quotient of polynomials for |y| <= TANH_END, where it ends. The value takes beta tanh(x / beta) as
    x P(y^2) / Q(y^2), all quotients over one reciprocal; gradients need each tanh by itself.
    """
    mul, sub, fma, reciprocal, spread, inverse = n.mul, n.sub, n.fma, n.reciprocal, n.spread, n.inverse
    clipped, is_within = n.clipped, n.is_within
    (p0, p1, p2, p3), (q0, q1, q2, q3, q4) = map(n.constant, TANH_P), map(n.constant, TANH_Q)
    r0, r1, r2, r3, r4 = (n.constant(c * SMALLER) for c in TANH_Q)
    one, end, smaller_2 = n.constant(1), n.constant(TANH_END), n.constant(SMALLER * SMALLER)

    @device
    def above(w):
        return fma(fma(fma(p3, w, p2), w, p1), w, p0)

    @device
    def quotient(x, beta):
        """(x P, Q / 256) of x cut to where tanh ends; its quotient is 256 beta tanh(x / beta). NaN stays."""
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

    @device
    def situ_both(x, beta1):
        s, rest = both(x)
        t, slope = scaled_tanh(x, beta1)
        value = mul(t, s)
        return value, fma(value, rest, mul(slope, s))

    @device
    def product(act, g, p):
        (a, b), (c, d) = quotient(act, p.beta1), quotient(g, p.beta2)
        return mul(mul(mul(a, reciprocal(mul(mul(b, d), denominator(act)))), c), smaller_2)

    @device
    def gradients(act, g, dy, p):
        value, derivative = situ_both(act, p.beta1)
        t, slope = scaled_tanh(g, p.beta2)
        return mul(mul(derivative, dy), t), mul(mul(slope, dy), value)

    gated = {"situglu_product": product, "situglu_gradients": gradients}
    return {"tanh": tanh, "situ_both": situ_both, "situ_gate_both": scaled_tanh, **gated}


def make_gated(n, unary):
    """Return "NAME_gradients", both halves, of the activations whose gate is plain."""
    mul = n.mul

    def gradients_of(both):
        @device
        def gradients(act, g, dy, p):
            value, derivative = both(act)
            return mul(mul(derivative, dy), g), mul(value, dy)

        return gradients

    names = {"glu": "sigmoid", "swiglu": "silu", "geglu": "gelu", "qgeglu": "qgelu"}
    return {f"{name}_gradients": gradients_of(unary[f"{value}_both"]) for name, value in names.items()}


@cache
def make_fast(n):
    """Return the fast formulas of an `Arithmetic` by name."""
    denominator, sigmoid, both = make_sigmoids(n)
    unary = {"sigmoid_pair": both, **make_unary(n, sigmoid, both), **make_gelu(n)}
    gated = {**make_clamped(n, sigmoid, both), **make_situ(n, denominator, both), **make_gated(n, unary)}
    return {**unary, **gated}


#: Formulas of single numbers for every GPU.
FAST_NUMBERS = make_fast(NUMBERS)
