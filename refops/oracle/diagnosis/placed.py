"""A convention in a part of the tensor, or of the copies; and what is right, but at another place or not written.

Where a replay gives what the dump has and the reference has not, the convention shows; where it changes something that
is right in the dump, it is absent. `inference` finds the place that holds the one without the other.
"""

from contextlib import suppress

import numpy as np

from refops.formats import E8M0
from refops.oracle.diagnosis import elements
from refops.oracle.diagnosis.comparison import Part, places, same
from refops.oracle.diagnosis.displaced import Marks, moved_in
from refops.oracle.diagnosis.inference import LEAST_SHOWN, STRAY
from refops.oracle.diagnosis.probes import SUM_ARRAYS
from refops.oracle.geometry import TILE, VALUES, Region, crop, whole
from refops.oracle.replay import FORMULA_STAGES, NotApplicable
from refops.oracle.report import NOT_WRITTEN, Explanation

#: The convention that exchanges copies: it has no place in one of them.
BETWEEN_COPIES = "swapped-directions"
#: Conventions whose place is sought in one copy, and the share of wrong entries that each must explain on the probes.
TRIED, PROMISED = 12, 0.85
#: Wrong scales, or else entries that show it, that a fitted number or a rare rule needs in a part of the tensor.
FIT_SCALES, FIT_ENTRIES = 4, 64


