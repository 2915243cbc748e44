"""The simplest place that holds all entries in which a fault shows, and none in which it would show but does not.

A place is a rectangle of rows and columns; each side is all lines, a range of them, or those of some phases of a
period. What costs least is taken: all lines nothing, a range from or to an edge little, any other range or a period
more. The ends are known up to the gap between the last entry without the fault and the first one with it; a tile or a
block begins at a power of two, so that the end with the most factors of two is taken.
"""

from itertools import product

import numpy as np

from refops.oracle.places import PERIODS, Lines

#: Entries that must show a fault before a place is said.
LEAST_SHOWN = 6
#: Entries without the fault in a place, as a share of those with it.
STRAY = 0.02
_COST_OF_EDGE, _COST_OF_RANGE, _COST_OF_PERIOD = 1.0, 2.0, 2.1


def find_lines(shown, absent):
    """Return (rows, columns), `Lines` of a matrix, or None where no place tells the two apart.

    Args:
        shown: bool (M, K), where the fault shows.
        absent: bool (M, K), where it would show if it were there, and does not.
    """
    if np.count_nonzero(shown) < LEAST_SHOWN:
        return None
    rows, columns = (list(_candidates(shown.any(axis=axis))) for axis in (1, 0))
    pairs = sorted(product(rows, columns), key=lambda pair: pair[0][0] + pair[1][0])
    for (_, row), (_, column) in pairs:
        inside = np.ix_(np.flatnonzero(row.mask()), np.flatnonzero(column.mask()))
        if _holds(shown[inside], absent[inside]):
            return _with_ends(row, column, shown, absent)
    return None


def _holds(shown, absent):
    """Whether a place has the fault: almost every entry, row and column in it shows the fault."""
    if np.count_nonzero(absent) > STRAY * np.count_nonzero(shown):
        return False
    for axis in (0, 1):
        with_it, without = np.count_nonzero(shown, axis=axis), np.count_nonzero(absent, axis=axis)
        lacking = (without > with_it) & (without > 1)
        if np.count_nonzero(lacking) > STRAY * np.count_nonzero(with_it):
            return False
    return True


def _candidates(shown):
    """(cost, `Lines`) that hold all lines of a bool vector."""
    size, found = len(shown), np.flatnonzero(shown)
    first, last = int(found[0]), int(found[-1])
    yield 0.0, Lines.all_of(size)
    if (first, last) != (0, size - 1):
        yield (_COST_OF_EDGE if first == 0 or last == size - 1 else _COST_OF_RANGE), Lines(size, first, last)
    for period in PERIODS:
        if 2 * period > size:
            return
        phases = found % period
        run = int(phases.min()), int(phases.max())
        if run != (0, period - 1):
            yield _COST_OF_PERIOD, Lines(size, 0, size - 1, period, run)


def _with_ends(row, column, shown, absent):
    """Both `Lines` with the ends that a tile or a block would have."""
    row = _settled(row, absent[:, column.mask()].any(axis=1))
    column = _settled(column, absent[row.mask()].any(axis=0))
    return row, column


def _settled(lines, absent):
    """`lines` with other ends that leave out the same lines of `absent`."""
    if lines.is_all:
        return lines
    without = np.flatnonzero(absent)
    if lines.period > 1:
        low, high = _ends(*lines.phases, without % lines.period, lines.period)
        return Lines(lines.size, 0, lines.size - 1, lines.period, (low, high))
    return Lines(lines.size, *_ends(lines.first, lines.last, without, lines.size))


def _ends(first, last, without, size):
    """The ends of a range around first..last, between the nearest lines that are not of it."""
    before, behind = without[without < first], without[without > last]
    least = int(before.max()) + 1 if len(before) else 0
    most = int(behind.min()) - 1 if len(behind) else size - 1
    low = max(range(least, first + 1), key=lambda i: (_twos(i, size), i))
    high = max(range(last, most + 1), key=lambda i: (_twos(i + 1, size), -i))
    return low, high


def _twos(end, size):
    """How many factors of two an end has; the edges of the tensor have most."""
    return 64 if end in (0, size) else (end & -end).bit_length()
