"""Which fault explains a wrong product, and where: every known one is tried on some rows and columns, then on all.

A fault explains a dump when the dump lies within the bounds of the product that the fault makes of the right one, where
it is wrong, and nearer to that product than to the right one; and when it does little harm where the dump is right. The
sums of a wrong product may be in any order, too. Where nothing does, sums of the few bits of Hopper's FP8 unit are
granted, and then two faults at once.

What is NaN or infinite shows little: many faults have such results. So it counts as explained only by the same, the
finite ones among the wrong results have to be explained by themselves, and only these are evidence of a fault in some
rows or columns alone. Results that were not written come first; beside them only that is said which makes all bits, or
explains more.
"""

from dataclasses import dataclass

import numpy as np

from refops.oracle.diagnosis.comparison import DAMAGE, ENOUGH
from refops.oracle.diagnosis.displaced import LEFT_OUT
from refops.oracle.diagnosis.inference import LEAST_SHOWN
from refops.oracle.places import Lines, Place
from refops.oracle.products.displaced import ELSEWHERE, displacements, not_written
from refops.oracle.products.faults import FAULTS, Attempt
from refops.oracle.products.halves import HalfProduct
from refops.oracle.products.product import SMALLEST
from refops.oracle.replay import NotApplicable
from refops.oracle.report import Explanation
from refops.tiles import cut

F = np.float32
#: Rows and columns that are looked at first.
SAMPLE = 40
#: How much nearer the dump must be to what a fault makes than to the right product, in the median.
NEARER = 0.25
#: Explanations that are returned, at most, and that are tried on all of the dump.
SHOWN, CONFIRMED = 5, 4
#: Faults that are tried together with each other one: those whose products are nearest to the dump.
NEAREST = 12
#: Wrong entries below which a fault must explain all.
FEW = 16
#: Rows and columns of a tile of results.
TILE = 512


@dataclass(frozen=True)
class Found:
    """How a candidate, one fault or two, compares with a dump.

    Attributes:
        attempt: the `Attempt` that it was applied to.
        wrong, explained, damaged: results that are wrong, of those within the candidate's bounds, and right results
            that are not.
        finite: of the wrong results those that are finite. shown: of these, explained.
        distance: the median distance of wrong results from the candidate, as a share of that from the right product.
        number: its place in the order of registration.
        same: whether the dump has the candidate's bits wherever it was compared.
    """

    attempt: Attempt
    wrong: int
    explained: int
    damaged: int
    finite: int
    shown: int
    distance: float
    number: int
    same: bool = False

    @property
    def enough(self):
        """Whether it explains the dump."""
        most = ENOUGH if self.wrong >= FEW else 1.0
        explains = self.explained >= most * self.wrong and self.shown >= most * self.finite
        return explains and self.distance <= NEARER and (self.harmless or self.shown >= LEAST_SHOWN)

    @property
    def harmless(self):
        """Whether it changes little that is right."""
        return self.damaged <= DAMAGE * self.wrong

    @property
    def rank(self):
        """Smaller is better."""
        last = any(convention.last for convention, _ in self.attempt.applied)
        steps = 0 if self.distance == 0 else max(round(np.log2(max(self.distance, 2.0**-40))) + 40, 0) // 4 + 1
        partly = self.wrong - self.explained > 0.02 * self.wrong
        return (last, not self.harmless, not self.same, partly, steps, self.number)


def diagnose(product, y, right, wrong, budget, has_short_sums, single):
    """Return what explains a wrong dump, best first, a list of `Explanation`; empty where nothing known does.

    Args:
        product: the right `Product`.
        y: the dump, (m, n).
        right: the right results, (m, n).
        wrong: bool (m, n).
        budget: the `Budget`.
        has_short_sums: whether the sums may be those of Hopper's FP8 unit.
        single: whether one fault must explain all by itself, with float32 sums.
    """
    if not wrong.any():
        return []
    search = Search(product, y, right, wrong, budget)
    unwritten = not_written(y, right, wrong)
    if unwritten is not None:
        others = [one for one in search.said(search.singles(False), False) if one.place is None]
        sure = [one for one in others if one.exact or one.explained > unwritten.explained]
        return sorted([unwritten, *sure], key=lambda one: -one.explained)
    for short in (False, True) if has_short_sums else (False,):
        explanations = search.said(search.singles(short), short)
        if explanations:
            return explanations
    return [] if single or not search.has_evidence else search.said(search.pairs(), False)