class Placing:
    """The search for places in one diagnosis; `search` is the `Search`.

    Attributes:
        displaced: output name -> what `displaced` found of it.
    """

    def __init__(self, search):
        self.search, self.case, self.shape = search, search.case, search.shape
        self._confirmed, self._wrong, self.displaced = {}, {}, {}
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
        """Names of all outputs of each copy that has a wrong entry."""
        wrong = [name for name, mask in self.search.wrong.items() if mask.any()]
        keys = dict.fromkeys(_owner_of(name) for name in wrong)
        return [[name for name in self.search.outputs if _owner_of(name) == key] for key in keys]

    def _of(self, names, singles):
        """The explanations of some outputs, best first."""
        promising = [r for r in self._promising(names, singles) if r.candidate[0][0].name != BETWEEN_COPIES]
        promising.sort(key=lambda result: places(result.candidate))
        placed = [self._in_place(result, names) for result in promising if not self.search.budget.is_spent()]
        moved = None if self.search.budget.is_spent() else moved_in(self, names)
        found = [answer for answer in (*placed, moved) if answer is not None]
        sure = all(self.displaced[name].is_sure for name in names if name in self.displaced)
        found.sort(key=lambda answer: _simplest_first(answer, NOT_WRITTEN if sure else None))
        best: dict = {}
        for answer in found:
            best.setdefault(answer.names, answer)
        return list(best.values())

    def _promising(self, names, singles):
        terms = [name for name in names if not self._is_whole(name)] or names  # the others follow from the place
        mine = [(result.of(terms), result) for result in singles]
        mine = [pair for pair in mine if pair[0].share >= PROMISED and any(c.gained for c in pair[0].counts.values())]
        mine.sort(key=lambda pair: (-round(pair[0].share, 2), pair[0].damage, pair[0].rank))
        return [result for _, result in mine[:TRIED]]

    # --- of a large tensor ------------------------------------------------------------------------

    def _wrong_elements(self, names):
        """bool (M, K): elements with a wrong entry in some outputs."""
        key = tuple(names)
        if key not in self._wrong:
            found, region = np.zeros(self.shape, bool), whole(self.shape)
            for name in names:
                cells = self.cells(name, region)
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
        confirm = self.search.probes.confirm
        tiles = [self._tile(*tile) for tile in chosen]
        return [*confirm, *(tile for tile in tiles if not any(_overlap(tile, region) for region in confirm))]

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
        if confirmed is None:
            return None
        marks = self._marks(confirmed, names)
        others = [
            n for n, count in confirmed.counts.items() if n not in names and count.damaged > STRAY * count.entries
        ]
        place = marks.place(names if others else ())
        if place is None or not self.is_evident(confirmed.candidate, marks, place):
            return None
        for name in names:
            if self._is_whole(name):
                self._count_whole(marks, confirmed, name, place)
        names_of = tuple(convention.name for convention, _ in confirmed.candidate)
        return self.explanation(names_of, self.search.sentence(confirmed), marks, place)

    def is_evident(self, candidate, marks, place):
        """Whether enough entries show the fault in its place to rule out an accident; a fitted number needs more.

        So do E8M0 bytes, if nothing else is wrong: many rules move one of them by one, and its codes follow from it.
        """
        if place.rows is None and place.columns is None:
            return True
        fits = any(convention.last or convention.alone for convention, _ in candidate)
        scales = sum(wrong for name, wrong in marks.wrong.items() if name.endswith("_scale_inv"))
        powers = self.case.quantizes and self.case.scaling.layout.scale_format == E8M0
        if candidate and powers and scales < FIT_SCALES and sum(marks.wrong.values()) == scales > 0:
            return False
        few = FIT_SCALES if scales else FIT_ENTRIES
        return marks.entries >= LEAST_SHOWN and not (fits and (scales or marks.entries) < few)

    def _is_whole(self, name):
        """Whether an output is a number or a sum of the whole tensor."""
        return name in SUM_ARRAYS or elements.is_of_tensor(self.case, name)

    def _count_whole(self, marks, result, name, place):
        """Count an output of the whole tensor as if the convention were followed in a place alone."""
        count = result.counts[name]
        changes_values = self.search.replay(result.candidate).changed & FORMULA_STAGES
        if changes_values and not (place.rows is None and place.columns is None):
            with suppress(NotApplicable):  # then it must be as the convention makes it everywhere
                if name == "dbias":
                    count = self.search.sum_in_place(result.candidate, name, place)
                elif name.startswith("amax"):
                    count = self.search.amax_in_place(result.candidate, name, place)
        spoiled = count.damaged if name in SUM_ARRAYS and count.damaged > STRAY * count.entries else 0
        marks.count(name, count.wrong - count.explained + spoiled, count.wrong)

    def _marks(self, result, names):
        """The `Marks` of a confirmed result."""
        search, marks = self.search, Marks.none(self.shape)
        reads = tuple(item for item in result.candidate if item[0].reads)
        laid = search.relaid(reads)[0] if reads and self.case.operation.kind != "dequantize" else None
        for region, made in result.made:
            for name in names:
                cells = None if name in SUM_ARRAYS else self.cells(name, region)
                if cells is None:
                    continue
                turned = self._turned(name, made[name], region)
                again = None
                if laid is not None:
                    again = elements.turned(self.case, name, crop(self.case, name, laid[name], region))
                part = Part(
                    cells.got,
                    cells.wrong,
                    cells.reference,
                    cells.fmt,
                    few=name not in VALUES,
                    follows=self.follows(name, region),
                )
                shown, absent, missed = part.marks(turned, again)
                shown &= ~self.accepted(name, cells, region)
                marks.add(name, cells, region, (shown, absent, missed))
        if not search.probes.complete:
            marks.shown |= self._elsewhere(names)
        return marks

    def cells(self, name, region):
        """The `Cells` of an output on a region, None for what belongs to the whole tensor or is a sum."""
        if name in SUM_ARRAYS and region != whole(self.shape):
            return None
        search = self.search
        return elements.cells(self.case, name, region, search.outputs, search.reference, search.wrong)

    def changed(self, result):
        """bool (M, K): elements that the replay of a confirmed result writes otherwise than the reference does."""
        found = np.zeros(self.shape, bool)
        for region, made in result.made:
            for name, array in made.items():
                cells = self.cells(name, region)
                if cells is not None:
                    turned = self._turned(name, array, region).astype(cells.reference.dtype)
                    differs = ~same(cells.reference, turned, cells.fmt)
                    found[region.rows, region.columns] |= cells.spread(differs, region.shape)
        return found

    def _turned(self, name, made, region):
        """What a replay made of an output on a region, in the orientation of the tensor."""
        stored = crop(self.case, name, self.search.reference[name], region)
        return elements.turned(self.case, name, made.reshape(stored.shape))

    def follows(self, name, region):
        """bool (R, C): codes that lie under another scale than the reference's; None where none do."""
        return elements.other_scales(self.case, name, region, self.search.outputs, self.search.reference)

    def accepted(self, name, cells, region):
        """bool, as `cells`: right codes of other bits than the reference's, though all that they follow from is right.

        The freedom of exp and tanh made them. They are no sign of a fault, whatever other rule has the same.
        """
        if not name.endswith("_data"):
            return np.zeros(cells.got.shape, bool)
        follows, amax = self.follows(name, region), f"amax_{_owner_of(name)}"
        found = ~cells.wrong & elements.differ(cells)
        search = self.search
        if amax in search.outputs and not np.array_equal(search.outputs[amax], search.reference[amax]):
            return np.zeros(found.shape, bool)
        return found if follows is None else found & ~follows

    def copies(self, names):
        """Some outputs, if the dump has others as well; () if it has not."""
        return tuple(names) if set(names) != set(self.search.outputs) else ()

    def explanation(self, names, sentence, marks, place):
        """The `Explanation` by what shows as `marks` say in a place, or None where that is too little after all."""
        if not marks.enough:
            return None
        complete = self.search.probes.complete
        clean = not any(marks.missed.values()) and not (marks.absent & place.mask(self.shape)).any() and complete
        said = None if place.is_everywhere else place
        return Explanation(names, sentence, marks.explained, clean, sampled=not complete, place=said)


def _simplest_first(answer, preferred):
    """Sort key of answers, best first: of two that explain as much, the one with the `preferred` name, or none such
    with None; then one fault before two, the lesser place."""
    sides = () if answer.place is None else (answer.place.rows, answer.place.columns)
    named = sum(side is not None and not side.is_all for side in sides)
    return not answer.exact, -round(answer.explained, 2), answer.names != (preferred,), len(answer.names), named


def _overlap(one, other):
    """Whether two regions share an element."""
    return all(
        max(a.start, b.start) < min(a.stop, b.stop) for a, b in ((one.rows, other.rows), (one.columns, other.columns))
    )


def _owner_of(name):
    """What an output belongs to: a direction, or itself."""
    return next((direction for direction in ("rowwise", "columnwise") if direction in name.split("_")), name)
