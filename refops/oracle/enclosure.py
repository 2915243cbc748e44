"""What a right kernel may write: an interval of values for each element, an interval of codes for each code and scale.

Derivation
----------
1. *Values.* TE fixes the formula and its order; hardware is free in the error of exp and tanh, in contracting products
   into multiply-adds, and in working more precisely than float32. `refops.oracle.interval` runs the very formulas of
   `refops.activations` on intervals that cover all three. Besides, whatever lies within `ulp` float32 units of the
   float64 truth of a formula with exp or tanh is accepted, however it was computed. The interval of an element is the
   hull of both. What `ulp` has above 2 also widens the hull, for other formulas of the same function, and division.
   A unit is that of the float32 which a truth rounds to; where an argument is an interval, each truth has its own.
2. *Rounding and casting* are monotone: v <= w implies RN(v) <= RN(w), RN(v s) <= RN(w s) for s >= 0, and the code of v
   is at most the code of w in the order of values. So the ends of the interval, pushed through the same steps, bound
   every result that starts inside. Exact inputs (plain quantization) have equal ends, and one code is right: the test
   is bit equality there.
3. *Amax.* The magnitude of an element lies in [mig, mag]: least and greatest |v| in its interval. max is monotone, so
   a block's amax lies between the largest mig and the largest mag. NaN is ignored, and an element that may be NaN may
   be missing: its mig is 0.
4. *Scales.* A scaling declares its rule, which is monotone in the amax. Codes grow with it, so those of the ends bound
   them, and every code between belongs to some amax between. A float32 scale_inv is traced back: it is right if some
   amax in the interval gives exactly it.
5. *Codes given the scale that was written.* Elements are judged with the multiplier that the dump's own scale implies,
   right or wrong: a wrong scale is reported once, not 32 times, and a code is wrong only if no right value gives it
   under that scale. Where scales were not dumped, or say nothing (NaN, 0), the multipliers of all acceptable scales
   bound the codes. A cast keeps the sign of zero; under coded scales of one level -0 may come out as +0, as from TE's
   specialised MXFP8 kernels, and a computed zero may have either sign.
6. *Sums* of n terms in any order: |sum - exact| <= (n - 1) u sum |terms|, u = 2^-24 (Jeannerod and Rump, "Improved
   error bounds for inner products in floating-point arithmetic", 2013; no higher-order term). A matrix unit may
   truncate instead of round: u = 2^-23 for the Hadamard transform, where the same holds because no partial sum is
   larger than sum |terms|. The exact sum of terms in [lo, hi] lies in [sum lo, sum hi]. Sums that are stored in float32
   lie inside the ends; for those that are not, the ends move out to the next float32.

Soundness: 1 holds operation by operation, 2 to 5 by monotonicity, 6 by the theorem; so nothing that follows TE's
formula, or the truth, is rejected. What is not free is not widened: +, -, *, / round to nearest, scales and casts are
exact, the values that are rounded before a cast are those of TE's path.

Tightness: at ulp=2 the interval of a value is 3 to 5 float32 ulp wide where nothing cancels (silu and its kin below
-5: up to 10), 12 for situglu with its three elementary functions, 0 without exp and tanh. One ulp of bfloat16 is 65536
of them, so nearly every bfloat16 result and FP8 code has one right value; where TE's formula cancels (gelu far left,
dgelu and dsilu at their roots) the interval is as wide as that formula's own error. Between its ends every float32 is
accepted. The bound of sums grows with n: a missing row shows up only while n^2 u is below 1 (n below 4096 for terms of
equal size).

What is accepted although no kernel writes it, by point (`tests/oracle/test_derivation.py` enumerates all kernels, in
small number systems in which this code computes and for small sets of float32, and asserts these widths):
    1  An operation's ends are the outermost of its results, but a result within 2^-51 of a tie has both neighbours. The
       ends of a value lie at most 3 float32 beyond those of all kernels where these are at most 16 apart, or where an
       operation's result is such a tie as far as its other neighbour leads: 13 float32 where clamped_swiglu's exponent
       is one of -20. The interval is never wider than twice all of them; of a gradient 6 times, at its roots, because
       s and 1 - s, or t and 1 - t t, are taken as independent. In the median it is no wider (1.05 times).
    2  Results that do not pass through float32: what is stored may be off by one value at each end.
    3  Amaxes between those with and without an element that may be NaN.
    4  No scale; of 4over6 the other candidate, where float32 errors in any order cannot tell which is smaller.
    5  Codes of the elements that decide the scale are judged as if another had decided it: one code more at most. Under
       a scale that says nothing, codes between those of two right scales.
    6  What no order reaches within the bound.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from refops.formats import encode_tile
from refops.oracle.geometry import Geometry, as_slice
from refops.oracle.interval import CUDA_ULP, INTERVALS, ROUNDS_TO_INF, Interval, ulp_of
from refops.quantization.hadamard import transform_exactly
from refops.quantization.layout import padded_blocks
from refops.quantization.quantize import amax_of_tile
from refops.scalings.arithmetic import REFERENCE, Reference
from refops.scalings.declaration import FLT_MAX
from refops.tiles import InputSource, Matrix, for_each, tile_slices

F = np.float32
#: Relative error of one float32 addition to nearest, and of one that truncates.
NEAREST, TRUNCATED = 2.0**-24, 2.0**-23
#: Elements of which a formula is evaluated at once: a dozen float64 arrays of them stay in the second-level cache.
STRIP = 1 << 14


@dataclass(frozen=True)
class Bounds:
    """Intervals of float32 values.

    Attributes:
        lo, hi: float32 arrays, the ends; NaN where only NaN is possible.
        nan: bool array, whether NaN is possible.
    """

    lo: np.ndarray
    hi: np.ndarray
    nan: np.ndarray

    def __getitem__(self, index):
        return Bounds(self.lo[index], self.hi[index], self.nan[index])

    def rounded(self, dtype):
        """After storing in `dtype`."""
        if dtype == np.float32:
            return self
        with np.errstate(all="ignore"):
            lo = self.lo.astype(dtype).astype(F)
            hi = lo if self.hi is self.lo else self.hi.astype(dtype).astype(F)
        return Bounds(lo, hi, self.nan)

    def scaled(self, least, greatest):
        """After a float32 product with a multiplier in [least, greatest], both >= 0."""
        if least is greatest:
            lo = self.lo * least
            return Bounds(lo, lo if self.hi is self.lo else self.hi * least, self.nan)
        return Bounds(
            np.minimum(self.lo * least, self.lo * greatest), np.maximum(self.hi * least, self.hi * greatest), self.nan
        )

    def with_either_zero(self):
        """Where a value may be -0, +0 may stand for it: what comes of a multiply-add with +0."""
        if not ((self.lo == 0) & np.signbit(self.lo)).any():
            return self
        return Bounds(self.lo, np.where(self.hi == 0, F(0), self.hi), self.nan)

    def magnitudes(self):
        """(mig, mag): least and greatest magnitude, 0 for NaN."""
        low, high = np.abs(self.lo), np.abs(self.hi)
        mag = np.fmax(np.fmax(low, high), F(0))
        mig = np.where((self.lo < 0) & (self.hi > 0) | self.nan, F(0), np.fmin(low, high))
        return np.fmax(mig, F(0)), mag

    def contain(self, values):
        """Whether each float32 value is inside; NaN where NaN is possible. The sign of zero does not count."""
        return ((self.lo <= values) & (values <= self.hi)) | (self.nan & np.isnan(values))


# --- values ---------------------------------------------------------------------------------------


class BoundsSource:
    """Intervals of a (M, K) matrix, any rectangle at a time.

    Attributes:
        shape: (M, K).
        dtype: nominal dtype of the values.
    """

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def read(self, rows, columns):
        """`Bounds` of a rectangle, unrounded."""
        raise NotImplementedError

    def rounded(self):
        """The same source after storing in its dtype."""
        return RoundedBounds(self)


class RoundedBounds(BoundsSource):
    """Intervals of what was stored, in the nominal dtype or another, and read back."""

    def __init__(self, source, dtype=None):
        super().__init__(source.shape, source.dtype if dtype is None else dtype)
        self._source = source

    def read(self, rows, columns):
        return self._source.read(rows, columns).rounded(self.dtype)


class RememberedBounds(BoundsSource):
    """Intervals that are read more than once: the last rectangle is kept.

    Both directions of a quantized tensor, and its amax, ask for the same one.
    """

    def __init__(self, source):
        super().__init__(source.shape, source.dtype)
        self._source, self._at, self._bounds = source, None, None

    def read(self, rows, columns):
        if self._at != (rows, columns):
            self._at, self._bounds = (rows, columns), self._source.read(rows, columns)
        return self._bounds

    def rounded(self):
        rounded = self._source.rounded()
        if rounded is self._source:
            return self
        return RememberedBounds(RoundedBounds(self) if isinstance(rounded, RoundedBounds) else rounded)


class ExactBounds(BoundsSource):
    """A given tensor: each interval is one value."""

    def __init__(self, tensor):
        self._source = InputSource(tensor)
        super().__init__(self._source.shape, tensor.dtype)

    def read(self, rows, columns):
        values = self._source.read(rows, columns)
        return Bounds(values, values, np.isnan(values))

    def rounded(self):
        return self


class FormulaBounds(BoundsSource):
    """Results of an activation or its gradient, plain or scaled by row.

    Args:
        case: the `Case`.
        ulp: permitted error of exp and tanh, and of the result.
        terms: "result", or "drow_scales": the terms of that sum, one for each element of dy.
        stored_float32: results were stored in float32: only float32 values inside the ends count.
        words: vocabulary of intervals. Default: `refops.oracle.interval.INTERVALS`.
    """

    def __init__(self, case, ulp, terms="result", *, stored_float32=False, words=None):
        self._case, self._ulp, self._terms, self._stored_float32 = case, ulp, terms, stored_float32
        self._words = INTERVALS if words is None else words
        kind, inputs = case.operation.kind, case.inputs
        self._gradient, self._scaled = kind.endswith("grad"), kind.startswith("scaled")
        self._bound, self._layout = case.bound.using(self._words), case.row_layout
        # A formula without exp or tanh is its own truth; nothing in it is free but rounding.
        self._elementary = any(function.elementary for function in self._bound.activation.functions)
        self._input = Matrix(inputs["x"])
        self._dy = Matrix(inputs["dy"]) if "dy" in inputs else None
        m, width = self._input.shape
        narrow = width // 2 if case.gated else width  # of act, of dy and of the forward result
        if self._scaled:
            self._row_scales = inputs["row_scales"].reshape(m, 1).astype(F)
        wide = self._gradient and terms == "result"
        super().__init__((m, width if wide else narrow), inputs["x"].dtype)

    def rounded(self):
        if self.dtype != np.float32:
            return super().rounded()
        return FormulaBounds(self._case, self._ulp, self._terms, stored_float32=True, words=self._words)

    def read(self, rows, columns):
        """Rectangles of gated gradients are cut into their act and gate columns and put together again."""
        if not (self._gradient and self._bound.gated and self._terms == "result"):
            column = np.arange(columns.start, columns.stop)
            return self._evaluate(rows, column, "act")
        column = np.arange(columns.start, columns.stop)
        is_gate, element = self._layout.locate(column)
        parts = [self._evaluate(rows, element[is_gate == half], ("act", "gate")[half]) for half in (False, True)]
        out = []
        for name in ("lo", "hi", "nan"):
            first, second = (getattr(part, name) for part in parts)
            whole = np.empty((len(first), len(column)), first.dtype)
            whole[:, ~is_gate], whole[:, is_gate] = first, second
            out.append(whole)
        return Bounds(*out)

    def _evaluate(self, rows, element, which):
        """Bounds of the result for elements (indices into a row of dy): of the `which` half for gated gradients."""
        height = max(1, STRIP // max(1, len(element)))
        starts = range(rows.start, rows.stop, height)
        strips = [self._strip(slice(i, min(i + height, rows.stop)), element, which) for i in starts]
        if len(strips) == 1:
            return strips[0]
        return Bounds(*(np.concatenate([getattr(strip, end) for strip in strips]) for end in ("lo", "hi", "nan")))

    def _strip(self, rows, element, which):
        """The same of a few rows."""
        act, gate = self._operands(rows, element)
        dy = None if self._dy is None else self._dy.read(rows, as_slice(element))
        with np.errstate(all="ignore"):
            interval, truth = self._formula(rows, which, dy, act, gate)
            slack = self._ulp * ulp_of(truth) * self._elementary
            hull = interval.widened_to(truth - slack, truth + slack)
            if self._elementary and self._ulp > CUDA_ULP:  # what is above it is for other formulas of the function
                hull = hull.widened_by(self._ulp - CUDA_ULP)
            lo, hi, nan = hull.as_float32(inward=self._stored_float32)
        # A computed zero may have either sign.
        lo, hi = np.where(lo == 0, F(-0.0), lo), np.where(hi == 0, F(0.0), hi)
        return Bounds(lo, hi, nan)

    def _operands(self, rows, element):
        if not self._bound.gated:
            return self._input.read(rows, as_slice(element)), None
        return tuple(self._input.read(rows, as_slice(self._layout.columns(element, gate))) for gate in (False, True))

    def _formula(self, rows, which, dy, act, gate):
        """(Interval, float64 truth) of one result."""
        bound, exact = self._bound, [None if v is None else v.astype(np.float64) for v in (dy, act, gate)]
        a, g, d = (None if v is None else Interval.point(v, self._ulp) for v in (act, gate, dy))
        if not self._gradient or self._terms == "drow_scales":
            interval, truth = bound.forward(a, g), bound.truth(*exact[1:])
            if self._terms == "drow_scales":
                return d * interval, exact[0] * truth
            if self._scaled:
                row_scales = self._row_scales[rows]
                return interval * row_scales, truth * row_scales.astype(np.float64)
            return interval, truth
        truth = bound.truth_grad(*exact)
        if self._scaled:
            row_scales = self._row_scales[rows]
            pair = bound.scaled_backward(d * Interval.point(row_scales, self._ulp), a, g)
            truth = truth if bound.gated else (truth, None)
            at = which == "gate"
            return pair[at], truth[at] * row_scales.astype(np.float64)
        if not bound.gated:
            return bound.backward(d, a), truth
        if which == "act":
            return bound.backward_act(d, a, g), truth[0]
        return bound.backward_gate(d, a, g), truth[1]


class HadamardBounds(BoundsSource):
    """Groups of 16 rows after the Hadamard transform, rounded to the nominal dtype; sums in any order."""

    def __init__(self, source, sign_mask):
        super().__init__(source.shape, source.dtype)
        self._source, self._sign_mask = source, sign_mask

    def read(self, rows, columns):
        return hadamard_bounds(self._source.read(rows, columns), self._sign_mask).rounded(self.dtype)

    def rounded(self):
        return self


def hadamard_bounds(tile, sign_mask, *, inverse=False):
    """Bounds of a tile whose groups of 16 rows go through the Hadamard transform, sums in any order."""
    lo, hi = tile.lo.astype(np.float64), tile.hi.astype(np.float64)
    groups = (-1, 16, lo.shape[1])
    infinite = (np.isinf(lo) & (lo == hi)).reshape(groups)
    ends = [np.where(np.isfinite(end), end, 0.0).reshape(groups) for end in (lo, hi)]
    centre = transform_exactly((ends[0] + ends[1]) / 2, sign_mask, inverse=inverse)
    size = np.maximum(np.abs(ends[0]), np.abs(ends[1])).sum(axis=1, keepdims=True)
    radius = (ends[1] - ends[0]).sum(axis=1, keepdims=True) / 8 + 15 * TRUNCATED * size / 4
    radius = radius + 16 * 2.0**-150  # products with 1/4 that are subnormal
    # Infinities of one sign give that infinity, of both NaN; what may be infinite, or overflow, may give anything.
    signs = 4 * transform_exactly(np.where(infinite, np.sign(lo).reshape(groups), 0.0), sign_mask, inverse=inverse)
    count = infinite.sum(axis=1, keepdims=True)
    anything = ((np.isinf(lo) | np.isinf(hi)).reshape(groups) & ~infinite).any(axis=1, keepdims=True)
    anything |= ~(size < FLT_MAX)
    only_nan = np.isnan(lo).reshape(groups).any(axis=1, keepdims=True) | ((np.abs(signs) != count) & ~anything)
    limit = np.where(count > 0, np.copysign(np.inf, signs), np.nan)
    low, high = (np.where(count > 0, limit, centre + off) for off in (-radius, radius))
    low, high = np.where(anything, -np.inf, low), np.where(anything, np.inf, high)
    low, high = (np.where(only_nan, np.nan, end).reshape(lo.shape) for end in (low, high))
    nan = tile.nan.reshape(groups).any(axis=1, keepdims=True) | anything
    interval = Interval(low, high, False, 0)
    lo, hi, only_nan = interval.as_float32()
    lo, hi = np.where(lo == 0, F(-0.0), lo), np.where(hi == 0, F(0.0), hi)
    return Bounds(lo, hi, np.broadcast_to(nan, centre.shape).reshape(lo.shape) | only_nan)


def bounds_of(case, ulp, *, stored_float32=False, words=None):
    """`BoundsSource` of the tensor that an operation computes before any quantization; arguments of `FormulaBounds`."""
    if case.operation.kind == "quantize":
        return ExactBounds(case.inputs["x"])
    return FormulaBounds(case, ulp, stored_float32=stored_float32, words=words)


class DequantizedBounds(BoundsSource):
    """Results of dequantize: products as the formula has them, rounded or not; of two levels also near the truth."""

    def __init__(self, q, ulp, *, stored_float32=False):
        self._q = q.unswizzled() if q.with_gemm_swizzled_scales else q
        self._ulp, self._stored_float32 = ulp, stored_float32
        self._columnwise = q.rowwise_data is None
        super().__init__(q.matrix_shape, np.dtype(F))

    def read(self, rows, columns):
        q, columnwise = self._q, self._columnwise
        geometry, fmt = Geometry(q.scaling, columnwise), q.scaling.fmt
        data, scale_inv = q.rowwise_data, q.rowwise_scale_inv
        if columnwise:
            data, scale_inv = q.columnwise_data, q.columnwise_scale_inv
        codes = geometry.codes(data, self.shape, rows, columns)
        scales = geometry.expand(geometry.scales(scale_inv, rows, columns), codes.shape)
        element = Interval.point(fmt.values[codes], self._ulp)
        amax = self._amax(rows, columns)
        product = element * q.scaling.decode_factor(IntervalWords(self._ulp))(scales, amax)
        if q.scaling.layout.two_level:  # other orders of the products are as good
            truth = element.lo * q.scaling.decode_factor(REFERENCE)(scales, amax.astype(np.float64))
            slack = self._ulp * ulp_of(truth)
            product = product.widened_to(truth - slack, truth + slack)
        bounds = Bounds(*product.as_float32(inward=self._stored_float32))
        if columnwise and q.scaling.hadamard is not None:
            return hadamard_bounds(bounds, q.scaling.hadamard, inverse=True)
        return bounds

    def _amax(self, rows, columns):
        """The amax that decoding needs, to meet a rectangle; None where it needs none."""
        layout = self._q.scaling.layout
        if not layout.two_level:
            return None
        amax = self._q.amax_columnwise if self._columnwise else self._q.amax_rowwise
        return amax_of_tile(layout, amax, rows, columns, self._columnwise)


# --- sums -----------------------------------------------------------------------------------------


def sum_bounds(source, axis, at, *, stored_float32=False):
    """Bounds of the float32 sums along `axis` (0: column sums, 1: row sums) in any order.

    Args:
        at: slice of the columns (or rows) to sum.
        stored_float32: sums were stored in float32: only float32 values inside the ends count.
    """
    count, length = source.shape[axis], at.stop - at.start
    low, high, size = np.zeros(length), np.zeros(length), np.zeros(length)
    nan, only_nan, to_minus, to_plus, minus, plus = np.zeros((6, length), bool)
    for start in range(0, count, 1024):
        along = slice(start, min(start + 1024, count))
        tile = source.read(*((along, at) if axis == 0 else (at, along)))
        lo, hi = tile.lo.astype(np.float64), tile.hi.astype(np.float64)
        only_nan |= np.isnan(lo).any(axis=axis)
        nan |= tile.nan.any(axis=axis)
        # Terms that may be infinite, and terms that are.
        to_minus |= (lo == -np.inf).any(axis=axis)
        to_plus |= (hi == np.inf).any(axis=axis)
        minus |= (hi == -np.inf).any(axis=axis)
        plus |= (lo == np.inf).any(axis=axis)
        lo, hi = np.where(np.isfinite(lo), lo, 0.0), np.where(np.isfinite(hi), hi, 0.0)
        low += lo.sum(axis=axis)
        high += hi.sum(axis=axis)
        size += np.maximum(np.abs(lo), np.abs(hi)).sum(axis=axis)
    slack = max(count - 1, 0) * NEAREST * size * (1 + 2.0**-40) + count * size * 2.0**-52
    lo, hi, _ = Interval(low - slack, high + slack, False, 0).as_float32(inward=stored_float32)
    overflows = size + slack >= ROUNDS_TO_INF  # a partial sum may be infinite
    lo = np.where(plus, F(np.inf), np.where(to_minus | overflows, F(-np.inf), lo))
    hi = np.where(minus, F(-np.inf), np.where(to_plus | overflows, F(np.inf), hi))
    nan |= overflows | (to_minus & to_plus)
    only_nan |= minus & plus
    return Bounds(np.where(only_nan, F(np.nan), lo), np.where(only_nan, F(np.nan), hi), nan | only_nan)


def tensor_amax_bounds(source, axis=None):
    """(least, greatest) amax of the tensor, float32 (1,); or of each row (axis=1) or column (axis=0)."""
    m, k = source.shape
    shape = {None: (1,), 0: (k,), 1: (m,)}[axis]
    least, greatest = np.zeros(shape, F), np.zeros(shape, F)

    def work(rows, columns):
        at = {None: slice(0, 1), 0: columns, 1: rows}[axis]
        for out, magnitude in zip((least, greatest), source.read(rows, columns).magnitudes(), strict=True):
            largest = np.fmax.reduce(magnitude, axis=axis, initial=F(0))
            out[at] = np.fmax(out[at], largest)

    for_each(tile_slices((m, k)), work)
    return least, greatest


def block_amax_bounds(bounds, block_rows, block_columns):
    """(least, greatest) amax of each block of a tile, missing elements counted as 0."""
    block_rows = min(block_rows, len(bounds.lo))
    out = []
    for magnitude in bounds.magnitudes():
        blocks = padded_blocks(magnitude, block_rows, block_columns)
        out.append(blocks.max(axis=(1, 3)))
    return out


# --- scales ---------------------------------------------------------------------------------------


def float_scale_inverses(written, least, greatest, scale_of, fmt):
    """Which float32 scale_inv are right, and by which scales the elements may have been multiplied.

    Args:
        written: scale_inv as dumped.
        least, greatest: float32 amax bounds of the shape of `written`.
        scale_of: function from amax to the encode scale, decreasing but for its special cases.
        fmt: the element format: the amax that gave scale_inv is about fmt.max times it.

    Returns:
        (right, scale_lo, scale_hi): for a wrong scale_inv both ends are its reciprocal.
    """
    written = written.astype(F)
    right = np.zeros(written.shape, bool)
    scale_lo, scale_hi = np.full(written.shape, np.inf, F), np.zeros(written.shape, F)
    with np.errstate(all="ignore"):
        traced = np.clip(fmt.max * written, least, greatest).astype(F)
        candidates = [least, greatest, *ordinary_ends(least, greatest)]
        for step in range(-4, 5):
            bits = traced.view(np.int32) + np.int32(step)
            candidates.append(np.clip(np.maximum(bits, 0).view(F), least, greatest))
        for amax in candidates:
            scale = scale_of(amax)
            matches = F(1) / scale == written
            right |= matches
            scale_lo = np.where(matches, np.minimum(scale_lo, scale), scale_lo)
            scale_hi = np.where(matches, np.maximum(scale_hi, scale), scale_hi)
        own = F(1) / written
    return right, np.where(right, scale_lo, own), np.where(right, scale_hi, own)


class IntervalWords(Reference):
    """The vocabulary of scale rules where operands are `Interval`s."""

    def __init__(self, ulp):
        self.ulp = ulp

    def decode(self, fmt):
        """f(code) -> its value, exact."""
        return lambda code: Interval.point(fmt.values[code], self.ulp)


def ordinary_ends(least, greatest):
    """The ends of ranges of amaxes without the special cases of scale rules: 0 and inf become their neighbours."""
    smallest = np.where((least == 0) & (greatest > 0), np.minimum(F(2.0**-149), greatest), least)
    finite = np.minimum(greatest, FLT_MAX)
    return smallest, np.where(np.isinf(greatest) & (least < greatest), finite, greatest)


def float_scale_range(least, greatest, scale_of):
    """(scale_lo, scale_hi) over all amaxes in [least, greatest], its special cases 0 and inf included."""
    with np.errstate(all="ignore"):
        smallest, largest = ordinary_ends(least, greatest)
        # Just above the amax whose quotient overflows: float16 caps that at 65504, less than the scales beside it.
        finite_quotient = np.clip(F(2) * scale_of(F(1)) / FLT_MAX, least, greatest)
        ends = [scale_of(amax.astype(F)) for amax in (least, greatest, smallest, largest, finite_quotient)]
    return np.minimum.reduce(ends), np.maximum.reduce(ends)


def encode_scale_of(scaling, dtype):
    """Function from amax to the encode scale of a scaling with float32 scales; tensors are of `dtype`."""
    scale, numbers = scaling.block_scale(REFERENCE), scaling.numbers(dtype)
    return lambda amax: scale(np.asarray(amax, F), F(0), numbers)[1]


# --- codes ----------------------------------------------------------------------------------------


def code_order(codes, fmt):
    """Integers in the order of the codes' values, -0 just below +0; NaN codes beyond the largest, by their sign bit."""
    return _orders(fmt).take(codes)


