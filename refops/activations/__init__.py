"""Every activation of TE and its derivative: a file of this folder declares each; everything else derives from that.

From a declaration come the NumPy reference and the float64 truth (`BoundActivation`), the functions of CPU and GPU
(`cuda_kernels.formulas`), the oracle's intervals and its other conventions, the fuser's operation, functional and JAX
names, the documents' tables and the parameters of the tests. To add an activation, add a file; `declaration` says what
it holds, `arithmetic` in which words. Here are the table of all, and `BoundActivation`: one with its parameters fixed,
as `refops.ops` evaluates it, tile by tile.

A unary activation maps x to f(x). A gated one takes a row [act | gate] of width 2H to f(act) * g(gate) of width H.
What a formula does at NaN and infinity is part of TE's definition and is kept: gelu(-inf) is NaN, relu(NaN) is 0, a
large finite x gives dgelu(x) = NaN.
"""

from collections import namedtuple
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from refops.activations.arithmetic import REFERENCE, TRUTH, Arithmetic
from refops.activations.declaration import Activation, Function, Parameter, forms, gated, unary
from refops.arguments import did_you_mean, require_name, require_number, shown
from refops.rows import modules_of, rows_of

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PARAMETERS",
    "REFERENCE",
    "ROW_SCALED",
    "TRUTH",
    "Activation",
    "Arithmetic",
    "BoundActivation",
    "Function",
    "Parameter",
    "bind_activation",
    "gated",
    "unary",
]


def _declared():
    """The rows of all files of this folder: those with a place in their order, then the others by name."""
    rows = [
        row
        for module in modules_of(__name__, __path__)
        for row in rows_of(module, "ROWS", Activation, without=("arithmetic", "declaration", "trial"))
    ]
    return sorted(rows, key=lambda row: (row.order is None, row.order or 0, row.name))


def _by_name(rows):
    table = {row.name: row for row in rows}
    for attribute in ("name", "order", "number", "op", "jax"):
        first = {}
        for row in rows:
            value = getattr(row, attribute)
            if value is not None and value in first:
                raise ValueError(f"two activations have the same {attribute}, {value!r}: {first[value]!r} and {row!r}")
            first[value] = row
    called = dict(table)
    for row in rows:
        for name in row.derived:
            if called.setdefault(name, row) is not row:
                rule = f"must not have the name of an operation that {row!r} makes"
                raise ValueError(f"{called[name]!r} {rule}; got {name!r}")
    return table


def _defaults(rows):
    """Parameter name -> default; kernels take parameters by name, so activations that share one share its default."""
    found = {}
    for row in rows:
        for p in row.declared:
            name, default = found.setdefault(p.name, (row.name, p.default))
            if default != p.default:
                raise ValueError(f"{p.name} has two defaults: {default} in {name}, {p.default} in {row.name}")
    return {parameter: default for parameter, (_, default) in found.items()}


#: Every activation by TE's name.
ACTIVATIONS = _by_name(_declared())

#: Parameter name -> TE's default.
DEFAULT_PARAMETERS = _defaults(ACTIVATIONS.values())
#: Activations that have a kernel with a scale for each row (token probabilities in mixtures of experts).
ROW_SCALED = tuple(name for name, activation in ACTIVATIONS.items() if activation.row_scaled)


def bind_activation(name, params):
    """Return the `BoundActivation` for `name` with `params` over TE's defaults.

    Raises:
        ValueError: unknown name; a parameter that is NaN, or one declared positive that is not positive and finite.
        TypeError: a parameter that `name` does not take, or that is not a number.
    """
    require_name(name, "name", ACTIVATIONS)
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
        similar = did_you_mean(unknown[0], activation.parameters)
        got = shown(params[unknown[0]])
        raise TypeError(f"{name} takes no parameter {unknown[0]!r} (it takes: {takes}); got {got}{similar}")
    values = {
        p.name: require_number(params.get(p.name, p.default), p.name, positive=p.positive, finite=p.positive)
        for p in activation.declared
    }
    return BoundActivation(activation, values)


@cache
def _named(parameters):
    """The tuple with parameters of these names, as formulas take them."""
    return namedtuple("Parameters", parameters)


@dataclass(frozen=True)
class BoundActivation:
    """An activation, its parameters and the arithmetic that it is evaluated in.

    All functions take and return float32 arrays, except `truth` and `truth_grad` and those with `true=True`, which
    are float64 whatever the arithmetic.
    """

    activation: Activation
    parameters: dict
    arithmetic: Arithmetic = REFERENCE

    @property
    def gated(self) -> bool:
        """Whether the input row is [act | gate]."""
        return self.activation.gated

    def using(self, arithmetic):
        """The same activation in another arithmetic."""
        return replace(self, arithmetic=arithmetic)

    # --- the functions ----------------------------------------------------------------------------

    def value(self, x, *, true=False):
        """f(x) of the activated half."""
        return self._call(self._true_act.value if true else self._act.value, x, true)

    def derivative(self, x, *, true=False):
        """f'(x) of the activated half."""
        return self._call(self._true_act.slope if true else self._act.slope, x, true)

    def gate(self, g, *, true=False):
        """The factor of the activated half."""
        return self._call(self._true_gate.value if true else self._gate.value, g, true)

    def gate_slope(self, g, *, true=False):
        """Derivative of `gate`."""
        return self._call(self._true_gate.slope if true else self._gate.slope, g, true)

    def scaled_derivative(self, x):
        """`derivative` in the order of the kernel with a scale for each row."""
        return self._call(self._scaled_slopes[0], x)

    def scaled_gate_slope(self, g):
        """`gate_slope` of that kernel."""
        return self._call(self._scaled_slopes[1], g)

    # --- their products, in TE's order ------------------------------------------------------------

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

    def scaled_backward(self, scaled_dy, act, gate=None):
        """(d_act, d_gate) in the order of TE's kernels with a scale for each row; d_gate is None for unary ones."""
        if not self.gated:
            return scaled_dy * self.scaled_derivative(act), None
        d_act = scaled_dy * (self.scaled_derivative(act) * self.gate(gate))
        return d_act, scaled_dy * (self.value(act) * self.scaled_gate_slope(gate))

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

    # --- binding ----------------------------------------------------------------------------------

    @cached_property
    def _act(self):
        return forms(self.activation.act.body, self.arithmetic)

    @cached_property
    def _gate(self):
        return forms(self.activation.gate.body, self.arithmetic)

    @cached_property
    def _scaled_slopes(self):
        plain = (self._act, self._gate) if self.gated else (self._act,)
        functions = self.activation.functions
        return [
            f.row_scaled(self.arithmetic) if f.row_scaled else own.slope
            for f, own in zip(functions, plain, strict=True)
        ]

    @cached_property
    def _true_act(self):
        return forms(self.activation.act.truth or self.activation.act.body, TRUTH)

    @cached_property
    def _true_gate(self):
        return forms(self.activation.gate.truth or self.activation.gate.body, TRUTH)

    @cached_property
    def _p(self):
        """The parameters as formulas take them, in float32 and in float64."""
        fields = _named(tuple(self.parameters))
        return tuple(fields(**{n: kind(v) for n, v in self.parameters.items()}) for kind in (np.float32, float))

    def _call(self, function, x, true=False):
        with np.errstate(all="ignore"):  # overflow to inf and inf * 0 = NaN are TE's results, not accidents
            if true:
                return function(x, self._p[1])
            return self.arithmetic.result(function(self.arithmetic.operand(x), self._p[0]))
