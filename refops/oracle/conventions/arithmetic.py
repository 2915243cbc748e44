"""The activations with their elementary functions and their arithmetic as arguments.

`refops.activations` fixes both; here they can be exchanged: a sigmoid made from tanh, every operation rounded to
bfloat16. With nothing exchanged the results are those of `refops.activations`, bit for bit.
"""

import math
from functools import lru_cache

import numpy as np

from refops import activations as table
from refops.activations import (
    GELU_CUBIC,
    GELU_CUBIC_RATIO,
    GELU_CUBIC_SLOPE,
    HALF,
    ONE,
    QGELU_ALPHA,
    SQRT_2_OVER_PI,
    TWO,
)
from refops.elementary import exp, tanh

F = np.float32


class Arithmetic:
    """float32 with TE's elementary functions."""

    def number(self, values):
        """What the formulas compute with, from a float32 array."""
        return values

    def result(self, values):
        """Back to a plain float32 array."""
        return values

    def tanh(self, x):
        """tanh x."""
        return tanh(x)

    def sigmoid(self, x):
        """1 / (1 + e^-x)."""
        return ONE / (ONE + exp(-x))


class TanhArithmetic(Arithmetic):
    """float32, sigmoid from tanh."""

    def sigmoid(self, x):
        """0.5 + 0.5 tanh(x / 2)."""
        return HALF + HALF * tanh(HALF * x)


