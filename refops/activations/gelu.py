"""GELU in its tanh form, alone and gated. Source: TE `common/util/math.h`, gelu and dgelu.

TE's backward formula factors the same cubic otherwise, so its constants are rounded otherwise.
"""

import numpy as np

from refops.activations.declaration import Forms, Function, gated, unary

F = np.float32
SQRT_2_OVER_PI = F(0.79788456)
CUBIC = F(0.03567741)  # sqrt(2/pi) * 0.044715, of the forward formula
RATIO = F(0.044715)  # of the backward formula
SLOPE = F(0.1070322243)  # 3 * sqrt(2/pi) * 0.044715
MINUS_2_LOG2_E = -2 * 1.4426950408889634


def gelu(words):
    """x (0.5 + 0.5 tanh u), u = sqrt(2/pi) x + 0.0357 x^3."""
    tanh, tanh_pair, half, one = words.tanh, words.tanh_pair, words.number(0.5), words.number(1)
    linear, cubic, ratio, cubic_slope = (words.number(c) for c in (SQRT_2_OVER_PI, CUBIC, RATIO, SLOPE))

    def value(x, p):
        return x * (half + half * tanh(x * (linear + (cubic * x) * x)))

    def slope(x, p):
        t, steepness = tanh_pair((linear * x) * (one + (ratio * x) * x))
        return (half * x) * (steepness * (linear + (cubic_slope * x) * x)) + half * (one + t)

    return value, slope


def truth(words):
    """The same with 0.5 (1 + tanh u) = sigmoid(2u), which does not cancel."""
    sigmoid, sigmoid_pair, one, two = words.sigmoid, words.sigmoid_pair, words.number(1), words.number(2)
    linear, cubic, ratio, cubic_slope = (words.number(c) for c in (SQRT_2_OVER_PI, CUBIC, RATIO, SLOPE))

    def value(x, p):
        return x * sigmoid(two * x * (linear + cubic * x * x))

    def slope(x, p):
        s, rest = sigmoid_pair(two * (linear * x * (one + ratio * x * x)))
        return s * (one + two * x * rest * (linear + cubic_slope * x * x))

    return value, slope


def fast(words):
    """x sigmoid(2u), and s + 2 x s (1 - s) u'.

    Nothing that rounding 2u lost needs to come back: TE's formula cancels where the sigmoid is small. The cubic term
    overflows where TE's does.
    """
    mul, sub, fma, exp2, reciprocal = words.mul, words.sub, words.fma, words.exp2, words.reciprocal
    less_one, mul_sat = words.less_one, words.mul_sat
    constants = 1, 2, MINUS_2_LOG2_E * SQRT_2_OVER_PI, MINUS_2_LOG2_E * CUBIC, SQRT_2_OVER_PI, SLOPE
    one, two, linear, cubic, slope_linear, slope_cubic = (words.constant(c) for c in constants)
    half, minus_half, minus_one = words.constant(0.5), words.constant(-0.5), words.constant(-1)
    # -2 log2(e) u / x from u' = a + 3 b x^2: a third of it and two thirds of a.
    third, two_thirds = words.constant(MINUS_2_LOG2_E / 3), words.constant(MINUS_2_LOG2_E * SQRT_2_OVER_PI * 2 / 3)

    def value(x, p):
        power = exp2(mul(x, fma(mul(cubic, x), x, linear)))
        return mul(x, reciprocal(fma(power, one, one)))

    def both(x, p):
        steepness = fma(mul(slope_cubic, x), x, slope_linear)
        d = fma(exp2(mul(x, fma(steepness, third, two_thirds))), one, one)
        s = reciprocal(d)
        y = mul(x, s)
        return y, fma(mul(mul(y, less_one(d, s)), steepness), two, s)

    def slope(x, p):
        """The same as 2 s (1/2 + x (1 - s) u'), from half of e^-2u: nothing is doubled."""
        steepness = fma(mul(slope_cubic, x), x, slope_linear)
        power = exp2(fma(x, fma(steepness, third, two_thirds), minus_one))
        twice_s = reciprocal(sub(power, minus_half))
        return mul(fma(mul(x, mul_sat(power, twice_s)), steepness, half), twice_s)

    return Forms(value, slope, both)


GELU = Function("gelu", gelu, truth=truth, fast=fast, jax="gelu")
ROWS = (
    unary("gelu", GELU, formula="x (0.5 + 0.5 tanh(0.79788456 x + 0.03567741 x^3))", op="GELU", order=0, number=0),
    gated("geglu", GELU, formula="gelu(act) gate", op="GEGLU", order=6, number=1),
)
