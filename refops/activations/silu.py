"""SiLU and SwiGLU. Source: TE `common/util/math.h`, silu and dsilu; `common/activation/scaled_activation.cu`."""

from refops.activations.declaration import Forms, Function, gated, unary


def silu(words):
    """x sigmoid(x)."""
    sigmoid, sigmoid_pair = words.sigmoid, words.sigmoid_pair

    def value(x, p):
        return x * sigmoid(x)

    def slope(x, p):
        s, rest = sigmoid_pair(x)
        return x * (s * rest) + s

    return value, slope


def fast(words):
    """The same; 1 - s is a factor that does not cancel."""
    mul, fma, sigmoid, sigmoid_pair = words.mul, words.fma, words.sigmoid, words.sigmoid_pair

    def value(x, p):
        return mul(x, sigmoid(x))

    def both(x, p):
        s, rest = sigmoid_pair(x)
        y = mul(x, s)
        return y, fma(y, rest, s)

    return Forms(value, both=both)


def row_scaled(words):
    """The slope of the kernel with a scale for each row, in another order."""
    sigmoid, one = words.sigmoid, words.number(1)

    def slope(x, p):
        s = sigmoid(x)
        return s + (x * s) * (one - s)

    return slope


SILU = Function("silu", silu, fast=fast, row_scaled=row_scaled, jax="silu")
ROWS = (
    unary("silu", SILU, formula="x sigmoid(x)", op="SiLU", order=4, number=3),
    gated("swiglu", SILU, formula="silu(act) gate", op="SwiGLU", order=10, number=4, row_scaled=True),
)
