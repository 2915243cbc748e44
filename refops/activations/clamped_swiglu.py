"""Clamped SwiGLU, the GLU of GPT-OSS. Source: TE `common/util/math.h`, clamped_silu and clamped_dsilu;
`common/util/vectorized_pointwise.h`, the gate; `common/activation/scaled_activation.cu`.

Gradients pass at exactly the limits and are zero beyond them. NaN is the value at the limit (act) or at -limit (gate),
as `fminf` and `fmaxf` give it.
"""

from refops.activations.declaration import Forms, Function, Parameter, gated

LIMIT = Parameter("limit", 7.0, 1.5, neutral=(float("inf"),), nothing=float("inf"))
ALPHA = Parameter("alpha", 1.702, 1.25, neutral=(1.0,))
OFFSET = Parameter("glu_linear_offset", 1.0, 0.5, neutral=(0.0,))


def clamped_silu(words):
    """c sigmoid(alpha c), c = min(x, limit); slope 0 above the limit."""
    at_most, where, sigmoid_pair, zero = words.at_most, words.where, words.sigmoid_pair, words.number(0)

    def shared(x, p):
        c = at_most(x, p.limit)
        z = p.alpha * c
        s, rest = sigmoid_pair(z)
        return c, z, s, rest

    def value(x, p, part):
        c, _, s, _ = part
        return c * s

    def slope(x, p, part):
        _, z, s, rest = part
        return where(x <= p.limit, z * (s * rest) + s, zero)

    return shared, value, slope


def row_scaled_slope(words):
    """The slope of the kernel with a scale for each row, in another order."""
    at_most, where, sigmoid, zero, one = words.at_most, words.where, words.sigmoid, words.number(0), words.number(1)

    def slope(x, p):
        z = p.alpha * at_most(x, p.limit)
        s = sigmoid(z)
        return where(x <= p.limit, s + (z * s) * (one - s), zero)

    return slope


def fast(words):
    """TE's mask as a factor."""
    mul, fma, at_most, is_at_most, spread = words.mul, words.fma, words.at_most, words.is_at_most, words.spread
    sigmoid, sigmoid_pair = words.sigmoid, words.sigmoid_pair

    def value(x, p):
        c = at_most(x, spread(p.limit))
        return mul(c, sigmoid(mul(spread(p.alpha), c)))

    def both(x, p):
        limit = spread(p.limit)
        c = at_most(x, limit)
        z = mul(spread(p.alpha), c)
        s, rest = sigmoid_pair(z)
        return mul(c, s), mul(is_at_most(x, limit), fma(mul(z, s), rest, s))

    return Forms(value, both=both)


def clamped_gate(words):
    """min(max(g, -limit), limit) + offset; slope 1 where -limit <= g <= limit."""
    at_most, at_least, where = words.at_most, words.at_least, words.where
    zero, one = words.number(0), words.number(1)

    def value(g, p):
        return at_most(at_least(g, -p.limit), p.limit) + p.glu_linear_offset

    def slope(g, p):
        return where((g <= p.limit) & (g >= -p.limit), one, zero)

    return value, slope


def row_scaled_gate_slope(words):
    """The mask of the kernel with a scale for each row lets a NaN pass."""
    where, is_nan, one, (_, plain) = words.where, words.is_nan, words.number(1), clamped_gate(words)

    def slope(g, p):
        return where(is_nan(g), one, plain(g, p))

    return slope


def fast_gate(words):
    """The mask as a factor."""
    fma, at_most, at_least, is_within = words.fma, words.at_most, words.at_least, words.is_within
    spread, one = words.spread, words.constant(1)

    def value(g, p):
        return fma(at_most(at_least(g, spread(-p.limit)), spread(p.limit)), one, spread(p.glu_linear_offset))

    def both(g, p):
        return value(g, p), is_within(g, spread(p.limit))

    return Forms(value, both=both)


CLAMPED_SILU = Function(
    "clamped_silu", clamped_silu, (LIMIT, ALPHA), fast=fast, row_scaled=row_scaled_slope, jax="clamped_silu"
)
CLAMPED_GATE = Function(
    "clamped_gate",
    clamped_gate,
    (LIMIT, OFFSET),
    fast=fast_gate,
    row_scaled=row_scaled_gate_slope,
    jax="clamped_linear",
)
ROWS = (
    gated(
        "clamped_swiglu",
        CLAMPED_SILU,
        CLAMPED_GATE,
        formula="c sigmoid(alpha c) (min(max(gate, -limit), limit) + glu_linear_offset), c = min(act, limit)",
        order=11,
        op="ClampedSwiGLU",
        number=11,
        row_scaled=True,
    ),
)
