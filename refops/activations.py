"""Every activation of TE and its derivative: one table from a name to its formulas.

Two versions of each formula stand side by side:
    value, derivative            float32 in the evaluation order of TE's `common/util/math.h`, each operation rounded
                                 once, no multiply-add contracted; exp and tanh from `refops.elementary`.
    true_value, true_derivative  float64, rearranged so that nothing cancels: the truth a kernel is judged against.
                                 Constants are TE's float32 constants, so both mean the same real function.

A unary activation maps x to f(x). A gated one takes a row [act | gate] of width 2H to f(act) * g(gate) of width H; g is
the identity unless the table says otherwise. What a formula does at NaN and infinity is part of TE's definition and
is kept: gelu(-inf) is NaN, relu(NaN) is 0, a large finite x gives dgelu(x) = NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from refops.arguments import require_number, shown
from refops.elementary import exp, tanh
from refops.hints import Array

F = np.float32
ZERO, HALF, ONE, TWO = F(0), F(0.5), F(1), F(2)
SQRT_2_OVER_PI = F(0.79788456)
GELU_CUBIC = F(0.03567741)  # sqrt(2/pi) * 0.044715, the factoring of TE's forward formula
GELU_CUBIC_RATIO = F(0.044715)  # ... and of its backward formula
GELU_CUBIC_SLOPE = F(0.1070322243)  # 3 * sqrt(2/pi) * 0.044715
QGELU_ALPHA = F(1.702)


# --- float32, in TE's order -----------------------------------------------------------------------


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


def sigmoid_slope(s):
    """d sigmoid / dx where sigmoid(x) = s."""
    return s * (ONE - s)


def gelu(x):
    """Gaussian error linear unit, tanh form."""
    return x * (HALF + HALF * tanh(x * (SQRT_2_OVER_PI + (GELU_CUBIC * x) * x)))


def dgelu(x):
    """Derivative of `gelu`."""
    t = tanh((SQRT_2_OVER_PI * x) * (ONE + (GELU_CUBIC_RATIO * x) * x))
    return (HALF * x) * ((ONE - t * t) * (SQRT_2_OVER_PI + (GELU_CUBIC_SLOPE * x) * x)) + HALF * (ONE + t)


def qgelu(x):
    """Quick GELU, x sigmoid(1.702 x)."""
    return x * sigmoid(QGELU_ALPHA * x)


def dqgelu(x):
    """Derivative of `qgelu`."""
    z = QGELU_ALPHA * x
    s = sigmoid(z)
    return z * sigmoid_slope(s) + s


def relu(x):
    """max(x, 0); NaN and -0 give +0, as `fmaxf` does."""
    return np.where(x > 0, x, ZERO)


def drelu(x):
    """1 above zero, else 0."""
    return np.where(x > 0, ONE, ZERO)


def srelu(x):
    """Squared ReLU."""
    return np.where(x > 0, x * x, ZERO)


def dsrelu(x):
    """Derivative of `srelu`, max(2x, 0)."""
    return np.where(x > 0, TWO * x, ZERO)


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def dsilu(x):
    """Derivative of `silu`."""
    s = sigmoid(x)
    return x * sigmoid_slope(s) + s


def dsigmoid(x):
    """Derivative of `sigmoid`."""
    return sigmoid_slope(sigmoid(x))


def clamped_silu(x, limit, alpha):
    """c sigmoid(alpha c) with c = min(x, limit); NaN gives the value at the limit, as `fminf` does."""
    c = np.where(x <= limit, x, limit)
    return c * sigmoid(alpha * c)


def dclamped_silu(x, limit, alpha):
    """Derivative of `clamped_silu`; the one-sided value at exactly x = limit, 0 above."""
    c = np.where(x <= limit, x, limit)
    z = alpha * c
    s = sigmoid(z)
    return np.where(x <= limit, z * sigmoid_slope(s) + s, ZERO)


def situ(x, beta1):
    """SiTU, beta1 tanh(x / beta1) sigmoid(x)."""
    return (beta1 * tanh(x / beta1)) * sigmoid(x)


def dsitu(x, beta1):
    """Derivative of `situ`."""
    t = tanh(x / beta1)
    s = sigmoid(x)
    return (ONE - t * t) * s + ((beta1 * t) * s) * (ONE - s)


def identity_gate(g):
    """The gate itself."""
    return g


def identity_gate_slope(g):
    """1 everywhere."""
    return np.ones_like(g)


def clamped_gate(g, limit, glu_linear_offset):
    """min(max(g, -limit), limit) + offset; NaN gives -limit + offset."""
    clamped = np.where(g >= -limit, g, -limit)
    return np.where(clamped <= limit, clamped, limit) + glu_linear_offset


def clamped_gate_slope(g, limit):
    """1 where -limit <= g <= limit, else (NaN too) 0."""
    return np.where((g <= limit) & (g >= -limit), ONE, ZERO)


def situ_gate(g, beta2):
    """beta2 tanh(g / beta2)."""
    return beta2 * tanh(g / beta2)


def situ_gate_slope(g, beta2):
    """Derivative of `situ_gate`."""
    t = tanh(g / beta2)
    return ONE - t * t


# --- float64, free of cancellation ----------------------------------------------------------------


def true_sigmoid(x):
    """Sigmoid with full relative accuracy on both sides."""
    decay = np.exp(-np.abs(x))
    return np.where(x < 0, decay, 1.0) / (1.0 + decay)


def true_dsigmoid(x):
    """sigmoid(x) sigmoid(-x)."""
    return true_sigmoid(x) * true_sigmoid(-x)


def true_tanh_slope(x):
    """1 - tanh^2 = 4 sigmoid(2x) sigmoid(-2x)."""
    return 4.0 * true_sigmoid(2.0 * x) * true_sigmoid(-2.0 * x)


def true_gelu(x):
    """0.5 (1 + tanh u) = sigmoid(2u)."""
    return x * true_sigmoid(2.0 * x * (float(SQRT_2_OVER_PI) + float(GELU_CUBIC) * x * x))


def true_dgelu(x):
    """The derivative as TE factors it, with 0.5 (1 + tanh u) = sigmoid(2u) taken out."""
    c, ratio, slope = float(SQRT_2_OVER_PI), float(GELU_CUBIC_RATIO), float(GELU_CUBIC_SLOPE)
    u = c * x * (1.0 + ratio * x * x)
    return true_sigmoid(2.0 * u) * (1.0 + 2.0 * x * true_sigmoid(-2.0 * u) * (c + slope * x * x))


def true_silu(x, alpha=1.0):
    """x sigmoid(alpha x)."""
    return x * true_sigmoid(alpha * x)


def true_dsilu(x, alpha=1.0):
    """sigmoid(z) (1 + z sigmoid(-z)), z = alpha x."""
    z = alpha * x
    return true_sigmoid(z) * (1.0 + z * true_sigmoid(-z))


def true_clamped_silu(x, limit, alpha):
    """`true_silu` of min(x, limit)."""
    return true_silu(np.where(x <= limit, x, limit), alpha)


def true_dclamped_silu(x, limit, alpha):
    """`true_dsilu` up to the limit, 0 above."""
    return np.where(x <= limit, true_dsilu(np.where(x <= limit, x, limit), alpha), 0.0)


def true_situ(x, beta1):
    """beta1 tanh(x / beta1) sigmoid(x)."""
    return beta1 * np.tanh(x / beta1) * true_sigmoid(x)


def true_dsitu(x, beta1):
    """Derivative of `true_situ`."""
    z = x / beta1
    return true_tanh_slope(z) * true_sigmoid(x) + beta1 * np.tanh(z) * true_dsigmoid(x)


def true_situ_gate(g, beta2):
    """beta2 tanh(g / beta2)."""
    return beta2 * np.tanh(g / beta2)


def true_situ_gate_slope(g, beta2):
    """Derivative of `true_situ_gate`."""
    return true_tanh_slope(g / beta2)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """A scalar function with its derivative, in float32 and in float64.

    Attributes:
        value, derivative: float32 array -> float32 array, plus the parameters as keywords.
        true_value, true_derivative: the same for float64. Formulas without exp or tanh serve both.
        value_parameters, derivative_parameters: names of the keywords that each takes.
    """

    value: Callable[..., Array]
    derivative: Callable[..., Array]
    true_value: Callable[..., Array]
    true_derivative: Callable[..., Array]
    value_parameters: tuple[str, ...] = ()
    derivative_parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Activation:
    """One row of `ACTIVATIONS`.

    Attributes:
        name: TE's name.
        formula: what it computes, in words of mathematics; the order of operations is the functions'.
        act: the function of x, or of the activated half.
        gate: the function of the gate half, None for unary activations.
    """

    name: str
    formula: str
    act: Formula
    gate: Formula | None = None

    def __repr__(self):
        return f"<{self.name}: {self.formula}>"

    @property
    def gated(self) -> bool:
        """Whether the input row is [act | gate]."""
        return self.gate is not None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the activation accepts."""
        return tuple(p for p in DEFAULT_PARAMETERS if p in self._all_parameters())

    def _all_parameters(self):
        formulas = (self.act, self.gate) if self.gated else (self.act,)
        return {p for f in formulas for p in (*f.value_parameters, *f.derivative_parameters)}


