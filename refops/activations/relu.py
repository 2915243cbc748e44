"""ReLU and ReGLU. Source: TE `common/util/math.h`, relu and drelu."""

from refops.activations.declaration import Function, gated, unary


def relu(words):
    """max(x, 0); NaN and -0 give +0, as `fmaxf` does."""
    maximum, where, zero, one = words.maximum, words.where, words.number(0), words.number(1)

    def value(x, p):
        return maximum(zero, x)

    def slope(x, p):
        return where(x > zero, one, zero)

    return value, slope


RELU = Function("relu", relu, jax="relu")
ROWS = (
    unary("relu", RELU, formula="max(x, 0)", op="ReLU", order=2, number=5),
    gated("reglu", RELU, formula="relu(act) gate", op="ReGLU", order=8, number=6),
)
