"""Count what is wrong: masks, the first and the worst entries, and how far outside an entry lies."""

from dataclasses import replace

import numpy as np

from refops.oracle.places import Lines, Place
from refops.oracle.report import NOT_WRITTEN, ArrayVerdict, draw

#: Mismatches that a report shows: the first ones and the worst ones of each array.
MOST_SHOWN = 4
#: From so many wrong entries on, one value in all of them is no accident.
MANY_WRONG = 16


class Tally:
    """What is wrong with one output.

    Attributes:
        slot: its `Slot`.
        wrong: bool array of the stored shape.
        bias: what is wrong with the array as a whole, or "".
        evident: bool array of the stored shape, wrong codes but for those that are right under the right scales.
        differing, differing_nans: entries with other bits than the reference's, and those of them that are NaN in both.
    """

    def __init__(self, slot):
        self.slot = slot
        self.wrong, self.evident = np.zeros((2, *slot.shape), bool)
        self.differing = self.differing_nans = self.entries = self.count = self.misread = 0
        self.blocks = self.blocks_touched = 0
        self.bias = ""
        self._first, self._worst = [], []

    def add(self, wrong, distance, describe, misread=None):
        """Add the wrong entries of a rectangle.

        Args:
            wrong: bool array, entries of the rectangle (elements, also where two share a byte).
            distance: array of that shape, how far outside each entry is.
            describe: function from an index into the rectangle to its `Mismatch`.
            misread: bool array of that shape, wrong entries for which the scale that was written is at fault: they
                are counted, and not shown. None for none.
        """
        self.count += int(np.count_nonzero(wrong))
        if misread is not None:
            self.misread += int(np.count_nonzero(misread))
            wrong = wrong & ~misread
        found = np.flatnonzero(wrong)
        if not found.size:
            return
        first = [describe(np.unravel_index(i, wrong.shape)) for i in found[:MOST_SHOWN]]
        far = distance.ravel()[found]
        order = np.argsort(-far, kind="stable")[:MOST_SHOWN] if found.size <= 4096 else _largest(far, MOST_SHOWN)
        worst = [describe(np.unravel_index(found[i], wrong.shape)) for i in order]
        self._first = sorted(self._first + first, key=lambda m: m.index)[:MOST_SHOWN]
        self._worst = sorted(self._worst + worst, key=lambda m: -m.distance)[:MOST_SHOWN]

    def count_differing(self, got, expected):
        """Count the entries of some that have other bits than the reference's."""
        differs = bits_of(got) != bits_of(expected)
        self.differing += int(np.count_nonzero(differs))
        self.differing_nans += int(np.count_nonzero(self._is_nan(got[differs]) & self._is_nan(expected[differs])))

    def _is_nan(self, entries):
        fmt = self.slot.fmt
        return np.isnan(entries) if fmt is None else np.isin(entries, np.flatnonzero(np.isnan(fmt.values)))

    def unwritten(self, stored, explanations):
        """Yield a note if many wrong entries of the array all hold the same, unless something else explains them."""
        bits = bits_of(stored)[self.wrong] if self.count >= MANY_WRONG else ()
        if not len(bits) or bits.min() != bits.max():
            return
        complete = [one.names for one in explanations if one.explains(self.slot.name)]
        if not complete or any(NOT_WRITTEN in names for names in complete):
            yield f"all wrong entries of {self.slot.name} hold 0x{int(bits[0]):02x}: were they written?"

    def verdict(self):
        """The `ArrayVerdict`."""
        found = ArrayVerdict(
            name=self.slot.name,
            kind=self.slot.kind,
            entries=self.entries,
            differing=self.differing,
            differing_nans=self.differing_nans,
            blocks=self.blocks,
            bias=self.bias,
        )
        if not self.count:
            return found
        counted = replace(found, wrong=self.count, misread=self.misread, blocks_touched=self.blocks_touched)
        shown = self.evident if self.misread else self.wrong
        matrix = shown.reshape(-1, shown.shape[-1]) if shown.ndim else shown.reshape(1, 1)
        rows, columns = matrix.any(axis=1), matrix.any(axis=0)
        if not rows.any():
            return replace(counted, shape=matrix.shape)
        return replace(
            counted,
            first=tuple(self._first),
            worst=tuple(self._worst),
            box=tuple((int(side.argmax()), len(side) - 1 - int(side[::-1].argmax())) for side in (rows, columns)),
            place=Place((), Lines.around(rows), Lines.around(columns)),
            picture=draw(matrix) if matrix.size > 1 else (),
            shape=matrix.shape,
        )


def _largest(values, count):
    chosen = np.argpartition(values, -count)[-count:]
    return chosen[np.argsort(-values[chosen], kind="stable")]


def bits_of(array):
    """The array's elements as unsigned integers."""
    array = np.ascontiguousarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])


def ordered(values, dtype):
    """Integers in the order of float values stored in `dtype`: neighbours differ by one."""
    values = values.astype(dtype)
    bits = bits_of(values).astype(np.int64)
    sign = np.int64(1) << (8 * dtype.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def distance_of(values, bounds, dtype):
    """Units in the last place of `dtype` between each value and its interval."""
    dtype = np.dtype(dtype)
    distance = outside(ordered(values, dtype), ordered(bounds.lo, dtype), ordered(bounds.hi, dtype))
    return np.where(np.isnan(values) | np.isnan(bounds.lo), np.float32(np.inf), distance)


def outside(values, lowest, highest):
    """How far values lie outside their ends, float32; codes and their orders, of at most two bytes, and numbers."""
    wide = np.int32 if all(v.dtype.kind in "iu" and v.itemsize <= 2 for v in (values, lowest, highest)) else np.float64
    values, lowest, highest = (np.asarray(v, wide) for v in (values, lowest, highest))
    return np.maximum(np.maximum(lowest - values, values - highest), 0).astype(np.float32)
