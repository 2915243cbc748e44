"""Products whose k is split: parts are summed by themselves, rounded to 16 bits, and added. Whether a dump shows it."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from refops.arguments import BFLOAT16
from refops.oracle.products.halves import HalfProduct
from refops.rounding import round_once
from refops.tiles import cut

F = np.float32
#: The name of the fault.
SPLIT = "split-sums-in-half"
HALVES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
#: Parts that are tried, and the terms that each is a multiple of.
PARTS, TILES = (2, 3, 4, 6, 8, 12, 16), (1, 32, 64, 128)
#: What multiplies the sum of the parts instead of each -> words.
LATE = {
    "nothing": "",
    "alpha": ", then multiplied by alpha",
    "all": ", then multiplied by the tensors' scales and alpha",
}
#: Rows and columns that are looked at.
EDGE = 48
#: Results of these that have to differ between a split and the right sum, and the share of them that must be the
#: split's. Of a right product nearly none is; where other parts were rounded about half are, by chance.
LEAST_DIFFERENT, SHARE = 64, 0.95
#: Relative difference up to which float32 results are the same: parts may be added in another order.
ORDER = 2.0**-20


@dataclass(frozen=True)
class Split:
    """How a product is split.

    Attributes:
        step: terms of each part, but the last.
        parts: how many.
        dtype: name of what parts are rounded to.
        total: dtype in which they are added.
        late: what multiplies their sum, and not the parts, a key of `LATE`.
    """

    step: int
    parts: int
    dtype: str
    total: Any
    late: str

    def __str__(self):
        added = "in float32" if self.total == F else "in it, too"
        return (
            f"{self.parts} parts of {self.step:,} terms, each rounded to {self.dtype}, added {added}{LATE[self.late]}"
        )


@dataclass(frozen=True)
class SplitProduct(HalfProduct):
    """Sums of parts along k, kept in 16 bits, and added.

    Attributes:
        step: terms of a part.
        total: dtype in which parts are added.
        late: as of `Split`.
    """

    step: int = 1
    total: Any = None
    late: str = "nothing"

    def accumulated(self, rows, columns):
        """float64, the sums of rounded parts."""
        parts, early = parts_of(self, rows, columns, self.step), factors_of(self, rows, columns, self.late)[0]
        return added([round_once(part * early, self.accumulator) for part in parts], self.total)

    def following(self, rows, columns):
        """float64, what multiplies the sums of the parts."""
        return factors_of(self, rows, columns, self.late)[1]


def parts_of(product, rows, columns, step):
    """float64 arrays, the exact sums of each `step` terms of some results, without factors."""
    a, b = product.a.values(rows), product.b.values(columns)
    return [a[:, part] @ b[:, part].T for part in cut(product.k, step)]


def factors_of(product, rows, columns, late):
    """float64 arrays that broadcast to the results: what each part, and what the sum of the parts is multiplied by."""
    factors, one = product.factors(rows, columns), np.ones((1, 1))
    if late == "alpha":
        alpha = product.alpha * product.factor
        return factors / alpha, alpha * one
    return (factors, one) if late == "nothing" else (one, factors)


def added(parts, total):
    """float64, parts added one behind the other, each sum rounded to a dtype."""
    sums = np.zeros(parts[0].shape)
    for part in parts:
        sums = round_once(sums + part.astype(np.float64), total).astype(np.float64)
    return sums


def split_shown(product, y):
    """The `Split` whose results a dump has where they are not the right ones, or None.

    Args:
        product: the right one.
        y: the dump, (m, n).
    """
    rows, columns = (np.linspace(0, size - 1, min(size, EDGE)).astype(int) for size in product.shape)
    values = y[rows][:, columns]
    right = product.stored(rows, columns)
    if np.count_nonzero(~_alike(values, right)) < LEAST_DIFFERENT // 2:
        return None
    best, most = None, SHARE
    factors = {late: factors_of(product, rows, columns, late) for late in LATE if late != "alpha" or product.alpha != 1}
    for step in _steps(product.k):
        exact = parts_of(product, rows, columns, step)
        for (late, (early, rest)), (name, dtype) in itertools.product(factors.items(), HALVES.items()):
            rounded = [round_once(part * early, dtype) for part in exact]
            for total in (F, dtype):
                sums = added(rounded, total) * rest
                made = round_once(product.finished(sums, rows, columns), y.dtype)
                decides = ~_alike(made, right) & np.isfinite(made.astype(F)) & np.isfinite(values.astype(F))
                share = np.mean(_alike(made, values)[decides]) if np.count_nonzero(decides) >= LEAST_DIFFERENT else 0
                if share > most:
                    best, most = Split(step, len(exact), name, total, late), share
    return best


def _steps(k):
    """The terms of a part, for each number of parts and each multiple that a part may be of."""
    steps = {-(-k // (parts * tile)) * tile: None for parts in PARTS for tile in TILES}
    return [step for step in steps if step < k]


def _alike(made, values):
    """Where results are the same: the bits, of float32 up to the order of additions."""
    made, values = made.astype(np.float64), values.astype(np.float64)
    return np.abs(made - values) <= ORDER * np.abs(made)