@cache
def _orders(fmt):
    """`code_order` of every code, int16; 0 is that of +0 (of the least value without one)."""
    values, codes = fmt.values, np.arange(len(fmt.values))
    if not fmt.signed:
        return codes.astype(np.int16)
    negative = codes >= len(codes) // 2
    below = np.where(np.isnan(values), negative, np.signbit(values))
    size = np.where(np.isnan(values), np.inf, np.abs(values))
    orders = np.zeros(len(codes), np.int16)
    for side, first, step in ((~below, 0, 1), (below, -1, -1)):
        ascending = codes[side][np.lexsort((codes[side], size[side]))]
        orders[ascending] = first + step * np.arange(len(ascending))
    return orders


def code_bounds(bounds, least, greatest, fmt, random_bits=None):
    """(lowest, highest) code of each element, given its multiplier in [least, greatest]; NaN counts as its code.

    Args:
        random_bits: uint8 array for stochastic rounding, "any" for the neighbours on both sides, None for nearest even.
    """
    scaled = bounds.scaled(least, greatest)
    if isinstance(random_bits, str):
        ends = (scaled.lo, "down"), (scaled.hi, "up")
        return tuple(encode_tile(np.ascontiguousarray(end), fmt, rounding=rounding) for end, rounding in ends)
    options = {} if random_bits is None else {"rounding": "stochastic", "random_bits": random_bits}
    lowest = encode_tile(np.ascontiguousarray(scaled.lo), fmt, **options)
    if scaled.hi is scaled.lo:
        return lowest, lowest
    return lowest, encode_tile(np.ascontiguousarray(scaled.hi), fmt, **options)


def codes_inside(codes, lowest, highest, nan, fmt):
    """Whether each code lies between the ends, or is NaN (without one: what NaN is cast to) where NaN is possible."""
    exist = codes < len(fmt.values)
    codes = codes & np.uint8(len(fmt.values) - 1)
    order, low = code_order(codes, fmt), code_order(lowest, fmt)
    high = low if highest is lowest else code_order(highest, fmt)
    inside = exist & (low <= order) & (order <= high)
    if fmt.nan_code is None:
        return inside | (nan & exist & (codes == fmt.code_of_nan))
    is_nan = np.isnan(fmt.values)
    return (inside & ~is_nan.take(codes) & ~is_nan.take(lowest)) | (is_nan.take(codes) & nan)
