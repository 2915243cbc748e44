"""SiTU-GLU. Source: TE `common/util/math.h`, situ_gate, situ_up and their derivatives. TE has no JAX name for it."""

from refops.activations.declaration import Forms, Function, Parameter, gated

BETA1 = Parameter("beta1", 4.0, 1.5, positive=True, neutral=(1.0, 1e30), nothing=1e30)
BETA2 = Parameter("beta2", 25.0, 3.0, positive=True, neutral=(1.0, 1e30), nothing=1e30)


def situ(words):
    """beta1 tanh(x / beta1) sigmoid(x)."""
    tanh, tanh_pair, quotient = words.tanh, words.tanh_pair, words.quotient
    sigmoid, sigmoid_pair = words.sigmoid, words.sigmoid_pair

    def value(x, p):
        return (p.beta1 * tanh(quotient(x, p.beta1))) * sigmoid(x)

    def slope(x, p):
        t, steepness = tanh_pair(quotient(x, p.beta1))
        s, rest = sigmoid_pair(x)
        return steepness * s + ((p.beta1 * t) * s) * rest

    return value, slope


def fast(words):
    """The same; neither 1 - s nor 1 - t^2 cancels."""
    mul, fma, sigmoid_pair, scaled_tanh = words.mul, words.fma, words.sigmoid_pair, words.scaled_tanh

    def both(x, p):
        s, rest = sigmoid_pair(x)
        t, steepness = scaled_tanh(x, p.beta1)
        y = mul(t, s)
        return y, fma(y, rest, mul(steepness, s))

    def value(x, p):
        return both(x, p)[0]

    return Forms(value, both=both)


def situ_gate(words):
    """beta2 tanh(g / beta2)."""
    tanh, tanh_pair, quotient = words.tanh, words.tanh_pair, words.quotient

    def value(g, p):
        return p.beta2 * tanh(quotient(g, p.beta2))

    def slope(g, p):
        _, steepness = tanh_pair(quotient(g, p.beta2))
        return steepness

    return value, slope


def fast_gate(words):
    """The same."""
    scaled_tanh = words.scaled_tanh

    def both(g, p):
        return scaled_tanh(g, p.beta2)

    def value(g, p):
        return both(g, p)[0]

    return Forms(value, both=both)


def product(words):
    """The value in one piece: three quotients over one reciprocal. Each `tanh_fraction` is 2^8 too large."""
    mul, reciprocal, fraction, denominator = words.mul, words.reciprocal, words.tanh_fraction, words.sigmoid_denominator
    back = words.constant(2.0**-16)

    def value(act, g, p):
        a, b = fraction(act, p.beta1)
        c, d = fraction(g, p.beta2)
        return mul(mul(mul(a, reciprocal(mul(mul(b, d), denominator(act)))), c), back)

    return value


SITU = Function("situ", situ, (BETA1,), fast=fast)
SITU_GATE = Function("situ_gate", situ_gate, (BETA2,), fast=fast_gate)
ROWS = (
    gated(
        "situglu",
        SITU,
        SITU_GATE,
        formula="beta1 tanh(act / beta1) sigmoid(act) beta2 tanh(gate / beta2)",
        order=12,
        op="SiTUGLU",
        row_scaled=True,
        product=product,
    ),
)