_SIGMOID = Formula(sigmoid, dsigmoid, true_sigmoid, true_dsigmoid)
_GELU = Formula(gelu, dgelu, true_gelu, true_dgelu)
_QGELU = Formula(
    qgelu, dqgelu, partial(true_silu, alpha=float(QGELU_ALPHA)), partial(true_dsilu, alpha=float(QGELU_ALPHA))
)
_RELU = Formula(relu, drelu, relu, drelu)
_SRELU = Formula(srelu, dsrelu, srelu, dsrelu)
_SILU = Formula(silu, dsilu, true_silu, true_dsilu)
_CLAMPED_SILU = Formula(
    clamped_silu, dclamped_silu, true_clamped_silu, true_dclamped_silu, ("limit", "alpha"), ("limit", "alpha")
)
_SITU = Formula(situ, dsitu, true_situ, true_dsitu, ("beta1",), ("beta1",))

_GATE = Formula(identity_gate, identity_gate_slope, identity_gate, identity_gate_slope)
_CLAMPED_GATE = Formula(
    clamped_gate, clamped_gate_slope, clamped_gate, clamped_gate_slope, ("limit", "glu_linear_offset"), ("limit",)
)
_SITU_GATE = Formula(situ_gate, situ_gate_slope, true_situ_gate, true_situ_gate_slope, ("beta2",), ("beta2",))

