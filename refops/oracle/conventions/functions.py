"""Conventions of single functions: a slope below zero, a sign, a coefficient, and cheap stand-ins for sigmoid, tanh."""

import numpy as np

from refops.activations import Arithmetic
from refops.activations.gelu import CUBIC, GELU, RATIO, SLOPE, SQRT_2_OVER_PI
from refops.activations.relu import RELU
from refops.activations.srelu import SRELU
from refops.oracle.conventions.fits import simplest_number
from refops.oracle.conventions.formulas import require_activation
from refops.oracle.conventions.intermediates import HALF_STEP
from refops.oracle.conventions.registry import computing

F = np.float32
HALF, ONE = F(0.5), F(1)


# --- relu -----------------------------------------------------------------------------------------


def _slopes_below_zero(replay):
    """The slope of a leaky relu that the dump shows, then the usual ones."""
    require_activation(replay)
    replay.require(replay.bound.activation.act is RELU)
    setting, region, usual = replay.setting, replay.setting.probe, [0.01, 0.1, 0.2, 0.25]
    name = next((n for n in ("y", "dx") if n in setting.outputs), None)
    if name is None or region is None or replay.gated or replay.scaled:
        return usual
    x = replay.load("x", region.rows, region.columns).astype(np.float64)
    factor = x if name == "y" else replay.load_upstream(region.rows, region.columns).astype(np.float64)
    written = setting.outputs[name].reshape(setting.shape)[region.rows, region.columns]
    below = (x < 0) & np.isfinite(x) & (np.abs(factor) > 1e-30) & (written != 0)
    if below.sum() < 4:
        return []
    ratio, step = written[below].astype(np.float64) / factor[below], HALF_STEP[written.dtype]
    low, high = (np.max(ratio - np.abs(ratio) * step), np.min(ratio + np.abs(ratio) * step))
    fitted = simplest_number(low, high)
    return [] if fitted is None or fitted == 0 else [fitted]


@computing(
    "leaky-relu",
    "The relu has a slope of {slope:.6g} below zero, where it is 0 there.",
    stage="function",
    choices=_slopes_below_zero,
    alone=True,
)
def leaky_relu(replay, choice):
    replay.facts["slope"] = choice
    slope = F(choice)
    replay.value = lambda x: np.where(x > 0, x, slope * x)
    replay.derivative = lambda x: np.where(x > 0, ONE, slope)


@computing(
    "relu-passes-at-zero",
    "The gradient passes where x = 0: {name} has the derivative 1 there, where TE has 0.",
    stage="function",
    alone=True,
)
def relu_passes_at_zero(replay):
    require_activation(replay)
    replay.require(replay.gradient and replay.bound.activation.act is RELU)
    replay.facts["name"] = replay.bound.activation.name
    replay.derivative = lambda x: np.where(x >= 0, ONE, F(0))


@computing(
    "clamp-at-zero-missing",
    "The square is taken of negative x too, where TE takes that of max(x, 0).",
    stage="function",
    alone=True,
)
def clamp_at_zero_missing(replay):
    require_activation(replay)
    replay.require(replay.bound.activation.act is SRELU)
    replay.value = lambda x: x * x
    replay.derivative = lambda x: F(2) * x


# --- gelu -----------------------------------------------------------------------------------------


class OtherNumbers(Arithmetic):
    """float32, with other constants: `instead` maps those of a formula to them."""

    def __init__(self, instead):
        self.instead = instead

    def number(self, c):
        """A constant, or what stands for it."""
        return self.instead.get(F(c), F(c))


#: What stands for 0.044715 in sqrt(2/pi) (x + 0.044715 x^3).
COEFFICIENTS = {
    "sqrt(2/pi) too much in it": CUBIC,
    "no sqrt(2/pi)": RATIO / SQRT_2_OVER_PI,
    "the value 0": F(0),
    "a third of it": RATIO / F(3),
    "three times it": RATIO * F(3),
}


@computing(
    "gelu-cubic-coefficient",
    "The coefficient of x^3 in gelu's tanh has {what}.",
    stage="function",
    choices=lambda replay: [
        (name, slope)
        for name in COEFFICIENTS
        for slope in (("argument", "both") if replay.computes and replay.gradient else ("argument",))
    ],
    alone=True,
)
def gelu_cubic_coefficient(replay, choice):
    name, where = choice
    require_activation(replay)
    replay.require(replay.bound.activation.act is GELU)
    replay.facts["what"] = name if where == "argument" else f"{name}, in its derivative too"
    ratio, linear = COEFFICIENTS[name], SQRT_2_OVER_PI
    instead = {CUBIC: linear * ratio, RATIO: ratio}
    if where == "both":
        instead[SLOPE] = F(3) * linear * ratio
    replay.bound = replay.bound.using(OtherNumbers(instead))


# --- sigmoid and tanh -----------------------------------------------------------------------------


class NegatedSigmoid(Arithmetic):
    """1 / (1 + e^x)."""

    def sigmoid(self, x):
        """The sigmoid of -x."""
        return super().sigmoid(-x)


class HardSigmoid(Arithmetic):
    """max(0, min(1, x / 6 + 1/2))."""

    def sigmoid(self, x):
        """A ramp."""
        return np.clip(x * F(1 / 6) + HALF, F(0), ONE)


class ClampedTanh(Arithmetic):
    """max(-1, min(1, x))."""

    def tanh(self, x):
        """A ramp."""
        return np.clip(x, -ONE, ONE)


class RationalTanh(Arithmetic):
    """x (27 + x^2) / (27 + 9 x^2), clamped to [-1, 1]."""

    def tanh(self, x):
        """Pade's approximation of order 3, 2."""
        square = x * x
        return np.clip(x * (F(27) + square) / (F(27) + F(9) * square), -ONE, ONE)


STAND_INS = {
    "the sigmoid is 1 / (1 + e^x), with the wrong sign": (NegatedSigmoid, {"sigmoid", "sigmoid_pair"}),
    "the sigmoid is the ramp x / 6 + 1/2 between 0 and 1": (HardSigmoid, {"sigmoid", "sigmoid_pair"}),
    "tanh is x between -1 and 1": (ClampedTanh, {"tanh", "tanh_pair"}),
    "tanh is x (27 + x^2) / (27 + 9 x^2)": (RationalTanh, {"tanh", "tanh_pair"}),
}


@computing("other-elementary-function", "In {operation} {what}.", stage="function", choices=STAND_INS, alone=True)
def other_elementary_function(replay, choice):
    require_activation(replay)
    arithmetic, words = STAND_INS[choice]
    replay.require(words & {word for function in replay.bound.activation.functions for word in function.words})
    replay.facts["operation"], replay.facts["what"] = replay.operation.name, choice
    replay.bound = replay.bound.using(arithmetic())
