"""What a check found: the verdict, where the wrong entries are and what explains them, as text and as plain data.

Nothing is judged here.
"""

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from refops.oracle.coverage import Coverage
from refops.oracle.places import Place

#: Cells of a picture, at most: rows and columns.
PICTURE_ROWS, PICTURE_COLUMNS = 8, 48
#: The name of an explanation: entries hold what was there before; nothing explains them more simply.
NOT_WRITTEN = "not-written"
#: The note on outputs of no elements, which are right whatever the kernel does.
NOTHING_CHECKED = "nothing was checked: the outputs have no elements"


class MismatchError(AssertionError):
    """Raised by `Report.raise_for_mismatch`; the message is the report."""


@dataclass(frozen=True)
class Mismatch:
    """One wrong entry.

    Attributes:
        array: name of the output.
        index: index into the array as stored.
        element: (row, column) of the tensor, leading dimensions flattened; of a block's first element for scales; None
            where an entry belongs to no element.
        got: what the dump holds, with its bits.
        acceptable: what it may hold.
        distance: how far outside: steps of the format for codes and scales, units in the last place for values.
        inputs: input name -> value there; empty for scales and sums.
        amax: amax of the block that the element belongs to, as text, or "".
        scale: the scale that the dump holds for it, or "encode scale" and that of its tensor, as text, or "".
    """

    array: str
    index: tuple[int, ...]
    element: tuple[int, int] | None
    got: str
    acceptable: str
    distance: float
    inputs: dict[str, float]
    amax: str = ""
    scale: str = ""

    def __str__(self):
        where = f"{self.array}[{', '.join(map(str, self.index))}]"
        if self.element is not None and self.element != self.index:
            where += f" (element {self.element[0]}, {self.element[1]})"
        text = f"{where}: got {self.got}, acceptable {self.acceptable}"
        details = [f"{name} {_number(value)}" for name, value in self.inputs.items()]
        details += [f"block amax {self.amax}"] * bool(self.amax)
        details += [self.scale if "scale" in self.scale else f"scale {self.scale}"] * bool(self.scale)
        return text + (f"   [{', '.join(details)}]" if details else "")


@dataclass(frozen=True)
class ArrayVerdict:
    """The verdict on one output array.

    Attributes:
        name: its name.
        kind: "values", "codes", "scales" or "amax".
        entries: how many were judged: elements, or scales without padding.
        wrong: how many are not acceptable.
        misread: how many of those are codes that are right under the right scales, where others were written: no entry,
            box, place or picture shows them.
        differing: how many differ from the reference at all (acceptable ones included).
        differing_nans: how many of those are NaN in both: only the sign or the payload differs.
        blocks, blocks_touched: blocks of the scaling, and those with a wrong entry; 0 where there are none.
        first, worst: mismatches in stored order, and by distance.
        box: ((first row, last row), (first column, last column)) around the wrong entries of the matrix.
        place: the same, in words: rows and columns, with a period if they have one; None where nothing is wrong.
        picture: lines of text, the density of wrong entries over the array seen as a matrix.
        shape: the matrix that box and picture refer to.
        bias: what is wrong with the array as a whole (stochastic rounding that is not fair), or "".
        first_row: row of the tensor that row 0 of this matrix is, where it is the part of one expert.
    """

    name: str
    kind: str
    entries: int
    wrong: int = 0
    misread: int = 0
    differing: int = 0
    differing_nans: int = 0
    blocks: int = 0
    blocks_touched: int = 0
    first: tuple[Mismatch, ...] = ()
    worst: tuple[Mismatch, ...] = ()
    box: tuple[tuple[int, int], ...] = ()
    place: Place | None = None
    picture: tuple[str, ...] = ()
    shape: tuple[int, int] = (0, 0)
    bias: str = ""
    first_row: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.wrong == 0 and not self.bias


