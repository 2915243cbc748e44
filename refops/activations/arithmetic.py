"""The vocabulary in which activations are written, and what its words mean for NumPy arrays.

A formula is made by a factory that takes a vocabulary `words`, binds what it needs to locals and returns functions of
(x, p): numbers and parameters. The operators + - * and comparisons are those of the numbers themselves; a constant is
a `number`, because a Python literal would turn a kernel's float32 into float64.

| word                | meaning                                                                                |
|---------------------|----------------------------------------------------------------------------------------|
| `number(c)`         | the float32 constant c, when the formula is made                                       |
| `exp(x)`, `tanh(x)` | the elementary functions                                                               |
| `sigmoid(x)`        | 1 / (1 + e^-x)                                                                         |
| `sigmoid_pair(x)`   | sigmoid(x) and sigmoid(-x), the latter as 1 - sigmoid(x)                               |
| `tanh_pair(x)`      | t = tanh(x) and its slope, 1 - t t                                                     |
| `quotient(x, y)`    | x / y, y > 0                                                                           |
| `where(c, a, b)`    | a where c holds, else b; both are evaluated                                            |
| `maximum(a, x)`     | the larger one; a where x is NaN, as `fmaxf` does. a is not NaN, and is chosen over -0 |
| `at_most(x, limit)` | x, but the limit where x is larger or NaN, as `fminf` does                             |
| `at_least(x, limit)`| x, but the limit where x is smaller or NaN                                             |
| `is_nan(x)`         | where x is NaN                                                                         |
| `one_like(x)`       | 1 for each x                                                                           |

`REFERENCE` rounds each operation to float32, correctly, in the order that a formula has, and contracts no product into
a multiply-add. `TRUTH` is float64, and its pairs do not cancel. The same words are compiled by `cuda_kernels.formulas`
and `fuser.torch_words` maps them to torch; the oracle gives some of them other meanings (`refops.oracle.interval`,
`refops.oracle.conventions.words`).
"""

import numpy as np

from refops.elementary import exp, tanh

F = np.float32
ONE = F(1)


class Arithmetic:
    """float32 NumPy arrays, with the exp and tanh of `refops.elementary`; subclasses give words another meaning.

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
