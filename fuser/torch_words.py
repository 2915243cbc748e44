"""The words of `refops.activations.arithmetic` for torch tensors: formulas that torch can differentiate and compile.

    value, slope, _ = forms(refops.ACTIVATIONS["gelu"].act.body, TORCH)
    y = value(x, None)          # float32 tensor of any shape; eager, traced or compiled

Results have the dtype of the tensors, for a constant is a Python number, which promotes none; a choice between two
constants, relu's slope, has torch's default dtype. Bits are those of torch's elementary functions and of the compiler's
multiply-adds, not those of `refops`.
"""

import numpy as np
import torch

from refops.activations import Arithmetic


class TorchArithmetic(Arithmetic):
    """float32 and float64 tensors; the words that are not here are made of those that are."""

    _one = 1  # a number of NumPy would make an array of a tensor

    def number(self, c):
        """The float32 constant c, exactly, also beside float64 tensors."""
        return float(np.float32(c))

    def exp(self, x):
        """e^x."""
        return torch.exp(x)

    def tanh(self, x):
        """Hyperbolic tangent."""
        return torch.tanh(x)

    def sigmoid(self, x):
        """1 / (1 + e^-x)."""
        return torch.sigmoid(x)

    def where(self, condition, a, b):
        """a where the condition holds, else b."""
        return torch.where(condition, a, b)

    def is_nan(self, x):
        """Whether x is NaN."""
        return torch.isnan(x)

    def one_like(self, x):
        """1 for each x."""
        return torch.ones_like(x)


TORCH = TorchArithmetic()
