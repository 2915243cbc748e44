"""A place: the rows and columns of the result, and the arrays, in which a kernel does something."""

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Periods that lines may have.
PERIODS = tuple(1 << n for n in range(1, 10))
#: Lines with a period that must be marked, and their share of all lines of that period.
LEAST_PERIODIC, MOST_PERIODIC = 4, 0.75


@dataclass(frozen=True)
class Lines:
    """Rows, or columns, of the result.

    Attributes:
        size: how many there are.
        first, last: ends of a range of them, both included.
        period, phases: of those, lines whose number modulo `period` lies between the two phases, both included; from
            the first one on around to the second.
    """

    size: int
    first: int
    last: int
    period: int = 1
    phases: tuple[int, int] = (0, 0)

    @classmethod
    def all_of(cls, size: int) -> "Lines":
        """All lines."""
        return cls(size, 0, size - 1)

    @classmethod
    def around(cls, marked: np.ndarray) -> "Lines":
        """The fewest lines that hold all of some marked ones, bool (size,): a range, or some phases of a period."""
        size, found = len(marked), np.flatnonzero(marked)
        first, last = int(found[0]), int(found[-1])
        best = cls(size, first, last)
        if len(found) < LEAST_PERIODIC:
            return best
        for period in PERIODS:
            phases = found % period
            low, high = int(phases.min()), int(phases.max())
            # Of a period that begins and ends with the tensor no range is said.
            start = 0 if first - period < 0 else first
            end = size - 1 if last + period >= size else last
            lines = cls(size, start, end, period, (low, high))
            count = int(np.count_nonzero(lines.mask()))
            fewer = count < np.count_nonzero(best.mask()) and (low, high) != (0, period - 1)
            if fewer and len(found) >= MOST_PERIODIC * count and end - start >= 2 * period:
                best = lines
        return best

    def from_line(self, start: int) -> "Lines":
        """The same lines of something larger, in which line 0 of this is line `start`."""
        low, high = ((phase + start) % self.period for phase in self.phases)
        return Lines(self.size + start, self.first + start, self.last + start, self.period, (low, high))

    @property
    def is_all(self) -> bool:
        """Whether no line is left out."""
        return self.period == 1 and self.first == 0 and self.last == self.size - 1

    def mask(self) -> np.ndarray:
        """bool (size,): which lines these are."""
        line = np.arange(self.size)
        phase = line % self.period
        inside = (self.first <= line) & (line <= self.last)
        low, high = self.phases
        return inside & ((phase - low) % self.period <= (high - low) % self.period)

    def words(self, one: str) -> str:
        """The lines in words; `one` is "row" or "column"."""
        many, parts = f"{one}s", []
        if self.period == 2:
            parts.append(f"{('even', 'odd')[self.phases[0]]} {many}")
        elif self.period > 1:
            a, b = self.phases
            which = f"{one} {a}" if a == b else f"{many} {a}..{b}"
            parts.append(f"{which} of every {self.period}")
        if (self.first, self.last) != (0, self.size - 1):
            ends = f"{self.first}" if self.first == self.last else f"{self.first}..{self.last}"
            parts.append(f"{one if self.first == self.last else many} {ends}")
        return " within ".join(parts)


@dataclass(frozen=True)
class Place:
    """Where a kernel does what an explanation says.

    Attributes:
        arrays: the outputs in question; () for all that were given.
        rows, columns: `Lines` of the (M, K) result; None for all.
    """

    arrays: tuple[str, ...] = ()
    rows: Lines | None = None
    columns: Lines | None = None

    @property
    def is_everywhere(self) -> bool:
        """Whether nothing is left out."""
        return not self.arrays and self.rows is None and self.columns is None

    def mask(self, shape: tuple[int, int]) -> np.ndarray:
        """bool (M, K): the elements of the place."""
        sides = zip((self.rows, self.columns), shape, strict=True)
        row, column = (np.ones(size, bool) if lines is None else lines.mask() for lines, size in sides)
        return row[:, None] & column[None, :]

    def __str__(self):
        parts = [words] if (words := _copy_of(self.arrays)) else []
        for lines, one in ((self.rows, "row"), (self.columns, "column")):
            if lines is not None and not lines.is_all:
                parts.append(lines.words(one))
        return ", ".join(parts)

    def from_row(self, start: int, count: int, size: int) -> "Place":
        """The same place in a tensor of `size` rows, of which this one is the `count` rows from `start` on."""
        rows = self.rows or Lines.all_of(count)
        low, high = ((phase + start) % rows.period for phase in rows.phases)
        moved = Lines(size, rows.first + start, rows.last + start, rows.period, (low, high))
        return Place(self.arrays, moved, self.columns)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        sides: dict[str, Any] = {}
        for name, lines in (("rows", self.rows), ("columns", self.columns)):
            if lines is not None:
                sides[name] = {
                    "first": lines.first,
                    "last": lines.last,
                    "period": lines.period,
                    "phases": list(lines.phases),
                }
        return {"arrays": list(self.arrays), **sides, "words": str(self)}


def _copy_of(arrays):
    """What some outputs are together, in words."""
    directions = {direction for direction in ("rowwise", "columnwise") for name in arrays if direction in name}
    if not arrays:
        return ""
    if len(directions) == 1 and all("wise" in name for name in arrays):
        return f"the {directions.pop()} copy"
    return " and ".join(arrays)
