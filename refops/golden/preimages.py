"""Inputs of an operation by its result: an activation is inverted by search.

It is computed on every 16-bit value of one input, and whoever wants a result gets the input whose result is nearest.
With float32 inputs the search goes on among the float32 numbers around that one. An input is as large as its result
needs: a gate, or dy, of 6e7 beside an activation of 2^-31 may be the only pair whose product is the amax wanted.
"""

from functools import lru_cache

import numpy as np

from refops.arguments import BFLOAT16
from refops.oracle.operation import Case
from refops.rounding import stored
from refops.survey import as_matrix

F = np.float32
#: What the inputs beside the one that is searched may be. Products with 243/64 have more bits than bfloat16.
PIVOTS = (32.0, 4.0, 243 / 64, 1.0, 2.0**-12, 2.0**-30, 2.0**-120)
#: float32 numbers on each side of an input that are tried for a result.
NEIGHBOURS = 8


class Preimage:
    """The inputs of an operation by its result: every 16-bit value of one (x, the gate or dy), the others fixed.

    Attributes:
        inputs: name -> (N, 1) or (N, 2) array.
        unrounded: float32 (N,), ascending: the result of each before it is rounded to the dtype.
        results: float32 (N,), ascending: what is cast for each, rounded or not.
    """

    def __init__(self, operation, params, dtype, rounded):
        self._operation, self._params, self._dtype = operation, params, dtype
        pivots = PIVOTS if len(operation.inputs) > 1 or operation.gated else PIVOTS[:1]
        with np.errstate(all="ignore"):
            trials = [self._trial(pivot) for pivot in pivots]
        results = np.concatenate([results for _, results in trials])
        order = np.argsort(results, kind="stable")
        order = order[np.isfinite(results[order])]
        self.inputs = {name: np.concatenate([inputs[name] for inputs, _ in trials])[order] for name in trials[0][0]}
        self.unrounded = results[order]
        self.results = stored(self.unrounded, dtype).astype(F) if rounded else self.unrounded

    def _trial(self, pivot):
        """(inputs, results) with `pivot` for the other inputs: act and gate of a gradient, act alone, or x of one."""
        operation, dtype = self._operation, self._dtype
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == np.float16 else BFLOAT16)
        values = values[np.isfinite(values)].astype(dtype)[:, None]
        other = np.full(values.shape, pivot, dtype)
        if "dy" in operation.inputs:
            inputs = {"dy": values, "x": np.concatenate([other] * (1 + operation.gated), axis=1)}
        else:
            inputs = {"x": np.concatenate([other, values], axis=1) if operation.gated else values}
        return inputs, self._compute(inputs)

    def _compute(self, inputs):
        return as_matrix(Case(self._operation.name, inputs, None, self._params).source)[:, 0]

    def find(self, wanted):
        """(indices, close) for an array of results: where the nearest one is, and whether it is within an eighth."""
        after = np.clip(np.searchsorted(self.unrounded, wanted), 1, len(self.unrounded) - 1)
        nearer = np.abs(self.unrounded[after] - wanted) < np.abs(self.unrounded[after - 1] - wanted)
        index = np.where(nearer, after, after - 1)
        return index, np.abs(self.unrounded[index] - wanted) <= np.abs(wanted) / 8

    def find_either_sign(self, wanted):
        """Indices for an array of results: those of negative results where only these are close."""
        index, close = self.find(wanted)
        other, other_close = self.find(-wanted)
        return np.where(~close & other_close, other, index)

    def reaches(self, wanted):
        """Whether some input gives exactly the wanted result, for an array."""
        index, _ = self.find(wanted)
        if self._dtype != F:
            return self.results[index] == wanted
        with np.errstate(all="ignore"):
            return self._compute(self.inputs_at(index, wanted)) == wanted

    def inputs_at(self, index, wanted):
        """Input name -> rows of inputs, their results refined to the wanted ones where the inputs are float32."""
        inputs = {name: given[index] for name, given in self.inputs.items()}
        if self._dtype != F:
            return inputs
        name = "dy" if "dy" in inputs else "x"
        with np.errstate(all="ignore"):
            inputs[name][:, -1] = self._refined(inputs, name, np.copysign(wanted, self.unrounded[index]))
        return inputs

    def _refined(self, inputs, name, wanted):
        """float32 (N,): the last column of an input at which the result is `wanted`, or nearest to it."""
        start = inputs[name][:, -1].astype(np.float64)

        def results_at(values):
            changed = {other: array.repeat(values.shape[1], axis=0) for other, array in inputs.items()}
            changed[name][:, -1] = values.astype(F).ravel()
            return self._compute(changed).reshape(values.shape).astype(np.float64)

        found, step = start, 1 + 2.0**-10
        for _ in range(2):  # the result is near a power of the input
            near = results_at(np.stack([found, found * step], axis=1))
            power = np.log(near[:, 1] / near[:, 0]) / np.log(step)
            moved = found * (wanted / near[:, 0]) ** (1 / power)
            found = np.where(np.isfinite(moved) & (moved != 0), moved, found)
        bits = found.astype(F).view(np.int32)[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS + 1, dtype=np.int32)
        tried = np.concatenate([bits.view(F), start.astype(F)[:, None]], axis=1)
        distance = np.abs(results_at(tried) - wanted[:, None])
        best = np.argmin(np.where(np.isnan(distance), np.inf, distance), axis=1)
        return np.take_along_axis(tried, best[:, None], axis=1)[:, 0]


@lru_cache(maxsize=64)
def _preimage(operation, params, dtype, rounded):
    return Preimage(operation, dict(params), dtype, rounded)


def preimage_of(case):
    """The `Preimage` of a case's operation, under what its scaling casts."""
    params, rounded = tuple(sorted(case.params.items())), case.scaling.path.casts_rounded
    return _preimage(case.operation, params, case.inputs["x"].dtype, rounded)