class Search:
    """One diagnosis.

    Attributes:
        product, y, result, wrong, budget: as given; `result`: the right results.
        rows, columns: indices of those that are looked at first.
    """

    def __init__(self, product, y, result, wrong, budget):
        self.product, self.y, self.result, self.wrong, self.budget = product, y, result, wrong, budget
        rows = np.flatnonzero(wrong.any(axis=1))
        self.rows = _spread(rows)
        self.columns = _spread(np.flatnonzero(wrong[self.rows].any(axis=0)))
        self.here = wrong[np.ix_(self.rows, self.columns)]
        self.right = product.exact(self.rows, self.columns)

    # --- candidates -------------------------------------------------------------------------------

    @property
    def has_evidence(self):
        """Whether so many finite results are wrong that two faults can be told from chance."""
        return np.count_nonzero(np.isfinite(self.y[self.wrong].astype(F))) >= LEAST_SHOWN

    def candidates(self):
        """Every fault with every choice; first that results stand elsewhere."""
        yield from (((law, None),) for law in displacements(self.y, self.result, self.wrong))
        for fault in FAULTS.values():
            try:
                choices = fault.choices_for(Attempt(self.product, self.y))
            except NotApplicable:
                continue
            yield from (((fault, choice),) for choice in choices)

    def singles(self, short):
        """What single faults explain, best first."""
        return self._best(self.candidates(), short)

    def pairs(self):
        """What two faults explain together, best first: one of those that bring the product nearest, and any other."""
        useful = [candidate[0] for candidate in self.candidates() if self._is_cheap(candidate[0][0])]
        near = sorted((one.distance, one.number) for one in self._all((item,) for item in useful))
        pairs = {}
        for _, nearest in near[:NEAREST]:
            for other in range(len(useful)):
                first, second = sorted((nearest, other))
                if useful[first][0] is not useful[second][0]:
                    pairs[first, second] = useful[first], useful[second]
        return self._best(pairs.values(), False)

    @staticmethod
    def _is_cheap(fault):
        """Whether a fault is tried with others: sums in 16 bits take long, a fitted factor explains too much."""
        return not fault.last and fault.stage not in ("sums", "rounding")

    def _best(self, candidates, short):
        """Of some candidates those that explain the dump, best first."""
        return sorted((one for one in self._all(candidates, short) if one.enough), key=lambda one: one.rank)

    def _all(self, candidates, short=False):
        """The `Found` of each candidate that means something, as long as the budget lasts."""
        for number, candidate in enumerate(candidates):
            if self.budget.is_spent():
                return
            try:
                yield self._tried(candidate, number, short)
            except NotApplicable:
                continue

    # --- comparing --------------------------------------------------------------------------------

    def _tried(self, candidate, number, short):
        attempt = Attempt(self.product, self.y)
        for fault, choice in candidate:
            fault.apply(attempt, choice)
        return self._compared(attempt, self.rows, self.columns, self.here, self.right, number, short)

    def _compared(self, attempt, rows, columns, wrong, right, number, short):
        """The `Found` of an attempt on some rows and columns."""
        y = attempt.y[rows][:, columns].astype(F)
        inside, made = _inside(attempt, rows, columns, short)
        finite, made = wrong & np.isfinite(y), made.astype(np.float64)
        parts = (wrong, wrong & inside, ~wrong & ~inside, finite, finite & inside)
        mine = np.abs(y.astype(np.float64) - made)
        others = np.abs(self.y[rows][:, columns].astype(np.float64) - right)
        if attempt.y is not self.y:  # the dump is read otherwise: where it lies is what was wrong
            others = np.abs(made - right) + others
        same = (y == made) | (np.isnan(y) & np.isnan(made))
        share = np.where(same, 0.0, mine / np.maximum(others, SMALLEST))
        distance = float(np.median(np.where(np.isnan(share), np.inf, share)[finite if finite.any() else wrong]))
        return Found(attempt, *(int(np.count_nonzero(part)) for part in parts), distance, number, bool(same.all()))

    # --- what is said -----------------------------------------------------------------------------

    def said(self, found, short):
        """The `Explanation` of each of the first candidates, tried on all of the dump."""
        explanations, names = [], set()
        for one in found[: 4 * CONFIRMED]:
            name = tuple(fault.name for fault, _ in one.attempt.applied)
            if name in names or len(explanations) == SHOWN:
                continue
            explanation = self._confirmed(one, short)
            if explanation is not None:
                names.add(name)
                explanations.append(explanation)
        return explanations

    def _confirmed(self, found, short):
        """The `Explanation` of a candidate that explains all of the dump, or all of a place; None where it does not."""
        attempt = found.attempt
        if isinstance(attempt.product, HalfProduct):  # too slow for all of a large one
            if found.shown < LEAST_SHOWN and not self._is_harmless(attempt):
                return None
            return self._explanation(attempt, found.explained / found.wrong, found.same, None, sampled=True)
        inside, same = np.empty(self.wrong.shape, bool), True
        for rows in cut(self.wrong.shape[0], TILE):
            for columns in cut(self.wrong.shape[1], TILE):
                inside[rows, columns], made = _inside(attempt, rows, columns, short)
                same = same and np.array_equal(made, attempt.y[rows, columns].astype(F), equal_nan=True)
        wrong = int(np.count_nonzero(self.wrong))
        explained = int(np.count_nonzero(self.wrong & inside))
        if explained < ENOUGH * wrong:
            return None
        place, damaged = _place_of(self.wrong), ~self.wrong & ~inside
        shown = np.count_nonzero(self.wrong & inside & np.isfinite(attempt.y.astype(F)))
        if shown < LEAST_SHOWN and np.count_nonzero(damaged) > DAMAGE * wrong:
            return None
        there = damaged & place.mask(self.wrong.shape)
        if np.count_nonzero(there) > DAMAGE * wrong:
            return None
        elsewhere = 2 * np.count_nonzero(there) >= np.count_nonzero(damaged)
        if ELSEWHERE in attempt.changed:  # a law says nothing of lines that stand where they belong
            elsewhere = place.mask(self.wrong.shape).mean() > 1 - LEFT_OUT
        if elsewhere or place.is_everywhere:
            place = None
        return self._explanation(attempt, explained / wrong, same, place)

    def _is_harmless(self, attempt):
        """Whether an attempt changes little that is right, in rows and columns spread over the dump."""
        rows, columns = (_spread(np.arange(size)) for size in self.wrong.shape)
        inside, _ = _inside(attempt, rows, columns, short=False)
        return np.count_nonzero(~self.wrong[np.ix_(rows, columns)] & ~inside) <= DAMAGE * np.count_nonzero(self.wrong)

    def _explanation(self, attempt, share, same, place, sampled=False):
        names = tuple(fault.name for fault, _ in attempt.applied)
        sentences = [
            fault.sentence.format_map({**attempt.facts, **attempt.facts[fault.name]}) for fault, _ in attempt.applied
        ]
        return Explanation(
            names, "; besides: ".join(s.rstrip(".") for s in sentences) + ".", share, same, sampled, place
        )


def _inside(attempt, rows, columns, short):
    """(Where the dump is what an attempt may make, the results of its exact sums, float32).

    What is not finite has to be the same: bounds that are infinite would let anything be explained.
    """
    y = attempt.y[rows][:, columns].astype(F)
    made = attempt.product.stored(rows, columns).astype(F)
    alike = (made == y) | (np.isnan(made) & np.isnan(y))
    return attempt.product.bounds(rows, columns, short=short).contain(y) & (np.isfinite(y) | alike), made


def _spread(lines):
    """At most `SAMPLE` of some lines, spread over them."""
    if len(lines) <= SAMPLE:
        return lines
    return lines[np.linspace(0, len(lines) - 1, SAMPLE).astype(int)]


def _place_of(wrong):
    """The `Place` of the rows and columns that are wrong."""
    lines = []
    for axis, size in ((1, wrong.shape[0]), (0, wrong.shape[1])):
        marked = np.flatnonzero(wrong.any(axis=axis))
        one = Lines(size, int(marked[0]), int(marked[-1]))
        lines.append(None if one.is_all else one)
    return Place((), *lines)
