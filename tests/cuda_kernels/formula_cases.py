"""What the tests of activation formulas share: every function of the table, with parameters, on units of any error."""

from collections import namedtuple
from functools import cache

import numba
import numpy as np
import units
from scalars import F, over_arrays

from cuda_kernels import formulas
from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS, Arithmetic, bind_activation

Parameters = namedtuple("Parameters", DEFAULT_PARAMETERS)
#: TE's parameters, as formulas take them.
P = Parameters(**{name: F(value) for name, value in DEFAULT_PARAMETERS.items()})
#: Every `refops.activations.Function` of the table, once.
DISTINCT = list(dict.fromkeys(function for row in ACTIVATIONS.values() for function in row.functions))


@cache
def of_p(function):
    """Return `run(x)`: a device function of (x, p) at TE's parameters, over arrays on the CPU."""
    return over_arrays(numba.njit(lambda x: function(x, P), error_model="numpy"))


@cache
def functions_with(name):
    """The `Functions` of an activation with `fast_math`, on units with the errors of the moment."""
    row, words = ACTIVATIONS[name], units.varying_words()
    made = [formulas.fast_forms(f, words) or formulas.accurate_forms(f) for f in row.functions]
    gate = (made[1].value, made[1].slope) if row.gated else (None, None)
    return formulas.Functions(*made[0], *gate)


class _Listening(Arithmetic):
    """Records the arguments of sigmoids."""

    def __init__(self):
        self.arguments = []

    def sigmoid(self, x):
        """The sigmoid of the reference, its argument recorded."""
        self.arguments.append(x)
        return super().sigmoid(x)


def flushed(name, x, below=-87.33):
    """Where a sigmoid is below 2^-126 (a little below, if `below` is -87.34): only a fast reciprocal is 0 there."""
    row, words = ACTIVATIONS[name], _Listening()
    if row.act.fast is None:
        return np.zeros(x.shape, bool)
    bind_activation(name, {}).using(words).value(x)
    with np.errstate(invalid="ignore"):
        found = [(z < below) & (z > -88.73) for z in words.arguments]
    return np.any(found, axis=0) if found else np.zeros(x.shape, bool)
