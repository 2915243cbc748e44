"""Squared ReLU, alone and gated. Source: TE `common/util/math.h`, srelu and dsrelu."""

from refops.activations.declaration import Function, gated, unary


def srelu(words):
    """max(x, 0)^2."""
    maximum, where, zero, two = words.maximum, words.where, words.number(0), words.number(2)

    def value(x, p):
        return where(x > zero, x * x, zero)

    def slope(x, p):
        return maximum(zero, two * x)

    return value, slope


SRELU = Function("srelu", srelu, jax="squared_relu")
ROWS = (
    unary("srelu", SRELU, formula="max(x, 0)^2", op="SReLU", order=3, number=9, row_scaled=True),
    gated("sreglu", SRELU, formula="srelu(act) gate", op="SReGLU", order=9, number=10),
)