#: Every activation by TE's name.
ACTIVATIONS = {
    row.name: row
    for row in (
        Activation("gelu", "x (0.5 + 0.5 tanh(0.79788456 x + 0.03567741 x^3))", _GELU),
        Activation("qgelu", "x sigmoid(1.702 x)", _QGELU),
        Activation("relu", "max(x, 0)", _RELU),
        Activation("srelu", "max(x, 0)^2", _SRELU),
        Activation("silu", "x sigmoid(x)", _SILU),
        Activation("glu", "sigmoid(act) gate", _SIGMOID, _GATE),
        Activation("geglu", "gelu(act) gate", _GELU, _GATE),
        Activation("qgeglu", "qgelu(act) gate", _QGELU, _GATE),
        Activation("reglu", "relu(act) gate", _RELU, _GATE),
        Activation("sreglu", "srelu(act) gate", _SRELU, _GATE),
        Activation("swiglu", "silu(act) gate", _SILU, _GATE),
        Activation(
            "clamped_swiglu",
            "c sigmoid(alpha c) (min(max(gate, -limit), limit) + glu_linear_offset), c = min(act, limit)",
            _CLAMPED_SILU,
            _CLAMPED_GATE,
        ),
        Activation("situglu", "beta1 tanh(act / beta1) sigmoid(act) beta2 tanh(gate / beta2)", _SITU, _SITU_GATE),
    )
}

