"""Outputs that are explained by right entries at another place, or by entries that were not written, and where."""

from dataclasses import dataclass

import numpy as np

from refops.oracle.diagnosis import elements, moved
from refops.oracle.diagnosis.comparison import ENOUGH, Part
from refops.oracle.diagnosis.inference import find_lines
from refops.oracle.diagnosis.probes import SUM_ARRAYS
from refops.oracle.geometry import VALUES, whole
from refops.oracle.places import Lines, Place
from refops.oracle.report import NOT_WRITTEN
from refops.quantization.result import DIRECTIONS

#: Share of the lines that a law must leave out before its place says so.
LEFT_OUT = 0.1


@dataclass
class Marks:
    """Where a convention shows and where it is absent, over the whole tensor.

    Attributes:
        shown, absent: bool (M, K).
        missed, wrong: array name -> entries that it leaves unexplained, and all wrong ones, where it was compared.
        entries: how many entries it shows in: a scale is one, however many elements it covers.
    """

    shown: np.ndarray
    absent: np.ndarray
    missed: dict
    wrong: dict
    entries: int = 0

    @classmethod
    def none(cls, shape):
        """Nothing yet."""
        return cls(np.zeros(shape, bool), np.zeros(shape, bool), {}, {})

    def add(self, name, cells, region, marks):
        """Add what `Part.marks` found of an array on a region."""
        shown, absent, missed = marks
        self.entries += int(np.count_nonzero(shown))
        at = region.rows, region.columns
        self.shown[at] |= cells.spread(shown, region.shape)
        self.absent[at] |= cells.spread(absent, region.shape)
        self.count(name, int(np.count_nonzero(missed)), int(np.count_nonzero(cells.wrong)))

    def count(self, name, missed, wrong):
        """Add numbers of entries."""
        self.missed[name] = self.missed.get(name, 0) + missed
        self.wrong[name] = self.wrong.get(name, 0) + wrong

    @property
    def explained(self):
        """Share of the wrong entries that is explained."""
        return 1 - sum(self.missed.values()) / max(sum(self.wrong.values()), 1)

    @property
    def enough(self):
        """Whether nearly all wrong entries of each array are explained."""
        return all(self.missed[name] <= (1 - ENOUGH) * self.wrong[name] for name in self.wrong)

    def place(self, copies=(), lines=None):
        """The `Place` of what shows; None where it explains too little, or no place holds it.

        Args:
            copies: the outputs that are spoken of, () for all.
            lines: {axis: `Lines`} that a law speaks of.
        """
        if not self.enough or not (self.shown.any() or copies):
            return None
        rows = columns = None
        if self.absent.any():
            found = find_lines(self.shown, self.absent)
            if found is None:
                return None
            rows, columns = (None if side.is_all else side for side in found)
        if lines:
            rows, columns = (_within(side, lines.get(axis)) for axis, side in enumerate((rows, columns)))
        return Place(tuple(copies), rows, columns)


def _within(side, lines):
    """`Lines` that a place has, cut to the range that a law speaks of; either may be None, which is all."""
    if side is None or lines is None or side.period > 1:
        return side or lines
    return Lines(side.size, max(side.first, lines.first), min(side.last, lines.last))


@dataclass
class Found:
    """What explains one output.

    Attributes:
        marks: where it shows, is absent and fails, entry by entry.
        said: (name, sentence about {what}) of each thing that is said of it; none where it is right as it is.
        lines: `Lines` of the tensor that a law speaks of, by axis.
        is_sure: whether nothing else can have made what is said to be not written.
    """

    marks: tuple
    said: list
    lines: dict
    is_sure: bool = True


def moved_in(placing, names):
    """The `Explanation` of some outputs, or None; `placing` is the `Placing` that asks."""
    marks, said, region, lines = Marks.none(placing.shape), {}, whole(placing.shape), []
    for name in names:
        cells = placing.cells(name, region)
        if cells is None:
            wrong, held = (int(np.count_nonzero(a[name])) for a in (placing.search.wrong, placing.search.outputs))
            if wrong and not held:  # all of an array that is one number: zero is what memory begins with
                said.setdefault(unwritten(moved.Constant(placing.search.outputs[name].flat[0])), []).append(name)
                marks.shown[:] = True
            marks.count(name, wrong if held else 0, wrong)
            continue
        if name not in placing.displaced:
            cells = cells._replace(got=np.where(placing.accepted(name, cells, region), cells.reference, cells.got))
            placing.displaced[name] = _found(name, cells, placing.follows(name, region), placing.shape)
        found = placing.displaced[name]
        marks.add(name, cells, region, found.marks)
        if found.said:
            lines.append(found.lines)
        for fault in found.said:
            said.setdefault(fault, []).append(name)
    if not said:
        return None
    spoken = lines[0] if lines and all(one == lines[0] for one in lines) else {}  # of one law alone
    place = marks.place(placing.copies(names), spoken)
    if place is None or not placing.is_evident((), marks, place):
        return None
    return placing.explanation(*together(said, names), marks, place)


