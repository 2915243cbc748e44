"""The vocabulary in which activations are written, what its words mean for NumPy arrays, and exp and tanh themselves.

A formula is made by a factory that takes a vocabulary `words`, binds what it needs to locals and returns functions of
(x, p): numbers and parameters. The operators + - * and comparisons are those of the numbers themselves; a constant is
a `number`, for a literal of Python would make float64 of a kernel's float32.

| word                | meaning                                                                                |
|---------------------|----------------------------------------------------------------------------------------|
| `number(c)`         | the float32 constant c, when the formula is made                                       |
| `exp(x)`, `tanh(x)` | the elementary functions                                                               |
| `sigmoid(x)`        | 1 / (1 + e^-x)                                                                         |
| `sigmoid_pair(x)`   | sigmoid(x) and sigmoid(-x), the latter as 1 - sigmoid(x)                               |
| `tanh_pair(x)`      | t = tanh(x) and its slope, 1 - t t                                                     |
| `quotient(x, y)`    | x / y, y > 0                                                                           |
| `where(c, a, b)`    | a where c holds, else b; both are evaluated                                            |
| `maximum(a, x)`     | the larger one; a where x is NaN, as `fmaxf` does. a is no NaN, and wins against -0    |
| `at_most(x, limit)` | x, but the limit where x is larger or NaN, as `fminf` does                             |
| `at_least(x, limit)`| x, but the limit where x is smaller or NaN                                             |
| `is_nan(x)`         | where x is NaN                                                                         |
| `one_like(x)`       | 1 for each x                                                                           |

`REFERENCE` rounds each operation to float32, in the order that a formula has, and contracts no product into a
multiply-add. `TRUTH` is float64, and its pairs do not cancel. The same words are compiled by `cuda_kernels.formulas`
and are torch's in `fuser.torch_words`; the oracle has other meanings of some (`refops.oracle.interval`,
`refops.oracle.conventions.words`).
"""

from fractions import Fraction
from math import factorial

import numpy as np

F = np.float32
ONE = F(1)


class Arithmetic:
    """float32 NumPy arrays, with `exp` and `tanh` below; subclasses give words another meaning.

    Attributes:
        _one: the 1 of the words here, no word itself: as exact as the numbers.
    """

    _one = ONE

    def operand(self, x):
        """What formulas compute with, from an array."""
        return x

    def result(self, x):
        """The array that a formula's result stands for."""
        return x

    def number(self, c):
        """A float32 constant."""
        return F(c)

    def exp(self, x):
        """e^x."""
        return exp(x)

    def tanh(self, x):
        """Hyperbolic tangent."""
        return tanh(x)

    def sigmoid(self, x):
        """1 / (1 + e^-x)."""
        return self._one / (self._one + self.exp(-x))

    def sigmoid_pair(self, x):
        """(s, 1 - s)."""
        s = self.sigmoid(x)
        return s, self._one - s

    def tanh_pair(self, x):
        """(t, 1 - t t)."""
        t = self.tanh(x)
        return t, self._one - t * t

    def quotient(self, x, y):
        """x / y."""
        return x / y

    def where(self, condition, a, b):
        """a where the condition holds, else b."""
        return np.where(condition, a, b)

    def maximum(self, a, x):
        """x where it is above a, else a."""
        return self.where(x > a, x, a)

    def at_most(self, x, limit):
        """x up to the limit, else the limit."""
        return self.where(x <= limit, x, limit)

    def at_least(self, x, limit):
        """x from the limit on, else the limit."""
        return self.where(x >= limit, x, limit)

    def is_nan(self, x):
        """Whether x is NaN."""
        return np.isnan(x)

    def one_like(self, x):
        """1 for each x."""
        return np.ones_like(x)


class TrueArithmetic(Arithmetic):
    """float64, with TE's float32 constants: both mean the same real function. The pairs have full relative accuracy."""

    def number(self, c):
        """A float32 constant, exactly."""
        return float(F(c))

    def exp(self, x):
        """e^x."""
        return np.exp(x)

    def tanh(self, x):
        """Hyperbolic tangent."""
        return np.tanh(x)

    def sigmoid(self, x):
        """Sigmoid, from e^-|x|."""
        decay = np.exp(-np.abs(x))
        return np.where(x < 0, decay, 1.0) / (1.0 + decay)

    def sigmoid_pair(self, x):
        """sigmoid(x) and sigmoid(-x)."""
        return self.sigmoid(x), self.sigmoid(-x)

    def tanh_pair(self, x):
        """t and 1 - t t = 4 sigmoid(2x) sigmoid(-2x)."""
        return np.tanh(x), 4.0 * self.sigmoid(2.0 * x) * self.sigmoid(-2.0 * x)


REFERENCE = Arithmetic()
TRUTH = TrueArithmetic()


# --- exp and tanh with the same bits on every machine -------------------------------------------------
#
# NumPy's float32 `exp` and `tanh` depend on the SIMD level of the host, and so does the C library. Here both are
# evaluated in float64 by additions, multiplications and one division, which IEEE 754 fixes, and rounded once. The
# float64 error is below 2^-48 relative, so the result is the correctly rounded float32 unless the true value lies that
# close to a tie: about one input in four million. CUDA's `expf` and `tanhf` are within 1 to 2 ulp of it.

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 21 zero bits at its end, so that n * _LN2_HIGH is exact for |n| < 2^21.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Taylor coefficients of e^r, highest first: |r| <= ln(2)/2, so the next term is below 2^-57.
_EXP_COEFFICIENTS = [1.0 / factorial(k) for k in range(13, -1, -1)]
# Taylor coefficients of tanh(u)/u in u^2, highest first (DLMF 4.33.3).
_TANH_COEFFICIENTS = [float(Fraction(*c)) for c in [(-1382, 155925), (62, 2835), (-17, 315), (2, 15), (-1, 3), (1, 1)]]
_SMALL = 2.0**-5  # below it tanh uses its series: the next term is under 2^-65, and 1 - e^-2u would cancel


def exp(x):
    """e^x. float32 array in, float32 array out. NaN stays NaN; exp(-inf) = 0; overflow gives inf.

    An `x` that is no array has a method of this name, which is called: the oracle runs formulas on intervals.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return x.exp()
    return _exp_float64(x.astype(np.float64)).astype(np.float32)


def tanh(x):
    """Hyperbolic tangent. float32 array in, float32 array out. NaN stays NaN; tanh(-0.0) = -0.0. Else as `exp`."""
    if not isinstance(x, np.ndarray | np.generic):
        return x.tanh()
    x = x.astype(np.float64)
    magnitude = np.abs(x)
    decay = _exp_float64(-2.0 * magnitude)
    large = np.copysign((1.0 - decay) / (1.0 + decay), x)
    small = x * _horner(_TANH_COEFFICIENTS, np.minimum(x * x, 1.0))
    return np.where(magnitude < _SMALL, small, large).astype(np.float32)


def _exp_float64(x):
    """e^x for float64 `x` that came from float32: x = n ln 2 + r, then 2^n times a polynomial in r."""
    x = np.clip(x, -200.0, 200.0)  # beyond, float32 is 0 or inf anyway; NaN passes
    n = np.rint(x * _LOG2_E)
    r = x - n * _LN2_HIGH
    r -= n * _LN2_LOW
    power_of_two = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return _horner(_EXP_COEFFICIENTS, r) * power_of_two


def _horner(coefficients, x):
    """Polynomial with `coefficients` from the highest power down."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result
