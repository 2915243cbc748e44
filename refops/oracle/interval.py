"""Intervals of float32 results: everything that a formula may give on hardware that may choose the last bits.

An `Interval` stands in for a float32 array in the formulas of `refops.activations`, which run on it in the vocabulary
`INTERVALS`. Every operation maps the interval of its operands to one that holds, for any operands inside:

    - the exact result (the kernel works in higher precision, or contracts a product into a multiply-add), and
    - the result rounded to float32 (it does not).

Both are monotone in the exact result, so the ends of the exact interval and the same ends rounded are enough. exp and
tanh may besides be off by `ulp` units in the last place of their true value; tanh is exactly 1 in magnitude where e^2x
overflows float32. +, -, * and / round to nearest, as IEEE 754 and CUDA without fast math do; with an `ulp` above 2,
which CUDA's exp and tanh keep, division may be off by the rest (Triton's `/`, by up to 2) but where it divides by 1.
float64 carries the ends; its own rounding, 2^-53, is accounted for where it could decide a float32 rounding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from refops.activations import Arithmetic
from refops.rounding import round_once

HALF = np.float32(0.5)
#: Largest error of CUDA's expf and tanhf, in units in the last place.
CUDA_ULP = 2
#: More than the relative error of one float64 operation.
_FUZZ = 2.0**-51
#: The largest float32.
_LARGEST = float(np.finfo(np.float32).max)
#: Half its logarithm: no implementation computes tanh beyond.
_TANH_IS_ONE = 0.5 * np.log(_LARGEST)
#: From here on a real number rounds to an infinite float32.
ROUNDS_TO_INF = 2.0**128 - 2.0**103
#: Beyond float32: lower ends stop here, so that they stay finite.
_HUGE = 2.0**400


class Interval(NDArrayOperatorsMixin):
    """Sets of float32 results, one for each element.

    Attributes:
        lo, hi: float64 arrays, the ends; NaN where only NaN is possible.
        nan: bool array (or False), whether NaN is possible besides.
        ulp: permitted error of exp and tanh.
    """

    def __init__(self, lo, hi, nan, ulp):
        self.lo, self.hi, self.nan, self.ulp = lo, hi, nan, ulp

    @classmethod
    def point(cls, values, ulp):
        """The exact float32 `values`."""
        values = np.asarray(values, np.float64)
        return cls(values, values, False, ulp)

    # --- what formulas use -----------------------------------------------------------------------

    def __array_ufunc__(self, ufunc, method, *operands, **options):
        if method != "__call__" or options or ufunc not in _UFUNCS:
            return NotImplemented
        return _UFUNCS[ufunc](*(as_interval(x, self.ulp) for x in operands))

    def __array_function__(self, function, types, arguments, options):
        if function is np.ones_like:
            return Interval.point(np.ones_like(self.lo), self.ulp)
        if function is np.where:
            condition, then, otherwise = arguments
            then, otherwise = as_interval(then, self.ulp), as_interval(otherwise, self.ulp)
            lo = np.where(condition, then.lo, otherwise.lo)
            hi = lo if then.is_point and otherwise.is_point else np.where(condition, then.hi, otherwise.hi)
            return Interval(lo, hi, np.where(condition, then.nan, otherwise.nan), self.ulp)
        return NotImplemented

    def exp(self):
        """e^x, off by up to `ulp` ulp."""
        exact, greatest = np.exp(self.lo), np.exp(self.hi)
        lo, hi = self._off(np.minimum(exact, _HUGE), greatest)
        return _rounded(np.where(np.isinf(self.lo), exact, np.maximum(lo, 0.0)), hi, self.nan, self.ulp)

    def tanh(self):
        """tanh x, off by up to `ulp` ulp, exactly 1 in magnitude where e^2x overflows."""
        least, greatest = np.tanh(self.lo), np.tanh(self.hi)
        lo, hi = self._off(least, greatest)
        exact = (self.lo > _TANH_IS_ONE) | (self.hi < -_TANH_IS_ONE)
        return Interval(np.where(exact, least, lo), np.where(exact, greatest, hi), self.nan, self.ulp)

    @property
    def is_point(self):
        """Whether every element is one value."""
        return self.lo is self.hi

    # --- rounding --------------------------------------------------------------------------------

    def _error(self, true):
        return self.ulp * ulp_of(true) + np.abs(true) * _FUZZ

    def _off(self, lo, hi):
        """The ends of what is off by up to `ulp` ulp of some truth in [lo, hi]."""
        if self.is_point:
            error = self._error(lo)
            return lo - error, hi + error
        return self._least_off(lo, hi), -self._least_off(-hi, -lo)

    def _least_off(self, lo, hi):
        """The lower end: that of `lo`, or of the first number after it that rounds to a power of two: its unit is twice
        what it is just below.
        """
        power = np.ldexp(1.0, np.frexp(np.clip(lo, 0.0, _LARGEST / 2))[1])
        first = power - ulp_of(power) / 4  # a tie, which goes to the power
        least = lo - self._error(lo)
        return np.where((lo > 0) & (lo < first) & (first <= hi), np.minimum(least, first - self._error(first)), least)

    def widened_to(self, lo, hi):
        """The hull with [lo, hi] (float64); where an end is NaN this interval alone counts, and NaN stays NaN."""
        some = ~np.isnan(self.lo)
        return Interval(
            np.where(some, np.fmin(self.lo, lo), self.lo),
            np.where(some, np.fmax(self.hi, hi), self.hi),
            self.nan,
            self.ulp,
        )

    def widened_by(self, ulp):
        """Both ends moved out by `ulp` units in their last place."""
        return Interval(self.lo - ulp * ulp_of(self.lo), self.hi + ulp * ulp_of(self.hi), self.nan, self.ulp)

    def as_float32(self, *, inward=False):
        """Return (lo, hi, nan): the nearest float32 outside the ends, or inside; the value itself where it is one.

        Outside holds for results that need not have passed through float32, inside is enough for those that did.
        """
        if self.is_point:
            value = _nearest(self.lo)
            return value, value, np.isnan(value) | self.nan
        exact = self.lo == self.hi
        if inward:
            lo, hi = toward(self.lo, np.inf), toward(self.hi, -np.inf)
            none = lo > hi  # no float32 between the ends: the one that both round to
            nearest = _nearest(self.lo)
            lo, hi = np.where(none, nearest, lo), np.where(none, nearest, hi)
            lo = np.where(self.lo <= -ROUNDS_TO_INF, np.float32(-np.inf), lo)
            hi = np.where(self.hi >= ROUNDS_TO_INF, np.float32(np.inf), hi)
        else:
            lo = toward(np.where(exact, self.lo, _below(self.lo)), -np.inf)
            hi = toward(np.where(exact, self.hi, _above(self.hi)), np.inf)
        return lo, hi, np.isnan(lo) | self.nan


def as_interval(x, ulp):
    """Return `x` as an Interval; arrays and numbers are exact."""
    return x if isinstance(x, Interval) else Interval.point(x, ulp)


def ulp_of(true):
    """Distance of neighbouring float32 at each magnitude, float64; that of the smallest ones below them."""
    magnitude = np.minimum(np.abs(true), 1.5 * 2.0**127).astype(np.float32)  # the spacing of FLT_MAX itself is inf
    return np.spacing(magnitude).astype(np.float64)


def are_roundings(values, low, high):
    """Whether each value is the rounding, to its dtype, of some number from `low` to `high`; of NaN it is not.

    Rounding is monotone, so these are the values from the one rounded end to the other. A bound on a number that was
    not rounded yet says nothing about the distance of stored values: beside a tie it moves them by a whole step.

    Args:
        values: float32, float16 or bfloat16.
        low, high: float64, the ends before rounding.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return (round_once(low, values.dtype) <= values) & (values <= round_once(high, values.dtype))


