"""Activations and their derivatives: scalar float32 functions in the evaluation order of TransformerEngine's math.h.

`ACCURATE` and `FAST` hold the same formulas by name. Accurate ones call CUDA's expf and tanhf and the correctly rounded
reciprocal, as TE's default build does; fast ones call the approximate units and stay within 8 ulp of float32 (`oracle.
check(..., ulp=8)`), except that a sigmoid below 2^-126 (of x < -87.3) is 0. A compiler may contract a product and a sum
into a multiply-add on a GPU; off the GPU none is.

A function takes x, then its parameters; `ACTIVATIONS` says which functions an activation is made of.
"""

from collections import namedtuple

import numpy as np

from cuda_kernels.elementary import exp, fast_exp, fast_reciprocal, reciprocal, tanh
from cuda_kernels.simt import U32, F, as_f32, as_u32, at_least, at_most, device, magnitude, maximum, select

ZERO, HALF, ONE, TWO = F(0), F(0.5), F(1), F(2)
SQRT_2_OVER_PI = F(0.79788456)
GELU_CUBIC = F(0.03567741)  # sqrt(2/pi) * 0.044715, the factoring of TE's forward formula
GELU_CUBIC_RATIO = F(0.044715)  # ... and of its backward formula
GELU_CUBIC_SLOPE = F(0.1070322243)  # 3 * sqrt(2/pi) * 0.044715
QGELU_ALPHA = F(1.702)


# --- what differs between accurate and fast ---------------------------------------------------------


@device
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(ONE + exp(-x))


@device
def sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x), the latter as TE's derivatives have it."""
    s = sigmoid(x)
    return s, ONE - s


@device
def gelu(x):
    """Gaussian error linear unit, tanh form."""
    return x * (HALF + HALF * tanh(x * (SQRT_2_OVER_PI + (GELU_CUBIC * x) * x)))


@device
def dgelu(x):
    """Derivative of `gelu`."""
    t = tanh((SQRT_2_OVER_PI * x) * (ONE + (GELU_CUBIC_RATIO * x) * x))
    return (HALF * x) * ((ONE - t * t) * (SQRT_2_OVER_PI + (GELU_CUBIC_SLOPE * x) * x)) + HALF * (ONE + t)


@device
def quotient(x, divisor):
    """x / divisor."""
    return x / divisor


@device
def fast_sigmoid(x):
    """1 / (1 + e^-x) with approximate units."""
    return fast_reciprocal(ONE + fast_exp(-x))


@device
def fast_sigmoid_pair(x):
    """sigmoid(x) = s and sigmoid(-x) = e^-x s: 1 - s would magnify the error of s. The cap keeps inf * 0 away."""
    e = fast_exp(-x)
    s = fast_reciprocal(ONE + e)
    return s, -maximum(-HUGE, -e) * s


@device
def fast_tanh(x):
    """tanh(x): an odd polynomial up to 0.55, 1 - 2 / (1 + e^2|x|) beyond."""
    a = magnitude(x)
    s = a * a
    small = a + a * (s * ((((P4 * s + P3) * s + P2) * s + P1) * s + P0))
    large = ONE - TWO * fast_reciprocal(ONE + fast_exp(a + a))
    return as_f32(as_u32(select(a < TANH_SMALL, small, large)) | (as_u32(x) & U32(0x80000000)))


@device
def fast_gelu(x):
    """`gelu` as x sigmoid(2 u), which equals x (0.5 + 0.5 tanh(u))."""
    return x * fast_sigmoid(x * (TWO_SQRT_2_OVER_PI + (TWO_GELU_CUBIC * x) * x))


@device
def fast_dgelu(x):
    """Derivative of `fast_gelu`: s + (2 x s) (1 - s) u'. The cubic terms overflow where TE's do."""
    cubic = (GELU_CUBIC_SLOPE * x) * x
    s, rest = fast_sigmoid_pair((TWO_SQRT_2_OVER_PI * x) * (ONE + THIRD * cubic))
    return s + (((TWO * x) * s) * rest) * (SQRT_2_OVER_PI + cubic)


@device
def fast_quotient(x, divisor):
    """x / divisor with one division for all x that share a divisor."""
    return x * (ONE / divisor)


HUGE = F(np.finfo(np.float32).max)
TWO_SQRT_2_OVER_PI, TWO_GELU_CUBIC = TWO * SQRT_2_OVER_PI, TWO * GELU_CUBIC
THIRD = F(0.044715 / 0.1070322243)  # back from the slope's constant to the formula's
TANH_SMALL = F(0.55)
# (tanh(x)/x - 1) / x^2 as a polynomial in x^2 on |x| <= 0.625: minimax, relative error of tanh below 2^-27.
P0, P1, P2 = F(-0.3333328068256378), F(0.13331441581249237), F(-0.05373971536755562)
P3, P4 = F(0.02063908614218235), F(-0.005704987794160843)


# --- the formulas -----------------------------------------------------------------------------------