#: Parameter name -> TE's default.
DEFAULT_PARAMETERS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, "beta1": 4.0, "beta2": 25.0}
_POSITIVE_PARAMETERS = ("beta1", "beta2")


@dataclass(frozen=True)
class BoundActivation:
    """An activation with its parameters fixed: what `refops.ops` evaluates.

    All functions take and return float32 arrays, except `truth` and `truth_grad`, which are float64.
    """

    activation: Activation
    parameters: dict

    @property
    def gated(self) -> bool:
        """Whether the input row is [act | gate]."""
        return self.activation.gated

    def value(self, x, *, true=False):
        """f(x) of the activated half."""
        return self._call(self.activation.act, "value", x, true)

    def derivative(self, x, *, true=False):
        """f'(x) of the activated half."""
        return self._call(self.activation.act, "derivative", x, true)

    def gate(self, g, *, true=False):
        """What the activated half is multiplied with."""
        return self._call(self.activation.gate, "value", g, true)

    def gate_slope(self, g, *, true=False):
        """Derivative of `gate`."""
        return self._call(self.activation.gate, "derivative", g, true)

    def forward(self, act, gate=None):
        """float32 output: f(act), or f(act) * gate(gate)."""
        value = self.value(act)
        return value * self.gate(gate) if self.gated else value

    def backward(self, dy, act, gate=None):
        """float32 gradient: dx, or the pair (d_act, d_gate), products in TE's order."""
        if not self.gated:
            return self.derivative(act) * dy
        return self.backward_act(dy, act, gate), self.backward_gate(dy, act, gate)

    def backward_act(self, dy, act, gate):
        """float32 gradient of the activated half of a gated activation."""
        return (self.derivative(act) * dy) * self.gate(gate)

    def backward_gate(self, dy, act, gate):
        """float32 gradient of the gate half of a gated activation."""
        return (self.gate_slope(gate) * dy) * self.value(act)

    def truth(self, act, gate=None):
        """float64 output for float64 inputs."""
        value = self.value(act, true=True)
        return value * self.gate(gate, true=True) if self.gated else value

    def truth_grad(self, dy, act, gate=None):
        """float64 gradient for float64 inputs: dx, or (d_act, d_gate)."""
        if not self.gated:
            return self.derivative(act, true=True) * dy
        d_act = self.derivative(act, true=True) * dy * self.gate(gate, true=True)
        d_gate = self.gate_slope(gate, true=True) * dy * self.value(act, true=True)
        return d_act, d_gate

    def _call(self, formula, which, x, true):
        function = getattr(formula, f"true_{which}" if true else which)
        names = getattr(formula, f"{which}_parameters")
        convert = float if true else F
        with np.errstate(all="ignore"):  # overflow to inf and inf * 0 = NaN are TE's results, not accidents
            return function(x, **{name: convert(self.parameters[name]) for name in names})


def bind_activation(name, params):
    """Return the `BoundActivation` for `name` with `params` over TE's defaults.

    Raises:
        ValueError: unknown name; a parameter that is NaN, or a beta that is not positive and finite.
        TypeError: a parameter that `name` does not take, or that is not a number.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"name must be one of {', '.join(ACTIVATIONS)}; got {shown(name)}")
    if not params:
        return _with_defaults(name)
    return _bound(ACTIVATIONS[name], params)


@cache
def _with_defaults(name):
    return _bound(ACTIVATIONS[name], {})


def _bound(activation, params):
    name = activation.name
    unknown = sorted(set(params) - set(activation.parameters))
    if unknown:
        takes = ", ".join(activation.parameters) or "none"
        raise TypeError(
            f"{name} takes no parameter {unknown[0]!r} (it takes: {takes}); got {shown(params[unknown[0]])}"
        )
    values = {}
    for parameter in activation.parameters:
        value = params.get(parameter, DEFAULT_PARAMETERS[parameter])
        positive = parameter in _POSITIVE_PARAMETERS
        values[parameter] = require_number(value, parameter, positive=positive, finite=positive)
    return BoundActivation(activation, values)
