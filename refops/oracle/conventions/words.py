"""Other arithmetic for the formulas of activations: words of their vocabulary exchanged, and the error function.

`refops.activations.REFERENCE` is float32; here a sigmoid is made from tanh, or every operation is rounded to bfloat16.
"""

import math
from functools import lru_cache

import numpy as np

from refops.activations import Arithmetic
from refops.elementary import exp, tanh
from refops.oracle.interval import SigmoidThroughTanh

F = np.float32
ONE = F(1)


class TanhArithmetic(SigmoidThroughTanh, Arithmetic):
    """float32, sigmoid from tanh."""


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

    def operand(self, x):
        """Rounded numbers."""
        return rounded(x, self.dtype)

    def result(self, x):
        """A plain array."""
        return np.asarray(x)

    def exp(self, x):
        """e^x, rounded."""
        return rounded(exp(np.asarray(x)), self.dtype)

    def tanh(self, x):
        """tanh, rounded."""
        return rounded(tanh(np.asarray(x)), self.dtype)

    def sigmoid(self, x):
        """Sigmoid, rounded once or at each of its operations."""
        if self.whole_sigmoid:
            return rounded(Arithmetic().sigmoid(np.asarray(x)), self.dtype)
        return super().sigmoid(x)

    def where(self, condition, a, b):
        """A choice, as rounded numbers: NumPy's own forgets what they are."""
        return rounded(np.where(condition, a, b), self.dtype)


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
