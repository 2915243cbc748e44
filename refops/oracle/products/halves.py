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
        """float64, the sums without factors, values of the accumulator."""
        raise NotImplementedError

    def sums(self, rows, columns):
        """float64 (rows, columns): the sums as accumulated, multiplied by the factors."""
        return self.accumulated(rows, columns) * self.factors(rows, columns)

    def bounds(self, rows, columns, *, short=False):
        """`Bounds` of what is stored: the results of the sums, off by up to a step of their accumulator."""
        sums = self.sums(rows, columns)
        step = np.abs(sums) * float(ml_dtypes.finfo(self.accumulator).eps)
        low, high = (self._moved(sums + sign * step, rows, columns).astype(np.float32) for sign in (-1, 1))
        return Bounds(low, high, np.isnan(low)).rounded(self.dtype)


@dataclass(frozen=True)
class SteppedProduct(HalfProduct):
    """Accumulated along k.

    Attributes:
        step: terms that are added exactly, with what was accumulated before, and rounded once.
    """

    step: int = 1

    def accumulated(self, rows, columns):
        """float64, the sums without factors, values of the accumulator."""
        a, b = self.a.values(rows), self.b.values(columns)
        total = np.zeros((len(a), len(b)))
        for start in range(0, self.k, self.step):
            part = slice(start, start + self.step)
            total = round_once(total + a[:, part] @ b[:, part].T, self.accumulator).astype(np.float64)
        return total


@dataclass(frozen=True)
class UnitProduct(HalfProduct):
    """Accumulated by a card's unit.

    Attributes:
        order: the card's `Order`.
    """

    order: Any = None

    def accumulated(self, rows, columns):
        """float64, the sums without factors, values of the accumulator."""
        return self.order.sums(self, rows, columns).astype(np.float64)