def _nearest(ends):
    """The float32 that float64 `ends` round to."""
    with np.errstate(over="ignore"):
        return ends.astype(np.float32)


def toward(ends, direction):
    """The nearest float32 at or beyond `ends` in `direction`."""
    nearest = _nearest(ends)
    short = nearest > ends if direction < 0 else nearest < ends
    # The neighbour has the next bits as an integer; a number that is short lies on one side of its end, so that it is
    # neither a NaN nor the last one of its direction. Past zero comes the least number of the direction's sign.
    past_zero = (nearest == 0) & short
    bits = nearest.view(np.int32)
    away_from_zero = (bits >> 31) | np.int32(1)
    away_from_zero *= short
    bits += away_from_zero if direction > 0 else -away_from_zero
    if past_zero.any():
        nearest[past_zero] = np.float32(np.copysign(2.0**-149, direction))
    return nearest


def _below(ends):
    """Just below float64 `ends`, by more than an operation's rounding; infinities stay."""
    return np.minimum(ends * (1 - _FUZZ), ends * (1 + _FUZZ))


def _above(ends):
    """Just above."""
    return np.maximum(ends * (1 - _FUZZ), ends * (1 + _FUZZ))


def _rounded(lo, hi, nan, ulp):
    """The interval of exact results [lo, hi] and of the same rounded to float32."""
    down, up = _nearest(_below(lo)), _nearest(_above(hi))
    return Interval(np.minimum(lo, down), np.maximum(hi, up), nan, ulp)


