"""Quick GELU, alone and gated. Source: TE `common/util/math.h`, qgelu and dqgelu."""

from refops.activations.declaration import Forms, Function, gated, unary


def qgelu(words):
    """x sigmoid(1.702 x)."""
    alpha, sigmoid_pair = words.number(1.702), words.sigmoid_pair

    def shared(x, p):
        z = alpha * x
        s, rest = sigmoid_pair(z)
        return z, s, rest

    def value(x, p, part):
        _, s, _ = part
        return x * s

    def slope(x, p, part):
        z, s, rest = part
        return z * (s * rest) + s

    return shared, value, slope


def fast(words):
    """The same; 1 - s is a factor that does not cancel."""
    mul, fma, sigmoid, sigmoid_pair = words.mul, words.fma, words.sigmoid, words.sigmoid_pair
    alpha = words.constant(1.702)

    def value(x, p):
        return mul(x, sigmoid(mul(alpha, x)))

    def both(x, p):
        z = mul(alpha, x)
        s, rest = sigmoid_pair(z)
        return mul(x, s), fma(mul(z, s), rest, s)

    return Forms(value, both=both)


QGELU = Function("qgelu", qgelu, fast=fast, jax="quick_gelu")
ROWS = (
    unary("qgelu", QGELU, formula="x sigmoid(1.702 x)", op="QGELU", order=1, number=7),
    gated("qgeglu", QGELU, formula="qgelu(act) gate", op="QGEGLU", order=7, number=8),
)
