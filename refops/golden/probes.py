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

import numpy as np

from refops.golden.amaxes import Amaxes
from refops.golden.edges import binade, edges_of
from refops.golden.inputs import INPUT_KINDS
from refops.golden.preimages import preimage_of
from refops.rounding import philox
from refops.tiles import ceil_div

F = np.float32
#: Edge of the squares where one scale serves the whole tensor.
SQUARE = 16
#: Number of the stream of random words that choose probes.
STREAM = 7


def place_probes(case, kind, seed):
    """Return the inputs of a `Case` that quantizes, with probes in them.

    Args:
        case: its inputs are those of `make_tensor`.
        kind: key of `refops.golden.inputs.INPUT_KINDS`.
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
    """The result that is wanted: where probes lie, and which numbers they are, under amaxes that others choose.

    A gradient of a gated activation, [d_act | d_gate], is designed in its first half; the second one follows.
    """

    def __init__(self, case, kind, seed):
        self.case, self.seed = case, seed
        self.layout, self.fmt = case.scaling.layout, case.scaling.fmt
        self.amaxes = Amaxes(case, INPUT_KINDS[kind])
        m, k = self.amaxes.random.shape
        self.shape = (m, k // 2) if case.gated and "dy" in case.inputs else (m, k)
        self.edges, self.on_edge = {}, np.zeros(self.shape, bool)

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
        magnitudes, amax = self.amaxes.magnitudes(), self.amaxes.of_tensor
        for number, square in enumerate(reversed(squares)):  # the last one, perhaps a partial block, has the first
            by_row = len(squares) < len(magnitudes)
            for i, magnitude in enumerate(magnitudes):
                lines = slice(-1 - i, None, -len(magnitudes)) if by_row else slice(None)
                if by_row or number % len(magnitudes) == i:
                    wanted[square][lines] = self._square(magnitude, square)[lines]
        if self.layout.amax is not None and np.isfinite(amax):
            if self.layout.amax == "rows":
                wanted[-1] = wanted[:, -1] = self.amaxes.largest
            random = self.amaxes.random[:, :k].astype(np.float64)
            as_large = np.isnan(wanted) & (np.abs(random) >= amax / 2)
            exponents = binade(amax) - 2 - np.frexp(random[as_large])[1]
            wanted[as_large] = np.ldexp(random[as_large], exponents)
            wanted[-1, -1], self.on_edge[-1, -1] = self.amaxes.largest, True
        elif self.layout.block is not None and self.amaxes.kind.largest == "above":
            wanted[-1, -1] *= 2
        return wanted

    def _square(self, magnitude, square):
        """The probes of a square."""
        words = self._words(square)
        signs = np.where(words[..., 2] & 1, -1.0, 1.0)
        if magnitude == "zero":
            return 0.0 * signs
        amax, multiplier = self.amaxes.of_block(magnitude)
        top = min(float(self.fmt.max), abs(amax) * multiplier) if np.isfinite(amax) else float(self.fmt.max)
        values = signs * _choose(_palettes(self.fmt, top / 2), words) / multiplier
        if self.layout.block is not None:
            largest = self.amaxes.signed(amax)
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
        return edges_of(self.case, lambda amaxes: self.amaxes.scales_of(amaxes)[0], usual)

    def _words(self, square):
        rows, columns = (np.arange(s.start, s.stop) for s in square)
        index = rows[:, None] * self.shape[1] + columns
        return philox(self.seed, STREAM, index.ravel()).reshape(*index.shape, 4)


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
