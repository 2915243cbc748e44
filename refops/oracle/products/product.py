"""y = alpha a b^T + beta c + bias, and the interval in which each value of y may lie: `Product`.

Derivation
----------
Elements times scales are exact in float64, and a float64 product of matrices is off by less than k 2^-52 of the sum of
magnitudes T = sum |a| |b|: far less than what is granted below, and added to it.

*Any order of float32 sums.* n terms summed in float32 in any order, rounded or cut off, with or without multiply-adds,
are off by at most gamma = n u / (1 - n u) of T, u = 2^-23 (Higham, "Accuracy and Stability of Numerical Algorithms",
section 4.2; u = 2^-24 were enough for sums that round). n is k, and 8 for what is rounded besides: both operands where
they are dequantized to float32 first, the product of both factors, alpha, its product with the sum, c and the bias.

A tensor core adds groups of L products and the sum so far; it aligns them to the largest exponent and cuts them off
after F bits (`refops.products`). One group is off by L 2^-F 2^e, e the largest exponent, and by 2^-23 of the new sum.
2^e is at most T if T counts an element below the smallest normal number of its format as that number, as the unit does,
which gives subnormal numbers one exponent; so T is counted. With F >= 24 and L >= 8, k / L groups are off by less than
k 2^-23 T (with F = 35 and exact sums of 16 still more so). So the bound holds for every unit but one.

*Hopper's FP8 unit* keeps F = 13 bits of products and sums (L = 32). A group is off by (32 max(2^e, R) + R) 2^-13, e the
largest exponent of its products, R the largest magnitude that a sum of groups, one behind the other, has; these add up
along k. R is the distance between the largest and the smallest of the exact sums of the first 0, 1, 2 ... groups (what
is off so far included), which bounds each sum of neighbouring groups: so the bound holds wherever the accumulator is
promoted, or k is split. Scales of blocks make it promoted after each block: R begins anew. 2^e is bounded by the
largest |a| of the group times the largest |b|. The bound is wide: beyond some thousand terms it reaches a tenth of what
the values are, and more.

*Rounding* is monotone: ends of the interval are moved by what follows (alpha, c, the bias, roundings) as the values
are. Underflow costs 2^-149 a term, operand and pair of scales, overflow makes infinity possible where the positive
(negative) terms may exceed the largest float32, before or after they are multiplied by any of the factors, and NaN
where both do, or where a factor is 0; where an operand's own values or factors overflow, or those of both together,
anything is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refops.oracle.enclosure import TRUNCATED, Bounds
from refops.oracle.interval import toward
from refops.oracle.products.operands import LARGEST, Operand
from refops.rounding import round_once

#: Roundings besides those of the sum.
MORE_ROUNDINGS = 8
#: Relative error of a term and of an addition in float64, with room.
DOUBLE = 2.0**-52
#: The smallest float32 above 0.
SMALLEST = 2.0**-149
#: The unit of Hopper that multiplies FP8: products added at once, and bits behind the first that are kept.
SHORT_GROUP, SHORT_BITS = 32, 13


@dataclass(frozen=True)
class Product:
    """One product of matrices, and what is done to it before it is stored.

    Attributes:
        a, b: the operands, (m, k) and (n, k).
        dtype: of the stored result.
        alpha, beta: numbers.
        bias: float64 (n,), or None.
        c: float64 (m, n), what the product is added to, or None.
        factor: a further factor of the product of both factors: 1 except in a wrong product.
        first: monotone function of float64 values, applied to alpha a b^T before anything is added; None: nothing.
        last: the same of results before they are stored.
    """

    a: Operand
    b: Operand
    dtype: Any
    alpha: float = 1.0
    beta: float = 1.0
    bias: np.ndarray | None = None
    c: np.ndarray | None = None
    factor: float = 1.0
    first: Callable[[np.ndarray], np.ndarray] | None = None
    last: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def shape(self):
        """(m, n)."""
        return self.a.rows, self.b.rows

    @property
    def k(self):
        """Length of the sums."""
        return self.a.k

    def taken(self, axis, source):
        """The product whose rows (axis 0) or columns are others of this one, by their indices."""
        if axis == 0:
            return replace(self, a=self.a.taken(source), c=None if self.c is None else self.c[source])
        bias = None if self.bias is None else self.bias[source]
        return replace(self, b=self.b.taken(source), bias=bias, c=None if self.c is None else self.c[:, source])

    def factors(self, rows, columns):
        """float64 factors of the sums of some results, which they broadcast to."""
        return self.alpha * self.factor * self.a.factor_of(rows) * self.b.factor_of(columns).T

    def addends(self, rows, columns):
        """What is added to the sums, a list of float64 arrays that broadcast to the results."""
        added = [] if self.bias is None else [self.bias[None, columns]]
        return added if self.c is None else [*added, self.beta * self.c[rows][:, columns]]

    def sums(self, rows, columns):
        """float64 (rows, columns), exact alpha a b^T."""
        return self.a.values(rows) @ self.b.values(columns).T * self.factors(rows, columns)

    def exact(self, rows, columns):
        """float64, the results of exact sums before they are stored."""
        return self.finished(self.sums(rows, columns), rows, columns)

    def bounds(self, rows, columns, *, short=False):
        """`Bounds` of what may be stored of some results.

        Args:
            rows, columns: slices or arrays of indices.
            short: for the sums of Hopper's FP8 unit, else for any order of float32 sums.
        """
        signed, added = self.factors(rows, columns), self.addends(rows, columns)
        exact, factors = self.sums(rows, columns), np.abs(signed)
        of_a, of_b = self.a.magnitudes(rows), self.b.magnitudes(columns)
        magnitudes = of_a @ of_b.T
        whole = magnitudes * factors + sum(map(np.abs, added))
        error = (gamma(self.k + MORE_ROUNDINGS) + self.k * DOUBLE) * whole
        error += self._underflow(factors, magnitudes) + self._scale_underflow(rows, columns) * factors
        for operand, part, elements in ((self.a, rows, of_a), (self.b, columns, of_b)):
            lost = SMALLEST * abs(self.alpha) * elements.sum(axis=1) * np.abs(operand.factor_of(part)[:, 0])
            error += lost[:, None] if operand is self.a else lost
        if short:
            error += self._short_error(rows, columns, of_a, of_b) * factors
        finite = np.isfinite(exact)
        low, high = (np.where(finite, exact + sign * error, exact) for sign in (-1, 1))
        low, high = (self.finished(end, rows, columns) for end in (low, high))
        nan = np.isnan(low)
        if not (whole <= LARGEST / 4).all():
            low, high, nan = _overflowing(low, high, nan, _beyond(whole, exact + sum(added)), finite)
        most = max(abs(self.alpha), 1) * self.a.factor_at_most(rows)[:, None] * self.b.factor_at_most(columns)
        if not (magnitudes * most <= LARGEST / 4).all():  # whatever the sums are multiplied by first
            up, down = _beyond(magnitudes * most, self.a.values(rows) @ self.b.values(columns).T * most)
            turned = [np.where(signed < 0, *ends) for ends in ((down, up), (up, down))]
            nan = nan | ((up | down) & (signed == 0))
            low, high, nan = _overflowing(low, high, nan, turned, finite & (signed != 0))
        wild = self.a.overflows(rows)[:, None] | self.b.overflows(columns)
        wild = wild | (most * self.a.scale_at_most(rows)[:, None] * self.b.scale_at_most(columns) > LARGEST)
        if wild.any():
            low, high, nan = np.where(wild, -np.inf, low), np.where(wild, np.inf, high), nan | wild
        return Bounds(toward(low, -np.inf), toward(high, np.inf), nan).rounded(self.dtype)

    def stored(self, rows, columns):
        """The exact results, rounded once to the dtype of the result."""
        return round_once(self.exact(rows, columns), self.dtype)

    def finished(self, values, rows, columns):
        """What alpha a b^T becomes until it is stored; monotone in it."""
        if self.first is not None:
            values = self.first(values)
        for addend in self.addends(rows, columns):
            values = values + addend
        return values if self.last is None else self.last(values)

    def _underflow(self, factors, magnitudes):
        """What subnormal products, sums and factors may cost: each is off by at most the smallest float32."""
        lost = SMALLEST * (2 * self.k + MORE_ROUNDINGS) * np.maximum(factors, 1)
        return lost + np.where(factors < 2.0**-126, 2 * SMALLEST * magnitudes, 0)

    def _scale_underflow(self, rows, columns):
        """float64: what subnormal float32 products of both scales of blocks may cost in sums without factors."""
        a, b = self.a, self.b
        lost = SMALLEST * self.k * a.element_at_most(rows)[:, None] * b.element_at_most(columns)
        return np.where(a.scale_at_least(rows)[:, None] * b.scale_at_least(columns) < 2.0**-126, lost, 0)

    def _short_error(self, rows, columns, a_most, b_most):
        """float64, the error of Hopper's FP8 unit in sums without factors, of operands with these magnitudes."""
        a_values, b_values = self.a.values(rows), self.b.values(columns)
        sums = np.zeros((len(a_values), len(b_values)))
        greatest, least, error, before = (np.zeros_like(sums) for _ in range(4))
        bit = 2.0**-SHORT_BITS
        for start in range(0, self.k, SHORT_GROUP):
            group = slice(start, start + SHORT_GROUP)
            if self.a.block is not None and start % self.a.block == 0:  # what partial sums are multiplied by changes
                greatest, least, before = sums.copy(), sums.copy(), error.copy()
            sums += a_values[:, group] @ b_values[:, group].T
            np.maximum(greatest, sums, out=greatest)
            np.minimum(least, sums, out=least)
            reach = greatest - least + error - before
            largest = a_most[:, group].max(axis=1)[:, None] * b_most[:, group].max(axis=1)
            error += bit * (SHORT_GROUP * np.maximum(largest, reach) + reach)
        return error


def _beyond(whole, total):
    """Where positive terms, and where negative ones, may exceed float32: of magnitudes `whole`, exactly `total`."""
    totals = [np.where(np.isfinite(total), sign * total, whole) for sign in (1, -1)]  # inf says nothing of the others
    return [(whole + part) / 2 > LARGEST * (1 - 2.0**-12) for part in totals]


def _overflowing(low, high, nan, beyond, moves):
    """(Ends, where NaN is possible) of results whose sums may be infinite; `moves`: the results whose ends do."""
    up, down = beyond
    return np.where(down & moves, -np.inf, low), np.where(up & moves, np.inf, high), nan | (up & down)


def gamma(n, u=TRUNCATED):
    """n u / (1 - n u), infinite where n u reaches 1."""
    return n * u / (1 - n * u) if n * u < 1 else np.inf
