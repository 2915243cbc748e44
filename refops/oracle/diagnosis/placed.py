"""A convention in a part of the tensor, or of the copies; and what is right, but at another place or not written.

Where a replay gives what the dump has and the reference has not, the convention shows; where it changes something that
is right in the dump, it is absent. `inference` finds the place that holds the one without the other.
"""

from dataclasses import dataclass

import numpy as np

from refops.oracle.diagnosis import elements, moved
from refops.oracle.diagnosis.comparison import ENOUGH, Part
from refops.oracle.diagnosis.inference import STRAY, find_lines
from refops.oracle.diagnosis.probes import SUM_ARRAYS
from refops.oracle.geometry import TILE, VALUES, Region, crop, whole
from refops.oracle.places import Place
from refops.oracle.report import Explanation

#: Conventions whose place is sought in one copy, and the share of wrong entries that each must explain on the probes.
TRIED, PROMISED = 12, 0.85


@dataclass
class Marks:
    """Where a convention shows and where it is absent, over the whole tensor.

    Attributes:
        shown, absent: bool (M, K).
        missed, wrong: array name -> entries that it leaves unexplained, and all wrong ones, where it was compared.
    """

    shown: np.ndarray
    absent: np.ndarray
    missed: dict
    wrong: dict

    @classmethod
    def none(cls, shape):
        """Nothing yet."""
        return cls(np.zeros(shape, bool), np.zeros(shape, bool), {}, {})

    def add(self, name, cells, region, marks):
        """Add what `Part.marks` found of an array on a region."""
        shown, absent, missed = marks
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


