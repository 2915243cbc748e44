"""Random numbers of stochastic rounding that several elements share, where each needs its own.

A value that lies a share p of the way to its upper neighbour moves up where p exceeds a random number t. Elements with
one t cannot disagree: none with a larger p stays below where one with a smaller p moves up. Independent draws of many
elements disagree.
"""

import numpy as np

from refops.oracle.fairness import moves

#: Error of p that a kernel's float32 sums, exp and tanh may make; elements whose p is less certain do not count.
TOLERANCE = 2.0**-12
#: What the chance of a draw of eight bits may be off.
STEP = 1 / 256
#: How near to 0, 1/2 or 1 a number is that need not be random: values are rounded up, to nearest or down.
MARGIN = 1 / 64
#: Share of the groups whose number must be another one: two elements often agree with 1/2 as well.
LEAST_RANDOM = 0.05
#: Logarithm of the chance that independent draws agree so well: 10^-26 for all groups together.
CHANCE = -60.0
#: Elements after which only the largest groups that are left are looked at, and those that a chance is made of.
MOST_ELEMENTS, EDGE = 1 << 18, 128
#: (rows, columns), as stored, of the elements that may share one number; None: as many as the tensor has.
GROUPS = (
    (None, None),
    (1, None),
    (None, 1),
    *((edge, edge) for edge in (128, 64, 32, 16)),
    *(group for run in (128, 64, 32, 16, 8, 4, 2) for group in ((1, run), (run, 1))),
)
#: What a draw may decide: whether the magnitude moves up, or whether the value does, towards +inf.
SENSES = ("magnitude", "value")


def shares(values, codes, fmt, sense):
    """(p, up): how far each value lies towards the neighbour above, and whether its code is that one; p is NaN where
    that says nothing.
    """
    judged, p, up = moves(values, codes, fmt)
    where, moved = np.full(values.shape, np.nan), np.zeros(values.shape, bool)
    if sense == "value":
        negative = np.signbit(values[judged])
        p, up = np.where(negative, 1 - p, p), up ^ negative
    where[judged], moved[judged] = p, up
    return where, moved


def said(found):
    """The elements that share a number, in words."""
    (rows, columns), sense = found
    if rows == columns:
        what = "the whole tensor" if rows is None else f"a tile of {rows} x {columns} elements"
    elif None in (rows, columns):
        what = f"each stored {'row' if columns is None else 'column'}"
    else:
        what = f"{max(rows, columns)} elements of a stored {'row' if rows == 1 else 'column'}"
    return f"{what}{', upwards or downwards' if sense == 'value' else ''}"


class Ends:
    """Least and greatest number that the elements of each group agree with.

    Attributes:
        below: the largest p that stayed below, -inf where none did.
        above: the smallest p that moved up, inf where none did.
    """

    def __init__(self, p, up, group):
        known = ~np.isnan(p)
        self.below = _of_groups(np.maximum, np.where(known & ~up, p, -np.inf), group)
        self.above = _of_groups(np.minimum, np.where(known & up, p, np.inf), group)

    @classmethod
    def none(cls, shape, group):
        """Of a tensor of which no element was seen: one entry, or one for each row or column."""
        sizes = [1 if edge is None else size for edge, size in zip(group, shape, strict=True)]
        ends = cls.__new__(cls)
        ends.below, ends.above = np.full(sizes, -np.inf), np.full(sizes, np.inf)
        return ends

    def include(self, other, group, rows, columns):
        """Let those of a rectangle, of groups that reach over rectangles, go on here, and here go on in them."""
        part = tuple(slice(0, 1) if edge is None else at for edge, at in zip(group, (rows, columns), strict=True))
        other.below = self.below[part] = np.maximum(self.below[part], other.below)
        other.above = self.above[part] = np.minimum(self.above[part], other.above)

    def agree(self):
        """Whether there is such a number in each group."""
        return bool((self.below <= self.above + TOLERANCE).all())

    def random(self):
        """(how many groups have elements, how many of these have a number that is neither 0 nor 1/2 nor 1)."""
        known = np.isfinite(self.below) | np.isfinite(self.above)
        below, above = np.clip(self.below, 0, 1) - MARGIN, np.clip(self.above, 0, 1) + MARGIN
        fixed = np.logical_or.reduce([(below <= number) & (number <= above) for number in (0, 0.5, 1)])
        return np.array([np.count_nonzero(known), np.count_nonzero(known & ~fixed)])

    def numbers(self):
        """One that all elements of a group agree with, in [0, 1]."""
        return (np.clip(self.below, 0, 1) + np.clip(self.above, 0, 1)) / 2


def spread(entries, group, shape):
    """Each group's entry for its elements."""
    edges = [size if edge is None else edge for edge, size in zip(group, shape, strict=True)]
    return entries.repeat(edges[0], axis=0).repeat(edges[1], axis=1)[: shape[0], : shape[1]]