def _add(a, b):
    lo, hi = a.lo + b.lo, a.hi + b.hi
    nan = a.nan | b.nan
    if not np.isfinite(lo).all() or not np.isfinite(hi).all():
        nan = nan | (((a.hi == np.inf) & (b.lo == -np.inf)) | ((a.lo == -np.inf) & (b.hi == np.inf)))
        # inf - inf at one end only: one operand is that infinity, and so is what is not NaN.
        lo, hi = np.where(np.isnan(lo) & ~np.isnan(hi), np.inf, lo), np.where(np.isnan(hi) & ~np.isnan(lo), -np.inf, hi)
    return _rounded(lo, hi, nan, a.ulp)


def _subtract(a, b):
    return _add(a, _negative(b))


def _negative(a):
    lo = -a.hi
    return Interval(lo, lo if a.is_point else -a.lo, a.nan, a.ulp)


def _multiply(a, b):
    nan = a.nan | b.nan
    if a is b:
        low, high = np.minimum(np.abs(a.lo), np.abs(a.hi)), np.maximum(np.abs(a.lo), np.abs(a.hi))
        return _rounded(np.where((a.lo < 0) & (a.hi > 0), 0.0, low * low), high * high, nan, a.ulp)
    lefts, rights = ((x.lo,) if x.is_point else (x.lo, x.hi) for x in (a, b))
    products = [left * right for left in lefts for right in rights]
    lo, hi = products[0], products[0]
    for product in products[1:]:
        lo, hi = np.minimum(lo, product), np.maximum(hi, product)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        nan = nan | (_contains_zero(a) & _contains_inf(b)) | (_contains_inf(a) & _contains_zero(b))
    undefined = np.isnan(lo) | np.isnan(hi)
    if undefined.any():  # 0 * inf somewhere among the ends, or a NaN that was there before
        nan = nan | undefined
        lo, hi = _ends(products, np.isnan(a.lo) | np.isnan(b.lo) | ((a.lo == a.hi) & (b.lo == b.hi)))
    return _rounded(lo, hi, nan, a.ulp)


def _ends(corners, only_nan):
    """(least, greatest) of results at the ends of the operands, NaN ignored.

    Where all of them are NaN, so is every result where `only_nan` says it; else a number between the ends gives 0.
    """
    corners = np.broadcast_arrays(*corners)
    none = np.where(only_nan, np.nan, 0.0)
    ends = np.fmin.reduce(corners), np.fmax.reduce(corners)
    return tuple(np.where(np.isnan(end), none, end) for end in ends)


def _contains_zero(a):
    return (a.lo <= 0) & (a.hi >= 0)


def _contains_inf(a):
    return np.isinf(a.lo) | np.isinf(a.hi)


