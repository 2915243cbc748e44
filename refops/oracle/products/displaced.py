"""Results that stand in other rows, columns or tiles than they belong into, or that were not written.

What finds them in the outputs of other operations finds them here, too (`refops.oracle.diagnosis`). Results in other
rows are those of a product whose operand a has other rows, so that the bounds of that product judge them.
"""

from refops.oracle.conventions.registry import Convention
from refops.oracle.diagnosis import moved
from refops.oracle.diagnosis.displaced import Marks, together, unwritten
from refops.oracle.diagnosis.elements import Cells
from refops.oracle.diagnosis.inference import LEAST_SHOWN
from refops.oracle.geometry import whole
from refops.oracle.report import Explanation

#: Share of a line that the noise of sums may move by more than these bits.
NOISE = 1 / 8
#: The stage of results that stand in other rows or columns.
ELSEWHERE = "elsewhere"


def not_written(y, right, wrong):
    """The `Explanation` of results that hold what was there before; None unless nearly all wrong ones do, in a place.

    Args:
        y, right: the dump and the right results, (m, n).
        wrong: bool (m, n).
    """
    constant = moved.find_constant(y, right, wrong, None)
    if constant is None:
        return None
    held, marks = constant.held_by(y), Marks.none(y.shape)
    cells = Cells(y, right, wrong, None, (1, 1))
    marks.add("y", cells, whole(y.shape), (wrong & held, ~wrong & ~held, wrong & ~held))
    place = marks.place()
    if place is None or (not place.is_everywhere and marks.entries < LEAST_SHOWN):
        return None
    names, sentence = together({unwritten(constant): ["y"]}, ["y"])
    said = None if place.is_everywhere else place
    return Explanation(names, sentence, marks.explained, marks.explained == 1, place=said)


def displacements(y, right, wrong):
    """A `Convention` of each law that leads from the right results to those that were written; none or one."""
    coarse = [moved.coarse(matrix) for matrix in (y, right)]
    law = moved.find_law(*coarse, wrong) or moved.find_law(*coarse, _beyond_noise(*coarse, wrong))
    if law is not None:
        yield _convention(law, lambda attempt: attempt.take(law.axis, law.source))
        return
    law = moved.find_tile_law(*coarse, wrong)
    if law is not None:
        yield _convention(law, lambda attempt: attempt.read(law.apply), stage="layout")


def _beyond_noise(y, right, wrong):
    """Of wrong results those that stand in lines of which more than noise is wrong: sums of few bits err everywhere."""
    differs = wrong & (y != right)
    lines = [differs.mean(axis=axis, keepdims=True) > NOISE for axis in (0, 1)]
    return differs & lines[0] & lines[1]


def _convention(law, function, stage=ELSEWHERE):
    name, words = law.names((1, 1))
    return Convention(name, together({(name, words): ["y"]}, ["y"])[1], function, stage)
