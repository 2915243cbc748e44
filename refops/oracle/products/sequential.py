"""A product whose sums are kept in 16 bits, term after term: what a wrong accumulator makes of it."""

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from refops.oracle.enclosure import Bounds
from refops.oracle.products.product import Product
from refops.rounding import round_once


@dataclass(frozen=True)
class SequentialProduct(Product):
    """A product that is accumulated along k and rounded to `accumulator` after every `step` terms.

    Attributes:
        accumulator: dtype.
        step: terms that are added exactly, with what was accumulated before, and rounded once.
    """

    accumulator: Any = None
    step: int = 1

    @classmethod
    def of(cls, product, accumulator, step):
        """The same product with another accumulator."""
        return cls(**{f.name: getattr(product, f.name) for f in fields(Product)}, accumulator=accumulator, step=step)

    def sums(self, rows, columns):
        """Return (sums, magnitudes): as accumulated, then multiplied with the factors."""
        a, b = self.a.values(rows), self.b.values(columns)
        total = np.zeros((len(a), len(b)))
        for start in range(0, self.k, self.step):
            part = slice(start, start + self.step)
            total = round_once(total + a[:, part] @ b[:, part].T, self.accumulator).astype(np.float64)
        factors = self.factors(rows, columns)
        return total * factors, np.abs(total * factors)

    def bounds(self, rows, columns, *, short=False):
        """`Bounds` of what is stored: the results of the sums, off by a step of their accumulator."""
        sums, magnitudes = self.sums(rows, columns)
        step = magnitudes * float(ml_dtypes.finfo(self.accumulator).eps)
        low, high = (self._moved(sums + sign * step, rows, columns).astype(np.float32) for sign in (-1, 1))
        return Bounds(low, high, np.isnan(low)).rounded(self.dtype)