def _of_groups(function, entries, group):
    for axis, edge in enumerate(group):
        edge = entries.shape[axis] if edge is None else edge
        if entries.size and edge > 1:
            entries = function.reduceat(entries, np.arange(0, entries.shape[axis], edge), axis=axis)
    return entries


def chance_of_agreement(p, group):
    """Logarithm of the chance that independent draws of all groups agree as `Ends.agree` says.

    In a group the least p that moves up is any of them, or none is. Where it is one, those below it stay, and those
    more than TOLERANCE above it move.
    """
    rows, columns = (np.arange(size) // (edge or size) for edge, size in zip(group, p.shape, strict=True))
    number = rows[:, None] * (columns.max() + 1) + columns
    known = ~np.isnan(p)
    number, p = number[known], p[known]
    order = np.lexsort((p, number))
    number, p = number[order], p[order]
    first = np.flatnonzero(np.diff(number, prepend=-1))  # of each group
    last = np.append(first[1:], len(p))
    group_of = np.repeat(np.arange(len(first)), last - first)
    stay, move = (np.log(np.minimum(chance + STEP, 1)) for chance in (1 - p, p))
    stayed, moved = (np.concatenate([[0.0], logs.cumsum()]) for logs in (stay, move))
    beyond = np.searchsorted(group_of + p / 2, group_of + (p + TOLERANCE) / 2, side="right")
    beyond = np.minimum(beyond, last[group_of])
    each = stayed[:-1] - stayed[first[group_of]] + move + moved[last[group_of]] - moved[beyond]
    ways = np.exp(stayed[last] - stayed[first]) + np.bincount(group_of, np.exp(each), len(first))
    with np.errstate(divide="ignore"):
        return float(np.minimum(np.log(ways), 0).clip(CHANCE).sum())


class SharedDraws:
    """Looks for numbers that elements share, rectangle by rectangle; these begin at multiples of a group.

    Args:
        shape: of the codes as they are stored, one an element.
    """

    def __init__(self, shape):
        self._shape, self._count = shape, 0
        self._ends, self._random = {}, {}  # of groups that reach over rectangles; `Ends.random` of the others
        self._chances = {(group, sense): 0.0 for group in GROUPS for sense in SENSES}  # of those that are left

    def add(self, rows, columns, values, codes, fmt):
        """Look at the codes of a rectangle.

        Args:
            values: two float32 arrays: the least and the greatest that each value, times its scale, may be.
        """
        for start in range(0, codes.shape[0], EDGE):
            at = slice(start, start + EDGE)
            part = slice(rows.start + start, min(rows.start + start + EDGE, rows.stop))
            if self._chances:
                self._add(part, columns, tuple(end[at] for end in values), codes[at], fmt)

    def _add(self, rows, columns, values, codes, fmt):
        self._count += codes.size
        for sense in SENSES:
            groups = [group for group, left in self._chances if left == sense]
            if not groups:
                continue
            p, up = shares(values[0], codes, fmt, sense)
            other, _ = shares(values[1], codes, fmt, sense)
            p = np.where(np.abs(p - other) <= TOLERANCE / 2, p, np.nan)
            for group in groups:
                self._look(group, sense, rows, columns, p, up)
        if self._count > MOST_ELEMENTS:
            whole = [key for key in self._chances if key[0] == (None, None)]
            self._chances = {key: self._chances[key] for key in dict.fromkeys([*self.all_found()[:1], *whole])}

    def _look(self, group, sense, rows, columns, p, up):
        key, ends = (group, sense), Ends(p, up, group)
        if None in group:
            self._ends.setdefault(key, Ends.none(self._shape, group)).include(ends, group, rows, columns)
        else:
            self._random[key] = self._random.get(key, 0) + ends.random()
        if not ends.agree():
            del self._chances[key]
        elif self._chances[key] > CHANCE:
            self._chances[key] += chance_of_agreement(p[:EDGE, :EDGE], group)

    def _is_random(self, key):
        """Whether enough groups have a number that is not one of those by which values are rounded without any."""
        known, random = self._ends[key].random() if key in self._ends else self._random.get(key, (0, 0))
        return random >= max(1, LEAST_RANDOM * known)

    def all_found(self):
        """(group, sense) of elements that share a number, the largest groups first."""
        if any(key[0] == (None, None) and not self._is_random(key) for key in self._chances):
            return []  # one rounding of all elements, and so of each group
        found = [key for key, chance in self._chances.items() if chance <= CHANCE and self._is_random(key)]
        return sorted(found, key=lambda key: -self._size(key))

    def _size(self, key):
        rows, columns = (
            size if edge is None else min(edge, size) for edge, size in zip(key[0], self._shape, strict=True)
        )
        return rows * columns

    def found(self):
        """(group, sense) of the largest elements that share a number, or None."""
        return next(iter(self.all_found()), None)
