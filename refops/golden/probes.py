"""Elements of golden inputs whose *results* show faults: ties of the cast, subnormal codes, values that flush, amaxes.

Random numbers let faults pass: a tie to even that goes away from zero, an amax of signed values, a loop that leaves out
its tail, a kernel compiled to flush float32 subnormals (FTZ), a scale that is rounded up where it need not be. So parts
of a golden tensor are designed from the result backwards. The result is cut into squares as large as a block; squares
take turns: one stays as `make_tensor` filled it, the next holds probes. There

    the last row and the last column hold the largest magnitude of their blocks, and it is negative; nothing else in
    the square is half as large. The last element of the tensor is the largest of all, where one can be; in a "rounding"
    tensor of 16 bits rounding changes it, so that the amax of rounded values is another;
    the scale that this amax gives is a power of two where the rule has one, so that a product can be a tie;
    every second row and column has an amax of its own, on an edge (`refops.golden.edges`): it has another scale than
    its neighbours, a small one, or another one before it is rounded;
    the other elements are, after scaling, midpoints of neighbouring codes, subnormal codes, values below half of the
    smallest one, and zeros, of both signs;
    squares (or rows, where there are few squares) take turns through magnitudes: usual ones, so small that float32
    calls them subnormal, as large as the dtype goes, all zero.

An activation is inverted by search (`refops.golden.preimages`): each probe gets the input whose result is nearest, of
the other sign where no input gives this one (a large negative GELU).
"""

from itertools import chain, cycle

import ml_dtypes
import numpy as np