def make_formulas(sigmoid, sigmoid_pair, tanh, gelu, dgelu, quotient):
    """Return every formula by name, made from these six."""

    @device
    def dsigmoid(x):
        s, rest = sigmoid_pair(x)
        return s * rest

    @device
    def qgelu(x):
        return x * sigmoid(QGELU_ALPHA * x)

    @device
    def dqgelu(x):
        z = QGELU_ALPHA * x
        s, rest = sigmoid_pair(z)
        return z * (s * rest) + s

    @device
    def relu(x):
        return maximum(ZERO, x)  # NaN and -0 give +0, as fmaxf does

    @device
    def drelu(x):
        return select(x > ZERO, ONE, ZERO)

    @device
    def srelu(x):
        return select(x > ZERO, x * x, ZERO)

    @device
    def dsrelu(x):
        return maximum(ZERO, TWO * x)

    @device
    def silu(x):
        return x * sigmoid(x)

    @device
    def dsilu(x):
        s, rest = sigmoid_pair(x)
        return x * (s * rest) + s

    @device
    def clamped_silu(x, limit, alpha):
        c = at_most(x, limit)  # NaN gives the value at the limit, as fminf does
        return c * sigmoid(alpha * c)

    @device
    def dclamped_silu(x, limit, alpha):
        below = x <= limit
        z = alpha * at_most(x, limit)
        s, rest = sigmoid_pair(z)
        return select(below, z * (s * rest) + s, ZERO)

    @device
    def situ(x, beta1):
        return (beta1 * tanh(quotient(x, beta1))) * sigmoid(x)

    @device
    def dsitu(x, beta1):
        t = tanh(quotient(x, beta1))
        s, rest = sigmoid_pair(x)
        return (ONE - t * t) * s + ((beta1 * t) * s) * rest

    @device
    def identity(g):
        return g

    @device
    def one(g):
        return ONE

    @device
    def clamped_gate(g, limit, glu_linear_offset):
        return at_most(at_least(g, -limit), limit) + glu_linear_offset  # NaN gives -limit

    @device
    def clamped_gate_slope(g, limit):
        return select((g <= limit) & (g >= -limit), ONE, ZERO)

    @device
    def situ_gate(g, beta2):
        return beta2 * tanh(quotient(g, beta2))

    @device
    def situ_gate_slope(g, beta2):
        t = tanh(quotient(g, beta2))
        return ONE - t * t

    return dict(locals())


ACCURATE = make_formulas(sigmoid, sigmoid_pair, tanh, gelu, dgelu, quotient)
FAST = make_formulas(fast_sigmoid, fast_sigmoid_pair, fast_tanh, fast_gelu, fast_dgelu, fast_quotient)

#: Names of the functions of an activation: of x or of the activated half, and of the gate (None for unary).
Activation = namedtuple("Activation", "value derivative gate gate_slope parameters gate_parameters slope_parameters")


def _row(value, gate=None, gate_slope=None, parameters=(), gate_parameters=(), slope_parameters=()):
    return Activation(value, f"d{value}", gate, gate_slope, parameters, gate_parameters, slope_parameters)


_PLAIN_GATE = {"gate": "identity", "gate_slope": "one"}
#: Every activation by TE's name. Formulas take x, then the parameters named here.
ACTIVATIONS = {
    "gelu": _row("gelu"),
    "qgelu": _row("qgelu"),
    "relu": _row("relu"),
    "srelu": _row("srelu"),
    "silu": _row("silu"),
    "glu": _row("sigmoid", **_PLAIN_GATE),
    "geglu": _row("gelu", **_PLAIN_GATE),
    "qgeglu": _row("qgelu", **_PLAIN_GATE),
    "reglu": _row("relu", **_PLAIN_GATE),
    "sreglu": _row("srelu", **_PLAIN_GATE),
    "swiglu": _row("silu", **_PLAIN_GATE),
    "clamped_swiglu": _row(
        "clamped_silu",
        "clamped_gate",
        "clamped_gate_slope",
        ("limit", "alpha"),
        ("limit", "glu_linear_offset"),
        ("limit",),
    ),
    "situglu": _row("situ", "situ_gate", "situ_gate_slope", ("beta1",), ("beta2",), ("beta2",)),
}


def with_parameters(function, names):
    """Return `bound(x, p)`: `function` of x and of the parameters that it takes, looked up by name in the tuple `p`."""
    if names == ("limit", "alpha"):
        return device(lambda x, p: function(x, p.limit, p.alpha))
    if names == ("limit", "glu_linear_offset"):
        return device(lambda x, p: function(x, p.limit, p.glu_linear_offset))
    if names == ("limit",):
        return device(lambda x, p: function(x, p.limit))
    if names == ("beta1",):
        return device(lambda x, p: function(x, p.beta1))
    if names == ("beta2",):
        return device(lambda x, p: function(x, p.beta2))
    return device(lambda x, p: function(x))


#: The functions of one activation, each of (x, p): value and derivative of x, gate and its slope (None for unary).
Functions = namedtuple("Functions", "value derivative gate gate_slope")


def functions_of(name, *, fast_math=False):
    """Return the `Functions` of an activation of `ACTIVATIONS`."""
    row, formulas = ACTIVATIONS[name], FAST if fast_math else ACCURATE
    value = with_parameters(formulas[row.value], row.parameters)
    derivative = with_parameters(formulas[row.derivative], row.parameters)
    if row.gate is None:
        return Functions(value, derivative, None, None)
    gate = with_parameters(formulas[row.gate], row.gate_parameters)
    gate_slope = with_parameters(formulas[row.gate_slope], row.slope_parameters)
    return Functions(value, derivative, gate, gate_slope)
