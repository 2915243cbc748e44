"""Activations and their derivatives: scalar float32 functions in the evaluation order of TransformerEngine's math.h.

`ACCURATE` and `FAST` hold the same formulas by name. Accurate ones call CUDA's expf and tanhf and the correctly rounded
reciprocal, as TE's default build does; fast ones (of `fast`) call the approximate units and stay within 8 ulp of
float32 (`oracle.check(..., ulp=8)`), except that a sigmoid below 2^-126 (of x < -87.3) is 0. A compiler may contract a
product and a sum into a multiply-add on a GPU; off the GPU none is.

A function takes x, then its parameters; `ACTIVATIONS` says which functions an activation is made of.
"""

from collections import namedtuple
from functools import cache

from cuda_kernels.elementary import exp, full_range_reciprocal, reciprocal, tanh
from cuda_kernels.fast import FAST_NUMBERS, GELU_CUBIC, GELU_CUBIC_SLOPE, QGELU_ALPHA, SQRT_2_OVER_PI
from cuda_kernels.simt import F, at_least, at_most, device, maximum, select

ZERO, HALF, ONE, TWO = F(0), F(0.5), F(1), F(2)
GELU_CUBIC_RATIO = F(0.044715)  # of TE's backward formula; GELU_CUBIC has the factoring of the forward one


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
def fast_quotient(x, divisor):
    """x / divisor with one division for all x that share a divisor."""
    return x * full_range_reciprocal(divisor)


def make_fast_formulas(fast):
    """Return every formula by name, of what `fast.make_fast` made of numbers."""
    situ_both, situ_gate_both = fast["situ_both"], fast["situ_gate_both"]
    six = (*(fast[name] for name in ("sigmoid", "sigmoid_pair", "tanh", "gelu", "gelu_derivative")), fast_quotient)
    return {
        **make_formulas(*six),
        "situ": device(lambda x, beta1: situ_both(x, beta1)[0]),
        "dsitu": device(lambda x, beta1: situ_both(x, beta1)[1]),
        "situ_gate": device(lambda g, beta2: situ_gate_both(g, beta2)[0]),
        "situ_gate_slope": device(lambda g, beta2: situ_gate_both(g, beta2)[1]),
    }


# --- the formulas -----------------------------------------------------------------------------------


@cache
def make_formulas(sigmoid, sigmoid_pair, tanh, gelu, dgelu, quotient):
    """Return every formula by name, made from these six.

    "NAME_both" is (value, derivative) where compilers do not see that they share a sigmoid.
    """

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
    def qgelu_both(x):
        z = QGELU_ALPHA * x
        s, rest = sigmoid_pair(z)
        return x * s, z * (s * rest) + s

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
    def clamped_silu_both(x, limit, alpha):
        c = at_most(x, limit)
        z = alpha * c
        s, rest = sigmoid_pair(z)
        return c * s, select(x <= limit, z * (s * rest) + s, ZERO)

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
FAST = make_fast_formulas(FAST_NUMBERS)

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


#: The functions of one activation, each of (x, p): value and derivative of x, both (or None), gate and its slope (None
#: for unary).
Functions = namedtuple("Functions", "value derivative both gate gate_slope")


def functions_of(name, *, fast_math=False):
    """Return the `Functions` of an activation of `ACTIVATIONS`."""
    row, formulas = ACTIVATIONS[name], FAST if fast_math else ACCURATE
    value = with_parameters(formulas[row.value], row.parameters)
    derivative = with_parameters(formulas[row.derivative], row.parameters)
    both = formulas.get(f"{row.value}_both")
    both = both and with_parameters(both, row.parameters)
    if row.gate is None:
        return Functions(value, derivative, both, None, None)
    gate = with_parameters(formulas[row.gate], row.gate_parameters)
    gate_slope = with_parameters(formulas[row.gate_slope], row.slope_parameters)
    return Functions(value, derivative, both, gate, gate_slope)