from refops.golden.edges import (
    LEAST_LOSS,
    amaxes_of_binade,
    binade,
    close_edges,
    in_turn,
    lossy_amaxes,
    power_of_two_edges,
    small_code_amaxes,
)
from refops.golden.preimages import preimage_of
from refops.quantization.quantize import amax_by_outer
from refops.rounding import philox, stored
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
#: Binades down to which an activation's results are looked for that are amaxes on an edge, and how many amaxes that
#: rounding changes are taken.
REACHED, LOSSY = 14, 6
#: Input kind -> the magnitudes that squares of probes take in turn.
MAGNITUDES = {
    "mixed": ("usual", "tiny", "zero"),
    "rounding": ("usual", "tiny", "zero"),
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
        design = _Design(case, kind, seed)
        return _put(case, design.wanted(), design.on_edge)


def _put(case, wanted, on_edge):
    """The inputs with those whose result is `wanted`, float64 (M, K or H), where that is not NaN.

    Results at `on_edge`, bool of the same shape, are to be exact where they can be.
    """
    dtype = case.inputs["x"].dtype
    probed = ~np.isnan(wanted)
    inputs = {name: array.reshape(-1, array.shape[-1]).copy() for name, array in case.inputs.items()}
    if case.operation.kind == "quantize":
        inputs["x"][probed] = wanted[probed].astype(F).astype(dtype)
    else:
        preimage = preimage_of(case)
        found = probed.nonzero()
        index, exact = preimage.find_either_sign(wanted[found]), on_edge[found]
        given = {name: array[index] for name, array in preimage.inputs.items()}
        for name, array in preimage.inputs_at(index[exact], wanted[found][exact]).items():
            given[name][exact] = array
        for name, array in given.items():
            for half in range(array.shape[1]):
                width = inputs[name].shape[1] // array.shape[1]
                inputs[name][found[0], found[1] + half * width] = array[:, half]
    return {name: array.reshape(case.inputs[name].shape) for name, array in inputs.items()}


# --- the design of a result -------------------------------------------------------------------------------------------


class _Design:
    """The result that is wanted: where probes lie, and which numbers they are.

    A gradient of a gated activation, [d_act | d_gate], is designed in its first half; the second one follows.
    """

    def __init__(self, case, kind, seed):
        self.case, self.scaling, self.kind, self.seed = case, case.scaling, kind, seed
        self.dtype, self.layout, self.fmt = case.inputs["x"].dtype, case.scaling.layout, case.scaling.fmt
        self.base = as_matrix(case.source)
        m, k = self.base.shape
        self.shape = (m, k // 2) if case.gated and "dy" in case.inputs else (m, k)
        self.numbers = self.scaling.numbers(self.dtype)
        info = ml_dtypes.finfo(self.dtype)
        self.least = int(info.minexp) - int(info.nmant)  # the exponent of the dtype's smallest number
        self.has_roundings = case.operation.kind != "quantize" and self.dtype != F
        self.edges, self.on_edge = {}, np.zeros(self.shape, bool)
        self.largest, self.amax = self._largest_element()
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
                lines = slice(-1 - i, None, -len(magnitudes)) if by_row else slice(None)
                if by_row or number % len(magnitudes) == i:
                    wanted[square][lines] = self._square(magnitude, square)[lines]
        if self.layout.amax is not None and np.isfinite(self.amax):
            if self.layout.amax == "rows":
                wanted[-1] = wanted[:, -1] = self.largest
            base = self.base[:, :k].astype(np.float64)
            as_large = np.isnan(wanted) & (np.abs(base) >= self.amax / 2)
            exponents = binade(self.amax) - 2 - np.frexp(base[as_large])[1]
            wanted[as_large] = np.ldexp(base[as_large], exponents)
            wanted[-1, -1], self.on_edge[-1, -1] = self.largest, True
        elif self.layout.block is not None and self._is_mixed:
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
            if np.isfinite(amax):
                if self.layout.block[0] == 1:
                    self._put_on_edges(values, amax, self.on_edge[square])
                else:
                    self._put_on_edge(values, amax, self.on_edge[square], plain_first=magnitude == "tiny")
        return values

    # --- amaxes on an edge ------------------------------------------------------------------------

    def _put_on_edges(self, values, amax, on_edge):
        """Give every second row and column of a square an amax on an edge, and make the others of it smaller.

        Args:
            values: the probes of the square, changed in place.
            amax: what the largest magnitude of the other rows and columns is.
            on_edge: bool of the square, set where these amaxes are.
        """
        usual = binade(amax)
        if usual not in self.edges:
            found = self._edges(usual)
            self.edges[usual] = cycle(found), cycle(found)
        for edges, lines, marks in zip(self.edges[usual], (values, values.T), (on_edge, on_edge.T), strict=True):
            for line, mark in zip(lines[1:-1:2], marks[1:-1:2], strict=True):
                edge = next(edges, None)
                if edge is not None:
                    line[:-1] = np.ldexp(line[:-1], min(0, binade(edge) - usual))
                    line[-1], mark[-1] = edge, True

    def _put_on_edge(self, values, amax, on_edge, plain_first):
        """Give every second square an amax on an edge, where a square is one block.

        Args:
            values, amax, on_edge: as above.
            plain_first: whether the first square of its magnitude keeps its amax: tiny ones have a subnormal scale.
        """
        usual = binade(amax)
        if usual not in self.edges:
            pairs = ((None, edge) if plain_first else (edge, None) for edge in self._edges(usual))
            self.edges[usual] = cycle(chain.from_iterable(pairs))
        edge = next(self.edges[usual], None)
        if edge is not None:
            values *= 2.0 ** min(0, binade(edge) - usual)
            values[-1], values[:, -1], on_edge[-1], on_edge[:, -1] = edge, edge, True, True

    def _edges(self, usual):
        """Signed amaxes on an edge below 2^(usual + 1), those that show the most first.

        Of an activation they are its results: those of the first binade in which it reaches most of them.
        """
        scale_format, scales_of = self.layout.scale_format, self._stored_scales
        highest, lossy = usual, []
        every = np.concatenate([amaxes_of_binade(self.dtype, e) for e in range(self.least, usual)])
        if self.case.operation.kind != "quantize":
            preimage = preimage_of(self.case)
            results = np.unique(np.abs(preimage.results))
            highest, every = min(usual, binade(results[-1])), results[(results > 0) & (results < 2.0**usual)]
            if self.has_roundings and self.scaling.path.casts_rounded:
                lossy = lossy_amaxes(preimage, scales_of, 2.0 ** (usual + 1))[:LOSSY]
        small = self._reached(small_code_amaxes(scale_format, scales_of, every))
        close = self._reached(close_edges(scales_of, every[every >= 2.0 ** (usual - 1)]))
        steps = []
        for exponent in range(highest, highest - REACHED, -1):
            wanted = power_of_two_edges(self.fmt, scales_of, amaxes_of_binade(self.dtype, exponent))
            reached = self._reached(wanted)
            steps = max(steps, reached, key=len)
            if wanted and len(reached) == len(wanted):
                break
        return in_turn(steps, close, small, lossy)

    def _stored_scales(self, amaxes):
        stored_scales, _ = self.scaling.block_scale(REFERENCE)(amaxes[None], self.tensor_scale, self.numbers)
        return np.broadcast_to(stored_scales, (1, amaxes.size))[0]

    def _reached(self, amaxes):
        """-amax where the operation has such a result, else amax; those that it never reaches are left out."""
        if self.case.operation.kind == "quantize" or not amaxes:
            return [-amax for amax in amaxes]
        preimage, positive = preimage_of(self.case), np.array(amaxes)
        with_sign = np.where(preimage.reaches(-positive), -positive, positive)
        return with_sign[preimage.reaches(with_sign)].tolist()

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

    def _largest_element(self):
        """(result, amax): the largest element of the tensor and the amax that it gives, float32; "special": infinity.

        In a "rounding" tensor of 16 bits it is a result that rounding changes, where there is one. No product with the
        scale that follows from it is a tie then: a "mixed" tensor has the ties.
        """
        amax = self._tensor_amax()
        is_lossy = self.kind == "rounding" and self.has_roundings and np.isfinite(amax)
        found = self._lossy_element() if is_lossy else None
        if found is None:
            return self._signed(np.float64(amax)), amax
        return found, self._amaxes_of(np.array([found]))[0]

    def _amaxes_of(self, results):
        """float32: magnitudes of which the reference takes the amax of the tensor."""
        amaxes = np.abs(results).astype(F)
        return stored(amaxes, self.dtype).astype(F) if self.scaling.path.amax_rounded else amaxes

    def _lossy_element(self):
        """A result that rounding changes much: a large one, negative if it can be; None where there is none."""
        if self.layout.amax is None:
            return None
        unrounded = preimage_of(self.case).unrounded
        rounded = stored(unrounded, self.dtype).astype(F)
        most = 4 * np.fmax.reduce(np.abs(self.base), axis=None, initial=0.25)
        loss = np.abs(unrounded - rounded) / np.abs(rounded)
        unrounded, loss = (a[(loss > LEAST_LOSS) & (np.abs(rounded) <= most)] for a in (unrounded, loss))
        for sign, share in ((-1, 0.25), (1, 0)):
            size = sign * unrounded
            if size.size and size.max() > max(0, share * np.abs(unrounded).max()):
                large = size > size.max() / 2
                scales = self._scales_of_tensors(self._amaxes_of(unrounded[large]))
                best = np.lexsort((loss[large], _is_power_of_two(scales)))[-1]
                return float(unrounded[large][best])
        return None

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
        for exponent in range(binade(most), binade(most) - 12, -1):
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
    def _is_mixed(self):
        """Whether the numbers are those of a "mixed" tensor."""
        return self.kind in ("mixed", "rounding")

    @property
    def _is_tiny(self):
        return self.kind == "tiny" and self.dtype != np.float16

    def _scale_of_tensor(self, amax):
        return self._scales_of_tensors(amax.reshape(1))[0]

    def _scales_of_tensors(self, amaxes):
        """What the amax of a tensor alone decides, for an array: the multiplier, or the first level of two."""
        if self.layout.block is None:
            scales = self.scaling.block_scale(REFERENCE)(amaxes[None], F(0), self.numbers)[1]
        elif self.layout.two_level:
            scales = self.scaling.tensor_scale(REFERENCE)(amaxes[None])[0]
        else:
            scales = F(1)
        return np.broadcast_to(np.ravel(scales), amaxes.shape)

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
        info, top = ml_dtypes.finfo(self.dtype), binade(self.fmt.max)
        has_level = self.layout.two_level and np.isfinite(self.amax)
        if has_level and magnitude == "usual" and not self._is_tiny:
            return binade(self.amax) - 2
        finite = np.abs(self.base[np.isfinite(self.base)])
        above = min(binade(finite.max(initial=1)) + 1, int(info.maxexp) - 3) if self._is_mixed else 0
        coded = self.layout.scale_format is not None and not has_level
        least = TINY + coded if self.dtype != np.float16 else int(info.minexp)
        return {
            "usual": max(top - 2, 6, above),
            "tiny": min(top + least, int(info.maxexp) - 2),
            "subnormal": int(info.minexp) - 2,
            "huge": int(info.maxexp) - 1,
        }["tiny" if has_level and self._is_tiny else magnitude]


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