class Rounded(np.ndarray):
    """A float32 array that rounds the result of every operation to its `dtype_to_keep`."""

    dtype_to_keep = None

    def __array_finalize__(self, parent):
        self.dtype_to_keep = getattr(parent, "dtype_to_keep", None)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [np.asarray(v) if isinstance(v, Rounded) else v for v in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        return rounded(result, self.dtype_to_keep) if result.dtype == F else result


def rounded(values, dtype):
    """`values` rounded to `dtype`, as a `Rounded`."""
    result = np.asarray(values).astype(dtype).astype(F).view(Rounded)
    result.dtype_to_keep = dtype
    return result


class LowPrecisionArithmetic(Arithmetic):
    """Every operation rounded to `dtype`; exp, tanh (and with `whole_sigmoid` sigmoid) count as one."""

    def __init__(self, dtype, whole_sigmoid):
        self.dtype, self.whole_sigmoid = dtype, whole_sigmoid

    def number(self, values):
        """Rounded numbers."""
        return rounded(values, self.dtype)

    def result(self, values):
        """A plain array."""
        return np.asarray(values)

    def tanh(self, x):
        """tanh, rounded."""
        return rounded(tanh(np.asarray(x)), self.dtype)

    def sigmoid(self, x):
        """Sigmoid, rounded once or at each of its operations."""
        if self.whole_sigmoid:
            return rounded(table.sigmoid(np.asarray(x)), self.dtype)
        return ONE / (ONE + rounded(exp(np.asarray(-x)), self.dtype))


def slope(s):
    """d sigmoid / dx where sigmoid(x) = s."""
    return s * (ONE - s)


def clamp_above(x, limit):
    """min(x, limit); NaN gives the limit."""
    return (
        np.where(x <= limit, x, limit)
        if not isinstance(x, Rounded)
        else rounded(np.where(np.asarray(x) <= limit, np.asarray(x), limit), x.dtype_to_keep)
    )


def _gelu(a, x):
    return x * (HALF + HALF * a.tanh(x * (SQRT_2_OVER_PI + (GELU_CUBIC * x) * x)))


def _dgelu(a, x):
    t = a.tanh((SQRT_2_OVER_PI * x) * (ONE + (GELU_CUBIC_RATIO * x) * x))
    return (HALF * x) * ((ONE - t * t) * (SQRT_2_OVER_PI + (GELU_CUBIC_SLOPE * x) * x)) + HALF * (ONE + t)


def _scaled_silu_slope(a, x, alpha):
    z = x if alpha is None else alpha * x
    s = a.sigmoid(z)
    return z * slope(s) + s


def _qgelu(a, x):
    return x * a.sigmoid(QGELU_ALPHA * x)


def _srelu(a, x):
    return np.where(x > 0, x * x, F(0))


def _dsrelu(a, x):
    return np.where(x > 0, TWO * x, F(0))


def _silu(a, x):
    return x * a.sigmoid(x)


def _sigmoid(a, x):
    return a.sigmoid(x)


def _dsigmoid(a, x):
    return slope(a.sigmoid(x))


def _clamped_silu(a, x, limit, alpha):
    c = clamp_above(x, limit)
    return c * a.sigmoid(alpha * c)


def _dclamped_silu(a, x, limit, alpha):
    return np.where(x <= limit, _scaled_silu_slope(a, clamp_above(x, limit), alpha), F(0))


def _situ(a, x, beta1):
    return (beta1 * a.tanh(x / beta1)) * a.sigmoid(x)


def _dsitu(a, x, beta1):
    t, s = a.tanh(x / beta1), a.sigmoid(x)
    return (ONE - t * t) * s + ((beta1 * t) * s) * (ONE - s)


def _situ_gate(a, g, beta2):
    return beta2 * a.tanh(g / beta2)


def _situ_gate_slope(a, g, beta2):
    t = a.tanh(g / beta2)
    return ONE - t * t


#: Function of `refops.activations` -> the same with an `Arithmetic`; the others have no elementary function in them.
FORMULAS = {
    table.gelu: _gelu,
    table.dgelu: _dgelu,
    table.qgelu: _qgelu,
    table.dqgelu: lambda a, x: _scaled_silu_slope(a, x, QGELU_ALPHA),
    table.srelu: _srelu,
    table.dsrelu: _dsrelu,
    table.silu: _silu,
    table.dsilu: lambda a, x: _scaled_silu_slope(a, x, None),
    table.sigmoid: _sigmoid,
    table.dsigmoid: _dsigmoid,
    table.clamped_silu: _clamped_silu,
    table.dclamped_silu: _dclamped_silu,
    table.situ: _situ,
    table.dsitu: _dsitu,
    table.situ_gate: _situ_gate,
    table.situ_gate_slope: _situ_gate_slope,
}


def evaluate(arithmetic, function, names, parameters, x):
    """`function` of `refops.activations` at x under `arithmetic`; names and parameters as in `Formula`."""
    arguments = {name: F(parameters[name]) for name in names}
    formula = FORMULAS.get(function)
    if formula is None:
        return function(x, **arguments)
    return arithmetic.result(formula(arithmetic, arithmetic.number(x), **arguments))


# --- the error function ---------------------------------------------------------------------------

_STEP = 1 / 512


@lru_cache(maxsize=1)
def _erfc_table():
    """erfc at multiples of 1/512 in [0, 7]."""
    return np.array([math.erfc(i * _STEP) for i in range(7 * 512 + 2)])


def normal_cdf(x):
    """The cumulative distribution of the standard normal, float64; about 1e-12 relative in the body.

    A cubic (Hermite) between tabulated values of erfc, whose slope is known in closed form.
    """
    z = np.abs(np.asarray(x, np.float64)) / math.sqrt(2)
    z = np.where(np.isnan(z), 0, np.minimum(z, 7.0))
    index = np.minimum((z / _STEP).astype(np.int64), 7 * 512 - 1)
    left, right = index * _STEP, (index + 1) * _STEP
    t = (z - left) / _STEP
    a, b = _erfc_table()[index], _erfc_table()[index + 1]
    da, db = (-2 / math.sqrt(math.pi) * np.exp(-e * e) * _STEP for e in (left, right))
    upper = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (2 * (a - b) + da + db)))
    cdf = np.where(np.signbit(x), 0.5 * upper, 1 - 0.5 * upper)
    return np.where(np.isnan(x), np.nan, cdf)


def normal_density(x):
    """The density of the standard normal, float64."""
    x = np.asarray(x, np.float64)
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
