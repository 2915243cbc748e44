"""Mish alone and gated: x n / (n + 2) with n = e^x (e^x + 2), and from 20 on x. Source: Misra, arXiv:1908.08681."""

from refops.activations.declaration import Function, gated, unary


def mish(words):
    exp, where, quotient = words.exp, words.where, words.quotient
    one, two, four, end = (words.number(c) for c in (1, 2, 4, 20))

    def shared(x, p):
        c = where(x > end, end, x)
        e = exp(c)
        n = e * (e + two)
        return c, e, n + two, quotient(n, n + two)

    def value(x, p, part):
        return x * part[3]

    def slope(x, p, part):
        c, e, d, t = part
        return t + c * quotient(quotient(four * e * (e + one), d), d)

    return shared, value, slope


MISH = Function("mish", mish, jax="mish")
ROWS = (
    unary("mish", MISH, formula="x tanh(ln(1 + e^x))", op="Mish"),
    gated("mishglu", MISH, formula="mish(act) gate", op="MishGLU"),
)
