"""An activation with its parameters fixed: what `refops.ops` evaluates, tile by tile."""

from collections import namedtuple
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from refops.activations.arithmetic import REFERENCE, TRUTH, Arithmetic
from refops.activations.declaration import Activation, forms


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
        """The same in another arithmetic."""
        return replace(self, arithmetic=arithmetic)

    # --- the functions ----------------------------------------------------------------------------

    def value(self, x, *, true=False):
        """f(x) of the activated half."""
        return self._call(self._true_act.value if true else self._act.value, x, true)

    def derivative(self, x, *, true=False):
        """f'(x) of the activated half."""
        return self._call(self._true_act.slope if true else self._act.slope, x, true)

    def gate(self, g, *, true=False):
        """What the activated half is multiplied with."""
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
        fields = namedtuple("Parameters", self.parameters)
        return tuple(fields(**{n: kind(v) for n, v in self.parameters.items()}) for kind in (np.float32, float))

    def _call(self, function, x, true=False):
        with np.errstate(all="ignore"):  # overflow to inf and inf * 0 = NaN are TE's results, not accidents
            if true:
                return function(x, self._p[1])
            return self.arithmetic.result(function(self.arithmetic.operand(x), self._p[0]))