class Placing:
    """The search for places in one diagnosis; `search` is the `Search`."""

    def __init__(self, search):
        self.search, self.case, self.shape = search, search.case, search.shape
        self._confirmed, self._wrong = {}, {}
        self.regions = search.probes.confirm if search.probes.complete else self._with_contrast()

    def answers(self, singles):
        """Explanations with a place, best first; of every copy by itself where no one explains all."""
        groups = self.groups()
        together = [name for group in groups for name in group]
        found = self._of(together, singles) if len(groups) > 1 else []
        if not found:
            each = [self._of(group, singles) for group in groups]
            if not all(each):  # what is left would be called explained
                return []
            first, *others = each
            found = first if not others else [answers[0] for answers in each]
        return found

    def groups(self):
        """Names of the outputs with wrong entries, those of a copy together."""
        wrong = [name for name, mask in self.search.wrong.items() if mask.any()]
        keys = dict.fromkeys(_copy_of(name) for name in wrong)
        return [[name for name in self.search.outputs if _copy_of(name) == key] for key in keys]

    def _of(self, names, singles):
        """The explanations of some outputs, best first."""
        placed = [self._in_place(result, names) for result in self._promising(names, singles)]
        found = [answer for answer in (*placed, self._moved(names)) if answer is not None]
        found.sort(key=lambda answer: (not answer.exact, -round(answer.explained, 2)))
        return list({answer.names: answer for answer in reversed(found)}.values())[::-1]

    def _promising(self, names, singles):
        mine = [(result.of(names), result) for result in singles]
        mine = [
            (own, result)
            for own, result in mine
            if own.share >= PROMISED and any(c.gained for c in own.counts.values())
        ]
        mine.sort(key=lambda pair: (-round(pair[0].share, 2), pair[0].damage, pair[0].rank))
        return [result for _, result in mine[:TRIED]]

    # --- of a large tensor ------------------------------------------------------------------------

    def _wrong_elements(self, names):
        """bool (M, K): elements with a wrong entry in some outputs."""
        key = tuple(names)
        if key not in self._wrong:
            found, region = np.zeros(self.shape, bool), whole(self.shape)
            for name in names:
                cells = self._cells(name, region)
                if cells is not None:
                    found |= cells.spread(cells.wrong, self.shape)
            self._wrong[key] = found
        return self._wrong[key]

    def _elsewhere(self, names):
        """Wrong elements outside the regions that are compared: a place has to hold them too."""
        found = self._wrong_elements(names).copy()
        for region in self.regions:
            found[region.rows, region.columns] = False
        return found

    def _with_contrast(self):
        """The regions that confirm, and tiles around the wrong part: what is right there bounds a place."""
        wrong = self._wrong_elements(self.search.matrix_names)
        if not wrong.any():
            return self.search.probes.confirm
        sides = []
        for lines in (wrong.any(axis=1), wrong.any(axis=0)):
            found, tiles = np.flatnonzero(lines) // TILE, -(-len(lines) // TILE)
            first, middle, last = int(found[0]), int(found[len(found) // 2]), int(found[-1])
            near = {first - 1, first, last, last + 1, 0, tiles - 1, middle + 1}
            sides.append((middle, sorted(tile for tile in near if 0 <= tile < tiles)))
        (row, rows), (column, columns) = sides
        chosen = dict.fromkeys([(r, column) for r in rows] + [(row, c) for c in columns])
        return [*self.search.probes.confirm, *(self._tile(*tile) for tile in chosen)]

    def _tile(self, row, column):
        ends = [slice(i * TILE, min((i + 1) * TILE, size)) for i, size in zip((row, column), self.shape, strict=True)]
        return Region(*ends)

    # --- a convention -----------------------------------------------------------------------------

    def _in_place(self, result, names):
        """The explanation of some outputs by a convention in a place, or None."""
        key = id(result)
        if key not in self._confirmed:
            self._confirmed[key] = self.search.confirm(result, self.regions)
        confirmed = self._confirmed[key]
        if len(confirmed.made) != len(self.regions):
            return None
        marks = self._marks(confirmed, names)
        others = [
            n for n, count in confirmed.counts.items() if n not in names and count.damaged > STRAY * count.entries
        ]
        names_of = tuple(convention.name for convention, _ in confirmed.candidate)
        return self._explanation(names_of, self.search.sentence(confirmed), marks, names if others else ())

    def _marks(self, result, names):
        """The `Marks` of a confirmed result."""
        search, marks = self.search, Marks.none(self.shape)
        reads = tuple(item for item in result.candidate if item[0].reads)
        laid = search.relaid(reads)[0] if reads and self.case.operation.kind != "dequantize" else None
        for made, region in zip(result.made, self.regions, strict=True):
            for name in names:
                cells = self._cells(name, region)
                if cells is None:
                    continue
                turned = elements.turned(
                    self.case, name, made[name].reshape(crop(self.case, name, search.reference[name], region).shape)
                )
                again = None
                if laid is not None:
                    again = elements.turned(self.case, name, crop(self.case, name, laid[name], region))
                part = Part(
                    cells.got,
                    cells.wrong,
                    cells.reference,
                    cells.fmt,
                    few=name not in VALUES,
                    follows=self._follows(name, region),
                )
                marks.add(name, cells, region, part.marks(turned, again))
        if not search.probes.complete:
            marks.shown |= self._elsewhere(names)
        for name in names:
            if name not in marks.wrong and name in result.counts:
                count = result.counts[name]
                marks.count(name, count.wrong - count.explained, count.wrong)
        return marks

    def _cells(self, name, region):
        if name in SUM_ARRAYS:
            return None
        search = self.search
        return elements.cells(self.case, name, region, search.outputs, search.reference, search.wrong)

    def _follows(self, name, region):
        return elements.other_scales(self.case, name, region, self.search.outputs, self.search.reference)

    def _explanation(self, names, sentence, marks, copies):
        """The `Explanation` of what shows as `marks` say, or None where no place holds it."""
        if not marks.enough or not marks.shown.any():
            return None
        if not marks.absent.any():
            rows = columns = None
        else:
            found = find_lines(marks.shown, marks.absent)
            if found is None:
                return None
            rows, columns = (None if lines.is_all else lines for lines in found)
        place = Place(tuple(copies), rows, columns)
        inside = place.mask(self.shape)
        clean = not any(marks.missed.values()) and not (marks.absent & inside).any() and self.search.probes.complete
        place = None if place.is_everywhere else place
        return Explanation(
            names, sentence, marks.explained, clean, sampled=not self.search.probes.complete, place=place
        )

    # --- what was moved ---------------------------------------------------------------------------

    def _moved(self, names):
        """The explanation of some outputs by right entries at another place, or by entries that were not written."""
        marks, said, region = Marks.none(self.shape), {}, whole(self.shape)
        for name in names:
            cells = self._cells(name, region)
            if cells is None:
                wrong = int(np.count_nonzero(self.search.wrong[name]))
                marks.count(name, wrong, wrong)
                continue
            part = Part(cells.got, cells.wrong, cells.reference, cells.fmt, few=name not in VALUES)
            differs = cells.wrong if name in VALUES else elements.differ(cells)
            constant = moved.find_constant(cells.got, cells.reference, differs) if differs.any() else None
            law = moved.find_law(cells.got, cells.reference, differs) if differs.any() and constant is None else None
            if constant is not None:
                held = elements.bits(cells.got) == elements.bits(np.asarray(constant.value, cells.got.dtype))
                marks.add(name, cells, region, (differs & held, ~held, cells.wrong & ~held & differs))
                said[name] = "not-written", f"{{what}} hold {constant.words}: they were not written"
            elif law is not None:
                marks.add(name, cells, region, part.marks(law.apply(cells.reference)))
                said[name] = law.names(cells.edge)
            else:
                marks.add(
                    name, cells, region, (np.zeros_like(cells.wrong), np.zeros_like(cells.wrong), cells.wrong & differs)
                )
        if not said:
            return None
        return self._explanation(*_together(said, names), marks, self._copies(names))

    def _copies(self, names):
        """`names`, where the dump has other arrays too."""
        return tuple(names) if set(names) != set(self.search.outputs) else ()


def _copy_of(name):
    """What an output belongs to: a direction, or itself."""
    return next((direction for direction in ("rowwise", "columnwise") if direction in name.split("_")), name)


def _together(said, names):
    """(names, sentence) of what was found of each array."""
    groups = {}
    for name, (fault, words) in said.items():
        groups.setdefault((fault, words), []).append(name)
    sentences = [words.format(what=_what(arrays)) for (_, words), arrays in groups.items()]
    text = "; ".join(sentences)
    codes = [n for n in names if n.endswith("_data") and n not in said]
    if codes:
        text += "; the codes are right under the right scales"
    return tuple(dict.fromkeys(fault for fault, _ in groups)), f"{text}."


def _what(arrays):
    """Arrays as the subject of a sentence."""
    words = {"data": "codes", "scale_inv": "scales"}
    kinds = [words.get(name.partition("_")[2], f"values of {name}") for name in arrays]
    return f"The {' and '.join(dict.fromkeys(kinds))}"