@dataclass(frozen=True)
class Explanation:
    """A convention, or two together, that explains what is wrong.

    Attributes:
        names: one or two convention names.
        sentence: what the kernel does, for the user.
        explained: share of the wrong entries that it accounts for.
        exact: whether the dump equals it everywhere.
        sampled: whether only a part of the tensor, the most wrong one, was compared.
        place: the copy, the rows and the columns in which the kernel does it; None where it does it everywhere.
        whole_arrays: outputs of which it explains all that is wrong, where it explains a part of the dump.
    """

    names: tuple[str, ...]
    sentence: str
    explained: float
    exact: bool = False
    sampled: bool = False
    place: Place | None = None
    whole_arrays: tuple[str, ...] = ()

    def explains(self, name: str) -> bool:
        """Whether it explains all that is wrong with an output."""
        return self.explained == 1 or name in self.whole_arrays

    def __str__(self):
        share = "all" if self.explained == 1 else _percentage(self.explained)
        where = " where it was compared, in the most wrong part" if self.sampled else ""
        place = "" if self.place is None else f", in {self.place} only"
        return f"{' + '.join(self.names)}{place}: {self.sentence} (explains {share} of what is wrong{where})"


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        operation: the operation's name.
        settings: scaling and parameters, as text.
        ulp: permitted error of exp and tanh.
        arrays: an `ArrayVerdict` for each output that was given.
        diagnosis: explanations, best first; empty where nothing is wrong or nothing explains it.
        notes: what else the user should know.
        diagnosed: whether a diagnosis was tried.
        leads: what decides where to look, said before all numbers: codes that are right under the right scales, or
            under wrong ones that were written.
        coverage: what the input of a right dump covered; None where it is wrong, or has no cast to speak of.
    """

    operation: str
    settings: str
    ulp: float
    arrays: tuple[ArrayVerdict, ...]
    diagnosis: tuple[Explanation, ...] = ()
    notes: tuple[str, ...] = ()
    diagnosed: bool = field(default=True)
    leads: tuple[str, ...] = ()
    coverage: Coverage | None = None

    @property
    def ok(self) -> bool:
        """Whether every entry of every output is acceptable."""
        return all(array.ok for array in self.arrays)

    @property
    def mismatches(self) -> list[Mismatch]:
        """The mismatches that are shown: the first ones of each array, then its worst."""
        shown: list[Mismatch] = []
        for array in self.arrays:
            shown += array.first
            shown += [mismatch for mismatch in array.worst if mismatch not in array.first]
        return shown

    def raise_for_mismatch(self) -> None:
        """Raise MismatchError with the report unless everything is right."""
        if not self.ok:
            raise MismatchError(f"\n{self}")

    def headline(self) -> str:
        """The verdict in one line."""
        verdict = "RIGHT" if self.ok else "WRONG"
        what = self.operation + (f" -> {self.settings}" if self.settings else "")
        return f"{verdict}: {what} ({'bit equality' if self.ulp == 0 else f'ulp={self.ulp:g}'})"

    def __str__(self):
        lines = [self.headline(), *(f"  {lead}" for lead in self.leads)]
        for array in self.arrays:
            lines += array_lines(array)
        lines += str(self.coverage).split("\n") if self.coverage is not None else []
        lines += [f"note: {note}" for note in self.notes]
        if not self.ok and self.diagnosed:
            lines.append("diagnosis:" if self.diagnosis else "diagnosis: unknown: no known convention explains it")
            lines += [f"  {n}. {explanation}" for n, explanation in enumerate(self.diagnosis, 1)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "operation": self.operation,
            "settings": self.settings,
            "ulp": self.ulp,
            "arrays": [_array_dict(array) for array in self.arrays],
            "diagnosis": [_explanation_dict(explanation) for explanation in self.diagnosis],
            "diagnosed": self.diagnosed,
            "leads": list(self.leads),
            "notes": list(self.notes),
            "coverage": None if self.coverage is None else self.coverage.as_dict(),
        }


def array_lines(array):
    """Lines of text on one array."""
    what = {"values": "value", "codes": "code", "scales": "scale", "amax": "number"}[array.kind]
    if array.ok:
        plural = "" if array.entries == 1 else "s"
        return [f"  {array.name}: {array.entries:,} {what}{plural} right{_other_bits(array)}"]
    if not array.wrong:
        return [f"  {array.name}: {array.bias}"]
    share = 100 * array.wrong / array.entries
    blocks = f", in {array.blocks_touched:,} of {array.blocks:,} blocks" if array.blocks else ""
    if array.wrong == array.misread:
        right = f"{array.entries:,} {what}s right under the right scales"
        return [f"  {array.name}: {right}; {array.wrong:,} ({share:.3g} %) wrong under those that were written{blocks}"]
    line = f"  {array.name}: {array.wrong:,} of {array.entries:,} {what}s wrong ({share:.3g} %){blocks}"
    lines = [line] + [f"    {array.bias}"] * bool(array.bias)
    if array.misread:
        lines.append(f"    {array.misread:,} of these are right under the right scales, and left out below")
    if array.place is not None and not (array.place.rows.is_all and array.place.columns.is_all):
        place = Place((), array.place.rows.from_line(array.first_row), array.place.columns)
        lines.append(f"    all in {place} of {_matrix_of(array)}")
    lines += [f"    first: {mismatch}" for mismatch in array.first]
    lines += [f"    worst: {mismatch}" for mismatch in array.worst if mismatch not in array.first]
    if array.picture:
        width = len(array.picture[0])
        lines.append(f"    where ({_matrix_of(array)}; . none, : to 1 %, + to 10 %, * to 50 %, # more):")
        lines.append("    +" + "-" * width + "+")
        lines += [f"    |{row}|" for row in array.picture]
        lines.append("    +" + "-" * width + "+")
    return lines


def _other_bits(array):
    """How many right entries have other bits than the reference's, in words."""
    if not array.differing:
        return ""
    text = f", {array.differing:,} of them other bits than the reference's"
    if not array.differing_nans:
        return text
    which = "all" if array.differing_nans == array.differing else f"{array.differing_nans:,}"
    return f"{text} ({which} NaN with another sign or payload)"


