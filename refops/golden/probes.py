"""Elements of golden inputs whose *results* show faults: ties of the cast, subnormal codes, values that flush, amaxes.

Random numbers let faults pass: a tie to even that goes away from zero, an amax of signed values, a loop that leaves out
its tail, a kernel compiled to flush float32 subnormals (FTZ). So parts of a golden tensor are designed from the result
backwards. The result is cut into squares as large as a block; squares take turns: one stays as `make_tensor` filled it,
the next holds probes. There

    the last row and the last column hold the largest magnitude of their blocks, and it is negative; nothing else in
    the square is half as large. The last element of the tensor is the largest of all, where one can be;
    the scale that this amax gives is a power of two where the rule has one, so that a product can be a tie;
    the other elements are, after scaling, midpoints of neighbouring codes, subnormal codes, values below half of the
    smallest one, and zeros, of both signs;
    squares (or rows, where there are few squares) take turns through magnitudes: usual ones, so small that float32
    calls them subnormal, as large as the dtype goes, all zero.

An activation is inverted by search (`Preimage`): it is computed on every 16-bit value of one input, and each probe gets
the input whose result is nearest, of the other sign where no input gives this one (a large negative GELU).
"""

from functools import lru_cache

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16
from refops.oracle.operation import Case
from refops.quantization.quantize import amax_by_outer
from refops.rounding import philox
from refops.scalings.arithmetic import REFERENCE
from refops.survey import as_matrix
from refops.tiles import ceil_div

F = np.float32
#: Edge of the squares where one scale serves the whole tensor.
SQUARE = 16
#: Number of the stream of random words that choose probes.
STREAM = 7
#: Mantissas that an amax may have.
MANTISSAS = 1 + np.arange(32) / 32
#: Float32's least normal number is 2^-126. An amax of fmt.max * 2^-127 gives a float32 scale of 2^-127, one below
#: fmt.max * 2^-126 a product with 1 / fmt.max that is subnormal before it becomes a scale code.
TINY = -127
#: What the inputs beside the one that is searched may be.
PIVOTS = (32.0, 4.0, 1.0, 2.0**-30, 2.0**-120)
#: Input kind -> the magnitudes that squares of probes take in turn.
MAGNITUDES = {
    "mixed": ("usual", "tiny", "zero"),
    "extreme": ("tiny", "huge", "zero"),
    "special": ("usual", "tiny", "infinite"),
    "tiny": ("tiny", "subnormal", "zero"),
}


def place_probes(case, kind, seed):
    """Return the inputs of a `Case` that quantizes, with probes in them.

    Args:
        case: its inputs are those of `make_tensor`.
        kind: key of `MAGNITUDES`.
        seed: 64-bit integer.
    """
    if case.is_empty:
        return case.inputs
    with np.errstate(all="ignore"):
        wanted = _Design(case, kind, seed).wanted()
        return _put(case, wanted)


# --- inputs that give a result ----------------------------------------------------------------------------------------