def _divide(a, b):
    """a / b for positive b, rounded to nearest or off by what `ulp` is above CUDA's; exact where b is 1."""
    if not (b.lo > 0).all() and not np.isnan(b.lo).any():
        raise ValueError("an interval divides by positive intervals only")
    lo, hi = np.where(a.lo < 0, a.lo / b.lo, a.lo / b.hi), np.where(a.hi < 0, a.hi / b.hi, a.hi / b.lo)
    nan = a.nan | b.nan
    if np.isinf(b.hi).any():  # inf / inf at some ends: the others still count.
        nan = nan | (_contains_inf(a) & np.isinf(b.hi))
        quotients = [left / right for left in (a.lo, a.hi) for right in (b.lo, b.hi)]
        lo, hi = _ends(quotients, np.isnan(a.lo) | np.isnan(b.lo) | ((a.lo == a.hi) & (b.lo == b.hi)))
    spare = max(a.ulp - CUDA_ULP, 0)
    if spare:
        inexact = (b.lo != 1) | (b.hi != 1)
        least, greatest = Interval(lo, hi, nan, spare)._off(lo, hi)
        lo = np.where(inexact & np.isfinite(lo), least, lo)
        hi = np.where(inexact & np.isfinite(hi), greatest, hi)
    return _rounded(lo, hi, nan, a.ulp)


def _compare(ufunc):
    def compare(a, b):
        if not (a.is_point and b.is_point):
            raise TypeError(f"{ufunc.__name__} of intervals is not one answer: formulas branch on their inputs alone")
        return ufunc(a.lo, b.lo)

    return compare


_UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: _add,
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.true_divide: _divide,
    np.negative: _negative,
    np.isnan: lambda a: np.isnan(a.lo) if a.is_point else np.isnan(a.lo) | a.nan,
    **{ufunc: _compare(ufunc) for ufunc in (np.less, np.less_equal, np.greater, np.greater_equal)},
}


class IntervalArithmetic(Arithmetic):
    """The words of `refops.activations` on intervals: the reference's, but limits are those of both ends."""

    def maximum(self, a, x):
        """The larger one; where x may be NaN also a."""
        return _monotone(super().maximum, a, x, chosen=0)

    def at_most(self, x, limit):
        """x up to the limit; where x may be NaN also the limit."""
        return _monotone(super().at_most, x, limit, chosen=1)

    def at_least(self, x, limit):
        """x from the limit on; where x may be NaN also the limit."""
        return _monotone(super().at_least, x, limit, chosen=1)


class SigmoidThroughTanh:
    """A vocabulary's sigmoid that is made from its tanh."""

    def sigmoid(self, x):
        """0.5 + 0.5 tanh(x / 2)."""
        return HALF + HALF * self.tanh(HALF * x)


class CoarseTanh(SigmoidThroughTanh, IntervalArithmetic):
    """Intervals with a tanh that is an approximation, and the sigmoid through it.

    An error of tanh relative to itself is absolute for this sigmoid: 2^-11 of tanh lets x sigmoid(x) be off by up to
    2^-12 |x|, more than the result itself where x is below -8.3.

    Args:
        ulp: permitted error of that tanh.
        below_zero: whether only tanh of what is below 0 is coarse.
    """

    def __init__(self, ulp, *, below_zero=False):
        self._ulp, self._below_zero = ulp, below_zero

    def tanh(self, x):
        """Hyperbolic tangent, off by up to the permitted error."""
        coarse = Interval(x.lo, x.hi, x.nan, self._ulp).tanh()
        if self._below_zero:
            coarse = self.where(x.lo < 0, coarse, x.tanh())
        return Interval(coarse.lo, coarse.hi, coarse.nan, x.ulp)


def _monotone(choice, *operands, chosen):
    """A choice that grows with both operands, intervals or numbers; of numbers alone a number.

    Where an operand is NaN the choice is operand number `chosen`, NaN or not.
    """
    ulps = [operand.ulp for operand in operands if isinstance(operand, Interval)]
    if not ulps:
        return choice(*operands)
    ulp = max(ulps)
    a, b = (as_interval(operand, ulp) for operand in operands)
    other = (a, b)[chosen]
    lo = choice(a.lo, b.lo)
    hi = lo if a.is_point and b.is_point else choice(a.hi, b.hi)
    may_be_nan = a.nan | b.nan
    if np.any(may_be_nan):
        lo = np.where(may_be_nan, np.minimum(lo, other.lo), lo)
        hi = np.where(may_be_nan, np.maximum(hi, other.hi), hi)
    return Interval(lo, hi, other.nan, ulp)


INTERVALS = IntervalArithmetic()