def _percentage(share):
    """A share below 1 in words, which never says 100 %."""
    return ">99.9 %" if share > 0.999 else f"{100 * share:.1f} %"


def _explanation_dict(explanation):
    place = explanation.place
    return {
        **asdict(explanation),
        "names": list(explanation.names),
        "whole_arrays": list(explanation.whole_arrays),
        "place": None if place is None else place.as_dict(),
    }


def _matrix_of(array):
    """The matrix that box and picture refer to, in words."""
    rows, columns = array.shape
    return f"{rows} x {columns}" + f" from row {array.first_row} on" * bool(array.first_row)


def _array_dict(array):
    def plain(mismatch):
        return {
            "index": list(mismatch.index),
            "element": None if mismatch.element is None else list(mismatch.element),
            "got": mismatch.got,
            "acceptable": mismatch.acceptable,
            "distance": mismatch.distance if math.isfinite(mismatch.distance) else None,
            "inputs": {name: value if math.isfinite(value) else str(value) for name, value in mismatch.inputs.items()},
            "amax": mismatch.amax,
            "scale": mismatch.scale,
        }

    return {
        "name": array.name,
        "kind": array.kind,
        "entries": array.entries,
        "wrong": array.wrong,
        "misread": array.misread,
        "differing": array.differing,
        "differing_nans": array.differing_nans,
        "blocks": array.blocks,
        "blocks_touched": array.blocks_touched,
        "first": [plain(m) for m in array.first],
        "worst": [plain(m) for m in array.worst],
        "box": [list(edge) for edge in array.box],
        "place": None if array.place is None else array.place.as_dict(),
        "picture": list(array.picture),
        "shape": list(array.shape),
        "bias": array.bias,
        "first_row": array.first_row,
    }


def draw(wrong):
    """Return the picture of a 2-D bool array: a character for the density of each cell."""
    rows, columns = wrong.shape
    lines = []
    row_edges = _edges(rows, PICTURE_ROWS)
    column_edges = _edges(columns, PICTURE_COLUMNS)
    for top, bottom in row_edges:
        counts = wrong[top:bottom].sum(axis=0)
        line = ""
        for left, right in column_edges:
            line += _shade(counts[left:right].sum() / ((bottom - top) * (right - left)))
        lines.append(line)
    return tuple(lines)


def _edges(length, most):
    cells = min(length, most)
    marks = [length * i // cells for i in range(cells + 1)] if cells else []
    return list(pairwise(marks))


def _shade(density):
    if density == 0:
        return "."
    return next(shade for limit, shade in ((0.01, ":"), (0.1, "+"), (0.5, "*"), (2.0, "#")) if density <= limit)


def _number(value):
    return f"{value:.9g}"