class Preimage:
    """The inputs of an operation by its result: every 16-bit value of one (x, the gate or dy), the others fixed.

    Attributes:
        inputs: name -> (N, 1) or (N, 2) array.
        results: float32 (N,), ascending: what is cast for each.
    """

    def __init__(self, operation, params, dtype, rounded):
        pivots = PIVOTS if len(operation.inputs) > 1 or operation.gated else PIVOTS[:1]
        with np.errstate(all="ignore"):
            trials = [self._trial(operation, params, dtype, rounded, pivot) for pivot in pivots]
        results = np.concatenate([results for _, results in trials])
        order = np.argsort(results, kind="stable")
        order = order[np.isfinite(results[order])]
        self.inputs = {name: np.concatenate([inputs[name] for inputs, _ in trials])[order] for name in trials[0][0]}
        self.results = results[order]

    @staticmethod
    def _trial(operation, params, dtype, rounded, pivot):
        """(inputs, results) with `pivot` for the other inputs: act and gate of a gradient, act alone, or x of one."""
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == np.float16 else BFLOAT16)
        values = values[np.isfinite(values)].astype(dtype)[:, None]
        other = np.full(values.shape, pivot, dtype)
        if "dy" in operation.inputs:
            inputs = {"dy": values, "x": np.concatenate([other] * (1 + operation.gated), axis=1)}
        else:
            inputs = {"x": np.concatenate([other, values], axis=1) if operation.gated else values}
        return inputs, _results(Case(operation.name, inputs, None, params), rounded)[:, 0]

    def find(self, wanted):
        """(indices, close) for an array of results: where the nearest one is, and whether it is within an eighth."""
        after = np.clip(np.searchsorted(self.results, wanted), 1, len(self.results) - 1)
        nearer = np.abs(self.results[after] - wanted) < np.abs(self.results[after - 1] - wanted)
        index = np.where(nearer, after, after - 1)
        return index, np.abs(self.results[index] - wanted) <= np.abs(wanted) / 8

    def find_either_sign(self, wanted):
        """Indices for an array of results: those of negative results where only these are close."""
        index, close = self.find(wanted)
        other, other_close = self.find(-wanted)
        return np.where(~close & other_close, other, index)


def _results(case, rounded):
    """float32 (M, K): what a case computes, rounded to the dtype of x or not."""
    return as_matrix(case.source.rounded() if rounded else case.source)


@lru_cache(maxsize=64)
def _preimage(operation, params, dtype, rounded):
    return Preimage(operation, dict(params), dtype, rounded)


def preimage_of(case):
    """The `Preimage` of a case's operation, under what its scaling casts."""
    params, rounded = tuple(sorted(case.params.items())), case.scaling.path.casts_rounded
    return _preimage(case.operation, params, case.inputs["x"].dtype, rounded)


def _put(case, wanted):
    """The inputs with those whose result is `wanted`, float64 (M, K or H), where that is not NaN."""
    dtype = case.inputs["x"].dtype
    probed = ~np.isnan(wanted)
    inputs = {name: array.reshape(-1, array.shape[-1]).copy() for name, array in case.inputs.items()}
    if case.operation.kind == "quantize":
        inputs["x"][probed] = wanted[probed].astype(F).astype(dtype)
    else:
        preimage = preimage_of(case)
        found = probed.nonzero()
        index = preimage.find_either_sign(wanted[found])
        for name, given in preimage.inputs.items():
            for half in range(given.shape[1]):
                width = inputs[name].shape[1] // given.shape[1]
                inputs[name][found[0], found[1] + half * width] = given[index, half]
    return {name: array.reshape(case.inputs[name].shape) for name, array in inputs.items()}


# --- the design of a result -------------------------------------------------------------------------------------------


