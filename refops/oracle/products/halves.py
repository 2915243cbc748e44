"""Products whose sums are kept in 16 bits: the results of a wrong accumulator."""

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from refops.oracle.enclosure import Bounds
from refops.oracle.products.product import Product
from refops.rounding import round_once


@dataclass(frozen=True)
class HalfProduct(Product):
    """A product that is accumulated in a dtype of 16 bits, in one order.

    Attributes:
        accumulator: the dtype.
    """

    accumulator: Any = None

    @classmethod
    def of(cls, product, **options):
        """The same product with another accumulator."""
        return cls(**{f.name: getattr(product, f.name) for f in fields(Product)}, **options)

    def accumulated(self, rows, columns):
        """float64, the sums as accumulated, which `following` multiplies."""
        raise NotImplementedError

    def following(self, rows, columns):
        """float64, what the accumulated sums are multiplied by; broadcasts to them."""
        return self.factors(rows, columns)

    def sums(self, rows, columns):
        """float64 (rows, columns), the sums as accumulated, multiplied by what follows."""
        return self.accumulated(rows, columns) * self.following(rows, columns)

    def bounds(self, rows, columns, *, short=False):
        """`Bounds` of what is stored: the results of the sums, off by a step of their accumulator.

        A sum that overflowed is infinite, and one within a step of the largest number may be.
        """
        total, limits = self.accumulated(rows, columns), ml_dtypes.finfo(self.accumulator)
        eps, largest = float(limits.eps), float(limits.max)
        step = np.where(np.isfinite(total), np.abs(total) * eps, 0)
        step = np.where(np.abs(total) + step > largest, np.inf, step)
        outward = [total + sign * np.where(sign * total > 0, step, np.abs(total) * eps) for sign in (-1, 1)]
        ends = [np.where(np.isfinite(total), end, total) * self.following(rows, columns) for end in outward]
        low, high = (self.finished(end, rows, columns) for end in (np.minimum(*ends), np.maximum(*ends)))
        return Bounds(low.astype(np.float32), high.astype(np.float32), np.isnan(low)).rounded(self.dtype)


@dataclass(frozen=True)
class SteppedProduct(HalfProduct):
    """Accumulated along k, scales of blocks applied to the terms, factors to the sums.

    Attributes:
        step: terms that are added exactly, with what was accumulated before, and rounded once.
    """

    step: int = 1

    def accumulated(self, rows, columns):
        """float64, the sums without what follows, values of the accumulator."""
        return self._in_steps(*self._terms(rows, columns))

    def _terms(self, rows, columns):
        """float64 (rows, k) and (columns, k), what is multiplied."""
        return self.a.values(rows), self.b.values(columns)

    def _in_steps(self, a, b):
        """float64 (rows, columns), a b^T, values of the accumulator."""
        total = np.zeros((len(a), len(b)))
        for start in range(0, a.shape[1], self.step):
            part = slice(start, start + self.step)
            total = self._kept(total + a[:, part] @ b[:, part].T)
        return total

    def _kept(self, sums):
        """Sums as the accumulator keeps them."""
        return round_once(sums, self.accumulator).astype(np.float64)


@dataclass(frozen=True)
class DequantizedProduct(SteppedProduct):
    """Accumulated along k, of operands that were multiplied by all of their scales first.

    Attributes:
        values: the dtype of the operands after that.
    """

    values: Any = None

    def _terms(self, rows, columns):
        parts = (self.a, rows), (self.b, columns)
        return [_in_dtype(operand, places, self.values).astype(np.float64) for operand, places in parts]

    def following(self, rows, columns):
        """float64, alpha."""
        return np.full((1, 1), self.alpha * self.factor)


@dataclass(frozen=True)
class BlockedProduct(SteppedProduct):
    """Accumulated along k within each block of scales; the sums of blocks are scaled, then added.

    Attributes:
        total: the dtype in which the scaled sums are added.
    """

    total: Any = None

    def accumulated(self, rows, columns):
        """float64, the sums without what follows."""
        whole, block = 0.0, self.block
        for start in range(0, self.k, block):
            part = slice(start, start + block)
            a, b = self.a.unscaled(rows, part), self.b.unscaled(columns, part)
            scaled = self._in_steps(a, b) * self.a.scale_at(rows, start) * self.b.scale_at(columns, start).T
            whole = round_once(whole + scaled, self.total).astype(np.float64)
        return whole

    @property
    def block(self):
        """Terms that have one pair of scales; None where neither operand has scales of blocks."""
        return min((operand.block for operand in (self.a, self.b) if operand.block is not None), default=None)


def _in_dtype(operand, rows, dtype):
    """An operand's values as a dtype holds them, rounded to float32 before."""
    return (operand.values(rows) * operand.factor_of(rows)).astype(np.float32).astype(dtype)


def is_narrowed(operand, rows, dtype):
    """Whether a dtype holds other values of an operand than float32 does."""
    narrow, wide = (_in_dtype(operand, rows, kind).astype(np.float32) for kind in (dtype, np.float32))
    return not np.array_equal(narrow, wide, equal_nan=True)


@dataclass(frozen=True)
class UnitProduct(HalfProduct):
    """Accumulated by a card's unit.

    Attributes:
        order: the card's `Order`.
    """

    order: Any = None

    def accumulated(self, rows, columns):
        """float64, the sums without what follows, values of the accumulator."""
        return self.order.sums(self, rows, columns).astype(np.float64)
