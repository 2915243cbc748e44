"""GLU, whose activation is the sigmoid itself. Source: TE `common/util/math.h`, sigmoid and dsigmoid."""

from refops.activations.declaration import Forms, Function, gated


def sigmoid(words):
    """1 / (1 + e^-x)."""
    one_sigmoid, sigmoid_pair = words.sigmoid, words.sigmoid_pair

    def value(x, p):
        return one_sigmoid(x)

    def slope(x, p):
        s, rest = sigmoid_pair(x)
        return s * rest

    return value, slope


def fast(words):
    """The same; 1 - s is a factor that does not cancel."""
    mul, one_sigmoid, sigmoid_pair = words.mul, words.sigmoid, words.sigmoid_pair

    def value(x, p):
        return one_sigmoid(x)

    def both(x, p):
        s, rest = sigmoid_pair(x)
        return s, mul(s, rest)

    return Forms(value, both=both)


SIGMOID = Function("sigmoid", sigmoid, fast=fast, jax="sigmoid")
ROWS = (gated("glu", SIGMOID, formula="sigmoid(act) gate", op="GLU", order=5, number=2),)