class _Design:
    """The result that is wanted: where probes lie, and which numbers they are.

    A gradient of a gated activation, [d_act | d_gate], is designed in its first half; the second one follows.
    """

    def __init__(self, case, kind, seed):
        self.case, self.scaling, self.kind, self.seed = case, case.scaling, kind, seed
        self.dtype, self.layout, self.fmt = case.inputs["x"].dtype, case.scaling.layout, case.scaling.fmt
        self.base = _results(case, self.scaling.path.casts_rounded)
        m, k = self.base.shape
        self.shape = (m, k // 2) if case.gated and "dy" in case.inputs else (m, k)
        self.numbers = self.scaling.numbers(self.dtype)
        self.amax = self._tensor_amax()
        self.tensor_scale = self._tensor_scale()

    def wanted(self):
        """float64 of the shape: the result of each probe, NaN where inputs stay."""
        wanted = np.full(self.shape, np.nan)
        (m, k), edge = self.shape, SQUARE if self.layout.block is None else self.layout.block[1]
        rows, columns = ceil_div(m, edge), ceil_div(k, edge)
        squares = [
            (slice(i * edge, min(i * edge + edge, m)), slice(j * edge, min(j * edge + edge, k)))
            for i in range(rows)
            for j in range(columns)
            if (i + j) % 2 or (i, j) == (rows - 1, columns - 1)
        ]
        magnitudes = self._magnitudes()
        for number, square in enumerate(reversed(squares)):  # the last one, perhaps a partial block, has the first
            by_row = len(squares) < len(magnitudes)
            for i, magnitude in enumerate(magnitudes):
                lines = slice(i, None, len(magnitudes)) if by_row else slice(None)
                if by_row or number % len(magnitudes) == i:
                    wanted[square][lines] = self._square(magnitude, square)[lines]
        if self.layout.amax is not None and np.isfinite(self.amax):
            if self.layout.amax == "rows":
                wanted[-1] = wanted[:, -1] = -self.amax
            base = self.base[:, :k]
            as_large = np.isnan(wanted) & (np.abs(base) >= self.amax / 2)
            wanted[as_large] = base[as_large] / 4
            wanted[-1, -1] = self._signed(np.float64(self.amax))
        elif self.layout.block is not None and self.kind == "mixed":
            wanted[-1, -1] *= 2
        return wanted

    def _magnitudes(self):
        """Those of `MAGNITUDES` that differ under the scaling: one scale of a tensor has one."""
        magnitudes = MAGNITUDES[self.kind]
        if self.layout.block is None:
            return ("usual", "zero")
        if self.layout.two_level:
            return tuple(dict.fromkeys("usual" if m in ("huge", "subnormal") else m for m in magnitudes))
        return magnitudes

    def _square(self, magnitude, square):
        """The probes of a square."""
        words = self._words(square)
        signs = np.where(words[..., 2] & 1, -1.0, 1.0)
        if magnitude == "zero":
            return 0.0 * signs
        amax, multiplier = self._block_amax(magnitude)
        top = min(float(self.fmt.max), abs(amax) * multiplier) if np.isfinite(amax) else float(self.fmt.max)
        values = signs * _choose(_palettes(self.fmt, top / 2), words) / multiplier
        if self.layout.block is not None:
            largest = self._signed(amax)
            values[-1], values[:, -1] = largest, largest
        return values

    def _words(self, square):
        rows, columns = (np.arange(s.start, s.stop) for s in square)
        index = rows[:, None] * self.shape[1] + columns
        return philox(self.seed, STREAM, index.ravel()).reshape(*index.shape, 4)

    def _signed(self, amax, *, exact=False):
        """-amax where the operation has such a result, else amax; None where `exact` and it has neither."""
        if self.case.operation.kind == "quantize" or np.isinf(amax):
            return -amax
        preimage = preimage_of(self.case)
        for signed in (-amax, amax):
            index, found = preimage.find(np.float64(signed))
            if found and (not exact or preimage.results[index] == signed):
                return signed
        return None if exact else amax

    # --- amaxes whose scale is a power of two -----------------------------------------------------

    def _tensor_amax(self):
        """float32: what the largest element of the tensor becomes; infinity where the tensor has one."""
        magnitudes = np.abs(self.base)
        if self.kind == "special" or np.isinf(magnitudes).any():
            return F(np.inf)
        if self.kind == "extreme":
            return F(ml_dtypes.finfo(self.dtype).max)
        top = self.fmt.max if not self.layout.two_level else self.scaling.top
        near = (
            np.ldexp(float(top), TINY) if self._is_tiny else 2.0 * np.fmax.reduce(magnitudes, axis=None, initial=0.25)
        )
        most = near if self._is_tiny else 2 * near
        for exponent in range(_binade(most), _binade(most) - 12, -1):
            for amax in np.ldexp(MANTISSAS[::-1], exponent).astype(F):
                if amax <= most and _is_power_of_two(self._scale_of_tensor(amax)) and self._reaches(amax):
                    return amax
        return F(near)

    def _reaches(self, amax):
        """Whether some input gives exactly this result, or its negative."""
        if self.case.operation.kind == "quantize":
            return amax.astype(self.dtype) == amax
        return self._signed(amax, exact=True) is not None

    @property
    def _is_tiny(self):
        return self.kind == "tiny" and self.dtype != np.float16

    def _scale_of_tensor(self, amax):
        """What the amax of the tensor alone decides: the multiplier, or the first level of two."""
        amax = amax.reshape(1, 1)
        if self.layout.block is None:
            return np.ravel(self.scaling.block_scale(REFERENCE)(amax, F(0), self.numbers)[1])[0]
        if self.layout.two_level:
            return np.ravel(self.scaling.tensor_scale(REFERENCE)(amax)[0])[0]
        return F(1)

    def _tensor_scale(self):
        if not self.layout.two_level:
            return F(0)
        return self.scaling.tensor_scale(REFERENCE)(amax_by_outer(self.layout, self.amax.reshape(1), slice(None)))

    def _block_amax(self, magnitude):
        """(amax of a block, multiplier of its elements), float64."""
        if self.layout.block is None:
            return float(self.amax), float(self._scale_of_tensor(self.amax))
        if magnitude == "infinite":
            return np.inf, float(self._multipliers(F([np.inf]))[0])
        amaxes = np.ldexp(MANTISSAS, self._exponent(magnitude)).astype(F)
        multipliers = self._multipliers(amaxes)
        largest = amaxes * multipliers
        fits = largest <= (self.fmt.max if self.layout.scale_format is None else 0.95 * self.fmt.max)
        best = np.lexsort((largest, fits, _is_power_of_two(multipliers)))[-1]
        return float(amaxes[best]), float(multipliers[best])

    def _multipliers(self, amaxes):
        _, multipliers = self.scaling.block_scale(REFERENCE)(amaxes[None], self.tensor_scale, self.numbers)
        return np.broadcast_to(multipliers, (1, amaxes.size))[0]

    def _exponent(self, magnitude):
        """The exponent of the amax of a block."""
        info, top = ml_dtypes.finfo(self.dtype), _binade(self.fmt.max)
        has_level = self.layout.two_level and np.isfinite(self.amax)
        if has_level and magnitude == "usual" and not self._is_tiny:
            return _binade(self.amax) - 2
        finite = np.abs(self.base[np.isfinite(self.base)])
        above = min(_binade(finite.max(initial=1)) + 1, int(info.maxexp) - 3) if self.kind == "mixed" else 0
        coded = self.layout.scale_format is not None and not has_level
        least = TINY + coded if self.dtype != np.float16 else int(info.minexp)
        return {
            "usual": max(top - 2, 6, above),
            "tiny": min(top + least, int(info.maxexp) - 2),
            "subnormal": int(info.minexp) - 2,
            "huge": int(info.maxexp) - 1,
        }["tiny" if has_level and self._is_tiny else magnitude]


def _binade(x):
    """The exponent e of a number: 2^e <= x < 2^(e + 1)."""
    return int(np.frexp(float(x))[1]) - 1


def _is_power_of_two(x):
    return np.frexp(x)[0] == 0.5


def _palettes(fmt, limit):
    """Magnitudes before the cast, in groups that are chosen equally often, all below `limit`."""
    grid = fmt.grid
    ties = (grid[1:] + grid[:-1]) / 2
    subnormal = grid[(grid > 0) & (grid < fmt.smallest_normal)]
    flushed = grid[1] * np.array([0.25, 0.375])
    groups = (ties, ties[: 2 * len(subnormal) + 1], ties, subnormal, grid, flushed, grid[:1])
    return [kept for kept in (group[group < limit] for group in groups) if kept.size]


def _choose(groups, words):
    """One number of one group for each element's random words."""
    lengths = np.array([len(group) for group in groups])
    group = words[..., 0] % len(groups)
    starts = np.cumsum(lengths) - lengths
    return np.concatenate(groups)[starts[group] + words[..., 1] % lengths[group]]