def _found(name, cells, follows, shape):
    """What explains an output: a number that was not overwritten, a law, or both, one after the other.

    Codes under other scales than the reference's (`follows`) have to be explained also where they are right under them.
    """
    measured = name in VALUES or name in SUM_ARRAYS or name.startswith("amax")
    differs = cells.wrong if measured else elements.differ(cells)
    nothing, due = np.zeros_like(cells.wrong), cells.wrong if follows is None else cells.wrong | (differs & follows)
    found = Found((nothing, nothing, due & differs), [], {})
    if not differs.any():
        return found
    constant = moved.find_constant(cells.got, cells.reference, differs, cells.fmt)
    if constant is not None:
        held = constant.held_by(cells.got)
        found.said.append(unwritten(constant))
        found.is_sure = not constant.may_be_computed
        found.marks = (differs & held, ~held, due & differs & ~held)
        differs = differs & ~held
        if np.count_nonzero(differs) <= (1 - ENOUGH) * np.count_nonzero(cells.wrong):
            return found
    law = moved.find_any_law(cells.got, cells.reference, differs)
    if law is None:
        return Found((nothing, nothing, due & elements.differ(cells)), [], {})
    shown, absent, missed = Part(cells.got, due, cells.reference, cells.fmt).marks(law.apply(cells.reference))
    if constant is not None:  # two things, whose places differ: none is said
        both = shown | (held & cells.wrong)
        found.marks = (both, nothing, missed & ~held)
    else:
        found.marks = (shown, absent, missed)
        found.lines = _lines_of(law, cells.edge, shape)
    found.said.append(law.names(cells.edge))
    return found


def unwritten(constant):
    """(name, sentence about {what}) for entries that hold what was there before."""
    if constant.may_be_computed:
        how = "they were not written, or all of them overflowed or met a NaN"
        return NOT_WRITTEN, f"{{what}} hold {constant.number}: {how}"
    if constant.is_left_over:
        return NOT_WRITTEN, f"{{what}} hold {constant.words}, which was there before: they were not written"
    return NOT_WRITTEN, f"{{what}} hold {constant.words}, whatever belongs there: they were not written"


def _lines_of(law, edge, shape):
    """{axis: `Lines` of the tensor} that a law speaks of, where it leaves out a good part of them."""
    if isinstance(law, moved.TileLaw):
        return {}
    held = np.flatnonzero(law.held())
    size, step, lines = len(law.source), edge[law.axis], shape[law.axis]
    if size - len(held) < LEFT_OUT * size or held[-1] - held[0] + 1 != len(held):
        return {}
    last = min(int(held[-1] + 1) * step, lines) - 1
    return {law.axis: Lines(lines, int(held[0]) * step, last)}


def together(said, names):
    """(names, sentence) of what was found of each array; with its copy, if something is said of each of two."""
    both = len({_copy_of(name) for arrays in said.values() for name in arrays}) > 1
    text = "; ".join(words.format(what=_what(arrays, both)) for (_, words), arrays in said.items())
    right = [name for name in names if name.endswith("_data") and not any(name in arrays for arrays in said.values())]
    if right:
        text += "; the codes are right under the right scales"
    return tuple(dict.fromkeys(fault for fault, _ in said)), f"{text[0].upper()}{text[1:]}."


def _copy_of(name):
    """The direction that an output is a copy of, or ""."""
    return next((direction for direction in DIRECTIONS if direction in name.split("_")), "")


def _what(arrays, with_copy):
    """Arrays as the subject of a sentence; `with_copy`: of which copy, if all are of one."""
    words = {"data": "codes", "scale_inv": "scales"}
    kinds = [words.get(name.partition("_")[2], f"values of {name}") for name in arrays]
    copies = {_copy_of(name) for name in arrays}
    of_copy = f"{copies.pop()} " if with_copy and len(copies) == 1 and "" not in copies else ""
    return f"the {of_copy}{' and '.join(dict.fromkeys(kinds))}"
