"""Leaky ReLU alone and gated, with a parameter of its own. Source: PyTorch, `torch.nn.functional.leaky_relu`."""

from refops.activations.declaration import Function, Parameter, gated, unary

SLOPE = Parameter("negative_slope", 0.01, 0.3, neutral=(1.0,))


def leaky_relu(words):
    """x, or negative_slope x below 0."""
    where, one_like, zero = words.where, words.one_like, words.number(0)

    def value(x, p):
        return where(x > zero, x, x * p.negative_slope)

    def slope(x, p):
        one = one_like(x)
        return where(x > zero, one, one * p.negative_slope)

    return value, slope


LEAKY_RELU = Function("leaky_relu", leaky_relu, (SLOPE,))
ROWS = (
    unary("leaky_relu", LEAKY_RELU, formula="x, below 0 negative_slope x", op="LeakyReLU"),
    gated("leaky_reglu", LEAKY_RELU, formula="leaky_relu(act) gate", op="LeakyReGLU"),
)
